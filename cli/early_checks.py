"""What is wrong with a command line of benchmark.py and shows without torch: it is answered before the imports.

`cli/checks.py` refuses what takes a library or the machine to know.
"""
import argparse
import contextlib
import json
import os
from collections.abc import Collection
from pathlib import Path

from cli.folders import is_first_rank, names_in, refuse_bad_results, refuse_missing_dataset, refuse_unusable_folder
from cli.options import split_time
from inputs.hub import refuse_impossible_model
from inputs.places import INDEX, number_of_samples, refuse_folder_without_index, refuse_mistyped_address
from inputs.text_files import read_prompts
from inputs.words import counted
from settings import switch_table
from training.checkpoint_files import (
    LOCK,
    checkpoints_among,
    no_weights_error,
    unet_folder,
)

MOST_INDEX_BYTES = 10 ** 7  # of an index.json that is read before the imports: more takes long itself
BATCHES_OR_EPOCHS = ('ba', 'ep')
# A flag that does nothing without another.
NEEDED_FLAGS = {'ema_half_life': 'use_ema', 'ema_start': 'use_ema', 'eval_interval': 'eval_remote',
                'sample_interval': 'sample_prompts', 'autoresume': 'save_folder'}


def refuse_early_training(args: argparse.Namespace) -> None:
    """Raises ValueError, with the flag, its value and the remedy, for what benchmark.py can run on no machine."""
    refuse_bad_source(args)
    refuse_bad_batch(args)
    refuse_bad_image_size(args)
    refuse_impossible_model(args.model_name, args.pretrained)
    refuse_bad_modes(args)
    refuse_flags_alone(args)
    refuse_missing_source(args)
    refuse_missing_dataset('--eval_remote', args.eval_remote)
    if args.dry_run is None:
        refuse_small_dataset(args)
        if not args.autoresume:  # a run that is resumed needs them no more
            refuse_missing_weights(args.load_weights)
        refuse_bad_times(args)
        refuse_bad_evaluation(args)
        refuse_bad_save_folder(args.save_folder, args.autoresume)
        refuse_bad_drawing(args)
        refuse_unusable_folder('--tensorboard', args.tensorboard)
        refuse_occupied_profile(args.profile)
        refuse_bad_results(args.results)


def refuse_bad_source(args: argparse.Namespace) -> None:
    """Raises ValueError if the images come from nowhere, or from two places."""
    is_synthetic = args.use_synth_data or args.use_synth_latents
    if not (args.remote or args.local or is_synthetic or args.dry_run is not None):
        raise ValueError('give one of --remote, --use_synth_data and --use_synth_latents')
    if sum(map(bool, (args.remote, args.use_synth_data, args.use_synth_latents))) > 1:
        raise ValueError('give only one of --remote, --use_synth_data and --use_synth_latents, not both')


def refuse_missing_source(args: argparse.Namespace) -> None:
    """Raises ValueError if there is no dataset at --remote, or at --local where that is the only place."""
    refuse_mistyped_address('--local', args.local)
    if args.remote:
        refuse_missing_dataset('--remote', args.remote)
    elif is_read_from_local(args):
        if not os.path.isdir(args.local):
            raise ValueError(f'--local {args.local} is no folder, and there is no --remote to fill it from; give '
                             '--remote')
        refuse_folder_without_index('--local', args.local)


def is_read_from_local(args: argparse.Namespace) -> bool:
    """Whether --local is the only place that is given: then it is the data."""
    is_synthetic = getattr(args, 'use_synth_data', False) or getattr(args, 'use_synth_latents', False)
    return bool(args.local) and not args.remote and not is_synthetic


def refuse_small_dataset(args: argparse.Namespace) -> None:
    """Raises ValueError if a batch takes more samples than a folder holds, as far as that is soon known."""
    remote = args.local if is_read_from_local(args) else args.remote
    samples = samples_in(remote) if remote else None
    if samples is not None:
        refuse_larger_batch(remote, samples, args.batch_size, args.device_train_microbatch_size,
                            number_of_devices(args))


def samples_in(folder: str) -> int | None:
    """The samples of a dataset in a folder; None where its index.json is not there, long, or none that is known."""
    path = Path(folder, INDEX)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        if path.stat().st_size <= MOST_INDEX_BYTES:
            return number_of_samples(json.loads(path.read_bytes()))
    return None


def refuse_larger_batch(remote: str, samples: int, batch_size: int, microbatch: int | str | None, devices: int) -> None:
    """Raises ValueError if a batch takes more samples than there are.

    Args:
        remote: the dataset.
        samples: that it holds.
        batch_size: over all devices.
        microbatch: images at once on a device; None, or auto: the program chooses.
        devices: how many share the batch.
    """
    if samples >= batch_size:
        return
    multiple = devices
    if microbatch not in (None, 'auto') and microbatch < batch_size // devices:
        multiple = devices * microbatch
    largest = samples // multiple * multiple
    remedy = f'use --batch_size {largest}' if largest else 'use more samples'
    raise ValueError(f'--remote {remote} holds {counted(samples, "sample")}, fewer than --batch_size {batch_size}; '
                     f'{remedy}')


def refuse_missing_weights(path: str | None) -> None:
    """Raises ValueError if --load_weights names nothing here that a training can start from."""
    if not path or '://' in path or os.path.isfile(path) or unet_folder(path):
        return
    if not checkpoints_among(names_in('--load_weights', path)):
        raise no_weights_error(f'--load_weights {path}')


