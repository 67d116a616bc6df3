"""Start, synchronize and end the ranks of a run, including the end after Ctrl-C, SIGTERM or SIGHUP."""
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from composer import Callback
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist, get_device

from sdbench.errors import DataError, UserError, one_line
from sdbench.process import cpu_cores, handle_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one comes when a terminal closes
ENDING = (b'\na signal came: the run ends after this batch; a launcher kills it after 30 seconds, and a second Ctrl-C '
          b'kills it now\n')


def join_ranks(timeout: int) -> None:
    """Start the process group, if there are several ranks, and divide the host's cores among them.

    `timeout` is how many seconds to wait for all ranks, now and in each collective operation.

    Raises UserError if two ranks would share a GPU, if SLURM has started several tasks without ranks, or if some ranks
    do not join within `timeout`.
    """
    # Count GPUs before anything uses one, because the use of a missing GPU fails with an obscure error.
    processes = dist.get_local_world_size()
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and processes > gpus:
        raise UserError(f'composer -n {processes} is more than the GPUs of this machine; use -n {gpus}')
    device = get_device()  # a side effect is that Composer enables TF32, also on a single GPU
    if dist.get_world_size() == 1:
        # `srun` sets the number of tasks of its step. In a shell of `srun --pty`, only one of them runs commands.
        tasks = os.environ.get('SLURM_STEP_NUM_TASKS', '1')
        if tasks != '1' and 'RANK' not in os.environ and 'SLURM_PTY_PORT' not in os.environ:
            raise UserError(f'SLURM has started {tasks} tasks, but no launcher has set RANK, so each of them would be '
                            'a run on 1 device; start one launcher per machine, as the script in docs/machines.md: '
                            "srun --ntasks-per-node=1 bash -c 'composer -n $GPUS ... benchmark.py ...'")
        return

    # Join the process group. On a CPU, ranks that each use all cores are 10 times slower.
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(max(1, cpu_cores() // processes))
    try:
        dist.initialize_dist(device, timeout)
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        address = f'{os.environ.get("MASTER_ADDR")}:{os.environ.get("MASTER_PORT")}'
        raise UserError(f'the {dist.get_world_size()} processes of this run did not meet at {address} within '
                        f'{timeout} seconds ({one_line(error, 200)}); check that every node runs, and can reach this '
                        'address') from None


def destroy_nccl_group() -> None:
    """Destroy the NCCL process group of a complete run; otherwise torch prints a warning when the process ends.

    A Gloo group is left alone. Up to torch 2.7, destroying it can deadlock: it holds Python's GIL while it waits for a
    thread, and the thread may wait for the GIL to free the last gathered tensor
    (https://github.com/pytorch/pytorch/pull/154976).
    """
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == 'nccl':
        torch.distributed.destroy_process_group()


def print_on_rank_0(text: str) -> None:
    """Print a line for people to stderr, once for all ranks."""
    if dist.get_global_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 only, and return its result on all ranks. Errors are as in `on_every_rank`."""
    def on_this_rank() -> Any:
        return function() if dist.get_global_rank() == 0 else None
    return on_every_rank(on_this_rank)[0]


def on_every_rank(function: Callable[[], Any]) -> list[Any]:
    """Call a function on each rank, and return the results of all ranks, sorted by rank.

    If the function fails on one rank, all ranks raise, because otherwise they would wait for that rank in the next
    collective operation. That rank raises its own error. The others raise a UserError or, if the error was of another
    type, a DataError with the same message.
    """
    # Call the function, and catch every error, because the other ranks must hear of it.
    value = None
    failure = None
    try:
        value = function()
    except Exception as error:
        failure = error

    # Exchange results and errors with the other ranks.
    kind = UserError if isinstance(failure, UserError) else DataError
    answers = dist.all_gather_object((value, kind, failure and one_line(failure)))
    if failure is not None:
        raise failure
    for _, kind, message in answers:
        if message is not None:
            raise kind(message)
    return [value for value, _, _ in answers]


class GracefulStop(Callback):
    """Ends the training on all ranks after the current batch, if any rank has received one of SIGNALS.

    It is a context manager: signals are handled until the context ends, so the record can still be written. A second
    Ctrl-C ends the process immediately. A second SIGTERM does not, because a cluster and the launcher both send one.

    In a program of your own, pass it to the Trainer as a callback in front of those that save.

    Attributes:
        is_wanted: whether this rank wants to end the training; a program may set it, too.
        interrupted: whether the training was ended.
    """

    def __init__(self):
        self.is_wanted = False
        self.interrupted = False
        self._handlers_before: dict = {}

    def __enter__(self) -> 'GracefulStop':
        self._handlers_before = handle_signals(SIGNALS, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        """Handle a signal: remember it, and let the next Ctrl-C end the process."""
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if not self.is_wanted and dist.get_global_rank() == 0:
            os.write(2, ENDING)
        self.is_wanted = True

    def stop_if_wanted(self, state: State, logger: Logger | None = None) -> None:
        """End the training now, between two batches, if any rank wants it. A checkpoint follows, but no evaluation.

        An evaluation can take longer than a cluster waits before it kills the run.
        """
        is_wanted = state.device.tensor_to_device(torch.tensor(int(self.is_wanted)))
        dist.all_reduce(is_wanted, 'MAX')
        if is_wanted.item():
            self.interrupted = True
            state.stop_training()
            state.evaluators = []

    fit_start = batch_end = stop_if_wanted  # `fit_start`: a program may call `fit` once more after the signal
