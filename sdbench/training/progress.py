"""Show the progress of a run: as a bar on a terminal, as a plain line now and then in a log."""
import sys
import time

from composer import Callback
from composer.core import State
from composer.utils import dist
from tqdm import tqdm

from sdbench.process import progress_bar
from sdbench.training.spending import Spending

SECONDS_BETWEEN_LINES = 30  # in a log; a run that is shorter leaves only its last line


def batches_in_words(state: State, total: int) -> str:
    """Return text such as 'batch 120 of 2000'."""
    return f'batch {state.timestamp.batch.value} of {total}'


class Progress(Callback):
    """Shows on rank 0 the progress of the whole training: batches, loss, speed and the time that is left.

    Composer's own bar counts the batches of an epoch only, and in a log it writes a line for each batch.
    """

    def __init__(self):
        self.bar: tqdm | None = None
        self._total = 0  # batches
        self._line_time = 0.0  # time.monotonic() when the last line was printed
        self._line_batch = 0
        self._line_sample = 0
        self._spending: list[Spending] = []

    def fit_start(self, state: State, logger) -> None:
        self._total = state.max_duration.value
        self._spending = [callback for callback in state.callbacks if isinstance(callback, Spending)]
        self._begin_line(state)
        if dist.get_global_rank() == 0 and sys.stderr.isatty():
            self.bar = progress_bar(self._total, ' batches', self._line_batch)

    def batch_end(self, state: State, logger) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(', '.join(self._loss_and_dollars(state)), refresh=False)
            self.bar.update()
        elif time.monotonic() - self._line_time >= SECONDS_BETWEEN_LINES:
            self._print_line(state)

    def fit_end(self, state: State, logger) -> None:
        if self.bar is None and state.timestamp.batch.value > self._line_batch:
            self._print_line(state)
        self.stop()

    def stop(self) -> None:
        """Close the bar, so that what is printed next begins a new line."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _print_line(self, state: State) -> None:
        """Print on rank 0 batch and loss, the speed since the last line, and the time left."""
        seconds = time.monotonic() - self._line_time
        batches = state.timestamp.batch.value - self._line_batch
        images = state.timestamp.sample.value - self._line_sample
        batches_left = state.max_duration.value - state.timestamp.batch.value  # none after a signal

        parts = [*self._loss_and_dollars(state), f'{images / seconds:.4g} images/s']
        if batches_left > 0:
            parts.append(f'{tqdm.format_interval(batches_left * seconds / batches)} left')
        if dist.get_global_rank() == 0:
            where = batches_in_words(state, self._total)
            print(f'{where}: {", ".join(parts)}', file=sys.stderr, flush=True)
        self._begin_line(state)

    def _begin_line(self, state: State) -> None:
        """Begin the interval that the next line is about."""
        self._line_time = time.monotonic()
        self._line_batch = state.timestamp.batch.value
        self._line_sample = state.timestamp.sample.value

    def _loss_and_dollars(self, state: State) -> list[str]:
        """Return texts such as 'loss 0.123', unless the batch was skipped, and '$1.23', where a price is given."""
        parts = []
        loss = state.total_loss_dict.get('loss/train/total')
        if loss is not None:
            parts.append(f'loss {float(loss):.3f}')
        for spending in self._spending:
            if spending.dollars is not None:
                parts.append(f'${spending.dollars:,.2f}')
        return parts
