"""The command lines of all commands: every flag, of benchmark.py and encode.py by subject. Nothing here needs torch."""
import argparse
import contextlib
import difflib
import itertools
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from cli.launcher import RANK_NUMBERS
from inputs.hub import CLIP_MODEL, SD2_BASE
from measuring.costs import DATASET_IMAGES, DOLLARS_PER_GPU_HOUR, DOLLARS_PER_TB_MONTH, TRAINING_IMAGES, Phase
from measuring.versions import git_commit, package_versions
from settings import switch_table
from settings.switch_table import Switch

GROUPS = ('data', 'model', 'speed', 'measurement', 'training and checkpoints', 'optimizer and average',
          'evaluation and drawing', 'logging', 'cost')
LR_SCHEDULES = ('constant', 'cosine', 'linear')
TIME_UNITS = {'ba': 'batches', 'ep': 'epochs', 'sp': 'samples', 'dur': 'of the run'}
MOST_MEANT = 5  # flags that are named as what another may mean
LONGEST = 10 ** 15  # of any unit: Composer counts in 64 bits
BYTES = {'': 1, 'b': 1, 'kb': 1 << 10, 'mb': 1 << 20, 'gb': 1 << 30}
LEAST_SHARD = 1 << 10
LARGEST_SHARD = (1 << 32) - 1  # an MDS shard counts its bytes in 32 bits


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, once: on rank 0, unless another rank is alone in its error.

    An argument `@FILE` stands for the arguments that FILE holds, any number on a line, as a shell would split them.
    What follows a # there is a comment. A flag that is none, or only the beginning of one, is answered with those that
    it may mean: it may be short for another flag tomorrow. `--version` is there in every command.

    Args:
        prog: name of the command.
        description: for the help.
        groups: subjects that the flags are shown by in the help; `groups[name]` is argparse's group.
        options: more for ArgumentParser.
    """

    def __init__(self, prog: str, description: str, groups: Sequence[str] = (), **options):
        super().__init__(prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                         fromfile_prefix_chars='@', allow_abbrev=False, exit_on_error=False, **options)
        self.groups = {name: self.add_argument_group(name) for name in groups}
        self.add_argument('--version', action=ShowVersion)

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """The arguments on one line of a file."""
        try:
            arguments = shlex.split(arg_line, comments=True)
        except ValueError as error:  # a quotation that does not end on its line
            self.error(f'{error} in a file of flags: {arg_line.strip()}')
        self._refuse_missing_files(arguments)
        return arguments

    def _refuse_missing_files(self, arguments: Sequence[str]) -> None:
        """An argument @FILE whose FILE is none is named with its remedy."""
        for argument in arguments:
            if argument.startswith('@') and not os.path.isfile(argument[1:]):
                self.error(f'{argument} names no file of flags; check the name behind the @')

    def parse_known_args(self, args=None, namespace=None):
        self._refuse_missing_files(sys.argv[1:] if args is None else args)
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            self.error(self._with_what_is_needed(error))
        except UnicodeDecodeError:
            self.error('a file of flags, named by @FILE, is no text')
        except RecursionError:
            self.error('a file of flags, named by @FILE, names itself; take that line out')

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """As argparse does, but for a flag that is none, with which it names the nearest one."""
        self._refuse_bad_ranks()
        self._refuse_unknown_flags(sys.argv[1:] if args is None else args)
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return known

    def _refuse_unknown_flags(self, arguments: Sequence[str]) -> None:
        """A flag that is none is named before what argparse would say is missing, which may only be misspelt."""
        for argument in itertools.takewhile(lambda argument: argument != '--', arguments):
            flag = argument.partition('=')[0]
            if flag.startswith('--') and flag not in self._option_string_actions:
                self.error(self._unknown(argument))

    def _check_value(self, action: argparse.Action, value) -> None:
        """Of a value that is none of those to choose from, as argparse does, with the one that may be meant."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = list(map(str, action.choices))
            meant = [choice for choice in choices if value and str(value).lower() in choice]
            meant = meant or difflib.get_close_matches(str(value), choices, n=1)
            if meant:
                error.message += f'; did you mean {meant[0]}?'
            raise

    def _with_what_is_needed(self, error: argparse.ArgumentError) -> str:
        """What argparse says; of a flag without its value what that is, and of one with a value that takes none."""
        names = (error.argument_name or '').split('/')
        flag = ' or '.join(names)
        if error.message.startswith('ignored explicit argument'):
            return f'{flag} takes no value; write {flag} alone'
        if not error.message.startswith('expected '):
            return str(error)
        action = self._option_string_actions[names[0]]
        if action.choices:
            return f'{flag} needs a value, one of {", ".join(map(str, action.choices))}'
        if action.help == argparse.SUPPRESS:
            return f'{flag} needs a value'
        return f'{flag} needs a value: {self._get_formatter()._expand_help(action)}'

    def _unknown(self, argument: str) -> str:
        flag = argument.partition('=')[0]
        if not flag.startswith('--'):
            return f'{argument} belongs to no flag; see --help'
        meant = self._flags_like(flag)
        if meant:
            return f'{flag} is no flag; did you mean {" or ".join(meant)}?'
        return f'{flag} is no flag; see --help'

    def _flags_like(self, flag: str) -> list[str]:
        """Those that one which is none may mean: flags that have it as a word, or begin so; else the nearest one."""
        word = flag.removeprefix('--')
        flags = [name for name in self._option_string_actions if name.startswith('--')]
        words = {name: name.removeprefix('--').split('_') for name in flags}
        with_word = [name for name in flags if word in words[name]]
        by_initials = [name for name in flags if word == ''.join(part[:1] for part in words[name])]
        begin_so = [name for name in flags if name.startswith(flag)]
        meant = list(dict.fromkeys([*by_initials, *sorted(with_word, key=len), *begin_so]))
        if len(meant) > MOST_MEANT:
            return []
        return meant or difflib.get_close_matches(flag, flags, n=1)

    def _refuse_bad_ranks(self) -> None:
        for name in RANK_NUMBERS:
            text = os.environ.get(name, '1')
            if not re.fullmatch('[0-9]{1,9}', text) or name.endswith('SIZE') and int(text) == 0:
                os.environ.pop('RANK', None)  # this process takes itself for the only one, and says it
                self.error(f'{name}={text} in the environment is no number of processes; unset it, or start this with '
                           'the launcher, composer')

    def error(self, message: str):
        rank = os.environ.get('RANK', '0')
        if rank.isdecimal() and int(rank):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how a launcher ends this rank when rank 0 has spoken
            time.sleep(10)
            message = f'rank {rank}: {message}'
        self.end(2, message)

    def end(self, status: int, message: str):
        """End with one line and this exit status."""
        print(f'{self.prog}: error: {" ".join(message.splitlines())}', file=sys.stderr)
        sys.exit(status)

    def format_help(self) -> str:
        """The help, without the groups that this command has no flag of."""
        self._action_groups = [group for group in self._action_groups if group._group_actions]
        return super().format_help()


