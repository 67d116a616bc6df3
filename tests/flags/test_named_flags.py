"""Every flag that an error or an advice names is one that its command takes."""
import ast
import re
import subprocess
from pathlib import Path

import pytest

from sdbench.flags.parser import build_parser
from tests.flags.test_parser import COMMANDS
from tests.runs import ROOT

FLAG = re.compile(r'(?<![\w-])--[a-z][a-z_]*(?:-[a-z_]+)*')
OF_OTHERS = {'--always', '--dirty', '--abbrev', '--exclude', '--shm-size', '--head', '--local-dir'}  # git, docker, ...
NO_FLAGS = {'--flag', '--no'}  # as --help says, and as in f'--no-{name}'
PARSERS = {program: build_parser(kind, '', program)._option_string_actions for program, kind in COMMANDS.items()}
FILES = subprocess.run(['git', 'ls-files', '*.py', ':!tests', ':!benchmarks'], cwd=ROOT, capture_output=True, text=True,
                       check=True).stdout.splitlines()


def flags_named(source: str) -> set[str]:
    """Of the texts in a program, but for its docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return set(FLAG.findall('\n'.join(str(node.value) for node in constants))) - OF_OTHERS - NO_FLAGS


def unknown(file: str, source: str) -> set[str]:
    """The flags in a file that are of no command. A command may name its own, and those of the commands that are next.
    """
    programs = [file, 'benchmark.py', 'evaluate.py'] if file in COMMANDS else list(COMMANDS)
    return flags_named(source) - set().union(*(PARSERS[program] for program in programs))


@pytest.mark.parametrize('file', FILES)
def test_every_flag_that_a_text_of_the_program_names_is_one(file):
    assert unknown(file, Path(ROOT, file).read_text()) == set()
