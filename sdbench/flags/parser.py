"""A frozen dataclass becomes the command line of a program: its fields are the flags. Nothing here needs torch.

    @dataclass(frozen=True, kw_only=True)
    class Greeting:
        heading = 'greeting'                               # of these flags in --help
        name: str = positional('who is greeted')
        times: int = flag(1, 'how often', converter=count)
        loud: bool = flag(False, 'in capitals')

    settings = parse(Greeting, 'Greet somebody.')          # of sys.argv
"""
import argparse
import dataclasses
import difflib
import importlib.util
import math
import os
import shlex
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sdbench.errors import UserError
from sdbench.files import read_text
from sdbench.process import begin, exit_with_error

Settings = TypeVar('Settings')
DEFAULTS_IN_WORDS = {'None': 'none', 'True': 'on', 'False': 'off'}  # defaults in --help


def flag(default: Any, help: str, *, converter: Callable[[str], Any] | None = None, metavar: str | None = None,
         bare: Any = None, needs: str = '', may_change: bool = False) -> Any:
    """Declare a field that is a flag.

    The field's type says what the flag takes: a bool is on or off (--flag, --no-flag), a Literal one of its texts,
    tuple[int, ...] one whole number or several, tuple[int, int] two. Of a bool | Literal the value may be left out.

    Args:
        default: its value where it is not given; None: see `help`.
        help: what it is, in words; the default is added, unless they name it.
        converter: turns the text into the value, or raises argparse.ArgumentTypeError; None: the field's type does.
        metavar: what the value is called in the help; None: as its converter has it, or else as the flag.
        bare: the value of the flag alone, where its value may be left out; a tuple where it takes several.
        needs: another flag, without which this one does nothing, so that it is refused; or several, parted by spaces,
            one of which is enough. Turning off the only one also removes this one, if it was given before (`Given`).
        may_change: whether a run that resumes may have another value, where the other flags of its group must be the
            same (`SAME_ON_RESUME` of sdbench/flags/train.py).
    """
    about = {'help': help, 'converter': converter, 'metavar': metavar, 'bare': bare, 'needs': needs,
             'may_change': may_change}
    return dataclasses.field(default=default, metadata=about)


def positional(help: str) -> Any:
    """Declare a field that is an argument without dashes. It has to be given; of a tuple, once or more."""
    return dataclasses.field(metadata={'help': help, 'positional': True})


def parse(cls: type[Settings], description: str, argv: Sequence[str] | None = None,
          program: str | None = None) -> Settings:
    """Return the settings that a command line gives, or end the process in one line, with status 2.

    Args:
        cls: the dataclass. It and its bases are the groups of --help, in their order, each under its `heading`. A
            `check` that any of them has is called last; it raises UserError for what cannot be.
        description: for --help.
        argv: the arguments; None: those of this process.
        program: name of the command; None: that of the script.
    """
    parser = build_parser(cls, description, program)
    try:
        values = vars(parser.parse_args(argv, Given(cls)))
        for name, value in values.items():
            if value == '' or isinstance(value, list) and '' in value:
                given = f'--{name}' if hasattr(cls, name) else name.upper()  # what is positional has no default
                raise UserError(f'{given} is empty; a variable of the shell may not be set')
            if isinstance(value, list):  # which cannot be in a frozen dataclass that is compared
                values[name] = tuple(value) or cls.__dataclass_fields__[name].metadata['bare']
        settings = cls(**values)
        check(settings)
    except UserError as error:
        parser.error(str(error))
    return settings


def answer_early(cls: type, description: str) -> None:
    """Answer --help and a mistake in the flags of this process before the imports of a command, which take seconds.

    Whoever waits at a terminal is told that these begin. The `main` of the command parses once more, since other
    programs call it with flags of their own.
    """
    begin()
    parse(cls, description)
    if importlib.util.find_spec('composer') is None:
        exit_with_error(Path(sys.argv[0]).name, 1, f'{sys.executable} is not the Python of the environment, which has '
                        'the libraries: source .venv/bin/activate (make smoke makes it)')
    if sys.stderr.isatty() and os.environ.get('RANK', '0') == '0':
        print('loading the libraries', file=sys.stderr, flush=True)


