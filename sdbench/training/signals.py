"""End a training at Ctrl-C or SIGTERM after its batch, with a checkpoint and a record."""
import os
import signal

import torch
from composer import Callback
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ENDING = b'\na signal came: the run ends with this batch; a launcher waits 30 seconds for it (Ctrl-C again: at once)\n'


class StopAtSignal(Callback):
    """Ends the training on all ranks at the end of the batch in which SIGINT or SIGTERM comes to one of them.

    It must come before the callbacks that save. It is also a context manager, around all that is to be finished after a
    signal: it handles signals from the start of the training until the context ends. A second Ctrl-C ends the process
    at once. A second SIGTERM does not, because a cluster and the launcher both send one.

    Attributes:
        interrupted: whether a signal ended the training.
    """

    def __init__(self):
        self.interrupted = False
        self._has_come = False  # to this rank
        self._handlers_before: dict = {}

    def __enter__(self) -> 'StopAtSignal':
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._handlers_before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame) -> None:
        """Handle a signal: note it, and let the next Ctrl-C end the process."""
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if not self._has_come and dist.get_global_rank() == 0:
            os.write(2, ENDING)
        self._has_come = True

    def batch_end(self, state: State, logger: Logger) -> None:
        has_come = state.device.tensor_to_device(torch.tensor(int(self._has_come)))
        dist.all_reduce(has_come, 'MAX')
        if has_come.item():
            self.interrupted = True
            state.stop_training()  # Composer saves at the end of a training
            state.evaluators = []  # and would evaluate, which can take longer than a cluster waits
