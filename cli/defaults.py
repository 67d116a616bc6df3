"""The flags that were not given, filled in by what this machine is."""
import argparse
import sys
from dataclasses import replace

import torch
from composer.utils import dist

from cli.early_checks import is_read_from_local, number_of_devices
from inputs.sample_size import bytes_of_sample, most_bytes_of_sample
from inputs.shared_memory import free_bytes
from inputs.timed_loader import queued_batches
from measuring.caution import fewest_batches
from measuring.costs import TRAINING_IMAGES
from settings import switch_table
from settings.commands import Encode, Evaluate
from settings.train import ENCODER_PRECISIONS, Train, settings_from
from settings.switch_table import Situation
from training.ranks import cores_per_rank

MOST_WORKERS = 8
INTERVALS = {'save_interval': '1ep', 'eval_interval': '1000ba', 'sample_interval': '1000ba'}  # unless given


def is_for_gpus(dry_run: int | None = None) -> bool:
    """Whether the run is on GPUs, or --dry_run speaks of them."""
    return torch.cuda.is_available() or dry_run is not None


def fill_in_training_defaults(args: argparse.Namespace) -> Train:
    """The settings of a run of benchmark.py: its flags, and what follows from the machine for those not given.

    Raises ValueError if --remote, which default workers depend on, cannot be read.
    """
    args = argparse.Namespace(**vars(args))  # the command line stays as it was given
    devices = number_of_devices(args)
    device_batch = args.batch_size // devices
    if args.dry_run is not None:
        args.dry_run = devices
        if not (args.remote or args.local or args.use_synth_latents):
            args.use_synth_data = True
    if args.device_train_microbatch_size is None:
        args.device_train_microbatch_size = 'auto' if is_for_gpus(args.dry_run) else device_batch
    args.precision = args.precision or best_precision(args.dry_run)
    fill_in_shared_defaults(args, device_batch, args.precision)
    args.only_measures = args.max_duration is None
    fill_in_duration(args)
    if args.use_ema:
        args.ema_half_life = args.ema_half_life or '1000ba'
    for flag, place in (('save_interval', args.save_folder), ('eval_interval', args.eval_remote),
                        ('sample_interval', args.sample_prompts)):
        if place and getattr(args, flag) is None:
            setattr(args, flag, INTERVALS[flag])
    if args.training_images is None and args.model_name != 'tiny':
        args.training_images = TRAINING_IMAGES  # tiny is for trying things out
    return settings_from(Train, vars(args))


def fill_in_encoding_defaults(args: argparse.Namespace, devices: int) -> Encode:
    """The settings of a run of encode.py on `devices` devices of this machine.

    Raises ValueError if --remote, which default workers depend on, cannot be read, or if --ray lacks a precision.
    """
    refuse_unknown_precision(args)
    args = argparse.Namespace(**vars(args))
    channels_last = args.channels_last
    fill_in_shared_defaults(args, args.batch_size, best_precision(), devices)
    if args.ray:
        args.channels_last = channels_last  # where it was not given, each worker decides for its device
    return settings_from(Encode, vars(args))


def fill_in_evaluate_defaults(args: argparse.Namespace) -> Evaluate:
    """The settings of a run of evaluate.py.

    Raises ValueError if --ray lacks a precision, or if this machine cannot draw in the one that was given.
    """
    refuse_unknown_precision(args, 'precision', 'amp_bf16 (GPUs since the A100), amp_fp16')
    args = argparse.Namespace(**vars(args))
    args.guidance = list(dict.fromkeys(args.guidance))
    refuse_equal_scales(args.guidance)
    args.precision = args.precision or best_precision()
    if args.precision != 'fp32' and not (torch.cuda.is_available() or args.ray):
        raise ValueError(f'--precision {args.precision}: there is no GPU here; use fp32')
    return settings_from(Evaluate, vars(args))


def refuse_equal_scales(scales: list[float]) -> None:
    """Raises ValueError if two guidance scales would have one name."""
    names = [f'{scale:g}' for scale in scales]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f'--guidance holds several scales that are {name} in six digits; give it once')


def refuse_unknown_precision(args: argparse.Namespace, flag: str = 'encoder_precision',
                             choices: str = 'bf16 (GPUs since the A100), fp16') -> None:
    """Raises ValueError if a cluster's GPUs would get the default precision of this machine, which has none."""
    if args.ray and getattr(args, flag) is None and not torch.cuda.is_available():
        raise ValueError(f'--ray {args.ray} needs --{flag}, since no GPU of this machine says what those of the '
                         f'cluster can do; give {choices}, or fp32 for CPUs')


