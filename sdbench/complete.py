"""Complete the settings of a run: fill in what the flags leave open, from the ranks, the machine and the data.

Later code can rely on every setting being filled in, and on every time being in batches. That keeps two of Composer's
special cases away: it rounds a fraction of a run to whole epochs if the length is in epochs, and it updates an EMA only
once per epoch if the half-life is in epochs.
"""
import math
from dataclasses import replace
from typing import Any

from sdbench.errors import UserError, plural
from sdbench.files import sibling_path
from sdbench.flags.commands import Encode
from sdbench.flags.times import LONGEST_INTERVAL, to_batches
from sdbench.flags.train import ENCODER_PRECISIONS, ENCODERS, MOST_WORKERS, TIMES, Run, Train, default_switches
from sdbench.flags.training_command import fine_tune_instead, trains_random_weights
from sdbench.inputs.shards import number_of_samples, read_index
from sdbench.process import cpu_cores, launcher_variable
from sdbench.records.status import fewest_batches

BATCHES_PER_WORKER = 2  # batches that each loader process prefetches: torch's default prefetch_factor
# Before cuDNN 9.15.1, gradients of its attention can be NaN at sequence lengths that are not multiples of 128.
FIXED_CUDNN = 91501
SYNTHETIC_SAMPLES = 100_000  # in an epoch of random images

# Each interval, and the flag without which nothing happens at that interval.
INTERVALS = {'save_interval': 'save_folder', 'eval_interval': 'eval_remote', 'sample_interval': 'sample_prompts'}
# Defaults of these flags depend on the machine, the number of devices or the kind of run. They are not a user's choice.
DEPENDENT_DEFAULTS = ('num_workers', 'device_train_microbatch_size', 'compile_blocks', 'max_duration', 'ema_half_life')


def index_of_data(settings: Train) -> dict | None:
    """Read the index.json of the shards; None for synthetic data. Raises UserError if it is missing or invalid."""
    if not settings.remote and not settings.local:
        return None
    return read_index(settings.remote or settings.local, '--remote' if settings.remote else '--local')


