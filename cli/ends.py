"""How a command that makes OUT in parts ends: in one line, with what stays of its work."""
import contextlib
import sys
import traceback
from collections.abc import Iterator

from cli.launcher import Stopped, signals_raise
from cli.options import Parser
from inputs.errors import DataError, one_line
from parts.engine import WorkerFailed


@contextlib.contextmanager
def ended_in_one_line(parser: Parser, stays: str) -> Iterator[None]:
    """A context whose errors and signals end the process in one line.

    The exit status is 2 where the command line is at fault, 130 and 143 after a signal, and 1 for all else.

    Args:
        parser: of the command.
        stays: what is kept of its work, and how to go on.
    """
    try:
        with signals_raise():
            yield
    except ValueError as error:
        parser.error(one_line(error))
    except DataError as error:
        parser.end(1, f'{one_line(error)}; put that right: {stays}')
    except OSError as error:
        parser.end(1, f'this machine cannot go on ({one_line(error)}); put that right: {stays}')
    except WorkerFailed as error:
        print(error, file=sys.stderr)
        parser.end(1, f'a worker failed, and nobody foresaw why: see above; {stays}')
    except KeyboardInterrupt:
        parser.end(130, f'interrupted; {stays}')
    except Stopped:
        parser.end(143, f'ended by SIGTERM; {stays}')
    except Exception as error:
        traceback.print_exc()
        parser.end(1, f'nobody foresaw this ({type(error).__name__}): see above; {stays}')
