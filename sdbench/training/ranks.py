"""Start, synchronize and end the ranks of a run, also at Ctrl-C or SIGTERM."""
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
from sdbench.process import cpu_cores

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ENDING = b'\na signal came: the run ends with this batch; a launcher waits 30 seconds for it (Ctrl-C again: at once)\n'


def join_ranks(timeout: int) -> None:
    """Start the process group, if there are several ranks, and divide the host's cores among them.

    Args:
        timeout: seconds to wait for all ranks, now and in each collective operation.

    Raises UserError if two ranks would share a GPU, or not all came within `timeout`.
    """
    # Nothing that touches a GPU, and so may fail, comes before this.
    processes = dist.get_local_world_size()
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and processes > gpus:
        raise UserError(f'composer -n {processes} is more than the GPUs of this machine; use -n {gpus}')
    device = get_device()  # by which Composer lets float32 be multiplied in TF32, on one GPU as on several
    if dist.get_world_size() == 1:
        return

    # The ranks meet.
    if dist.get_local_world_size() > 1 and 'OMP_NUM_THREADS' not in os.environ:
        cores = cpu_cores() // dist.get_local_world_size()
        torch.set_num_threads(max(1, cores))  # each rank on all cores is 10 times slower on a CPU
    try:
        dist.initialize_dist(device, timeout)
    except (RuntimeError, ValueError) as error:  # torch's DistError and its kinds are RuntimeErrors
        address = f'{os.environ.get("MASTER_ADDR")}:{os.environ.get("MASTER_PORT")}'
        raise UserError(f'the {dist.get_world_size()} processes of this run did not meet at {address} within '
                        f'{timeout} seconds ({one_line(error, 200)}); check that every node runs, and can reach it'
                        ) from None


def destroy_nccl_group() -> None:
    """Destroy the process group of a run that completed on several GPUs; torch warns if a process ends without.

    Gloo's group is not destroyed. Up to torch 2.7 that can deadlock: it holds Python's GIL while it waits for a thread,
    which may wait for the GIL to free the last tensor that was gathered
    (https://github.com/pytorch/pytorch/pull/154976).
    """
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == 'nccl':
        torch.distributed.destroy_process_group()


def print_on_rank_0(text: str) -> None:
    """Print a line for people to stderr, once for all ranks."""
    if dist.get_global_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 alone, and return its result on all ranks.

    Raises what `on_every_rank` does.
    """
    def on_this_rank() -> Any:
        return function() if dist.get_global_rank() == 0 else None
    return on_every_rank(on_this_rank)[0]


def on_every_rank(function: Callable[[], Any]) -> list[Any]:
    """Call a function on each rank, and return the results of all ranks, in their order.

    An error on one rank ends all, so that none waits for another in its next collective operation. There it is raised
    as it is, and on the others as UserError or DataError, by whose fault it is, with the same words.
    """
    # what it returns or raises here
    value = None
    failure = None
    try:
        value = function()
    except Exception as error:  # also what nobody foresaw
        failure = error

    # what it did on the others
    kind = UserError if isinstance(failure, UserError) else DataError
    answers = dist.all_gather_object((value, kind, failure and one_line(failure)))
    if failure is not None:
        raise failure
    for _, kind, message in answers:
        if message is not None:
            raise kind(message)
    return [value for value, _, _ in answers]


class GracefulStop(Callback):
    """Ends the training on all ranks at the end of the batch in which SIGINT or SIGTERM comes to one of them, or `end`.

    It must come before the callbacks that save. It is also a context manager, around all that is to be finished after a
    signal: it handles signals from the start of the training until the context ends. A second Ctrl-C ends the process
    at once. A second SIGTERM does not, because a cluster and the launcher both send one. A training that begins later
    ends before its first batch.

    Attributes:
        interrupted: whether the training was ended so.
    """

    def __init__(self):
        self.interrupted = False
        self._has_come = False  # to this rank
        self._handlers_before: dict = {}

    def __enter__(self) -> 'GracefulStop':
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._handlers_before = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        if not self._handlers_before:
            self._handlers_before = {number: signal.signal(number, self._note) for number in SIGNALS}
        self.batch_end(state, logger)  # a program may call `fit` again after the signal

    def _note(self, number: int, frame) -> None:
        """Handle a signal: note it, and let the next Ctrl-C end the process."""
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if not self._has_come and dist.get_global_rank() == 0:
            os.write(2, ENDING)
        self._has_come = True

    def end(self) -> None:
        """End the training with the batch that it is in, as a signal does."""
        self._has_come = True

    def batch_end(self, state: State, logger: Logger) -> None:
        has_come = state.device.tensor_to_device(torch.tensor(int(self._has_come)))
        dist.all_reduce(has_come, 'MAX')
        if has_come.item():
            self.interrupted = True
            state.stop_training()  # Composer saves at the end of a training
            state.evaluators = []  # and would evaluate, which can take longer than a cluster waits
