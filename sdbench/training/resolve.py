"""Fill in the flags that were not given, by what this machine knows, and refuse those that it cannot serve."""
import dataclasses
from typing import Any

import torch
from composer.utils import dist

from sdbench.costs import TRAINING_IMAGES
from sdbench.flags.commands import Encode
from sdbench.flags.times import to_batches
from sdbench.flags.train import ENCODER_PRECISIONS, TINY_MODEL, Train, number_of_devices
from sdbench.inputs.loader import default_workers, queued_batches
from sdbench.inputs.shards import read_index
from sdbench.paths import number_of_samples, sibling_path
from sdbench.records.reliability import fewest_batches

FAULTLESS_CUDNN = 91501  # 9.15.1; before it, gradients of its attention can be NaN at lengths that no 128 divides


def resolve_defaults(settings: Train) -> Train:
    """Return the settings of a run with each flag filled in. Raises ValueError for what this machine cannot do."""
    refuse_more_ranks_than_gpus()
    devices = number_of_devices(settings)
    is_for_gpus = torch.cuda.is_available() or settings.dry_run is not None
    settings = with_local_in_place(settings)
    if settings.dry_run:
        is_synthetic = not (settings.remote or settings.use_synth_latents)
        settings = dataclasses.replace(settings, dry_run=devices, use_synth_data=is_synthetic)
    settings = with_defaults(settings, {
        'precision': best_precision(is_for_gpus),
        'device_train_microbatch_size': 'auto' if is_for_gpus else settings.batch_size // devices,
        'channels_last': is_for_gpus,
        # blocks send gradients while others still compute; CUDA graphs are tied to weights, which blocks differ in
        'compile_blocks': devices > 1 and settings.compile not in (False, 'reduce-overhead'),
        'num_workers': default_workers(settings),
        'ema_half_life': '1000ba' if settings.use_ema else None,
        'sample_folder': sibling_path(settings.save_folder, 'samples') if settings.save_folder else 'samples',
        'training_images': images_of_training(settings),
    })
    settings = with_defaults(settings, {'encoder_precision': ENCODER_PRECISIONS[settings.precision]})
    refuse_what_cannot_be_here(settings, is_for_gpus, devices)
    return with_length(settings)


def broadcast_from_rank_0(settings: Train) -> Train:
    """Return the settings of this rank with rank 0's length of the run and number of loader processes.

    All ranks call it together. Ranks whose loaders differ, as hosts with other numbers of cores have them, would train
    for different numbers of batches.
    """
    first = dist.all_gather_object(settings)[0]
    return dataclasses.replace(settings, num_workers=first.num_workers, measure_batches=first.measure_batches,
                               max_duration=first.max_duration)


def resolve_encoding_defaults(settings: Encode) -> Encode:
    """Return the settings of an encoding with each flag filled in. Raises ValueError if --ray needs a precision."""
    is_for_gpus = torch.cuda.is_available()
    if settings.ray and settings.encoder_precision is None and not is_for_gpus:
        raise ValueError(f'--ray {settings.ray} needs --encoder_precision, since no GPU of this machine says what '
                         'those of the cluster can do; give bf16 (GPUs since the A100), fp16, or fp32 for CPUs')
    settings = with_local_in_place(settings)
    return with_defaults(settings, {
        'encoder_precision': ENCODER_PRECISIONS[best_precision(is_for_gpus)],
        'channels_last': None if settings.ray else is_for_gpus,  # each worker knows
        'num_workers': default_workers(settings),
    })


def with_defaults(settings: Any, defaults: dict[str, Any]) -> Any:
    """Return the settings with these values for the flags that were not given."""
    missing = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    return dataclasses.replace(settings, **missing)


def images_of_training(settings: Train) -> int | None:
    """Return the images of the training whose cost is stated; None for the model tiny, which is for trials.

    They are those of Stable Diffusion 2, but those of --max_duration in a dry run that has it.
    """
    if settings.model_name == TINY_MODEL:
        return None
    if not settings.dry_run or settings.max_duration is None:
        return TRAINING_IMAGES
    batches_per_epoch = None
    if settings.max_duration.endswith('ep'):
        if not settings.remote:  # nothing says how long an epoch is
            return TRAINING_IMAGES
        batches_per_epoch = number_of_samples(read_index(settings.remote)) // settings.batch_size
    return to_batches(settings.max_duration, batches_per_epoch) * settings.batch_size


def with_local_in_place(settings: Train | Encode) -> Train | Encode:
    """Return the settings with --local as the data where it is the only place that is given."""
    is_synthetic = isinstance(settings, Train) and (settings.use_synth_data or settings.use_synth_latents)
    if settings.remote or is_synthetic:
        return settings
    return dataclasses.replace(settings, remote=settings.local, local=None)


def best_precision(is_for_gpus: bool) -> str:
    """Return amp_bf16 for a GPU that has it, amp_fp16 for another, fp32 for a CPU. A dry run is for one that has it."""
    if not is_for_gpus:
        return 'fp32'
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return 'amp_fp16'
    return 'amp_bf16'


def with_length(settings: Train) -> Train:
    """Return the settings with the length of the run: without --max_duration that of the measurement.

    With --max_duration all batches after the warm-up are measured.
    """
    if settings.max_duration and not settings.loader_only:
        return settings
    queue = queued_batches(settings.num_workers) if settings.remote else 0
    settings = with_defaults(settings, {'measure_batches': fewest_batches(queue)})
    batches = settings.warmup_batches + queue + settings.measure_batches
    return with_defaults(settings, {'max_duration': f'{batches}ba'})


def refuse_more_ranks_than_gpus() -> None:
    """Raise ValueError if two ranks would share a GPU. Nothing that touches a GPU, and so may fail, comes before it."""
    processes = dist.get_local_world_size()
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and processes > gpus:
        raise ValueError(f'composer -n {processes} is more than the GPUs of this machine; use -n {gpus}')


def refuse_half_precision_without_a_gpu(settings: Train) -> None:
    """Raise ValueError if a training would compute in a precision that Composer has for GPUs alone."""
    if settings.precision != 'fp32' and not torch.cuda.is_available():
        raise ValueError(f'--precision {settings.precision} needs a GPU, and this machine has none; give --precision '
                         'fp32, after a recipe that has the other')


def refuse_what_cannot_be_here(settings: Train, is_for_gpus: bool, devices: int) -> None:
    """Raise ValueError, with the flag, its value and the remedy, if a flag would do nothing or the wrong thing."""
    device_batch_size = settings.batch_size // devices
    if settings.searches_microbatch and not is_for_gpus:
        raise ValueError(f'--device_train_microbatch_size auto needs a GPU; give a number, such as {device_batch_size}')
    if settings.compile == 'reduce-overhead' and settings.device_train_microbatch_size != device_batch_size:
        raise ValueError('--compile reduce-overhead replays CUDA graphs, whose gradients the next microbatch would '
                         f'overwrite; use --device_train_microbatch_size {device_batch_size}')
    if settings.attention == 'cudnn' and torch.cuda.is_available():
        version = torch.backends.cudnn.version() or FAULTLESS_CUDNN
        if version < FAULTLESS_CUDNN:
            raise ValueError(f'--attention cudnn needs cuDNN 9.15.1 or newer, and torch {torch.__version__} has '
                             f'{version}, whose attention has faults at lengths that no 128 divides; leave it out')
