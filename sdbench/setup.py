"""Describe what decides the speed of a training step: the GPUs, the model, and the switches. Nothing here needs torch.

Flags and records are read into a Setup, and a forecast is calculated from it. If a setup needs too much memory, its
microbatch becomes smaller, or one of its switches saves memory.
"""
import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sdbench.flags.train import ENCODERS, Train, default_switches
from sdbench.gpus import is_one_nvlink_domain, machines_for


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What decides the speed of a training step. A value is None where it is not known.

    Attributes without a comment are the switches of the same names in sdbench/flags/train.py.
    """
    device: str | None = None  # torch's name of the GPU or the CPU
    num_devices: int | None = None  # in all machines
    gpus_per_node: int | None = None  # None also for the machines that this GPU is usually sold in
    network_gbits: float | None = None  # of each machine
    model_name: str | None = None
    image_size: int | None = None  # in pixels
    latents: bool | None = None  # whether the training reads latents, so that no VAE encoder runs in it
    batch_size: int | None = None  # images in a step, summed over all devices
    microbatch: int | None = None  # images per pass on each device; None also for the largest that fits
    precision: str | None = None
    encoder_precision: str | None = None
    channels_last: bool | None = None
    compile: bool | str | None = None
    compile_blocks: bool | None = None
    attention: str | None = None
    gradient_checkpointing: bool | None = None
    fused_optimizer: bool | None = None
    half_precision_norms: bool | None = None
    cudnn_benchmark: bool | None = None
    allreduce_precision: str | None = None
    use_ema: bool | None = None
    ema_start: str | None = None  # None also for the start of the run
    clip_grad_norm: float | None = None  # None also without clipping

    @property
    def machines(self) -> int | None:
        """Return the number of machines, rounded up; None if the number of devices is not known."""
        if self.num_devices is None:
            return None
        return machines_for(self.num_devices, self.gpus_per_node or self.device or '')

    @property
    def needs_network(self) -> bool:
        """Tell whether gradients cross a network, because the interconnect of the GPU does not join all of them."""
        return (self.machines or 1) > 1 and not is_one_nvlink_domain(self.device, self.num_devices)

    @property
    def device_batch_size(self) -> int:
        """Return the images per device in a step, of a setup with defaults."""
        return self.batch_size // self.num_devices

    def with_defaults(self) -> 'Setup':
        """Return the setup with the default of each flag for what is not known, so that it can be forecast.

        The device and the microbatch stay None: the forecast is for a given GPU, and takes the largest microbatch that
        fits. So does the network, which is then assumed to be as fast as the interconnect of the GPUs.
        """
        known = DEFAULTS | {name: value for name, value in vars(self).items() if value is not None}
        return Setup(**default_switches(known['precision'], known['compile'], known['num_devices']) | known)


SMALLER_MICROBATCH = 'a smaller --device_train_microbatch_size'  # a key of `changes_that_take_less`
NAMES = tuple(field.name for field in fields(Setup))
FLAGS = {name: {'microbatch': 'device_train_microbatch_size'}.get(name, name) for name in NAMES}  # by attribute
FLAG_DEFAULTS = {field.name: field.default for field in fields(Train) if field.default is not None}
# The default of each attribute that has one, for a dry run where it depends on the machine.
DEFAULTS = {name: default for name, default in FLAG_DEFAULTS.items() if name in NAMES}
DEFAULTS |= {'num_devices': 1, 'latents': False, 'precision': 'amp_bf16'}


def with_flag_defaults(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the default of each flag that it lacks, if a training of this program wrote it.

    Such a record states every flag that there was. A record by hand may state no more than the device and the speed.
    """
    is_ours = 'command' in record and record.get('stage') == 'train'
    return FLAG_DEFAULTS | record if is_ours else record


def setup_of_settings(settings: Train) -> Setup:
    """Return the setup of a run with these flags. What the flags leave open is None, unless complete.py filled it in.

    Flags do not name the GPU of a run.
    """
    return setup_of_record(vars(settings) | {'device': None})


def setup_of_record(record: dict[str, Any]) -> Setup:
    """Return the setup of a record, with the default of each flag that a record of a training lacks."""
    record = with_flag_defaults(record)
    known = {name: record.get(flag) for name, flag in FLAGS.items()}
    known = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in known.items()}
    if known['microbatch'] == 'auto':  # of a run that ended before the search did
        known['microbatch'] = None

    # The names of the encoders in the training loop tell what it reads.
    is_latents = {name: latents for latents, name in ENCODERS.items()}
    known['latents'] = is_latents.get(record.get('encoders'))
    if known['latents'] is None and record.get('use_synth_latents'):
        known['latents'] = True

    # Measurements state the number of machines. Ignore it where it is the usual one for this GPU.
    nodes, devices = record.get('num_nodes'), known['num_devices']
    if not known['gpus_per_node'] and nodes and devices and machines_for(devices, known['device'] or '') != nodes:
        known['gpus_per_node'] = math.ceil(devices / nodes)
    return Setup(**known)


def settings_of_setup(setup: Setup) -> Train:
    """Return the flags of a run with this setup, which must have defaults."""
    values = {FLAGS[name]: getattr(setup, name) for name in NAMES
              if name not in ('device', 'num_devices', 'latents', 'microbatch')}
    return Train(**values, use_synth_latents=setup.latents, dry_run=(setup.num_devices,),
                 device_train_microbatch_size=setup.microbatch or 'auto')


def changes_that_take_less(setup: Setup) -> dict[str, Setup]:
    """Return the setup with each change that saves memory, keyed by a description of the change.

    Changes that the user has already made are skipped. The first two make a step slower, but train the same model.
    """
    half = setup.image_size // 16 * 8
    changes = {}
    if setup.microbatch is not None:
        changes[SMALLER_MICROBATCH] = {'microbatch': 1}
    changes['--gradient_checkpointing'] = {'gradient_checkpointing': True}
    changes['--no-use_ema'] = {'use_ema': False}
    if half >= 64:
        changes[f'--image_size {half}'] = {'image_size': half}
    changes['latents (encode.py)'] = {'latents': True}
    changed = {change: replace(setup, **flags) for change, flags in changes.items()}
    return {change: other for change, other in changed.items() if other != setup}


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest size for which `fits` is true, by binary search; None if not even the smallest size fits.

    The sizes are in ascending order, and each is tried at most once. The smallest is tried first, because CUDA's
    libraries then allocate their handles and workspaces while there is still memory.
    """
    if not fits(sizes[0]):
        return None
    too_large = bisect.bisect_left(sizes, True, lo=1, key=lambda size: not fits(size))
    return sizes[too_large - 1]
