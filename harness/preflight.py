"""Before anything is built: the defaults that depend on this machine, and the refusal of what cannot run."""
import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from composer import Time
from composer.core import TimeUnit
from composer.utils import dist
from streaming.base.util import bytes_to_int

from harness.checkpoints import checkpoints, from_storage
from harness.costs import TRAINING_IMAGES
from harness.measurement import QUEUES_IN_WINDOW
from harness.ranks import cores_per_rank
from harness.sampling import read_prompts
from harness.tracing import TRACE_WARMUP, TRACED_BATCHES
from inputs.timed_loader import queued_batches

HALF_PRECISION = {'amp_bf16': 'bf16', 'amp_fp16': 'fp16', 'fp32': 'fp32'}  # of the encoders, by that of the UNet
MOST_WORKERS = 8
MEASURED_BATCHES = 20
BATCHES_OR_EPOCHS = (TimeUnit.BATCH, TimeUnit.EPOCH)
FIRST_SOUND_CUDNN = 91501  # 9.15.1; before it, attention over lengths that no 128 divides can give gradients of NaN


def refuse_more_ranks_than_gpus() -> None:
    """ValueError: two ranks would share a GPU. It comes before anything that touches one, and so may fail."""
    processes = dist.get_local_world_size()
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise ValueError(f'composer -n {processes} is more than the {torch.cuda.device_count()} GPUs of this machine')


def number_of_devices(args: argparse.Namespace) -> int:
    """How many devices share the batch: those of this run, or those that --dry_run speaks of."""
    return getattr(args, 'dry_run', None) or dist.get_world_size()


def is_for_gpus(args: argparse.Namespace) -> bool:
    """Whether the run is on GPUs, or --dry_run speaks of them."""
    return torch.cuda.is_available() or getattr(args, 'dry_run', None) is not None


def fill_in_training_defaults(args: argparse.Namespace) -> None:
    """Fill in the flags of benchmark.py that were not given."""
    if args.dry_run is not None and not (args.remote or args.local or args.use_synth_latents):
        args.use_synth_data = True
    device_batch = args.batch_size // number_of_devices(args)
    if not args.device_train_microbatch_size:
        args.device_train_microbatch_size = 'auto' if is_for_gpus(args) else device_batch
    elif args.device_train_microbatch_size.isdecimal():
        args.device_train_microbatch_size = int(args.device_train_microbatch_size)
    args.microbatch_search = args.device_train_microbatch_size == 'auto'  # by harness/microbatch.py
    args.precision = args.precision or best_precision(args)
    fill_in_shared_defaults(args, device_batch, args.precision)
    args.keeps_nothing = bool(args.max_duration) and not args.save_folder
    fill_in_duration(args)
    if args.compile_blocks is None:
        args.compile_blocks = compiles_blocks(args)
    if args.use_ema:
        args.ema_half_life = args.ema_half_life or '1000ba'
    if args.eval_remote:
        args.eval_interval = args.eval_interval or '1000ba'
    if args.sample_prompts:
        args.sample_interval = args.sample_interval or '1000ba'
    if args.training_images is None and args.model_name != 'tiny':
        args.training_images = TRAINING_IMAGES  # tiny is for trying things out: nobody trains it


def compiles_blocks(args: argparse.Namespace) -> bool:
    """Whether --compile goes by blocks unless it is told: where several devices exchange gradients.

    A whole UNet has all its gradients at once, at the end of its backward pass; of blocks those of one travel while
    those of the next are computed. CUDA graphs stay whole: they are tied to the weights, which blocks differ in.
    """
    return bool(args.compile) and args.compile != 'reduce-overhead' and number_of_devices(args) > 1