def check(settings: Any) -> None:
    """Raise UserError for a flag without the one that it needs, and for what `check` of the groups refuses."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        needed = field.metadata.get('needs', '').split()
        if needed and is_given(value) and not any(is_given(getattr(settings, name)) for name in needed):
            is_one_value = value is not True and not isinstance(value, tuple)
            given = f'--{field.name} {value}' if is_one_value else f'--{field.name}'
            raise UserError(f'{given} needs --{needed[0]}; give both, or leave it out')
    for group in reversed(type(settings).__mro__):
        if 'check' in vars(group):
            group.check(settings)


def is_given(value: Any) -> bool:
    """Tell whether a flag that is off or none by default was given."""
    return value is not None and value is not False and value != ()


def build_parser(cls: type, description: str, program: str | None = None) -> 'Parser':
    """Build the parser of a dataclass; `parse` says what the arguments are."""
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    program = program or Path(sys.argv[0]).name
    positionals = [name.upper() for name, field in fields.items() if 'positional' in field.metadata]
    parser = Parser(program, ' '.join([program, *positionals, '[--flag VALUE ...]', '[@FILE]']), description,
                    formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    # the fields of each class, in the order in which they are written
    groups = {}  # of argparse, by heading
    for owner in (*cls.__bases__, cls):
        for name in vars(owner).get('__annotations__', ()):
            about = fields[name].metadata
            if 'positional' in about:
                several = {'nargs': '+'} if get_origin(hints[name]) is tuple else {}
                parser.add_argument(name, metavar=name.upper(), help=about['help'], **several)
            elif 'help' in about:
                if owner.heading not in groups:
                    groups[owner.heading] = parser.add_argument_group(owner.heading)
                add_flag(groups[owner.heading], fields[name], hints[name])
    return parser


def add_flag(group, field: dataclasses.Field, hint: Any) -> None:
    """Add a field to argparse's group. `hint` is its type."""
    about = field.metadata

    # its help, with the default
    types_of_value = [hint]
    if get_origin(hint) in (Union, types.UnionType):
        types_of_value = [one for one in get_args(hint) if one is not types.NoneType]
    help = about['help'].replace('%', '%%')
    if '(default' not in help and '(needed)' not in help:
        help += f' (default: {DEFAULTS_IN_WORDS.get(str(field.default), field.default)})'
    options = {'default': argparse.SUPPRESS, 'help': help}  # the dataclass has the defaults

    # a switch: --flag and --no-flag
    if types_of_value == [bool]:
        group.add_argument(f'--{field.name}', action=argparse.BooleanOptionalAction, **options)
        return

    # a value, or several, of the field's type
    converter = next(one for one in types_of_value if one is not bool)
    if get_origin(converter) is tuple:
        types_of_items = get_args(converter)
        converter = types_of_items[0]
        if types_of_items[-1] is ...:
            options |= {'nargs': '+' if about['bare'] is None else '*', 'action': 'extend'}
        else:
            options['nargs'] = len(types_of_items)
    if about['converter'] is not None:
        converter = about['converter']
    elif get_origin(converter) is Literal:
        options['choices'] = get_args(converter)
        converter = str

    # a value that may be left out
    if about['bare'] is not None and 'nargs' not in options:
        options |= {'nargs': '?', 'const': about['bare']}
    metavar = about['metavar'] or getattr(converter, 'metavar', None)
    if metavar is None and 'choices' not in options:
        metavar = field.name.upper()
    group.add_argument(f'--{field.name}', type=converter, metavar=metavar, **options)
    if bool in types_of_value:
        group.add_argument(f'--no-{field.name}', dest=field.name, action='store_const', const=False,
                           default=argparse.SUPPRESS, help=f'turn --{field.name} off, where a @FILE turned it on')


class Given(argparse.Namespace):
    """The flags that a command line has given so far.

    A flag that is turned off takes with it the flags before it that need it: after `@recipes/phase-1.txt` a
    `--no-use_ema` also removes the `--ema_half_life` of the file.
    """
    __slots__ = ('_needs',)  # keeps it out of `vars`, which are the flags

    def __init__(self, cls: type):
        object.__setattr__(self, '_needs', {field.name: field.metadata.get('needs') for field in
                                            dataclasses.fields(cls)})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if value is False:
            for other, needed in self._needs.items():
                if needed == name:
                    vars(self).pop(other, None)


def with_files(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with those of each FILE in the place of its @FILE.

    argparse does this too, but takes a byte order mark for a part of the first flag, and does not name a broken file.

    Raises UserError, which names the file, if it cannot be read or a quotation mark in it is not closed.
    """
    found = []
    for argument in arguments:
        if not argument.startswith('@'):
            found.append(argument)
            continue
        for number, line in enumerate(read_text(argument[1:], argument).splitlines(), start=1):
            try:
                words = shlex.split(line, comments=True)
            except ValueError as error:
                raise UserError(f'{argument}, line {number}: {str(error).lower()}') from None
            found += with_files(words)
    return found


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and knows the nearest flag to one that is none.

    An argument `@FILE` stands for the arguments that FILE holds, any number on a line, as a shell would split them.
    What follows a # there is a comment.
    """

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """Parse as argparse does; for an argument that is no flag, name the one that may have been meant.

        Raises UserError for a FILE that cannot be read.
        """
        known, unknown = self.parse_known_args(with_files(sys.argv[1:] if args is None else args), namespace)
        if unknown:
            name = unknown[0].partition('=')[0]
            nearest = difflib.get_close_matches(name, self._option_string_actions, n=1)
            remedy = f'did you mean {nearest[0]}?' if nearest else 'see --help'
            self.error(f'{name} is no flag; {remedy}')
        return known

    def error(self, message: str) -> None:
        """End with one line and status 2."""
        exit_with_error(self.prog, 2, message)


def number(cls: type, least: float, most: float, name: str, metavar: str = 'N') -> Callable[[str], int | float]:
    """Make a converter to an int or a float from `least` to `most`; `name` says in error messages what it takes."""
    def parse_number(text: str) -> int | float:
        try:
            value = cls(text)
        except ValueError:
            value = math.nan
        if least <= value <= most:
            return value
        raise argparse.ArgumentTypeError(f'{text} is not {name}')

    parse_number.metavar = metavar
    return parse_number


count = number(int, 1, sys.maxsize, 'a whole number above 0')
whole_number = number(int, 0, sys.maxsize, 'a whole number')
amount = number(float, 0, sys.float_info.max, 'an amount')
positive = number(float, sys.float_info.min, sys.float_info.max, 'a number above 0')
fraction = number(float, 0, 1, 'a share between 0 and 1', 'SHARE')
below_1 = number(float, 0, math.nextafter(1, 0), 'a number from 0 to below 1')
seed = number(int, 0, 4_000_000_000, 'a whole number up to 4,000,000,000')  # NumPy takes 32 bits, with the rank on top