class ShowVersion(argparse.Action):
    """Print the commit of this program, and the libraries that bear on what it does, and end."""

    def __init__(self, option_strings, dest):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS,
                         help='show the commit of this program and the versions of its libraries')

    def __call__(self, parser, namespace, values, option_string=None):
        known = {name: version for name, version in package_versions().items() if version}
        libraries = ', '.join(f'{name} {version}' for name, version in known.items())
        print(f'{parser.prog} {git_commit() or "outside a git checkout"}, with {libraries or "no libraries"}')
        parser.exit()


def number(kind: type, least: float, most: float, name: str) -> Callable[[str], int | float]:
    """An argparse type: an int or a float from `least` to `most`, which errors call `name`."""
    def parse(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value <= most:
                return value
        raise argparse.ArgumentTypeError(f'{text} is not {name}')
    return parse


count = number(int, 1, sys.maxsize, 'a whole number above 0')
whole_number = number(int, 0, sys.maxsize, 'a whole number')
amount = number(float, 0, sys.float_info.max, 'an amount')
positive = number(float, sys.float_info.min, sys.float_info.max, 'a number above 0')


seed = number(int, 0, 4_000_000_000, 'a whole number up to 4,000,000,000')  # NumPy takes 32 bits, with the rank on top
seconds = number(int, 1, 10 ** 6, 'a number of seconds, from 1 to 1,000,000')


def share(text: str) -> float:
    """An argparse type: a share, from 0 to 1."""
    try:
        return number(float, 0, 1, 'between 0 and 1')(text)
    except argparse.ArgumentTypeError as error:
        percent = text.removesuffix('%')
        if percent == text or not is_a_number(percent) or not 0 <= float(percent) <= 100:
            raise
        raise argparse.ArgumentTypeError(f'{error}; write {float(percent) / 100:g}') from None


def microbatch(text: str) -> int | Literal['auto']:
    """An argparse type: how many images go through the model at once, or auto."""
    if text == 'auto':
        return text
    try:
        return count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f'{text} is neither a whole number above 0 nor auto') from None


