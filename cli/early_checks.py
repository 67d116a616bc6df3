"""What is wrong with a command line and shows without torch: it is answered in half a second, before the imports.

`cli/checks.py` refuses what takes a library or the machine to know.
"""
import argparse
import glob
import importlib.util
import json
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cli.options import Parser
from inputs.caption_file import read_captions
from inputs.errors import one_line
from inputs.hub import CLIP_MODEL, INCEPTION_WEIGHTS
from inputs.places import hold_others_files, is_address
from parts.names import held_out_beside
from settings import switch_table

TRAINING_PACKAGES = ('torch', 'composer', 'streaming', 'diffusers')
REPORT_PACKAGES = ('pandas', 'tabulate')
EVALUATION_PACKAGES = (*TRAINING_PACKAGES, 'transformers', 'torchmetrics', 'torch_fidelity')
PIPELINE_INDEX = 'model_index.json'  # of a pipeline folder of diffusers
# A flag that does nothing without another.
NEEDED_FLAGS = {'ema_half_life': 'use_ema', 'ema_start': 'use_ema', 'eval_interval': 'eval_remote',
                'sample_interval': 'sample_prompts', 'autoresume': 'save_folder'}


def answer_early(parser: Parser, check: Callable[[argparse.Namespace], None],
                 packages: Sequence[str] = TRAINING_PACKAGES) -> None:
    """Parse this process's command line, and end it with one line where `check` refuses it or a package is missing.

    From here on Ctrl-C is one line as well: the imports that follow take seconds.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in the background of a script
        signal.signal(signal.SIGINT, partial(end_interrupted, parser))
    args = parser.parse_args()
    try:
        check(args)
        require_packages(*packages)
    except ValueError as error:
        parser.error(one_line(error))


def end_interrupted(parser: Parser, number: int, frame) -> None:
    """Answer Ctrl-C in one line, on rank 0. Composer, once it is imported, has a handler of its own."""
    if os.environ.get('RANK', '0') != '0':
        sys.exit(130)
    parser.end(130, 'interrupted')


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


def refuse_early_conversion(args: argparse.Namespace) -> None:
    """Raises ValueError if a SOURCE is not there, or OUT is something else than a folder that convert.py can begin or
    go on in.

    `parts` looks at both more closely, and at those in stores.
    """
    for source in args.source:
        if not is_address(source) and not os.path.lexists(source) and not glob.glob(source, recursive=True):
            raise ValueError(f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
    if not args.out.strip():
        raise ValueError('OUT is empty; give a new folder, or an address in a store')
    refuse_occupied_folder(args.out)
    if args.held_out:
        refuse_occupied_folder(held_out_beside(args.out))


def refuse_occupied_folder(out: str, flag: str = 'OUT') -> None:
    """Raises ValueError if OUT is no folder, or holds what none of our commands has begun."""
    if is_address(out) or not os.path.lexists(out):
        return
    if not os.path.isdir(out):
        raise ValueError(f'{flag} {out} is not a folder; give a new one')
    try:
        names = os.listdir(out)
    except OSError:
        return  # parts/output.py says what is wrong with it
    if hold_others_files(names):
        raise ValueError(f'{flag} {out} already holds something; give a new folder')


def refuse_early_report(args: argparse.Namespace) -> None:
    """Raises ValueError if records are not there, a file to write is a folder or holds the records, or a picture's name
    says no format.
    """
    records = {Path(path).resolve() for path in args.records}
    for flag, path, example in (('--csv', args.csv, 'table.csv'), ('--figure', args.figure, 'days.png'),
                                ('--quality', args.quality, 'quality.png')):
        if path is None:
            continue
        if Path(path).resolve() in records:
            raise ValueError(f'{flag} {path} would overwrite the records; give another file')
        if Path(path).is_dir():
            raise ValueError(f'{flag} {path} is a folder; name a file, such as {Path(path) / example}')
    for flag, path in (('--figure', args.figure), ('--quality', args.quality)):
        if path and not Path(path).suffix:
            raise ValueError(f'{flag} {path} has no ending that says its format; use {path}.png')
    for path in args.records:
        if not os.path.exists(path):
            raise ValueError(f'{path}: No such file or directory; give files of JSON lines or CSV')


def refuse_early_export(args: argparse.Namespace) -> None:
    """Raises ValueError if the checkpoint is not there, or OUT is."""
    if '://' not in args.checkpoint and not os.path.exists(args.checkpoint):
        raise ValueError(f'CHECKPOINT {args.checkpoint} is not there; give one, or the --save_folder of a run')
    if os.path.lexists(args.out):
        raise ValueError(f'OUT {args.out} already exists; give a new folder')


def refuse_early_evaluation(args: argparse.Namespace) -> None:
    """Raises ValueError, with the flag, its value and the remedy, for what evaluate.py can run on no machine."""
    if not args.out:
        raise ValueError('give --out, a new folder for the features of the pictures')
    refuse_occupied_folder(args.out, '--out')
    refuse_bad_model(args)
    refuse_missing_judges(args)
    refuse_missing_data(args)
    if args.image_size is not None:
        refuse_bad_image_size(args)
    refuse_bad_results(args.results)


def refuse_bad_model(args: argparse.Namespace) -> None:
    """Raises ValueError if MODEL is not there, is another kind of pipeline, or cannot be what the flags say of it."""
    model = args.model
    if not is_address(model) and not os.path.exists(model):
        raise ValueError(f'MODEL {model} is not there; give a checkpoint, the --save_folder of a run, or a pipeline '
                         'folder')
    if not is_pipeline(model):
        if args.ray:
            raise ValueError(f'--ray {args.ray} needs a pipeline folder that all machines see, and MODEL {model} is '
                             'none; make one with export.py')
        return
    for flag in ('live', 'model_name', 'pretrained', 'tokenizer'):
        if getattr(args, flag):
            raise ValueError(f'--{flag} says something of a checkpoint, and MODEL {model} is a pipeline; leave it out')
    try:
        kind = json.loads(Path(model, PIPELINE_INDEX).read_text())['_class_name']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'MODEL {model} has a {PIPELINE_INDEX} that is none ({one_line(error)}); give a folder of '
                         'export.py') from None
    if kind != 'StableDiffusionPipeline':
        raise ValueError(f'MODEL {model} is a {kind}, not a StableDiffusionPipeline; give a folder of export.py')


def is_pipeline(model: str) -> bool:
    """Whether a folder holds a pipeline of diffusers."""
    return os.path.isfile(os.path.join(model, PIPELINE_INDEX))


def refuse_missing_judges(args: argparse.Namespace) -> None:
    """Raises ValueError if there is nothing to judge by, and says where to get it."""
    if not args.inception and not args.clip:
        raise ValueError('give --inception for FID, --clip for the CLIP score, or both')
    if args.inception and not os.path.isfile(args.inception):
        raise ValueError(f'--inception {args.inception} is no file; fetch {INCEPTION_WEIGHTS}')
    if args.clip and not os.path.isfile(os.path.join(args.clip, 'config.json')):
        raise ValueError(f'--clip {args.clip} is no folder with a model; fetch one: hf download {CLIP_MODEL} '
                         f'--local-dir {args.clip}')
    if args.reference and not args.inception:
        raise ValueError(f'--reference {args.reference} is for FID, which needs --inception; give both, or neither')


def refuse_missing_data(args: argparse.Namespace) -> None:
    """Raises ValueError if DATA is not there or has too few captions, or a text that nothing is compared with."""
    reference = args.reference
    if reference and is_address(reference):
        raise ValueError(f'--reference {reference} is an address; name a file of this machine')
    if reference and os.path.isdir(reference):
        raise ValueError(f'--reference {reference} is a folder; name a file, such as '
                         f'{os.path.join(reference, "reference.safetensors")}')
    if not os.path.isfile(args.data):
        refuse_missing_folder('DATA', args.data)
        return
    if args.inception and not reference:
        raise ValueError(f'DATA {args.data} is a text, and FID compares with images; give --reference FILE, or shards '
                         'of images with captions')
    if args.inception and not os.path.exists(reference):
        raise ValueError(f'--reference {reference} is not there, and DATA {args.data} has no images to make it of; '
                         'make it with shards as DATA first')
    read_captions(args.data, args.samples)


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