def fill_in_duration(args: argparse.Namespace) -> None:
    """Without --max_duration the run is as long as the measurement; with it, all after the warm-up is measured."""
    if args.max_duration and not args.loader_only:
        return
    queue = queued_batches(args.num_workers) if args.remote else 0
    if args.measure_batches is None:
        args.measure_batches = max(MEASURED_BATCHES, QUEUES_IN_WINDOW * queue)
    args.max_duration = args.max_duration or f'{args.warmup_batches + queue + args.measure_batches}ba'


def fill_in_shared_defaults(args: argparse.Namespace, device_batch: int, precision: str) -> None:
    """Fill in the flags that encode.py has as well, for `device_batch` images at once on each device."""
    read_local_in_place(args)
    args.encoder_precision = args.encoder_precision or HALF_PRECISION[precision]
    if args.channels_last is None:
        args.channels_last = is_for_gpus(args)
    if args.num_workers is None:
        args.num_workers = 0
        if args.remote and getattr(args, 'dry_run', None) is None:
            args.num_workers = default_workers(device_batch, args.image_size)


def default_workers(device_batch: int, image_size: int) -> int:
    """Loader processes of each rank: as many as its cores, unless shared memory holds fewer, which is said."""
    wanted = min(MOST_WORKERS, cores_per_rank())
    fitting = workers_that_fit(device_batch, image_size)
    if fitting >= wanted:
        return wanted
    if dist.get_global_rank() == 0:
        print(f'warning: --num_workers is {fitting} instead of {wanted}, because the shared memory, /dev/shm, holds '
              'the batches of no more; loading will be slower; make it larger (docker run --shm-size)', file=sys.stderr)
    return fitting


def read_local_in_place(args: argparse.Namespace) -> None:
    """Where --local is the only place that is given, it is the data. ValueError: it is no folder."""
    is_synthetic = getattr(args, 'use_synth_data', False) or getattr(args, 'use_synth_latents', False)
    if args.remote or is_synthetic or not args.local:
        return
    if not os.path.isdir(args.local):
        raise ValueError(f'--local {args.local} is no folder, and there is no --remote to fill it from; give --remote')
    args.remote = args.local
    args.local = None


def agree_on_workers(args: argparse.Namespace) -> None:
    """Once the ranks have met: as many loader processes on each as the poorest host allows, and what follows from them.

    Ranks whose loaders differ would train and measure for different numbers of batches.
    """
    mine = (args.num_workers, args.measure_batches or 0, args.max_duration)
    args.num_workers, measure_batches, args.max_duration = min(dist.all_gather_object(mine))
    args.measure_batches = measure_batches or None


def best_precision(args: argparse.Namespace) -> str:
    """amp_bf16 on a GPU that has it, amp_fp16 on another, fp32 on a CPU. --dry_run speaks of a GPU that has it."""
    if not torch.cuda.is_available():
        return 'amp_bf16' if is_for_gpus(args) else 'fp32'
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return 'amp_bf16'
    return 'amp_fp16'


