"""Start a command's process, show its progress, and end it, with one line for a user's error. Does not import torch."""
import contextlib
import datetime
import getpass
import io
import math
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sdbench.errors import UserError, known_reason, one_line, redacted

GPU_DEVICES = ('/dev/nvidiactl', '/dev/kfd')  # device files of the NVIDIA driver and the AMD driver

LAUNCHER_VARIABLES = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK')
# Job scripts often set these from other variables, as in WORLD_SIZE=$SLURM_NTASKS. If SLURM_NTASKS is unset, that gives
# an empty text.
EMPTY_IS_UNSET = (*LAUNCHER_VARIABLES, 'MASTER_ADDR', 'MASTER_PORT', 'OMP_NUM_THREADS', 'S3_ENDPOINT_URL')
SECONDS_BETWEEN_LINES = 60  # between progress lines in a log; shorter work prints none
LINE = '{desc}{n_fmt} of {total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left{postfix}'  # tqdm's bar_format

began_at = datetime.datetime.now(datetime.UTC)  # of the import; `begin` sets it to the time at which a command began


def begin() -> None:
    """Prepare the process of a command. Call it before torch is imported, because torch reads the environment then."""
    global began_at
    began_at = datetime.datetime.now(datetime.UTC)

    # Remove empty variables, because the libraries read these variables, too, and fail on an empty text.
    for name in EMPTY_IS_UNSET:
        if name in os.environ and not os.environ[name].strip():
            del os.environ[name]

    # Print a character that the terminal or log cannot encode as an escape such as \u732b. By default such a character
    # in a path or a caption would end the command with a UnicodeEncodeError.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')

    # Let waiting OpenMP threads sleep on a machine without a GPU. By default they spin, and if another program takes a
    # core, they keep the thread that they wait for from running, and training on a CPU becomes ten times slower.
    if not any(os.path.exists(device) for device in GPU_DEVICES):
        os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

    # Give a user id without a name, as in many containers, its number as a name. torch.compile and Composer ask for a
    # name, and fail without one.
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ['LOGNAME'] = str(os.getuid())

    # Let torch's GPU allocator grow its segments in place. Otherwise early frees fragment the memory.
    if not {'PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF'} & os.environ.keys():  # the second name is new in torch 2.9
        os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'

    # If the launcher of this rank is killed, send the rank SIGTERM, so it saves a checkpoint and does not run on alone.
    if os.environ.get('LOCAL_RANK'):
        end_with_parent(signal.SIGTERM)


def cpu_cores(cgroups: str = '/sys/fs/cgroup') -> int:
    """Return how many CPU cores this process may use: its CPU affinity or its container's quota, whichever is less.

    `cgroups` is the folder with the container's limits, in the layout of cgroups version 2.
    """
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max", which means no limit
        quota, period = map(int, Path(cgroups, 'cpu.max').read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def end_with_parent(signal_number: int) -> None:
    """Start a thread that sends this process a signal when the process that started it has ended.

    If multiprocessing started this process, the thread waits for the parent that multiprocessing reports, which is the
    right one even if a fork server did the fork. In any other process, such as a rank under a launcher, the thread
    checks once per second whether the parent process id has changed. Linux's PR_SET_PDEATHSIG is no alternative,
    because it watches the fork server, which lives as long as the processes that it forked.
    """
    import multiprocessing  # here, because --help starts faster without it
    parent = multiprocessing.parent_process()
    parent_id = os.getppid()

    def wait_for_parent() -> None:
        if parent is not None:
            parent.join()
        else:
            while os.getppid() == parent_id:
                time.sleep(1)
        os.kill(os.getpid(), signal_number)
    threading.Thread(target=wait_for_parent, daemon=True).start()


def launcher_variable(name: str) -> int | None:
    """Return the number in an environment variable that a launcher sets, such as RANK; None if it is not set.

    Raises UserError if any of LAUNCHER_VARIABLES is not a number, because Composer reads all of them.
    """
    for variable in LAUNCHER_VARIABLES:
        text = os.environ.get(variable) or '0'
        if not text.isdecimal():
            raise UserError(f'environment variable {variable} is {text}, which is not a number; unset it, or start the '
                            'command with a launcher, which sets it')
    text = os.environ.get(name)
    return int(text) if text else None


def exit_with_error(program: str, status: int, message: str) -> NoReturn:
    """Print the error in one line, with passwords removed, and exit with `status`.

    Most errors happen on all ranks at the same time. Therefore ranks other than 0 wait for ten seconds. Meanwhile rank
    0 prints the error, and the launcher ends the other ranks before they print it again.
    """
    rank = os.environ.get('RANK') or '0'
    if rank != '0':
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher sends it after rank 0 has exited
        time.sleep(10)
        message = f'rank {rank}: {message}'
    print(f'{program}: error: {redacted(" ".join(message.split()))}', file=sys.stderr)
    sys.exit(status)


def handle_signals(numbers: Sequence[int], handler: Callable) -> dict[int, Any]:
    """Set the handler of several signals, and return the handlers before, by signal.

    If SIGHUP is ignored, as `nohup` does, it stays ignored. Otherwise it means that the terminal has closed. Writing to
    a closed terminal is an error, so what is printed from then on is dropped.
    """
    def handle(number: int, frame: Any) -> None:
        for stream in (1, 2):
            if number == signal.SIGHUP and stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        handler(number, frame)

    before = {}
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    return before


@contextlib.contextmanager
def one_line_errors(program: str, how_to_continue: str = '') -> Iterator[None]:
    """End the process with one line if code in this context raises an error that a user can fix.

    The exit status is 2 if the command line or a file named there is wrong (UserError), 1 for errors of data, a disk or
    a package (DataError, OSError, ImportError), and 130 after Ctrl-C, SIGTERM or SIGHUP. Any other error keeps its
    traceback.

    `how_to_continue` follows an error with status 1 or 130: it says which results are kept, and how to continue.
    """
    suffix = how_to_continue and f'; {how_to_continue}'
    # These signals raise KeyboardInterrupt, as Ctrl-C does.
    handlers_before = handle_signals((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)
    try:
        yield
    except UserError as error:
        exit_with_error(program, 2, one_line(error))
    except Exception as error:  # torch has its own error types, and a full disk raises SafetensorError
        reason = known_reason(error)
        if reason is None:
            raise
        exit_with_error(program, 1, reason + suffix)
    except KeyboardInterrupt:
        exit_with_error(program, 130, f'interrupted{suffix}')
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


class LogLines:
    """A file for tqdm that prints each state of a progress bar as a line on stderr, for logs."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def progress_bar(total: int, unit: str, done: int = 0, doing: str | None = None, hidden: bool = False):
    """Return a tqdm progress bar on stderr. If stderr is a log file, it prints a line once per minute.

    `unit` is the text after a number, such as ' images'; 'B' means bytes, which are shown in kB, MB or GB. `done` is
    what an earlier run completed, and `doing` the text before the bar.
    """
    from tqdm import tqdm
    options = {'desc': doing and f'{doing}: ', 'total': total, 'initial': done, 'unit': unit, 'unit_scale': unit == 'B',
               'disable': hidden}
    if sys.stderr.isatty():
        return tqdm(**options)
    return tqdm(**options, file=LogLines(), bar_format=LINE, mininterval=SECONDS_BETWEEN_LINES,
                maxinterval=SECONDS_BETWEEN_LINES, delay=SECONDS_BETWEEN_LINES)
