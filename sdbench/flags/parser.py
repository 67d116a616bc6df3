"""Turn a frozen dataclass into the command line of a program: its fields are the flags. Nothing here needs torch.

    @flags('greeting')                                     # their heading in --help
    class Greeting:
        name: str = positional('name of the person to greet')
        times: int = flag(1, 'number of greetings', type=count)
        loud: bool = flag(False, 'print in upper case')

    settings = parse(Greeting, 'Greet a person.')          # parses sys.argv
"""
import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from sdbench.errors import UserError
from sdbench.files import read_text
from sdbench.process import begin, exit_with_error

Settings = TypeVar('Settings')
# What this program does not train, in the words of README.md, and words in the flags with which other programs do.
LIMITS = ('this program trains the whole UNet of Stable Diffusion 1 or 2, on centre squares, on a GPU with 24 GB or '
          "more; for LoRA, the text encoder, SDXL or newer models, use diffusers' examples or kohya-ss/sd-scripts")
LIMITED = ('lora', 'text_encoder', 'xl')
# How --help shows these defaults
SHOWN_DEFAULTS = {'None': 'none', '()': 'none', '': 'none', 'True': 'on', 'False': 'off'}


def flags(heading: str) -> Callable[[type], type]:
    """Return a decorator for a class of flags, which makes it a frozen dataclass and gives it a heading in --help."""
    def decorate(cls: type) -> type:
        cls.heading = heading
        return dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    return decorate


def flag(default: Any, help: str, *, needs: str = '', **options: Any) -> Any:
    """Declare a field that is a flag. With the default True or False it takes no value: --flag and --no-flag.

    Args:
        default: value if the flag is not given. If it is None, `help` says what happens then.
        help: help string. The default is appended unless the string already mentions it.
        needs: names of other flags, separated by spaces. The flag is refused unless at least one of them is given, and
            ignored after --no-NAME for the first of them.
        options: more arguments for argparse's `add_argument`. A `type` turns the text into the value, or raises
            argparse.ArgumentTypeError; its attribute `metavar` is shown in --help.
    """
    return dataclasses.field(default=default, metadata={'help': help, 'needs': needs, 'options': options})


def positional(help: str, default: Any = dataclasses.MISSING, nargs: str | None = None) -> Any:
    """Declare a field that is a positional argument, with argparse's `nargs`."""
    return dataclasses.field(default=default, metadata={'help': help, 'nargs': nargs})


def parse(cls: type[Settings], description: str, argv: Sequence[str] | None = None,
          program: str | None = None) -> Settings:
    """Parse a command line and return the settings. A mistake in it prints one line and exits with status 2.

    The dataclass and its bases are the groups in --help, in this order, each under its heading. If a group has a method
    `check`, it is called at the end, and raises UserError for values that do not fit. By default `argv` are the
    arguments of this process, and `program` is the name of the script.
    """
    parser = build_parser(cls, description, program)
    try:
        given = vars(parser.parse_args(argv))
        for name, value in given.items():
            if isinstance(value, list):  # a frozen dataclass needs hashable values
                given[name] = tuple(value) or (0,)  # only --dry_run may be without a value
        resolve_needs(cls, given)
        settings = cls(**given)
        for group in reversed(cls.__mro__):
            if 'check' in vars(group):
                group.check(settings)
    except UserError as error:
        parser.error(str(error))
    return settings


def resolve_needs(cls: type, given: dict[str, Any]) -> None:
    """Remove flags that do nothing after a --no-NAME. Raises UserError for a flag whose `needs` are not given.

    For example, --no-use_ema removes the --ema_half_life in a @FILE.
    """
    for field in dataclasses.fields(cls):
        needed = field.metadata.get('needs', '').split()
        if not needed or any(given.get(name, getattr(cls, name)) for name in needed):
            continue
        if given.get(needed[0]) is False:
            given.pop(field.name, None)
        elif given.get(field.name):
            raise UserError(f'--{field.name} needs --{needed[0]}; give both, or neither')


def answer_early(cls: type[Settings], description: str, answer: Callable[[Settings], None] | None = None) -> None:
    """Handle --help and mistakes in the flags before a command imports its libraries, which takes several seconds.

    `answer` may end the process after it has done what needs no libraries.

    On a terminal, a line says that the imports begin. The command's `main` parses the flags again, because other
    programs call `main` with their own arguments.
    """
    begin()
    settings = parse(cls, description)
    if answer is not None:
        answer(settings)
    if importlib.util.find_spec('composer') is None:
        exit_with_error(Path(sys.argv[0]).name, 1, f'{sys.executable} does not have the required libraries; run '
                        'source .venv/bin/activate first (make install creates .venv)')
    if sys.stderr.isatty() and os.environ.get('RANK', '0') == '0':
        print('loading the libraries', file=sys.stderr, flush=True)