def split_time(text: str) -> tuple[float, str]:
    """The number and the unit of a time such as 5000ba, 2ep or 0.5dur. Raises ValueError if it is none."""
    match = re.fullmatch('([-0-9.e+_]+)(' + '|'.join(TIME_UNITS) + ')', text)
    if not match:
        raise ValueError(text)
    return float(match[1]), match[2]


def time_in(units: str, example: str, least: int = 1) -> Callable[[str], str]:
    """An argparse type: a time in one of `units`, from `least` batches or the like, as the text that Composer takes."""
    def parse(text: str) -> str:
        try:
            value, unit = split_time(text)
        except ValueError:
            unit = None
        if text.isdecimal():
            raise argparse.ArgumentTypeError(f'{text} has no unit; write {text}ba for batches, {text}ep for epochs')
        if unit not in units.split() or value > LONGEST:
            raise argparse.ArgumentTypeError(f'{text} is not a time such as {example}')
        if value < 0 or value == 0 and least > 0:
            raise argparse.ArgumentTypeError(f'{text} is not above 0; use {example}')
        if unit == 'dur' and value > 1:
            raise argparse.ArgumentTypeError(f'{text} is longer than the run, which is 1dur; use {example}')
        if unit != 'dur' and value != int(value):
            raise argparse.ArgumentTypeError(f'{text} is no whole number of {TIME_UNITS[unit]}; use {example}')
        return text
    return parse


def shard_size(text: str) -> int:
    """An argparse type: a size such as 64mb, that shards can have."""
    match = re.fullmatch(r'(\d{1,12})\s*([a-z]*)', text.lower())
    if not match or match[2] not in BYTES:
        raise argparse.ArgumentTypeError(f'{text} is not a size such as 64mb')
    size = int(match[1]) * BYTES[match[2]]
    if not LEAST_SHARD <= size <= LARGEST_SHARD:
        raise argparse.ArgumentTypeError(f'{text} is not between 1kb and 4gb, which shards can have')
    return size


def benchmark_parser(description: str) -> Parser:
    """The command line of benchmark.py."""
    parser = Parser('benchmark.py', description, GROUPS)
    add_shared_flags(parser, 'images and captions as convert.py writes them, or latents as encode.py does')
    add_training_data_flags(parser.groups['data'])
    add_training_speed_flags(parser.groups['speed'])
    add_training_measurement_flags(parser.groups['measurement'])
    add_training_flags(parser.groups['training and checkpoints'])
    add_optimizer_flags(parser.groups['optimizer and average'])
    add_evaluation_flags(parser.groups['evaluation and drawing'])
    add_logging_flags(parser.groups['logging'])
    add_cost_flags(parser.groups['cost'])
    return parser


