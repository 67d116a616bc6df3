"""What cannot run on this machine is refused before anything is built.

What shows without torch is in cli/early_checks.py.
"""
import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import torch
from composer.core import State
from composer.utils import dist

from cli.defaults import INTERVALS, is_for_gpus, workers_that_fit
from cli.early_checks import number_of_devices, refuse_early_training
from cli.options import split_time
from fitting import switch_table
from fitting.switch_table import Value
from inputs.shards import parse_size
from measuring.measurement import total_batches
from measuring.tracing import TRACE_WARMUP, TRACED_BATCHES
from training.checkpoints import checkpoints, from_storage
from training.sampling import read_prompts

BATCHES_OR_EPOCHS = ('ba', 'ep')


def refuse_more_ranks_than_gpus() -> None:
    """ValueError: two ranks would share a GPU. It comes before anything that touches one, and so may fail."""
    processes = dist.get_local_world_size()
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise ValueError(f'composer -n {processes} is more than the {torch.cuda.device_count()} GPUs of this machine')


def refuse_bad_training(args: argparse.Namespace) -> None:
    """ValueError, with the flag, its value and the remedy, for flags of benchmark.py that cannot run."""
    refuse_early_training(args)
    refuse_bad_microbatch(args)
    if args.dry_run is not None:
        return
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
    refuse_unusable_folder('tensorboard', args.tensorboard)
    if dist.get_global_rank() == 0:
        for sentence in without_effect(args):
            print(f'warning: {sentence}', file=sys.stderr)


def refuse_bad_switches(args: argparse.Namespace) -> None:
    """Raises ValueError if a switch would do nothing, and the record say that it was on, or if it cannot work here."""
    has_one_microbatch = args.device_train_microbatch_size == args.batch_size // dist.get_world_size()
    for switch in switch_table.SWITCHES:
        given = getattr(args, switch.flag)
        if switch.needs_half_precision and args.precision == 'fp32' and given:
            raise ValueError(f'--{switch.flag} does nothing in --precision fp32; leave it out')
        for value in switch.values_in(given):
            flags = ' '.join(switch.as_flags(given))
            refuse_missing_package(flags, value)
            refuse_faulty_cudnn(flags, value)
            if value.whole_batch and not has_one_microbatch:
                raise ValueError(f'{flags} {value.whole_batch}; use a --device_train_microbatch_size that is a '
                                 "device's whole share of the batch")


def refuse_missing_package(flags: str, value: Value) -> None:
    """Raises ValueError if the value of a switch needs a package that is not there, or has no GPU to work on."""
    package = value.package
    if package and not (torch.cuda.is_available() and importlib.util.find_spec(package)):
        raise ValueError(f'{flags} needs a GPU and the package {package}; {value.remedy}')


def refuse_bad_microbatch(args: argparse.Namespace) -> None:
    """ValueError: a microbatch is to be searched for where there is no GPU."""
    if args.device_train_microbatch_size == 'auto' and not is_for_gpus(args):
        raise ValueError('--device_train_microbatch_size auto needs a GPU; give a number, such as '
                         f'{args.batch_size // number_of_devices(args)}')


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


def refuse_bad_shared_flags(args: argparse.Namespace, device_batch: int) -> None:
    """ValueError for the flags that encode.py has as well."""
    if args.remote and args.num_workers:
        fitting = workers_that_fit(args.num_workers, device_batch, args.image_size, args.remote)
        if args.num_workers > fitting:
            raise ValueError(f'--num_workers {args.num_workers} may fill the shared memory, /dev/shm, with its '
                             f'batches; use at most {fitting}, or make it larger (docker run --shm-size)')
    if args.cache_limit:
        refuse_bad_cache_limit(args)


def refuse_bad_cache_limit(args: argparse.Namespace) -> None:
    """ValueError: --cache_limit is no size, or there is no cache that it could bound."""
    if not args.remote or (os.path.isdir(args.remote) and not args.local):
        raise ValueError(f'--cache_limit {args.cache_limit} has no cache to bound: --remote {args.remote} is read '
                         'in place; give --local a folder, or leave the limit out')
    try:
        parse_size(args.cache_limit)
    except ValueError:
        raise ValueError(f'--cache_limit {args.cache_limit} is not a size such as 500gb') from None


def refuse_bad_duration(args: argparse.Namespace) -> None:
    """ValueError: the run would end within its warm-up."""
    duration, unit = split_time(args.max_duration)
    if unit == 'ba' and duration <= args.warmup_batches:
        raise ValueError(f'--max_duration {args.max_duration} ends within --warmup_batches {args.warmup_batches}')


def refuse_unusable_folder(flag: str, folder: str | None) -> None:
    """ValueError: a folder cannot be made, or nothing can be written in it. Nothing stays of the attempt."""
    if not folder or '://' in folder or dist.get_global_rank() != 0:
        return
    parent = os.path.abspath(folder)
    try:
        while not is_there(parent):
            parent = os.path.dirname(parent)
        tempfile.TemporaryDirectory(dir=parent).cleanup()
    except NotADirectoryError:
        raise ValueError(f'--{flag} {folder} cannot be a folder, because {parent} is a file; name another') from None
    except OSError as error:
        raise ValueError(f'--{flag} {folder} cannot be written: {error.strerror}; name another') from None


