"""Commands as processes of tests: they end with their own exit status, and print where they are told."""
import os
import sys
from collections.abc import Callable
from pathlib import Path

import convert


def convert_program(argv: list[str]) -> None:
    """convert.py, with its exit status."""
    sys.exit(convert.main(argv))


def logged(program: Callable[[list[str]], object], log: Path, argv: list[str], environment: dict[str, str]) -> None:
    """A program in this environment, which prints to `log`."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    program(argv)