def encode_parser(description: str) -> Parser:
    """The command line of encode.py."""
    parser = Parser('encode.py', description, GROUPS)
    add_shared_flags(parser, 'images and captions as convert.py writes them')
    add = parser.groups['data'].add_argument
    add('--out', help='new folder or object store for the latents (needed)')
    add('--batch_size', type=count, default=32, help='images at once on each device (default: 32)')
    add('--ray', metavar='ADDRESS', default=os.environ.get('RAY_ADDRESS'), help='encode on the machines of this Ray '
        'cluster, such as auto (default: RAY_ADDRESS of the environment; without it, on this machine)')
    return parser


def convert_parser(description: str) -> Parser:
    """The command line of convert.py."""
    parser = Parser('convert.py', description)
    add = parser.add_argument
    add('source', metavar='SOURCE', nargs='+', help='tars, folders of tars or of images, or globs; or tars in an '
        'object store (s3://bucket/tars/)')
    add('out', metavar='OUT', help='new folder, or an address in an object store (s3://, gs://, az://)')
    add('--held_out', type=count, metavar='N', help='keep N samples, drawn by --seed, out of OUT, and write them to '
        'OUT-held-out, for --eval_remote of benchmark.py (default: all samples are in OUT)')
    add('--seed', type=seed, default=17, help='of the draw of --held_out: an image is on the same side whatever else '
        'SOURCE holds, but for those at the edge (default: 17)')
    add('--num_workers', type=count, help='processes of this machine, or with --ray the most of the cluster (default: '
        'as many as there are cores)')
    add('--size_limit', type=shard_size, default=64 << 20, help='the most that a shard takes; smaller neighbouring '
        'files are joined up to it (default: 64mb)')
    add('--ray', metavar='ADDRESS', default=os.environ.get('RAY_ADDRESS'), help='convert on the machines of this Ray '
        'cluster, such as auto (default: RAY_ADDRESS of the environment; without it, on this machine)')
    add('--dist_timeout', help=argparse.SUPPRESS)  # of earlier versions; nothing waits for ranks now
    return parser


def add_pipeline_flags(parser: Parser, without_vae: str) -> None:
    """How a checkpoint becomes a pipeline; `without_vae` says what becomes of one that has no VAE."""
    add = parser.add_argument
    add('--live', action='store_true', help='the live weights of the UNet in a checkpoint (default: the averaged ones, '
        'where the run had --use_ema)')
    add('--model_name', help='tiny, a diffusers folder or a hub name, for the configuration of each part of a '
        'checkpoint (default: that of the run)')
    add('--pretrained', action='store_true', help='take the VAE from --model_name where the checkpoint has none, '
        f'because the run trained on latents (default: {without_vae})')
    add('--tokenizer', help="folder or hub name, for a checkpoint (default: that of the run, or CLIP's own)")


def export_parser(description: str) -> Parser:
    """The command line of export.py."""
    parser = Parser('export.py', description)
    add = parser.add_argument
    add('checkpoint', metavar='CHECKPOINT', help='a checkpoint, or a folder or an object store, for its newest')
    add('out', metavar='OUT', help='new folder for the pipeline')
    add_pipeline_flags(parser, 'a random one, which cannot decode')
    return parser


