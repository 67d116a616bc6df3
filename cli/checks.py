"""What cannot run on this machine is refused before anything is built.

What shows without torch is in cli/early_checks.py.
"""
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import torch
from composer.core import State
from composer.utils import dist

from cli.defaults import INTERVALS, is_for_gpus, workers_that_fit
from cli.early_checks import refuse_files_of_another_run
from cli.options import split_time
from inputs.shards import parse_size
from inputs.words import counted
from measuring.measurement import total_batches
from measuring.tracing import TRACE_WARMUP, TRACED_BATCHES
from settings import switch_table
from settings.commands import Encode
from settings.train import Train
from settings.switch_table import Value
from training.checkpoints import checkpoints, from_storage


def refuse_more_ranks_than_gpus() -> None:
    """Raises ValueError if two ranks would share a GPU. It comes before anything that touches one, and so may fail."""
    processes = dist.get_local_world_size()
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        gpus = counted(torch.cuda.device_count(), 'GPU')
        raise ValueError(f'composer -n {processes} is more than the {gpus} of this machine; use -n '
                         f'{torch.cuda.device_count()}')
    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available() and processes > cores and dist.get_global_rank() == 0:
        print(f'warning: no GPU here: the {processes} processes of composer -n {processes} share '
              f'{counted(cores, "core")} of the CPU; use python instead of composer', file=sys.stderr)