def complete(given: Train, index: dict | None) -> Run:
    """Return the settings of a run with every default filled in. All ranks call this together.

    Only a microbatch of `auto` stays: training replaces it once the model is built (`with_found_microbatch`), and a dry
    run replaces it for each GPU model.

    A dry run for several GPU counts is completed once for each count. `index` is the index.json of the shards; None for
    synthetic data.

    Raises UserError for flags that these ranks, this machine or this data cannot serve.
    """
    # Devices: a dry run is for the GPU count in --dry_run, whatever GPUs this machine has.
    num_devices = given.dry_run[0] if given.dry_run else 0
    num_devices = num_devices or launcher_variable('WORLD_SIZE') or 1
    is_for_gpus, most_workers, precision_here = facts_of_machine(given.dry_run is not None)

    # Data: --local without --remote is the folder of the shards. A dry run without data is for random images.
    remote = given.remote or given.local
    latents = given.use_synth_latents if index is None else 'latents' in index
    samples = max(given.batch_size, SYNTHETIC_SAMPLES) if index is None else number_of_samples(index)
    batches_per_epoch = max(1, samples // given.batch_size)
    num_workers = or_default(given.num_workers, most_workers if remote else 0)  # synthetic data needs none

    # Speed: trials of microbatches on a CPU could fill the memory of the machine.
    microbatch = given.device_train_microbatch_size
    if microbatch == 'auto' and not is_for_gpus:
        microbatch = given.batch_size // num_devices
    precision = given.precision or precision_here
    switches = {flag: or_default(getattr(given, flag), default)
                for flag, default in default_switches(precision, given.compile, num_devices).items()}

    # Length: without --max_duration the run is a measurement, which outlasts the prefetched batches. With it, all
    # batches after the warm-up are measured.
    queue_batches = num_workers * BATCHES_PER_WORKER if remote else 0
    measure_batches = given.measure_batches
    if given.loader_only or given.max_duration is None:
        measure_batches = or_default(measure_batches, fewest_batches(queue_batches))
    if given.max_duration is None:
        length = given.warmup_batches + queue_batches + measure_batches
    else:
        length = to_batches(given.max_duration, batches_per_epoch)

    known = vars(given) | times_in_batches(given, batches_per_epoch, length) | switches
    known |= {'remote': remote, 'local': given.local if given.remote else None, 'num_workers': num_workers,
              'use_synth_data': index is None and not latents, 'device_train_microbatch_size': microbatch,
              'precision': precision, 'measure_batches': measure_batches}
    run = Run(**known, encoders=ENCODERS[latents], num_devices=num_devices, batches_per_epoch=batches_per_epoch,
              sample_folder=sibling_path(given.save_folder, 'samples') if given.save_folder else 'samples',
              by_default=tuple(flag for flag in DEPENDENT_DEFAULTS if getattr(given, flag) in (None, 'auto')))
    refuse_impossible(run, samples, is_for_gpus)
    return run


def facts_of_machine(is_dry_run: bool) -> tuple[bool, int, str]:
    """Return whether the run is for GPUs, the default of --num_workers, and the best precision.

    A forecast does not depend on the machine that makes it. In a training all ranks take the values of rank 0. If the
    ranks had different numbers of workers, they would also have runs of different lengths, because a measurement
    outlasts the batches that the workers have prefetched.
    """
    if is_dry_run:
        return True, workers_per_device(1), 'amp_bf16'
    import torch  # here, because a forecast needs no torch, and its import takes seconds
    from composer.utils import dist
    is_for_gpus = torch.cuda.is_available()
    mine = (workers_per_device(dist.get_local_world_size()), best_precision(is_for_gpus))
    return is_for_gpus, *dist.all_gather_object(mine)[0]


def times_in_batches(given: Train, batches_per_epoch: int, length: int) -> dict[str, str | None]:
    """Return the times of a run in batches, such as '1000ba', by flag; None for times that the run does not need.

    `length` is the length of the run in batches. Raises UserError if the EMA would start after the end of the run.
    """
    # Defaults for a short run: it is saved and evaluated four times, and lasts for ten half-lives of its EMA.
    defaults = {}
    if given.use_ema:
        defaults['ema_half_life'] = f'{min(LONGEST_INTERVAL, math.ceil(length / 10))}ba'
    for interval, needed in INTERVALS.items():
        if getattr(given, needed):
            defaults[interval] = f'{min(LONGEST_INTERVAL, math.ceil(length / 4))}ba'

    times = {}
    for flag in TIMES:
        time = getattr(given, flag) or defaults.get(flag)
        times[flag] = time and f'{to_batches(time, batches_per_epoch, length)}ba'
    times['max_duration'] = f'{length}ba'
    if given.dry_run is None and times['ema_start'] and to_batches(times['ema_start']) >= length:
        raise UserError(f'--ema_start {given.ema_start} is not before the end of the run, --max_duration {length}ba: '
                        'there would be no EMA weights; give an earlier time')
    return times


def refuse_impossible(run: Run, samples: int, is_for_gpus: bool) -> None:
    """Raise UserError for flags that would do nothing, or the wrong thing, on this machine or with this data.

    `is_for_gpus` tells whether the run is on GPUs, or a forecast for GPUs.
    """
    if samples < run.batch_size and run.dry_run is None:
        remedy = 'use a smaller batch'
        if samples and trains_random_weights(run):  # so few samples cannot train random weights at any batch size
            remedy = fine_tune_instead(run, samples)
        raise UserError(f'--remote {run.remote} holds {plural(samples, "sample")}, fewer than --batch_size '
                        f'{run.batch_size}; {remedy}')
    if run.precision != 'fp32' and not is_for_gpus and not run.loader_only:  # Composer needs GPUs for it
        raise UserError(f'--precision {run.precision} needs a GPU, and this machine has none; give --precision fp32 on '
                        'the command line, after any recipe')
    if run.compile == 'reduce-overhead' and run.device_train_microbatch_size != run.device_batch_size:
        raise UserError('--compile reduce-overhead replays CUDA graphs, whose gradients the next microbatch would '
                        f'overwrite; use --device_train_microbatch_size {run.device_batch_size}')
    if run.attention == 'cudnn' and is_for_gpus and run.dry_run is None:
        import torch
        version = torch.backends.cudnn.version()
        if version and version < FIXED_CUDNN:
            raise UserError(f'--attention cudnn needs cuDNN 9.15.1 or newer, and torch {torch.__version__} has '
                            f'{version}, whose attention is wrong at sequence lengths that are not a multiple of 128; '
                            'use --attention sdpa')
    if run.random_flip and run.latents:
        raise UserError('--random_flip mirrors images, and this run trains on latents; give --no-random_flip')


def complete_encoding(settings: Encode) -> Encode:
    """Return the settings of encode.py with its precision filled in. Raises UserError if --ray needs a precision."""
    import torch
    is_for_gpus = torch.cuda.is_available()  # on this machine
    if settings.ray and settings.encoder_precision is None and not is_for_gpus:
        raise UserError(f'--ray {settings.ray} needs --encoder_precision, because this machine has no GPU that shows '
                        'what the GPUs of the cluster can do; give bf16 (GPUs since the A100), fp16, or fp32 for CPUs')
    precision = ENCODER_PRECISIONS[best_precision(is_for_gpus)]
    return replace(settings, encoder_precision=settings.encoder_precision or precision,
                   channels_last=or_default(settings.channels_last, bool(settings.compile)))


def or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def best_precision(is_for_gpus: bool) -> str:
    """Return amp_bf16 for a GPU that supports it, amp_fp16 for another GPU, and fp32 for a CPU."""
    if not is_for_gpus:
        return 'fp32'
    import torch
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return 'amp_fp16'
    return 'amp_bf16'


def workers_per_device(devices: int) -> int:
    """Return the number of loader processes for each device of this machine: one per CPU core, up to MOST_WORKERS."""
    return min(MOST_WORKERS, max(1, cpu_cores() // max(1, devices)))