def evaluate_parser(description: str) -> Parser:
    """The command line of evaluate.py."""
    parser = Parser('evaluate.py', description, usage='%(prog)s MODEL DATA --out OUT [--flag VALUE ...]')
    add = parser.add_argument
    add('model', metavar='MODEL', help='a checkpoint, a folder or an object store for its newest, or a pipeline folder '
        'of diffusers')
    add('data', metavar='DATA', help='MDS shards of images with captions, a folder or an object store; or a text file '
        'with a caption on each line')
    add('--out', help='new folder or object store for the features of the pictures; the same command goes on there '
        '(needed)')
    add('--inception', metavar='FILE', help="weights of InceptionV3, torch-fidelity's "
        'weights-inception-2015-12-05-6726825d.pth (default: none, and no FID)')
    add('--clip', metavar='FOLDER', help=f'a CLIP model in the layout of transformers, such as {CLIP_MODEL} (default: '
        'none, and no CLIP score)')
    add('--reference', metavar='FILE', help='features of the real images: made of DATA where it is not there yet, '
        'and used where it is (default: they stay in --out)')
    add('--samples', type=number(int, 2, 10 ** 9, 'a whole number above 1'), default=30_000, metavar='N',
        help='captions of DATA to draw, the first N, at each guidance scale (default: 30000)')
    add('--guidance', type=guidance_scale, nargs='+', default=[7.5], metavar='SCALE',
        help='scales of classifier-free guidance, each of which draws all captions; 1 is none (default: 7.5)')
    add('--steps', type=count, default=50, help='of the sampler, DDIM; a divisor of its 1000 timesteps (default: 50)')
    add('--seed', type=seed, default=17, help='of the noise: that of a sample follows from it and from the number of '
        'the sample (default: 17)')
    add('--image_size', type=count, metavar='PIXELS', help='height and width of the pictures (default: those that the '
        'model was trained at)')
    add('--batch_size', type=count, default=16, help='pictures at once on each device, 128 at most; an H100 needs '
        'more than 16 at 256 pixels (default: 16)')
    add('--precision', choices=['amp_bf16', 'amp_fp16', 'fp32'], help='of the UNet; all else is in float32 (default: '
        'amp_bf16 on a GPU that has it, amp_fp16 on another GPU, fp32 on a CPU)')
    add_pipeline_flags(parser, 'such a checkpoint is refused')
    add('--save_pictures', action='store_true', help='keep the pictures in --out as PNGs (default: their features '
        'alone)')
    add('--ray', metavar='ADDRESS', default=os.environ.get('RAY_ADDRESS'), help='draw on the machines of this Ray '
        'cluster, such as auto (default: RAY_ADDRESS of the environment; without it, on this machine)')
    add('--results', default='results.jsonl', help='file that the record is appended to (default: results.jsonl)')
    return parser


def report_parser(description: str) -> Parser:
    """The command line of report.py."""
    parser = Parser('report.py', description, usage='%(prog)s RECORDS [RECORDS ...] [--flag VALUE ...]')
    images = partial(positive_number, kind=int)
    add = parser.add_argument
    add('records', nargs='+', metavar='RECORDS', help='files of JSON lines, or of CSV where the name ends in .csv')
    add('--training_images', type=images, metavar='IMAGES', help='images to train on, repeats counted (default: '
        f'{TRAINING_IMAGES}, those of Stable Diffusion 2; for the model tiny no days are shown)')
    add('--dataset_images', type=images, metavar='IMAGES', help='images of the data set, which an encoding goes '
        f'through once and a cache holds (default: {DATASET_IMAGES}; for the model tiny no days are shown)')
    add('--dollars_per_gpu_hour', type=positive_number, default=DOLLARS_PER_GPU_HOUR, metavar='DOLLARS',
        help='price of one GPU for an hour, in dollars (default: %(default)s)')
    add('--dollars_per_tb_month', type=partial(positive_number, least=0), default=DOLLARS_PER_TB_MONTH,
        metavar='DOLLARS', help='price of storing a TB of latents for a month, in dollars; it is in the cost while the '
                                'training lasts (default: %(default)s, as Amazon S3 lists it)')
    add('--image_bytes', type=positive_number, default=0, metavar='BYTES',
        help='stored bytes of an average sample; adds the columns remote and cache (default: not known, no columns)')
    either = parser.add_mutually_exclusive_group()
    either.add_argument('--extrapolate', type=number_of_gpus, nargs='+', default=[], metavar='GPUS',
                        help='numbers of GPUs to predict the throughput of (default: none)')
    either.add_argument('--compare', action='store_true',
                        help='one table with a row a record (default: a table for each setting)')
    add('--phase', type=phase_of_text, action='append', default=[], metavar='IMAGES@SIZE',
        help='a phase of a plan: how many images to train on, and the side of each in pixels; repeat it for the next '
             'phase (default: no plan, or --training_images at each size where there are records of encoding)')
    add('--figure', metavar='FILE', help='file for a picture, in the format of its ending, such as png, svg or pdf: '
        'images per second of each record; or, without --compare, days and efficiency, where a setting has days on '
        'several numbers of GPUs (default: none)')
    add('--quality', metavar='FILE', help='file for a picture, in the format of its ending, such as png, svg or pdf, '
        'of what evaluate.py has scored: FID against CLIP score, and both against the images of the training (default: '
        'none)')
    add('--csv', metavar='FILE', help='file for the rows of all tables, unrounded (default: none)')
    return parser


