"""Complete the settings of a run: what its flags leave open follows from its ranks, its machine and its data, once.

What comes after sees whole settings: every flag has its value, and every time is in batches. Composer counts a share of
a run in whole epochs where the run's length is in epochs, and moves an average whose half-life is in epochs once an
epoch. A run that is told nothing but batches has none of these cases.
"""
import math
from dataclasses import replace
from typing import Any

import torch
from composer.utils import dist

from sdbench.costs import TRAINING_IMAGES
from sdbench.errors import UserError, plural
from sdbench.flags.commands import Encode
from sdbench.flags.times import LONGEST_INTERVAL, to_batches
from sdbench.flags.train import ENCODER_PRECISIONS, ENCODERS, TINY_MODEL, Train
from sdbench.flags.training_command import fine_tune_instead, trains_random_weights
from sdbench.inputs.loader import BATCHES_PER_WORKER
from sdbench.inputs.shards import number_of_samples, read_index
from sdbench.paths import sibling_path
from sdbench.process import cpu_cores
from sdbench.records.status import fewest_batches

FAULTLESS_CUDNN = 91501  # 9.15.1; before it, gradients of its attention can be NaN at lengths that no 128 divides
MOST_WORKERS = 8
SYNTHETIC_SAMPLES = 100_000  # of an epoch, or those of a larger batch

# each interval, and the flag without which nothing happens at it
INTERVALS = {'save_interval': 'save_folder', 'eval_interval': 'eval_remote', 'sample_interval': 'sample_prompts'}
# flags that are left open follow from the machine, the number of devices, or what is measured: no settings of a user
FOLLOW = ('num_workers', 'device_train_microbatch_size', 'compile_blocks', 'max_duration')
TIMES = ('max_duration', *INTERVALS, 'lr_warmup', 'ema_half_life', 'ema_start')


def index_of_data(settings: Train) -> dict | None:
    """Read the index.json of the shards; None of synthetic data. Raises UserError if there is none to be trusted."""
    if not settings.remote and not settings.local:
        return None
    return read_index(settings.remote or settings.local, '--remote' if settings.remote else '--local')


def complete(settings: Train, index: dict | None) -> Train:
    """Return the settings of a run with nothing left open. All ranks call it together, once they have met.

    The steps go in the order in which one needs another: each says what it takes from those before it. One thing is
    still to be found with the model: a microbatch that is auto, by `with_found_microbatch`, and in a dry run for each
    card.

    Args:
        settings: as the flags gave them; a dry run of several numbers of GPUs is completed for each.
        index: the index.json of the shards, which says what they hold and how long an epoch is; None: synthetic data.

    Raises UserError for what these ranks, this machine or this data cannot serve.
    """
    # Number of devices: needs the flags alone. A dry run is of as many GPUs as it says, whether any are here or not.
    devices = settings.dry_run[0] if settings.dry_run else 0
    settings = replace(noting_what_follows(settings), num_devices=devices or dist.get_world_size())
    is_for_gpus = torch.cuda.is_available() or settings.dry_run is not None

    # The data: needs num_devices for the length of an epoch. A dry run without data is of random images.
    settings = with_local_in_place(settings)
    latents = settings.use_synth_latents if index is None else 'latents' in index
    settings = replace(settings, encoders=ENCODERS[latents], use_synth_data=index is None and not latents,
                       batches_per_epoch=batches_per_epoch(settings, index))

    # The machine: needs the place of the data for num_workers, and num_devices for the share of a batch. It is rank 0's
    # for all ranks: if their loaders differed, they would train for different numbers of batches.
    here = (cores_of_device(dist.get_local_world_size()), best_precision(is_for_gpus))
    cores, precision = dist.all_gather_object(here)[0]
    settings = with_workers(settings, cores)
    settings = with_defaults(settings, precision=precision)
    settings = with_defaults(settings, encoder_precision=ENCODER_PRECISIONS[settings.precision])
    if settings.device_train_microbatch_size == 'auto' and not is_for_gpus:  # a trial could take all of its memory
        settings = replace(settings, device_train_microbatch_size=settings.device_batch_size)

    # How it is compiled: needs num_devices. Blocks send gradients while others still compute. CUDA graphs are tied to
    # weights, in which blocks differ. Where nothing is compiled, torch's group norm would copy images in channels_last.
    by_blocks = settings.num_devices > 1 and settings.compile not in (False, 'reduce-overhead')
    settings = with_defaults(settings, compile_blocks=by_blocks, channels_last=bool(settings.compile))

    sample_folder = sibling_path(settings.save_folder, 'samples') if settings.save_folder else 'samples'
    settings = replace(settings, sample_folder=sample_folder)

    # The length, then the times: need batches_per_epoch, and for a measurement num_workers, whose queue it outlasts.
    # A time may be a share of the length.
    settings = with_times(with_length(settings))

    # Refused: what this machine or this data cannot serve. Needs all of the above.
    refuse_what_cannot_be(settings, is_for_gpus)
    return settings


def refuse_what_cannot_be(settings: Train, is_for_gpus: bool) -> None:
    """Raise UserError for flags that would do nothing, or the wrong thing, on this machine or with this data."""
    if settings.precision != 'fp32' and not is_for_gpus and not settings.loader_only:  # Composer has it for GPUs alone
        raise UserError(f'--precision {settings.precision} needs a GPU, and this machine has none; give --precision '
                        'fp32, after a recipe that has the other')
    if settings.compile == 'reduce-overhead' and settings.device_train_microbatch_size != settings.device_batch_size:
        raise UserError('--compile reduce-overhead replays CUDA graphs, whose gradients the next microbatch would '
                        f'overwrite; use --device_train_microbatch_size {settings.device_batch_size}')
    if settings.attention == 'cudnn' and torch.cuda.is_available():
        version = torch.backends.cudnn.version()
        if version and version < FAULTLESS_CUDNN:
            raise UserError(f'--attention cudnn needs cuDNN 9.15.1 or newer, and torch {torch.__version__} has '
                            f'{version}, whose attention has faults at lengths that no 128 divides; leave it out')
    if settings.random_flip and settings.latents:
        raise UserError('--random_flip mirrors images, and this run is on latents; leave it out')


