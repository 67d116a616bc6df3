"""What is wrong with a command line and shows without torch: it is answered in half a second, before the imports.

`cli/checks.py` refuses what takes a library or the machine to know.
"""
import argparse
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Callable

from cli.options import Parser
from fitting import switch_table
from inputs.errors import one_line

# A flag that does nothing without another.
NEEDED_FLAGS = {'ema_half_life': 'use_ema', 'ema_start': 'use_ema', 'eval_interval': 'eval_remote',
                'sample_interval': 'sample_prompts', 'autoresume': 'save_folder'}


def answer_early(parser: Parser, check: Callable[[argparse.Namespace], None]) -> None:
    """Parse this process's command line, and end it with one line where `check` refuses it or a package is missing."""
    args = parser.parse_args()
    try:
        check(args)
        require_packages('torch', 'composer', 'streaming', 'diffusers')
    except ValueError as error:
        parser.error(one_line(error))


def require_packages(*names: str) -> None:
    """Raises ValueError if this Python lacks one of the packages, as where the environment is not activated."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f'{sys.executable} has no package {name}; activate the environment with: source '
                             '.venv/bin/activate (README.md says how to make it)')


def refuse_early_training(args: argparse.Namespace) -> None:
    """Raises ValueError, with the flag, its value and the remedy, for what benchmark.py can run on no machine."""
    refuse_bad_source(args)
    refuse_missing_folder('--remote', args.remote)
    refuse_missing_folder('--eval_remote', args.eval_remote)
    refuse_bad_batch(args)
    refuse_bad_image_size(args)
    refuse_bad_modes(args)
    refuse_flags_alone(args)
    if args.dry_run is None:
        refuse_bad_results(args.results)


def refuse_early_encoding(args: argparse.Namespace) -> None:
    """Raises ValueError, with the flag, its value and the remedy, for what encode.py can run on no machine."""
    if not (args.remote or args.local) or not args.out:
        raise ValueError('give both --remote and --out')
    refuse_missing_folder('--remote', args.remote)
    refuse_bad_image_size(args)
    refuse_bad_results(args.results)


def refuse_early_export(args: argparse.Namespace) -> None:
    """Raises ValueError if the checkpoint is not there, or OUT is."""
    if '://' not in args.checkpoint and not os.path.exists(args.checkpoint):
        raise ValueError(f'CHECKPOINT {args.checkpoint} is not there; give one, or the --save_folder of a run')
    if os.path.lexists(args.out):
        raise ValueError(f'OUT {args.out} already exists; give a new folder')


def refuse_bad_source(args: argparse.Namespace) -> None:
    """Raises ValueError if the images come from nowhere, or from two places."""
    is_synthetic = args.use_synth_data or args.use_synth_latents
    if not (args.remote or args.local or is_synthetic or args.dry_run is not None):
        raise ValueError('give one of --remote, --use_synth_data and --use_synth_latents')
    if sum(map(bool, (args.remote, args.use_synth_data, args.use_synth_latents))) > 1:
        raise ValueError('give only one of --remote, --use_synth_data and --use_synth_latents, not both')


def refuse_missing_folder(flag: str, place: str | None) -> None:
    """Raises ValueError if a dataset is neither in a store nor in a folder that there is."""
    if place and ':/' not in place and not os.path.isdir(place):
        raise ValueError(f'{flag} {place} is no folder; check the name, or make a dataset with convert.py')


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
        raise ValueError(f'--device_train_microbatch_size {microbatch} does not divide the {device_batch} images '
                         f'that each of {devices} devices gets of --batch_size {args.batch_size}; use '
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
        other = switch.useless_with
        if other and getattr(args, switch.flag) and getattr(args, other):
            raise ValueError(f'--{switch.flag} does nothing with --{other}, {switch.useless_because}; leave one out')
    if args.profile and args.loader_only:
        raise ValueError(f'--profile {args.profile} traces training; leave out --loader_only')
    if args.sample_prompts and not args.pretrained:
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


def refuse_bad_results(path: str) -> None:
    """Raises ValueError if no record can be appended to --results. It is said before the run, not after it."""
    if int(os.environ.get('RANK', 0)):
        return
    try:
        if not os.path.exists(path):
            tempfile.TemporaryFile(dir=os.path.dirname(path) or '.').close()  # could one be made there?
            return
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise ValueError(f'--results {path} is a pipe, which would wait for a reader; name a file')
        open(path, 'a').close()
    except OSError as error:
        raise ValueError(f'--results {path} cannot be written: {error.strerror}; name another') from None
