"""A command line is answered before the imports, which take seconds: a mistake in it in half a second.

What is a mistake, cli/early_checks.py and cli/early_data_checks.py say.
"""
import argparse
import importlib.util
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

from cli.folders import is_first_rank
from cli.options import Parser
from cli.streams import outlive_readers
from inputs.errors import one_line

TRAINING_PACKAGES = ('torch', 'composer', 'streaming', 'diffusers')
REPORT_PACKAGES = ('pandas', 'tabulate')
EVALUATION_PACKAGES = (*TRAINING_PACKAGES, 'transformers', 'torchmetrics', 'torch_fidelity')


def answer_early(parser: Parser, check: Callable[[argparse.Namespace], None],
                 packages: Sequence[str] = TRAINING_PACKAGES) -> None:
    """Parse this process's command line, and end it with one line where `check` refuses it or a package is missing.

    From here on Ctrl-C is one line as well, since the imports that follow take seconds; and nothing that is printed
    raises an error because its reader has gone.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in the background of a script
        signal.signal(signal.SIGINT, partial(end_interrupted, parser))
    outlive_readers()
    args = parser.parse_args()
    try:
        check(args)
        require_packages(*packages)
    except ValueError as error:
        parser.error(one_line(error))


def end_interrupted(parser: Parser, number: int, frame) -> None:
    """Answer Ctrl-C in one line, on rank 0. Composer, once it is imported, has a handler of its own."""
    if not is_first_rank():
        sys.exit(130)
    parser.end(130, 'interrupted')


def require_packages(*names: str) -> None:
    """Raises ValueError if this Python lacks one of the packages, as where the environment is not activated."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f'{sys.executable} has no package {name}; activate the environment with: source '
                             '.venv/bin/activate (README.md says how to make it)')