def complete_encoding(settings: Encode) -> Encode:
    """Return the settings of an encoding with nothing left open. Raises UserError if --ray needs a precision."""
    is_for_gpus = torch.cuda.is_available()  # here
    if settings.ray and settings.encoder_precision is None and not is_for_gpus:
        raise UserError(f'--ray {settings.ray} needs --encoder_precision, since no GPU of this machine says what '
                        'those of the cluster can do; give bf16 (GPUs since the A100), fp16, or fp32 for CPUs')
    settings = noting_what_follows(with_local_in_place(settings))
    settings = with_workers(settings, cores_of_device(torch.cuda.device_count()))
    return with_defaults(settings, encoder_precision=ENCODER_PRECISIONS[best_precision(is_for_gpus)],
                         channels_last=bool(settings.compile))


def noting_what_follows(settings: Train | Encode) -> Train | Encode:
    """Return the settings with the names of those flags that are left open to what they follow from."""
    names = [name for name in FOLLOW if getattr(settings, name, True) in (None, 'auto')]
    return replace(settings, by_default=tuple(names))


def with_defaults(settings: Any, **defaults: Any) -> Any:
    """Return the settings with these values for the flags that were not given."""
    return replace(settings, **{name: value for name, value in defaults.items() if getattr(settings, name) is None})


def with_local_in_place(settings: Train | Encode) -> Train | Encode:
    """Return the settings with --local as the data where it is the only place that is given."""
    if settings.remote:
        return settings
    return replace(settings, remote=settings.local, local=None)


def batches_per_epoch(settings: Train, index: dict | None) -> int:
    """Return the length of the loader. Raises UserError if the shards hold no batch to train on."""
    if index is None:
        return max(1, SYNTHETIC_SAMPLES // settings.batch_size)
    samples = number_of_samples(index)
    if samples < settings.batch_size and settings.dry_run is None:
        remedy = 'use a smaller batch'
        if samples and trains_random_weights(settings):  # which would not help either
            remedy = fine_tune_instead(settings, samples)
        raise UserError(f'--remote {settings.remote} holds {plural(samples, "sample")}, fewer than --batch_size '
                        f'{settings.batch_size}; {remedy}')
    return max(1, samples // settings.batch_size)


def best_precision(is_for_gpus: bool) -> str:
    """Return amp_bf16 for a GPU that has it, amp_fp16 for another, fp32 for a CPU. A dry run is for one that has it."""
    if not is_for_gpus:
        return 'fp32'
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return 'amp_fp16'
    return 'amp_bf16'


def cores_of_device(devices: int) -> int:
    """Return the CPU cores that each of so many devices of this machine has for its loader."""
    return max(1, cpu_cores() // max(1, devices))


def with_workers(settings: Train | Encode, cores: int) -> Train | Encode:
    """Return the settings with the loader's processes: one for each core, up to 8. Synthetic data needs none."""
    return with_defaults(settings, num_workers=min(MOST_WORKERS, cores) if settings.remote else 0)


def with_length(settings: Train) -> Train:
    """Return the settings with the length of the run in batches, and the images whose cost is stated."""
    # Without --max_duration it is that of the measurement; with it, all after the warm-up is measured.
    is_given = settings.max_duration is not None
    if settings.loader_only or not is_given:
        queue = settings.num_workers * BATCHES_PER_WORKER if settings.remote else 0
        settings = with_defaults(settings, measure_batches=fewest_batches(queue))
        batches = settings.warmup_batches + queue + settings.measure_batches
        settings = with_defaults(settings, max_duration=f'{batches}ba')
    length = to_batches(settings.max_duration, settings.batches_per_epoch)

    # No cost is stated of the model tiny, which is for trials.
    if settings.model_name != TINY_MODEL:
        images = length * settings.batch_size if settings.dry_run is not None and is_given else TRAINING_IMAGES
        settings = with_defaults(settings, training_images=images)
    return replace(settings, max_duration=f'{length}ba')


def with_times(settings: Train) -> Train:
    """Return the settings with every time in batches. Raises UserError if the average starts when the run is over."""
    # Times that are not given. A short run is saved and judged as well, and its average forgets its first weights.
    length = to_batches(settings.max_duration)
    if settings.use_ema:
        settings = with_defaults(settings, ema_half_life=f'{min(LONGEST_INTERVAL, math.ceil(length / 10))}ba')
    for flag, needed in INTERVALS.items():
        if getattr(settings, needed):
            settings = with_defaults(settings, **{flag: f'{min(LONGEST_INTERVAL, math.ceil(length / 4))}ba'})

    # All in batches.
    times = {flag: getattr(settings, flag) for flag in TIMES if getattr(settings, flag) is not None}
    in_batches = {flag: to_batches(time, settings.batches_per_epoch, length) for flag, time in times.items()}

    # An average that would never start.
    is_trained = settings.dry_run is None and not settings.loader_only
    if is_trained and in_batches.get('ema_start', 0) >= length:
        raise UserError(f'--ema_start {settings.ema_start} is not before the end of the run, --max_duration '
                        f'{settings.max_duration}: there would be no average; give an earlier time')
    return replace(settings, **{flag: f'{batches}ba' for flag, batches in in_batches.items()})