def refuse_bad_times(args: argparse.Namespace) -> None:
    """Raises ValueError if the run would end within its warm-up, or the learning rate cannot rise as asked."""
    if args.max_duration is None:
        return
    duration, unit = split_time(args.max_duration)
    if unit == 'ba' and duration <= args.warmup_batches:
        raise ValueError(f'--max_duration {args.max_duration} ends within --warmup_batches {args.warmup_batches}')
    if args.lr_warmup is not None and unit not in BATCHES_OR_EPOCHS:
        raise ValueError(f'--lr_warmup {args.lr_warmup} needs a --max_duration in batches (ba) or epochs (ep), not '
                         f'{args.max_duration}')


def refuse_bad_evaluation(args: argparse.Namespace) -> None:
    """Raises ValueError if what is held out is what the run trains on."""
    trained_on = args.local if is_read_from_local(args) else args.remote
    if args.eval_remote and trained_on and os.path.realpath(args.eval_remote) == os.path.realpath(trained_on):
        raise ValueError(f'--eval_remote {args.eval_remote} is what the run trains on; give it shards of other samples')


def refuse_bad_save_folder(folder: str | None, autoresume: bool) -> None:
    """Raises ValueError if checkpoints cannot go to --save_folder, or a new run's would lie among those of another."""
    if not folder:
        return
    if '{' in folder or '}' in folder:
        raise ValueError(f'--save_folder {folder} has a brace in it, for which Composer puts other words; name another')
    refuse_unusable_folder('--save_folder', folder)
    if not autoresume and is_first_rank():
        refuse_files_of_another_run(folder, names_in('--save_folder', folder))


def refuse_files_of_another_run(folder: str, names: Collection[str]) -> None:
    """Raises ValueError if names in a --save_folder are of more than the lock of a run."""
    if set(names) - {LOCK}:
        raise ValueError(f'--save_folder {folder} already holds files; give a new one, or --autoresume to go on from '
                         'there')


def refuse_bad_drawing(args: argparse.Namespace) -> None:
    """Raises ValueError if there is nothing to draw, or if the pictures of another run are in their place."""
    if not args.sample_prompts:
        return
    read_prompts(args.sample_prompts)
    refuse_unusable_folder('--sample_folder', args.sample_folder)
    if not args.autoresume and is_first_rank() and any(Path(args.sample_folder).glob('ba*.png')):
        raise ValueError(f'--sample_folder {args.sample_folder} already holds drawings of another run; give a new one')


def refuse_occupied_profile(folder: str | None) -> None:
    """Raises ValueError if the trace of --profile cannot be written, or would lie among other files."""
    refuse_unusable_folder('--profile', folder)
    if folder and is_first_rank() and names_in('--profile', folder):
        raise ValueError(f'--profile {folder} already holds files; give a new folder')


def number_of_devices(args: argparse.Namespace) -> int:
    """How many devices share the batch: those of this run, or those that --dry_run speaks of."""
    return getattr(args, 'dry_run', None) or int(os.environ.get('WORLD_SIZE', 1))


def refuse_bad_batch(args: argparse.Namespace) -> None:
    """Raises ValueError if the batch does not divide over the devices, or a device's share into microbatches."""
    devices = number_of_devices(args)
    if args.batch_size % devices:
        divisible = args.batch_size // devices * devices or devices
        raise ValueError(f'--batch_size {args.batch_size} does not divide over {devices} devices; use {divisible}')
    device_batch = args.batch_size // devices
    microbatch = args.device_train_microbatch_size
    if microbatch in (None, 'auto'):
        return
    if device_batch % microbatch:
        share = f'--batch_size {args.batch_size}'
        if devices > 1:
            share = f'the {counted(device_batch, "image")} that each of {devices} devices gets of {share}'
        raise ValueError(f'--device_train_microbatch_size {microbatch} does not divide {share}; use '
                         f'{largest_divisor(device_batch, microbatch)}')


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is not above `most`, and at least 1."""
    return next((divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0), 1)


def refuse_bad_image_size(args: argparse.Namespace) -> None:
    """Raises ValueError if the VAE, which makes one latent of 8 x 8 pixels, leaves some over."""
    if args.image_size % 8:
        multiple = args.image_size // 8 * 8 or 8
        raise ValueError(f'--image_size {args.image_size} is not a multiple of 8; use {multiple}')


def refuse_bad_modes(args: argparse.Namespace) -> None:
    """Raises ValueError if two flags contradict each other, or one of them would do nothing."""
    if args.dry_run is not None and args.loader_only:
        raise ValueError('--dry_run speaks of a training, --loader_only measures a loader; give one of them')
    for switch in switch_table.SWITCHES:
        for other, why in switch.useless_with.items():
            if getattr(args, switch.flag) and getattr(args, other):
                raise ValueError(f'--{switch.flag} does nothing with --{other}, {why}; leave one out')
    if args.profile and args.loader_only:
        raise ValueError(f'--profile {args.profile} traces training; leave out --loader_only')
    if args.sample_prompts and not args.pretrained and args.model_name != 'tiny':
        raise ValueError(f'--sample_prompts {args.sample_prompts} needs a VAE that can decode, and without '
                         '--pretrained it is random; give --model_name FOLDER --pretrained')
    if args.random_flip and args.use_synth_latents:
        raise ValueError('--random_flip mirrors images, and --use_synth_latents has none; leave one out')


def refuse_flags_alone(args: argparse.Namespace) -> None:
    """Raises ValueError if a flag is given without the one that it says something of."""
    needed_by_switches = {switch.flag: switch.needs for switch in switch_table.SWITCHES if switch.needs}
    for flag, needed in (NEEDED_FLAGS | needed_by_switches).items():
        value = getattr(args, flag)
        if value and not getattr(args, needed):
            given = f'--{flag}' if value is True else f'--{flag} {value}'
            raise ValueError(f'{given} needs --{needed}; give both, or leave it out')