def build_parser(cls: type, description: str, program: str | None = None) -> 'Parser':
    """Build the argparse parser for a dataclass, from the arguments that `parse` explains."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    program = program or Path(sys.argv[0]).name
    parser = Parser(program, description=description, formatter_class=HelpFormatter, allow_abbrev=False,
                    epilog='@FILE reads flags from FILE. A later flag replaces an earlier one.')

    # Add the fields class by class, in the order of --help: the class of this command, and then its base classes.
    usage = [program]
    groups = {}  # argparse's groups, by heading
    for owner in (cls, *cls.__bases__):
        for name in vars(owner).get('__annotations__', ()):
            about = fields[name].metadata
            if 'nargs' in about:
                nargs = about['nargs']
                usage.append({None: name.upper(), '+': f'{name.upper()} ...', '*': f'[{name.upper()} ...]'}[nargs])
                parser.add_argument(name, metavar=name.upper(), help=about['help'], nargs=nargs, type=nonempty,
                                    default=argparse.SUPPRESS)
            else:
                if owner.heading not in groups:
                    groups[owner.heading] = parser.add_argument_group(owner.heading)
                add_flag(groups[owner.heading], fields[name])
    parser.usage = ' '.join([*usage, '[--flag VALUE ...]', '[@FILE]'])
    return parser


def add_flag(group, field: dataclasses.Field) -> None:
    """Add the flag of a field to an argparse group."""
    # The help string states the default, because argparse does not know it: the dataclass has the defaults.
    help = field.metadata['help'].replace('%', '%%')
    options = {'default': argparse.SUPPRESS, 'help': help, **field.metadata['options']}
    if field.default is dataclasses.MISSING:
        options |= {'help': f'{help} (required)', 'required': True}
    elif '(default' not in help:
        options['help'] += f' (default: {SHOWN_DEFAULTS.get(str(field.default), field.default)})'

    has_modes = 'const' in options  # --compile or --compile MODE
    if isinstance(field.default, bool) and not has_modes:
        options['action'] = argparse.BooleanOptionalAction
    if 'action' not in options:
        options.setdefault('type', nonempty)
        if 'choices' not in options:
            options.setdefault('metavar', getattr(options['type'], 'metavar', field.name.upper()))
    group.add_argument(f'--{field.name}', **options)
    if has_modes:
        group.add_argument(f'--no-{field.name}', dest=field.name, action='store_const', const=False,
                           default=argparse.SUPPRESS, help=f'turn --{field.name} off after a @FILE turned it on')


def with_files(arguments: Sequence[str], within: tuple[str, ...] = ()) -> list[str]:
    """Replace each @FILE by the arguments in that file, and return all arguments. `within` are the @FILEs around them.

    argparse has the same feature, but its errors do not name the file.

    Raises UserError if a file cannot be read, contains an unclosed quotation mark or names itself.
    """
    found = []
    for argument in arguments:
        if not argument.startswith('@'):
            found.append(argument)
            continue
        if argument in within:
            raise UserError(f'{argument} names itself ({" ".join([*within, argument])}); remove it there')
        for number, line in enumerate(read_text(argument[1:], argument).splitlines(), start=1):
            try:
                words = shlex.split(line, comments=True)
            except ValueError as error:
                raise UserError(f'{argument}, line {number}: {str(error).lower()}') from None
            found += with_files(words, (*within, argument))
    return found


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps help strings without breaking file names and flags at their hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, and suggests the nearest flag for an unknown one.

    An argument `@FILE` is replaced by the arguments in FILE. A line can hold several, split as in a shell, and a #
    starts a comment.
    """

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """Parse as argparse does. For an unknown flag, suggest the one that may have been meant.

        Raises UserError if a @FILE cannot be read.
        """
        known, unknown = self.parse_known_args(with_files(sys.argv[1:] if args is None else args), namespace)
        if unknown:
            name = unknown[0].partition('=')[0]
            nearest = difflib.get_close_matches(name, self._option_string_actions, n=1)
            remedy = f'did you mean {nearest[0]}?' if nearest else 'see --help'
            if any(word in name for word in LIMITED):
                remedy = LIMITS
            self.error(f'{name} is not a flag; {remedy}')
        return known

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        exit_with_error(self.prog, 2, message)


def nonempty(given: str) -> str:
    """Return a text unchanged. An empty one is refused, because it would count as if the flag was not given."""
    if not given:
        raise argparse.ArgumentTypeError('the value is empty; is a shell variable unset?')
    return given


def number_between(cls: type, least: float, most: float, name: str, metavar: str = 'N') -> Callable[[str], int | float]:
    """Return a converter to an int or float between `least` and `most`; error messages call the value `name`."""
    def parse_number(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            value = cls(text)
            if least <= value <= most:
                return value
        raise argparse.ArgumentTypeError(f'{text} is not {name}')

    parse_number.metavar = metavar
    return parse_number


def file_ending(*suffixes: str) -> Callable[[str], str]:
    """Return a converter for the name of a new file with one of these suffixes, in any case. It changes nothing."""
    def check_suffix(text: str) -> str:
        if not text.lower().endswith(suffixes):
            raise argparse.ArgumentTypeError(f'{text} does not end in {" or ".join(suffixes)}; give such a file name')
        return text

    check_suffix.metavar = 'FILE'
    return check_suffix


count = number_between(int, 1, sys.maxsize, 'a whole number above 0')
whole_number = number_between(int, 0, sys.maxsize, 'a whole number')
amount = number_between(float, 0, sys.float_info.max, 'a number of at least 0')
positive = number_between(float, sys.float_info.min, sys.float_info.max, 'a number above 0')
fraction = number_between(float, 0, 1, 'a fraction between 0 and 1', 'FRACTION')
below_1 = number_between(float, 0, math.nextafter(1, 0), 'a number from 0 to below 1')
picture = file_ending('.png', '.pdf', '.svg')
# NumPy's seeds have 32 bits, and the rank is added
seed = number_between(int, 0, 4_000_000_000, 'a whole number up to 4,000,000,000')