def workers_that_fit(device_batch: int, image_size: int) -> int:
    """Workers of each rank whose batches shared memory can hold; where it is full they would die of a bus error."""
    if not os.path.isdir('/dev/shm'):
        return sys.maxsize
    disk = os.statvfs('/dev/shm')
    batch_bytes = max(1, device_batch) * 3 * image_size ** 2  # uint8, at most of this size
    batches = disk.f_bavail * disk.f_frsize // (dist.get_local_world_size() * batch_bytes)
    return max(0, (batches - 2) // 2)  # each worker prefetches 2, and 2 are in use


def refuse_bad_training(args: argparse.Namespace) -> None:
    """ValueError, with the flag, its value and the remedy, for flags of benchmark.py that cannot run."""
    refuse_bad_source(args)
    refuse_bad_batch(args)
    if args.dry_run is not None:
        refuse_bad_image_size(args)
        if args.loader_only:
            raise ValueError('--dry_run speaks of a training, --loader_only measures a loader; give one of them')
        return
    if args.attention == 'xformers' and not (torch.cuda.is_available() and importlib.util.find_spec('xformers')):
        raise ValueError('--attention xformers needs a GPU and the package xformers; use sdpa')
    if args.precision != 'fp32' and not (torch.cuda.is_available() or args.loader_only):
        raise ValueError(f'--precision {args.precision}: Composer trains in fp32 where there is no GPU; use fp32')
    refuse_bad_switches(args)
    refuse_bad_shared_flags(args, args.batch_size // dist.get_world_size())
    refuse_bad_duration(args)
    refuse_bad_profile(args)
    refuse_bad_warmup(args)
    refuse_bad_average(args)
    refuse_bad_evaluation(args)
    refuse_bad_save_folder(args)
    refuse_bad_sampling(args)


def refuse_bad_switches(args: argparse.Namespace) -> None:
    """ValueError: a switch would do nothing, and the record say that it was on; or it cannot work."""
    for flag in ('half_precision_norms', 'cast_weights_once'):
        if getattr(args, flag) and args.precision == 'fp32':
            raise ValueError(f'--{flag} does nothing in --precision fp32; leave it out')
    if args.cast_weights_once and args.compile:
        raise ValueError('--cast_weights_once does nothing with --compile, whose graphs cast the weights themselves; '
                         'leave one out')
    if 'cudnn' in args.attention.split(',') and torch.cuda.is_available():
        refuse_faulty_cudnn(args.attention)
    if args.compile_blocks and not args.compile:
        raise ValueError('--compile_blocks says what --compile compiles; give that as well')
    single_microbatch = args.device_train_microbatch_size == args.batch_size // dist.get_world_size()
    if args.compile == 'reduce-overhead' and not single_microbatch:
        raise ValueError('--compile reduce-overhead replays CUDA graphs, whose gradients the next microbatch would '
                         'overwrite; use a --device_train_microbatch_size that is a device\'s whole share of the batch')


def refuse_faulty_cudnn(attention: str) -> None:
    """ValueError: --attention names cuDNN, and the one that torch has loaded has faults in its attention."""
    version = torch.backends.cudnn.version()
    if version is not None and version < FIRST_SOUND_CUDNN:
        found = f'{version // 10000}.{version // 100 % 100}.{version % 100}'
        raise ValueError(f'--attention {attention} needs cuDNN 9.15.1 or newer, and torch {torch.__version__} has '
                         f'{found}, whose attention has faults at lengths that no 128 divides; leave cudnn out')


def refuse_bad_source(args: argparse.Namespace) -> None:
    """ValueError: the images come from nowhere, or from two places."""
    given = [args.remote, args.use_synth_data, args.use_synth_latents]
    if not any(given):
        raise ValueError('give one of --remote, --use_synth_data and --use_synth_latents')
    if sum(map(bool, given)) > 1:
        raise ValueError('give only one of --remote, --use_synth_data and --use_synth_latents, not both')


def refuse_bad_batch(args: argparse.Namespace) -> None:
    """ValueError: the batch does not divide over the devices, or a device's share into microbatches."""
    world_size = number_of_devices(args)
    if args.batch_size % world_size:
        divisible = args.batch_size // world_size * world_size or world_size
        raise ValueError(f'--batch_size {args.batch_size} does not divide over {world_size} devices; use {divisible}')
    device_batch = args.batch_size // world_size
    microbatch = args.device_train_microbatch_size
    if microbatch == 'auto':
        if not is_for_gpus(args):
            raise ValueError('--device_train_microbatch_size auto needs a GPU; give a number')
    elif not isinstance(microbatch, int) or microbatch == 0 or device_batch % microbatch:
        raise ValueError(f'--device_train_microbatch_size {microbatch} does not divide the {device_batch} images '
                         f'that each of {world_size} devices gets of --batch_size {args.batch_size}')


def refuse_bad_shared_flags(args: argparse.Namespace, device_batch: int) -> None:
    """ValueError for the flags that encode.py has as well."""
    refuse_bad_image_size(args)
    fitting = workers_that_fit(device_batch, args.image_size)
    if args.num_workers > fitting:
        raise ValueError(f'--num_workers {args.num_workers} may fill the shared memory, /dev/shm, with its batches; '
                         f'use at most {fitting}, or make it larger (docker run --shm-size)')
    if args.cache_limit:
        refuse_bad_cache_limit(args)
    if dist.get_global_rank() == 0:
        try:
            open(args.results, 'a').close()  # said before the run, not after it
        except OSError as error:
            raise ValueError(f'--results {args.results} cannot be written: {error.strerror}; name another') from None


def refuse_bad_image_size(args: argparse.Namespace) -> None:
    """ValueError: the VAE, which makes one latent of 8 x 8 pixels, leaves some over."""
    if args.image_size % 8:
        multiple = args.image_size // 8 * 8 or 8
        raise ValueError(f'--image_size {args.image_size} is not a multiple of 8; use {multiple}')


def refuse_bad_cache_limit(args: argparse.Namespace) -> None:
    """ValueError: --cache_limit is no size, or there is no cache that it could bound."""
    if not args.remote or (os.path.isdir(args.remote) and not args.local):
        raise ValueError(f'--cache_limit {args.cache_limit} has no cache to bound: --remote {args.remote} is read '
                         'in place; give --local a folder, or leave the limit out')
    try:
        bytes_to_int(args.cache_limit)
    except ValueError:
        raise ValueError(f'--cache_limit {args.cache_limit} is not a size such as 500gb') from None


def time_of(args: argparse.Namespace, flag: str, example: str, units: Sequence[TimeUnit] = tuple(TimeUnit)) -> Time:
    """The value of a flag as a Time. ValueError: it is none, or not in one of `units`."""
    value = getattr(args, flag)
    try:
        time = Time.from_timestring(value)
    except (ValueError, KeyError):
        time = None
    if time is None or time.unit not in units:
        raise ValueError(f'--{flag} {value} is not a time such as {example}')
    return time


def refuse_bad_duration(args: argparse.Namespace) -> None:
    """ValueError: a time is none, or the run would end within its warm-up."""
    duration = time_of(args, 'max_duration', '5000ba or 2ep', (*BATCHES_OR_EPOCHS, TimeUnit.SAMPLE))
    for flag, time in (('max_duration', duration), ('save_interval', time_of(args, 'save_interval', '5000ba or 2ep'))):
        if time.value <= 0:
            raise ValueError(f'--{flag} {getattr(args, flag)} is not above 0; use 5000ba or 2ep')
    if duration.unit == TimeUnit.BATCH and duration.value <= args.warmup_batches:
        raise ValueError(f'--max_duration {args.max_duration} ends within --warmup_batches {args.warmup_batches}')


def refuse_bad_profile(args: argparse.Namespace) -> None:
    """ValueError: there is no step to trace, the run ends too early, or its trace would lie among other files."""
    if not args.profile:
        return
    if args.loader_only:
        raise ValueError(f'--profile {args.profile} traces training; leave out --loader_only')
    least = args.warmup_batches + TRACE_WARMUP + TRACED_BATCHES
    duration = Time.from_timestring(args.max_duration)
    if duration.unit == TimeUnit.BATCH and duration.value < least:
        raise ValueError(f'--profile {args.profile} traces {TRACED_BATCHES} batches up to the {least}th, and the run '
                         f'has {duration.value}; use --max_duration {least}ba or more')
    if dist.get_global_rank() == 0 and os.path.isdir(args.profile) and os.listdir(args.profile):
        raise ValueError(f'--profile {args.profile} already holds files; give a new folder')


def refuse_bad_warmup(args: argparse.Namespace) -> None:
    """ValueError: the learning rate cannot rise as asked."""
    if args.lr_warmup is None:
        return
    warmup = time_of(args, 'lr_warmup', '10000ba, 1ep or 0.01dur', (*BATCHES_OR_EPOCHS, TimeUnit.DURATION))
    if warmup.value <= 0:
        raise ValueError(f'--lr_warmup {args.lr_warmup} is no time; leave it out for a constant learning rate')
    if Time.from_timestring(args.max_duration).unit not in BATCHES_OR_EPOCHS:
        raise ValueError(f'--lr_warmup {args.lr_warmup} needs a --max_duration in batches (ba) or epochs (ep), not '
                         f'{args.max_duration}')


def refuse_bad_average(args: argparse.Namespace) -> None:
    """ValueError: the average cannot be kept as asked, or there is none."""
    for flag in ('ema_half_life', 'ema_start'):
        value = getattr(args, flag)
        if value is not None and not args.use_ema:
            raise ValueError(f'--{flag} {value} needs --use_ema')
    if not args.use_ema:
        return
    half_life = time_of(args, 'ema_half_life', '1000ba or 1ep', BATCHES_OR_EPOCHS)
    if half_life.value <= 0:
        raise ValueError(f'--ema_half_life {args.ema_half_life} is not above 0; use 1000ba, or leave --use_ema out')
    if args.ema_start is not None:
        time_of(args, 'ema_start', '5000ba, 1ep or 0.5dur', (*BATCHES_OR_EPOCHS, TimeUnit.DURATION))


def refuse_bad_evaluation(args: argparse.Namespace) -> None:
    """ValueError: there is nothing to evaluate on, or at no time."""
    if not args.eval_remote:
        if args.eval_interval is not None:
            raise ValueError(f'--eval_interval {args.eval_interval} needs --eval_remote')
        return
    if args.remote and os.path.realpath(args.eval_remote) == os.path.realpath(args.remote):
        raise ValueError(f'--eval_remote {args.eval_remote} is what the run trains on; give it shards of other samples')
    if time_of(args, 'eval_interval', '1000ba or 1ep', BATCHES_OR_EPOCHS).value <= 0:
        raise ValueError(f'--eval_interval {args.eval_interval} is not above 0; use 1000ba')


def refuse_bad_save_folder(args: argparse.Namespace) -> None:
    """ValueError: there is nothing to resume from, or a new run would write among the files of another."""
    folder = args.save_folder
    if args.autoresume:
        if not folder:
            raise ValueError('--autoresume needs the --save_folder of the run to resume')
        return
    if not folder or dist.get_global_rank() != 0:
        return
    if '://' in folder:
        occupied = bool(from_storage(checkpoints, folder))
    else:
        occupied = os.path.isdir(folder) and bool(os.listdir(folder))
    if occupied:
        raise ValueError(f'--save_folder {folder} already holds files; give a new one, or --autoresume to go on from '
                         'there')


def refuse_bad_sampling(args: argparse.Namespace) -> None:
    """ValueError: there is nothing to draw, nothing that can decode it, or the pictures of another run in its place."""
    if not args.sample_prompts:
        if args.sample_interval is not None:
            raise ValueError(f'--sample_interval {args.sample_interval} needs --sample_prompts')
        return
    if time_of(args, 'sample_interval', '1000ba or 1ep', BATCHES_OR_EPOCHS).value <= 0:
        raise ValueError(f'--sample_interval {args.sample_interval} is not above 0; use 1000ba')
    read_prompts(args.sample_prompts)
    if not args.pretrained:
        raise ValueError(f'--sample_prompts {args.sample_prompts} needs a VAE that can decode, and without '
                         '--pretrained it is random; give --model_name FOLDER --pretrained')
    if args.autoresume or dist.get_global_rank() != 0:
        return
    if any(Path(args.sample_folder).glob('ba*.png')):
        raise ValueError(f'--sample_folder {args.sample_folder} already holds drawings of another run; give a new one')