def is_there(path: str) -> bool:
    """Whether there is something of that name. OSError: that cannot be said."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def refuse_bad_profile(args: argparse.Namespace) -> None:
    """ValueError: there is no step to trace, the run ends too early, or its trace would lie among other files."""
    if not args.profile:
        return
    if args.loader_only:
        raise ValueError(f'--profile {args.profile} traces training; leave out --loader_only')
    least = args.warmup_batches + TRACE_WARMUP + TRACED_BATCHES
    duration, unit = split_time(args.max_duration)
    if unit == 'ba' and duration < least:
        raise ValueError(f'--profile {args.profile} traces {TRACED_BATCHES} batches up to the {least}th, and the run '
                         f'has {duration:.0f}; use --max_duration {least}ba or more')
    refuse_unusable_folder('profile', args.profile)
    if dist.get_global_rank() == 0 and os.path.isdir(args.profile) and os.listdir(args.profile):
        raise ValueError(f'--profile {args.profile} already holds files; give a new folder')


def refuse_bad_warmup(args: argparse.Namespace) -> None:
    """ValueError: the learning rate cannot rise as asked."""
    if args.lr_warmup is None:
        return
    if split_time(args.max_duration)[1] not in BATCHES_OR_EPOCHS:
        raise ValueError(f'--lr_warmup {args.lr_warmup} needs a --max_duration in batches (ba) or epochs (ep), not '
                         f'{args.max_duration}')


def refuse_bad_average(args: argparse.Namespace) -> None:
    """ValueError: the average cannot be kept as asked, or there is none."""
    for flag in ('ema_half_life', 'ema_start'):
        value = getattr(args, flag)
        if value is not None and not args.use_ema:
            raise ValueError(f'--{flag} {value} needs --use_ema')


def refuse_bad_evaluation(args: argparse.Namespace) -> None:
    """ValueError: there is nothing to evaluate on."""
    if not args.eval_remote:
        if args.eval_interval is not None:
            raise ValueError(f'--eval_interval {args.eval_interval} needs --eval_remote')
        return
    if args.remote and os.path.realpath(args.eval_remote) == os.path.realpath(args.remote):
        raise ValueError(f'--eval_remote {args.eval_remote} is what the run trains on; give it shards of other samples')


def refuse_bad_save_folder(args: argparse.Namespace) -> None:
    """ValueError: there is nothing to resume from, or a new run would write among the files of another."""
    folder = args.save_folder
    if args.autoresume and not folder:
        raise ValueError('--autoresume needs the --save_folder of the run to resume')
    if not folder:
        return
    if '{' in folder or '}' in folder:
        raise ValueError(f'--save_folder {folder} has a brace in it, for which Composer puts other words; name another')
    refuse_unusable_folder('save_folder', folder)
    if args.autoresume or dist.get_global_rank() != 0:
        return
    if '://' in folder:
        occupied = bool(from_storage(checkpoints, folder))
    else:
        occupied = os.path.isdir(folder) and bool(os.listdir(folder))
    if occupied:
        raise ValueError(f'--save_folder {folder} already holds files; give a new one, or --autoresume to go on from '
                         'there')


def refuse_bad_sampling(args: argparse.Namespace) -> None:
    """ValueError: there is nothing to draw, or the pictures of another run are in its place."""
    if not args.sample_prompts:
        if args.sample_interval is not None:
            raise ValueError(f'--sample_interval {args.sample_interval} needs --sample_prompts')
        return
    read_prompts(args.sample_prompts)
    refuse_unusable_folder('sample_folder', args.sample_folder)
    if args.autoresume or dist.get_global_rank() != 0:
        return
    if any(Path(args.sample_folder).glob('ba*.png')):
        raise ValueError(f'--sample_folder {args.sample_folder} already holds drawings of another run; give a new one')


def without_effect(args: argparse.Namespace) -> list[str]:
    """A sentence for each flag that was given and does nothing in this run, or not what it is for."""
    sentences = []
    for flag in ('save_interval', 'save_num_checkpoints_to_keep'):
        if getattr(args, flag) is not None and not args.save_folder:
            sentences.append(f'--{flag} {getattr(args, flag)} does nothing without --save_folder: nothing is saved')
    uses_tokenizer = (args.remote, args.caption_drop, args.eval_remote, args.sample_prompts, args.save_folder)
    if args.tokenizer and not any(uses_tokenizer):
        sentences.append(f'--tokenizer {args.tokenizer} does nothing here: synthetic captions are tokens already')
    if args.sample_prompts and not args.pretrained:  # of tiny, to try it out; refuse_early_training refuses others
        sentences.append(f'--sample_prompts {args.sample_prompts} will draw noise: the VAE of --model_name '
                         f'{args.model_name} is random')
    return sentences


def warn_of_what_comes_too_late(args: argparse.Namespace, state: State) -> None:
    """On rank 0, once the length of an epoch is known: what was asked for a time that this run does not reach."""
    total = total_batches(state)
    if total is None or dist.get_global_rank() != 0:
        return
    for sentence in too_late(args, total, int(state.dataloader_len)):
        print(f'warning: {sentence}', file=sys.stderr)


def too_late(args: argparse.Namespace, total: int, epoch: int) -> list[str]:
    """A sentence for each flag whose time is beyond the `total` batches of a run, with `epoch` batches in an epoch."""
    batches = {'ba': 1, 'ep': epoch, 'sp': 1 / args.batch_size, 'dur': total}  # in one of each unit

    def is_too_late(time: str) -> bool:
        value, unit = split_time(time)
        return value * batches[unit] > total

    run = f'this run of {total} batches (--max_duration {args.max_duration})'
    sentences = []
    if args.use_ema and args.ema_start and is_too_late(args.ema_start):
        sentences.append(f'--ema_start {args.ema_start} comes after the end of {run}: there will be no average')
    for flag, deed in (('save_interval', 'saved'), ('eval_interval', 'evaluated'), ('sample_interval', 'drawn')):
        interval = getattr(args, flag)
        if interval not in (None, INTERVALS[flag]) and is_too_late(interval):
            sentences.append(f'--{flag} {interval} is longer than {run}: only its end will be {deed}')
    return sentences