def positive_number(text: str, kind: type = float, least: float = 1e-15) -> int | float:
    """An argparse type: the number that a flag of report.py gives."""
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if least <= value < 1e15:
        return value
    if kind is int:
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive whole number')
    raise argparse.ArgumentTypeError(f'{text!r} is not a positive number')


def guidance_scale(text: str) -> float:
    """An argparse type: one of the scales of --guidance."""
    try:
        return number(float, 1, 1000, 'a scale from 1 on')(text)
    except argparse.ArgumentTypeError as error:
        if is_a_number(text):
            raise
        raise argparse.ArgumentTypeError(f'{error}; MODEL and DATA come before this flag') from None


def is_a_number(text: str) -> bool:
    """Whether a flag that takes several numbers can have meant this one; another argument may stand behind them."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def number_of_gpus(text: str) -> int:
    """An argparse type: one of the numbers of --extrapolate."""
    if ',' in text:
        raise argparse.ArgumentTypeError(f'{text!r} is no number; separate several by spaces, as in '
                                         f'{" ".join(text.replace(",", " ").split())}')
    if not is_a_number(text):
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive whole number; files come before this flag')
    return positive_number(text, int)


def phase_of_text(text: str) -> Phase:
    """An argparse type: the phase that IMAGES@SIZE stands for."""
    images, _, size = text.partition('@')
    try:
        return Phase(positive_number(images, int), str(positive_number(size, int)))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f'{text!r} is not IMAGES@SIZE, such as 1126400000@256') from None


def add_shared_flags(parser: Parser, samples: str) -> None:
    """The flags that benchmark.py and encode.py have in common; `samples` says what --remote holds."""
    add = parser.groups['data'].add_argument
    add('--remote', help=f'MDS shards, a folder or an object store: {samples} (default: none)')
    add('--local', help='folder that caches the shards (default: one for each remote; a local remote is read in '
        'place); without --remote, the folder with the shards')
    add('--cache_limit', metavar='SIZE', help='most that this cache may hold, such as 500gb (default: no limit)')
    add('--max_bad_samples', type=share, default=0.01, help='share of samples that may be bad before the run ends '
        '(default: 0.01)')
    add('--num_workers', type=whole_number, help='processes that decode, per device (default: up to 8 of its CPU '
        'cores)')

    add = parser.groups['model'].add_argument
    add('--model_name', default=SD2_BASE, help='tiny, a diffusers folder or a hub name (default: '
        f'{SD2_BASE}, whose architecture is built in)')
    add('--pretrained', action=argparse.BooleanOptionalAction, default=False, help='load the weights of the VAE and '
        'the text encoder from --model_name (default: random weights, which train as fast)')
    add('--image_size', type=count, default=512, help='height and width in pixels (default: 512)')

    add = parser.groups['speed'].add_argument
    add('--encoder_precision', choices=['bf16', 'fp16', 'fp32'], help='of the frozen encoders; in training, fp32 '
        'holds their weights in float32 and computes in --precision (default: the half precision of --precision)')
    for switch in switch_table.SWITCHES:
        if switch.in_encoding:
            add_switch(parser.groups['speed'], switch)

    add = parser.groups['measurement'].add_argument
    add('--warmup_batches', type=count, default=3, help='batches before the clock starts (default: 3)')
    add('--results', default='results.jsonl', help='file that the record is appended to (default: results.jsonl)')

    add = parser.groups['training and checkpoints'].add_argument
    add('--seed', type=seed, default=17, help='of weights, noise and shuffle (default: 17)')
    add('--dist_timeout', type=seconds, default=300, help='seconds to wait for the other processes (default: 300)')


def add_training_data_flags(group) -> None:
    add = group.add_argument
    add('--use_synth_data', action='store_true', help='train on random images that cost nothing to load (default: off)')
    add('--use_synth_latents', action='store_true', help='train on random latents, as if encode.py had made them '
        '(default: off)')
    add('--batch_size', type=count, default=2048, help='images in a step, over all devices (default: 2048)')
    add('--tokenizer', help="folder or hub name (default: CLIP's own, from the package open_clip_torch)")
    add('--random_flip', action='store_true', help='mirror every image with a chance of one half, drawn anew in each '
        'epoch (default: off)')
    add('--caption_drop', type=share, default=0.0, metavar='SHARE', help='share of the captions that the empty one '
        'replaces, such as 0.1, so that images can be drawn with classifier-free guidance (default: 0)')


def add_training_speed_flags(group) -> None:
    add = group.add_argument
    add('--device_train_microbatch_size', type=microbatch, metavar='N', help="images that go through the model at "
        "once; must divide the device's share of the batch (default: auto, the largest that fits, found by trying "
        'before the run; on a CPU the whole share)')
    add('--precision', choices=['amp_bf16', 'amp_fp16', 'fp32'], help='of the UNet; on GPUs since the A100 fp32 '
        'multiplies as TF32, which keeps 10 bits of the fraction (default: amp_bf16 on a GPU that has it, amp_fp16 on '
        'another GPU, fp32 on a CPU)')
    for switch in switch_table.SWITCHES:
        if not switch.in_encoding:
            add_switch(group, switch)


def add_switch(group, switch: Switch) -> None:
    """The flag of a switch; where its default follows from the machine, it is None until that is known."""
    name = f'--{switch.flag}'
    default = None if callable(switch.default) else switch.default
    if switch.is_on_or_off:
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=switch.help)
    elif switch.parse is not None:
        group.add_argument(name, type=switch.parse, default=default, metavar=switch.metavar, help=switch.help)
    elif switch.values_in(True):
        group.add_argument(name, nargs='?', const=True, default=default, choices=switch.names, metavar=switch.metavar,
                           help=switch.help)
        group.add_argument(f'--no-{switch.flag}', dest=switch.flag, action='store_const', const=False,
                           help=f'leave --{switch.flag} off (the default)')
    else:
        group.add_argument(name, choices=switch.names, default=default, help=switch.help)


def add_training_measurement_flags(group) -> None:
    add = group.add_argument
    add('--measure_batches', type=count, help='batches measured after the warm-up (default: with --max_duration to the '
        "end of the run; else 20, or with streamed data five times the loader's queue if that is more)")
    add('--dry_run', nargs='?', type=count, const=0, metavar='GPUS', help='train nothing: say what memory each '
        'microbatch needs, which fits on which card, and how fast so many GPUs could be at most; needs no GPU '
        "(default: off; without a number, as many GPUs as the launcher starts processes)")
    add('--loader_only', action='store_true', help='measure the loader alone, without a model (default: off)')
    add('--profile', metavar='DIR', help='trace 3 batches after the warm-up and write them to this new folder, for '
        'Perfetto and TensorBoard; no report counts the record of such a run (default: none)')


def add_training_flags(group) -> None:
    add = group.add_argument
    add('--max_duration', metavar='TIME', type=time_in('ba ep sp', '5000ba or 2ep'), help='length of the run, such as '
        '5000ba or 2ep (default: warm-up and measured batches)')
    add('--load_weights', metavar='PATH', help='start from the weights, and with --use_ema from their average, of an '
        "earlier run: a checkpoint, a folder's newest, one in an object store, or a diffusers UNet or pipeline folder "
        '(default: random weights)')
    add('--on_nan', choices=['stop', 'skip'], default='stop', help='end the run at a loss or a gradient that is '
        'not finite, or skip such steps and count them, up to 10 in a row (default: stop)')
    add('--save_folder', help='save checkpoints to this new folder or object store (default: none are saved)')
    add('--save_interval', metavar='TIME', type=time_in('ba ep sp dur', '5000ba or 2ep'), help='time between '
        'checkpoints, such as 1000ba (default: 1ep); one is also saved at the end and on Ctrl-C or SIGTERM')
    add('--save_num_checkpoints_to_keep', type=count, metavar='N', help='the newest that stay in a folder (default: '
        'all, and one of Stable Diffusion 2 takes 15 GB); an object store keeps all')
    add('--autoresume', action='store_true', help='go on from the newest checkpoint in --save_folder, if there is one '
        '(default: off)')


def add_optimizer_flags(group) -> None:
    add = group.add_argument
    add('--learning_rate', type=positive, default=1e-4, help='of AdamW (default: %(default)s)')
    add('--lr_warmup', metavar='TIME', type=time_in('ba ep dur', '10000ba, 1ep or 0.01dur'),
        help='time in which the learning rate rises from 0, such as 10000ba (default: none)')
    add('--lr_schedule', choices=LR_SCHEDULES, default='constant', help='how the learning rate goes on after the '
        'warm-up: it stays, or falls to 0 at the end of --max_duration along a cosine or a line (default: constant)')
    add('--weight_decay', type=amount, default=0.001, help='of AdamW (default: %(default)s)')
    add('--clip_grad_norm', type=positive, metavar='NORM', help='scale the gradients of a step down to this norm where '
        'it is larger (default: they are left as they are)')
    add('--use_ema', action='store_true', help='keep an exponential moving average of the UNet (default: off)')
    add('--ema_half_life', metavar='TIME', type=time_in('ba ep', '1000ba or 1ep'),
        help="time after which today's weights count half in the average "
        '(default: 1000ba)')
    add('--ema_start', metavar='TIME', type=time_in('ba ep dur', '5000ba, 1ep or 0.5dur', least=0),
        help='training before the average starts, such as 5000ba or 0.5dur, half of it '
        '(default: none)')


def add_evaluation_flags(group) -> None:
    add = group.add_argument
    add('--eval_remote', metavar='PATH', help='MDS shards that are held out, a folder or an object store: the loss on '
        'them is calculated with the same noise and timesteps each time (default: no evaluation)')
    add('--eval_interval', metavar='TIME', type=time_in('ba ep', '1000ba or 1ep'),
        help='time between evaluations, in batches or epochs (default: 1000ba); '
        'there is also one at the end')
    add('--sample_prompts', metavar='FILE', help='draw each prompt of this file, one a line, with the averaged weights '
        'where there are any, 50 steps and guidance 7.5; needs --pretrained, but for the model tiny, whose pictures '
        'are noise (default: nothing is drawn)')
    add('--sample_interval', metavar='TIME', type=time_in('ba ep', '1000ba or 1ep'),
        help='time between the drawings, in batches or epochs (default: 1000ba); '
        'the end of the run is also drawn')
    add('--sample_folder', metavar='DIR', default='samples', help='new folder for the drawings, a PNG each time '
        '(default: samples)')


def add_logging_flags(group) -> None:
    add = group.add_argument
    add('--wandb_name', help='log to Weights & Biases under this name (default: W&B is not used)')
    add('--wandb_project', help='log to this project of Weights & Biases (default: W&B is not used)')
    add('--tensorboard', metavar='DIR', help='log to TensorBoard files in this folder (default: none)')


def add_cost_flags(group) -> None:
    add = group.add_argument
    add('--training_images', type=count, help='images of the whole training, for its cost (default: '
        f'{TRAINING_IMAGES}, those of Stable Diffusion 2; for the model tiny no cost is shown)')
    add('--dollars_per_gpu_hour', type=amount, default=DOLLARS_PER_GPU_HOUR, help='price in dollars, for the cost '
        '(default: %(default)s)')
