"""The process of a command: how it starts, shows its progress and ends, a user's error in one line, without torch."""
import contextlib
import io
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from sdbench.errors import DataError, UserError, known_reason, one_line, redacted

GPU_DEVICES = ('/dev/nvidiactl', '/dev/kfd')  # of NVIDIA's driver, and of AMD's

NUMBERS_OF_LAUNCHER = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK')
# Variables that scripts set from others, such as WORLD_SIZE=$SLURM_NTASKS, and that are empty where those are not set.
EMPTY_IS_UNSET = (*NUMBERS_OF_LAUNCHER, 'MASTER_ADDR', 'MASTER_PORT', 'OMP_NUM_THREADS', 'S3_ENDPOINT_URL')
SECONDS_BETWEEN_LOOKS = 1.0  # at whether the launcher of a rank is still there
SECONDS_BETWEEN_LINES = 60  # of progress in a log; what takes less leaves none
LINE = '{desc}{n_fmt} of {total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left{postfix}'  # as tqdm fills it in


def begin() -> None:
    """Prepare the process of a command: its environment, before torch is imported, its output, and its end."""
    # The libraries read these variables, too, and stop at an empty one.
    for name in EMPTY_IS_UNSET:
        if name in os.environ and not os.environ[name].strip():
            del os.environ[name]

    # A terminal or a log that lacks a letter of a path or a caption gets its number instead of ending the command.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')

    # By default OpenMP's threads spin while they wait for one another. Where another program has taken the core of the
    # one that they wait for, they keep it from coming back, and a training on a CPU is ten times slower.
    if not any(os.path.exists(device) for device in GPU_DEVICES):
        os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

    # The memory that torch takes of a GPU grows in place: else what is freed early leaves holes that nothing fits into.
    if not {'PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF'} & os.environ.keys():  # torch 2.9 has the second as well
        os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'

    # When the launcher that started this process is gone, no rank runs on alone.
    if os.environ.get('LOCAL_RANK'):
        end_with_parent(signal.SIGTERM)


def cpu_cores(cgroups: str = '/sys/fs/cgroup') -> int:
    """Return how many CPU cores this process may use: those of its affinity, or its container's quota where it is less.

    Args:
        cgroups: folder of the container's limits, as version 2 of cgroups has them (cpu.max) or version 1.
    """
    cores = len(os.sched_getaffinity(0))
    for names in (['cpu.max'], ['cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us']):
        with contextlib.suppress(OSError, ValueError):  # no such file, or no limit: "max" in version 2
            quota, period = map(int, ' '.join(Path(cgroups, name).read_text() for name in names).split())
            if quota > 0:  # -1 in version 1 where there is no limit
                cores = min(cores, math.ceil(quota / period))
    return cores


def end_with_parent(signal_number: int) -> None:
    """Start a thread that sends this process a signal when the process that started it has ended.

    A process that multiprocessing has started is told by multiprocessing when its parent ends, also where a fork server
    has forked it. For any other process, such as a rank under a launcher, the thread looks at the parent's process id,
    which changes when the parent ends. Linux's own PR_SET_PDEATHSIG would not do: it watches the fork server, which
    lives as long as the processes that it has forked.

    Args:
        signal_number: signal to send, such as signal.SIGKILL.
    """
    import multiprocessing  # here, because --help starts faster without it
    parent = multiprocessing.parent_process()
    parent_id = os.getppid()

    def wait_for_parent() -> None:
        if parent is not None:
            parent.join()
        else:
            while os.getppid() == parent_id:
                time.sleep(SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal_number)
    threading.Thread(target=wait_for_parent, daemon=True).start()


def launcher_variable(name: str) -> int | None:
    """Return a number that a launcher has set, such as RANK; None without a launcher.

    Raises UserError where any of its numbers is none.
    """
    for variable in NUMBERS_OF_LAUNCHER:
        text = os.environ.get(variable) or '0'
        if not text.isdecimal():
            raise UserError(f'{variable} of the environment is {text}, and no number; unset it, or leave it to a '
                            'launcher')
    text = os.environ.get(name)
    return int(text) if text else None


def exit_with_error(program: str, status: int, message: str) -> NoReturn:
    """End the process with one line, without passwords.

    Most errors are those of all ranks: the others wait until rank 0 has said it and the launcher has ended them.
    """
    rank = os.environ.get('RANK') or '0'
    if rank != '0':
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how a launcher ends this rank when rank 0 has spoken
        time.sleep(10)
        message = f'rank {rank}: {message}'
    print(f'{program}: error: {redacted(" ".join(message.split()))}', file=sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def one_line_errors(program: str, what_stays: str = '') -> Iterator[None]:
    """End the process in one line where a user can mend the error that is raised in this context.

    The status is 2 where the command line or what it names is wrong (UserError), 1 for data, a disk or a package
    (DataError, OSError, ImportError), and 130 after Ctrl-C or SIGTERM. Any other error keeps its traceback.

    Args:
        program: name of the command.
        what_stays: of its work, and how to go on; it stands behind what ends with 1 or 130.
    """
    behind = what_stays and f'; {what_stays}'
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, as Ctrl-C does
    try:
        yield
    except UserError as error:
        exit_with_error(program, 2, one_line(error))
    except (DataError, OSError, ImportError) as error:
        exit_with_error(program, 1, one_line(error) + behind)
    except Exception as error:  # of torch, and SafetensorError of a full disk
        reason = known_reason(error)
        if reason is None:
            raise
        exit_with_error(program, 1, reason + behind)
    except KeyboardInterrupt:
        exit_with_error(program, 130, f'interrupted{behind}')
    finally:
        signal.signal(signal.SIGTERM, before)


class LogLines:
    """The stderr of a log, in which each state of a bar is a line, where on a terminal it is written over the last."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def progress_bar(total: int, unit: str, done: int = 0, doing: str | None = None, hidden: bool = False):
    """Make a progress bar of tqdm on stderr. In a log, where there is no terminal, it prints a line now and then.

    Args:
        total: units of the whole work.
        unit: name of the unit behind a number, such as ' images'; bytes are 'B', and shown with prefixes.
        done: units that an earlier run has done.
        doing: text before the bar.
        hidden: whether nothing is shown.
    """
    from tqdm import tqdm
    what = {'desc': doing and f'{doing}: ', 'total': total, 'initial': done, 'unit': unit, 'unit_scale': unit == 'B',
            'disable': hidden}
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns  # 80 where the terminal does not say
        return tqdm(**what, ncols=columns, nrows=20)
    return tqdm(**what, file=LogLines(), bar_format=LINE, mininterval=SECONDS_BETWEEN_LINES,
                maxinterval=SECONDS_BETWEEN_LINES, delay=SECONDS_BETWEEN_LINES)