def fill_in_switches(args: argparse.Namespace) -> None:
    """The switches that were not given, by what they depend on."""
    situation = Situation(is_for_gpus(dry_run_of(args)), number_of_devices(args), args.compile)
    for switch in switch_table.SWITCHES:
        if getattr(args, switch.flag, '') is None:  # encode.py has some of them alone
            setattr(args, switch.flag, switch.default_in(situation))


def dry_run_of(args: argparse.Namespace) -> int | None:
    """The value of --dry_run, which encode.py has not."""
    return getattr(args, 'dry_run', None)


def fill_in_duration(args: argparse.Namespace) -> None:
    """Without --max_duration the run is as long as the measurement; with it, all after the warm-up is measured."""
    if args.max_duration and not args.loader_only:
        return
    queue = queued_batches(args.num_workers) if args.remote else 0
    if args.measure_batches is None:
        args.measure_batches = fewest_batches(queue)
    args.max_duration = args.max_duration or f'{args.warmup_batches + queue + args.measure_batches}ba'


def fill_in_shared_defaults(args: argparse.Namespace, device_batch: int, precision: str, devices: int = 1) -> None:
    """Fill in the flags that encode.py has as well, for `device_batch` images at once on each device.

    Args:
        args: of the command line, or a copy of it.
        device_batch: images at once on a device.
        precision: of the UNet.
        devices: that this process works for.
    """
    read_local_in_place(args)
    args.encoder_precision = args.encoder_precision or ENCODER_PRECISIONS[precision]
    fill_in_switches(args)
    args.num_workers_by_default = args.num_workers is None
    if args.num_workers_by_default:
        args.num_workers = 0
        if args.remote and dry_run_of(args) is None:
            args.num_workers = default_workers(device_batch, args.image_size, args.remote, devices)


def default_workers(device_batch: int, image_size: int, remote: str, devices: int) -> int:
    """Loader processes of each rank: as many as its cores, unless shared memory holds fewer, which is said.

    Where this process works for several `devices` of its machine, they share its cores.

    Raises ValueError if it may hold fewer, and `remote`, by which that is decided, cannot be read.
    """
    wanted = min(MOST_WORKERS, max(1, cores_per_rank() // devices))
    fitting = workers_that_fit(wanted, device_batch, image_size, remote)
    if fitting >= wanted:
        return wanted
    if dist.get_global_rank() == 0:
        print(f'warning: --num_workers is {fitting} instead of {wanted}, because the shared memory, /dev/shm, holds '
              'the batches of no more; loading will be slower; make it larger (docker run --shm-size)', file=sys.stderr)
    return fitting


def read_local_in_place(args: argparse.Namespace) -> None:
    """Where --local is the only place that is given, it is the data."""
    if is_read_from_local(args):
        args.remote = args.local
        args.local = None


def agree_on_workers(settings: Train) -> Train:
    """Once the ranks have met: as many loader processes on each as the poorest host allows, and what follows from them.

    Ranks whose loaders differ would train and measure for different numbers of batches.
    """
    mine = (settings.num_workers, settings.measure_batches or 0, settings.max_duration)
    num_workers, measure_batches, max_duration = min(dist.all_gather_object(mine))
    return replace(settings, num_workers=num_workers, measure_batches=measure_batches or None,
                   max_duration=max_duration)


def best_precision(dry_run: int | None = None) -> str:
    """amp_bf16 on a GPU that has it, amp_fp16 on another, fp32 on a CPU. --dry_run speaks of a GPU that has it."""
    if not torch.cuda.is_available():
        return 'amp_bf16' if is_for_gpus(dry_run) else 'fp32'
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return 'amp_bf16'
    return 'amp_fp16'


def workers_that_fit(wanted: int, device_batch: int, image_size: int, remote: str) -> int:
    """Workers of each rank whose batches shared memory can hold; where it is full they would die of a bus error.

    Args:
        wanted: the number that is asked for.
        device_batch: samples a device.
        image_size: that is trained at, in pixels: no image is larger in a batch.
        remote: the dataset, which is looked at only where the largest images would not fit.

    Raises ValueError if `remote` cannot be read.
    """
    free = free_bytes()
    if free is None:
        return sys.maxsize
    share = free // (dist.get_local_world_size() * max(1, device_batch))
    fitting = workers_in(share // most_bytes_of_sample(image_size))
    if fitting < wanted:
        fitting = workers_in(share // bytes_of_sample(remote, image_size))
    return fitting


def workers_in(batches: int) -> int:
    """Workers whose batches are that many: each prefetches 2, and 2 are in use."""
    return max(0, (batches - 2) // 2)
