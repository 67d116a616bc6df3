"""How a command ends: what a user can mend is one line. Nothing here needs torch."""
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from sdbench.errors import DataError, known_reason, one_line, redacted


def exit_with_error(program: str, status: int, message: str) -> NoReturn:
    """End the process with one line, without passwords.

    Most errors are those of all ranks: the others wait until rank 0 has said it and the launcher has ended them.
    """
    rank = int(os.environ.get('RANK', 0))
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how a launcher ends this rank when rank 0 has spoken
        time.sleep(10)
        message = f'rank {rank}: {message}'
    print(f'{program}: error: {redacted(" ".join(message.split()))}', file=sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def one_line_errors(program: str, what_stays: str = '') -> Iterator[None]:
    """A context in which an error that a user can mend ends the process in one line.

    The status is 2 where the command line or what it names is wrong (ValueError), 1 for data, a disk or a package
    (DataError, OSError, ImportError), and 130 after Ctrl-C or SIGTERM. Any other error keeps its traceback.

    Args:
        program: name of the command.
        what_stays: of its work, and how to go on; it stands behind what ends with 1 or 130.
    """
    behind = what_stays and f'; {what_stays}'
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    try:
        yield
    except ValueError as error:
        exit_with_error(program, 2, one_line(error))
    except (DataError, OSError, ImportError) as error:
        exit_with_error(program, 1, one_line(error) + behind)
    except (RuntimeError, MemoryError) as error:
        reason = known_reason(error)
        if reason is None:
            raise
        exit_with_error(program, 1, reason + behind)
    except KeyboardInterrupt:
        exit_with_error(program, 130, f'interrupted{behind}')
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_launcher() -> None:
    """SIGTERM for this process when the launcher that started it is gone, so that no rank runs on alone (Linux)."""
    if 'LOCAL_RANK' in os.environ and sys.platform == 'linux':
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