def refuse_bad_training(settings: Train) -> None:
    """Raises ValueError, with the flag, its value and the remedy, for a run of benchmark.py that cannot be here.

    What shows from the command line alone was refused before, by `refuse_early_training`.
    """
    refuse_bad_microbatch(settings)
    if settings.dry_run is not None:
        return
    if settings.precision != 'fp32' and not (torch.cuda.is_available() or settings.loader_only):
        raise ValueError(f'--precision {settings.precision}: Composer trains in fp32 where there is no GPU; '
                         'use fp32')
    refuse_bad_switches(settings, settings.batch_size)
    refuse_missing_stack(settings)
    refuse_bad_loading(settings, settings.image_size, settings.batch_size // dist.get_world_size())
    refuse_short_profile(settings, settings.max_duration)
    refuse_occupied_store(settings)
    if dist.get_global_rank() == 0:
        for sentence in without_effect(settings):
            print(f'warning: {sentence}', file=sys.stderr)


def refuse_bad_switches(settings: Train, batch_size: int) -> None:
    """Raises ValueError if a switch would do nothing, and the record say that it was on, or if it needs another batch.
    """
    has_one_microbatch = settings.device_train_microbatch_size == batch_size // dist.get_world_size()
    for switch in switch_table.SWITCHES:
        given = getattr(settings, switch.flag)
        if switch.needs_half_precision and settings.precision == 'fp32' and given:
            raise ValueError(f'--{switch.flag} does nothing in --precision fp32; leave it out')
        for value in switch.values_in(given):
            if value.whole_batch and not has_one_microbatch:
                flags = ' '.join(switch.as_flags(given))
                raise ValueError(f'{flags} {value.whole_batch}; use a --device_train_microbatch_size that is a '
                                 "device's whole share of the batch")


def refuse_missing_stack(settings: Train) -> None:
    """Raises ValueError if a switch needs a GPU, a package or a version of cuDNN that is not here."""
    if settings.compile:
        refuse_missing_headers()
    for switch in switch_table.SWITCHES:
        given = getattr(settings, switch.flag)
        for value in switch.values_in(given):
            flags = ' '.join(switch.as_flags(given))
            refuse_missing_package(flags, value)
            refuse_faulty_cudnn(flags, value)


def refuse_missing_package(flags: str, value: Value) -> None:
    """Raises ValueError if the value of a switch needs a package that is not there, or has no GPU to work on."""
    package = value.package
    if package and not (torch.cuda.is_available() and importlib.util.find_spec(package)):
        raise ValueError(f'{flags} needs a GPU and the package {package}; {value.remedy}')


def refuse_missing_headers() -> None:
    """Raises ValueError if Python's headers are not here, which the compilers of --compile include."""
    header = Path(sysconfig.get_path('include')) / 'Python.h'
    if not header.exists():
        version = f'{sys.version_info.major}.{sys.version_info.minor}'
        raise ValueError(f"--compile needs Python's headers, and {header} is not there; install the package "
                         f'python{version}-dev, on Fedora and Red Hat python{version}-devel, or leave --compile out')


def refuse_bad_microbatch(settings: Train) -> None:
    """Raises ValueError if a microbatch is to be searched for where there is no GPU."""
    dry_run = settings.dry_run
    if settings.searches_microbatch and not is_for_gpus(dry_run):
        share = settings.batch_size // (dry_run or dist.get_world_size())
        raise ValueError(f'--device_train_microbatch_size auto needs a GPU; give a number, such as {share}')


def refuse_faulty_cudnn(flags: str, value: Value) -> None:
    """Raises ValueError if the value of a switch uses what the cuDNN that torch has loaded does wrong."""
    if value.cudnn is None or not torch.cuda.is_available():
        return
    version = torch.backends.cudnn.version()
    if version is not None and version < value.cudnn:
        raise ValueError(f'{flags} needs cuDNN {cudnn_in_words(value.cudnn)} or newer, and torch {torch.__version__} '
                         f'has {cudnn_in_words(version)}, {value.faults}; {value.remedy}')


def cudnn_in_words(version: int) -> str:
    """A version of cuDNN as torch gives it, such as 91501, as people write it, such as 9.15.1."""
    return f'{version // 10000}.{version // 100 % 100}.{version % 100}'


def refuse_bad_loading(settings: Train | Encode, image_size: int, device_batch: int) -> None:
    """Raises ValueError if --num_workers or --cache_limit cannot work, in benchmark.py or encode.py.

    Args:
        data: where the samples come from.
        image_size: in pixels.
        device_batch: samples of a batch on each device.
    """
    if settings.remote and settings.num_workers:
        fitting = workers_that_fit(settings.num_workers, device_batch, image_size, settings.remote)
        if settings.num_workers > fitting:
            raise ValueError(f'--num_workers {settings.num_workers} may fill the shared memory, /dev/shm, with its '
                             f'batches; use at most {fitting}, or make it larger (docker run --shm-size)')
    if settings.cache_limit:
        refuse_bad_cache_limit(settings.cache_limit, settings.remote, settings.local)


def refuse_bad_cache_limit(limit: str, remote: str | None, local: str | None) -> None:
    """Raises ValueError if --cache_limit is no size, or if there is no cache that it could bound."""
    if not remote or (os.path.isdir(remote) and not local):
        raise ValueError(f'--cache_limit {limit} has no cache to bound: --remote {remote} is read in place; give '
                         '--local a folder, or leave the limit out')
    try:
        parse_size(limit)
    except ValueError:
        raise ValueError(f'--cache_limit {limit} is not a size such as 500gb') from None


def refuse_short_profile(settings: Train, max_duration: str) -> None:
    """Raises ValueError if the run ends before what --profile traces."""
    folder = settings.profile
    if not folder:
        return
    least = settings.warmup_batches + TRACE_WARMUP + TRACED_BATCHES
    duration, unit = split_time(max_duration)
    if unit == 'ba' and duration < least:
        raise ValueError(f'--profile {folder} traces {TRACED_BATCHES} batches up to the {least}th, and the run has '
                         f'{duration:.0f}; use --max_duration {least}ba or more')


def refuse_occupied_store(settings: Train) -> None:
    """Raises ValueError if the checkpoints of a new run would lie among those of another, in a store."""
    folder = settings.save_folder
    if folder and '://' in folder and not settings.autoresume and dist.get_global_rank() == 0:
        refuse_files_of_another_run(folder, from_storage(checkpoints, folder))


def without_effect(settings: Train) -> list[str]:
    """A sentence for each flag that was given and does nothing in this run, or not what it is for."""
    sentences = []
    for flag in ('save_interval', 'save_num_checkpoints_to_keep'):
        value = getattr(settings, flag)
        if value is not None and not settings.save_folder:
            sentences.append(f'--{flag} {value} does nothing without --save_folder: nothing is saved')
    uses_tokenizer = (settings.remote, settings.caption_drop, settings.eval_remote, settings.sample_prompts,
                      settings.save_folder)
    if settings.tokenizer and not any(uses_tokenizer):
        sentences.append(f'--tokenizer {settings.tokenizer} does nothing here: synthetic captions are tokens already')
    prompts = settings.sample_prompts
    if prompts and not settings.pretrained:  # of tiny, to try it out; refuse_early_training refuses others
        sentences.append(f'--sample_prompts {prompts} will draw noise: the VAE of --model_name '
                         f'{settings.model_name} is random')
    return sentences


def warn_of_what_comes_too_late(settings: Train, state: State) -> None:
    """On rank 0, once the length of an epoch is known: what was asked for a time that this run does not reach."""
    total = total_batches(state)
    if total is None or dist.get_global_rank() != 0:
        return
    for sentence in too_late(settings, total, int(state.dataloader_len)):
        print(f'warning: {sentence}', file=sys.stderr)


def too_late(settings: Train, total: int, epoch: int) -> list[str]:
    """A sentence for each flag whose time is beyond the `total` batches of a run, with `epoch` batches in an epoch."""
    batches = {'ba': 1, 'ep': epoch, 'sp': 1 / settings.batch_size, 'dur': total}  # in one of each unit

    def is_too_late(time: str, share: float = 1) -> bool:
        value, unit = split_time(time)
        return value * batches[unit] > share * total

    run = f'this run of {counted(total, "batch", "batches")} (--max_duration {settings.max_duration})'
    sentences = []
    ema_start = settings.ema_start
    if ema_start and is_too_late(ema_start):
        sentences.append(f'--ema_start {ema_start} comes after the end of {run}: there will be no average')
    half_life = settings.ema_half_life
    is_used = settings.save_folder or settings.eval_remote or settings.sample_prompts
    if half_life and is_used and is_too_late(half_life, share=1 / 4):
        sentences.append(f'--ema_half_life {half_life} is more than a quarter of {run}: the average will still be near '
                         f'the weights that it started from; give {max(1, total // 10)}ba')
    warmup = settings.lr_warmup
    if warmup and is_too_late(warmup, share=1 / 2):
        sentences.append(f'--lr_warmup {warmup} is more than half of {run}: the learning rate will hardly get near '
                         f'its value; give {max(1, total // 10)}ba')
    intervals = (('save_interval', settings.save_interval, 'saved'),
                 ('eval_interval', settings.eval_interval, 'evaluated'),
                 ('sample_interval', settings.sample_interval, 'drawn'))
    for flag, interval, deed in intervals:
        if interval not in (None, INTERVALS[flag]) and is_too_late(interval):
            sentences.append(f'--{flag} {interval} is longer than {run}: only its end will be {deed}')
    return sentences
