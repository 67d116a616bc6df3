"""What a launcher of several processes asks of each, and how a command of one answers it. Nothing here needs torch."""
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

RANK_NUMBERS = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK')  # that a launcher sets
RANK_VARIABLES = (*RANK_NUMBERS, 'MASTER_ADDR', 'MASTER_PORT')


class Stopped(BaseException):
    """SIGTERM came."""


def end_with_launcher() -> None:
    """SIGTERM for this process when the launcher that started it is gone, so that no rank runs on alone (Linux)."""
    if 'LOCAL_RANK' in os.environ and sys.platform == 'linux':
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def leave_to_first_process(program: str) -> None:
    """Where a launcher has started several processes of a command that needs one, end all but the first."""
    if os.environ.get('WORLD_SIZE', '1') == '1':
        return
    if os.environ.get('RANK', '0') != '0':
        raise SystemExit(0)
    if os.environ.get('WORLD_SIZE', '1') != os.environ.get('LOCAL_WORLD_SIZE', '1'):
        print(f'{program}: this machine does all of the work; to use several, start a Ray cluster on them and give '
              '--ray', file=sys.stderr)
    for name in RANK_VARIABLES:  # its own processes are no ranks
        os.environ.pop(name, None)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM raises Stopped in here, and Ctrl-C KeyboardInterrupt, so that what is open is closed and it is said what
    stays. (Composer, where it is imported, would end the process at either without a word.)
    """
    def stop(number: int, frame) -> None:
        raise Stopped

    handlers_before = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        handlers_before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
