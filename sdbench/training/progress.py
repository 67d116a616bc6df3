"""Show the progress of a run: as a bar on a terminal, as a plain line now and then in a log."""
import sys
import time

from composer import Callback
from composer.core import State
from composer.utils import dist
from tqdm import tqdm

from sdbench.measuring.clock import Measurement
from sdbench.progress_bar import progress_bar

SECONDS_BETWEEN_LINES = 30  # in a log; a run that is shorter leaves only its last line


def batches_in_words(state: State, total: int) -> str:
    """Return text such as 'batch 120 of 2000'."""
    return f'batch {state.timestamp.batch.value} of {total}'


class Progress(Callback):
    """Shows on rank 0 the progress of the whole training: batches, loss, speed and the time that is left.

    Composer's own bar counts the batches of an epoch only, and in a log it writes a line for each batch. The speed in a
    log leaves out checkpoints, evaluations and drawing, as the record does.

    Args:
        measurement: of the run, which times what the speed leaves out. It must come earlier among the callbacks.
    """

    def __init__(self, measurement: Measurement):
        self.measurement = measurement
        self.bar: tqdm | None = None
        self._total = 0  # batches
        self._next_line = 0.0  # time.monotonic() when it is due
        self._line_time = 0.0  # seconds on batches alone, when the last one was printed
        self._line_batch = 0
        self._line_sample = 0

    def fit_start(self, state: State, logger) -> None:
        self._total = state.max_duration.value
        self._begin_line(state)
        if dist.get_global_rank() == 0 and sys.stderr.isatty():
            self.bar = progress_bar(self._total, ' batches', self._line_batch)

    def batch_end(self, state: State, logger) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(self._loss(state), refresh=False)
            self.bar.update()
        elif time.monotonic() >= self._next_line:
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
        """Print batch, loss, speed and time left on rank 0."""
        # since the last line
        batch = state.timestamp.batch.value
        seconds = self._training_time() - self._line_time
        batches_per_second = (batch - self._line_batch) / seconds
        images = state.timestamp.sample.value - self._line_sample

        # the line
        parts = [self._loss(state), f'{images / seconds:.4g} images/s']
        if batch < state.max_duration.value:  # which a signal brings forward to this batch
            seconds_left = (self._total - batch) / batches_per_second
            parts.append(f'{tqdm.format_interval(seconds_left)} left')
        if dist.get_global_rank() == 0:
            where = batches_in_words(state, self._total)
            print(f'{where}: {", ".join(filter(None, parts))}', file=sys.stderr, flush=True)
        self._begin_line(state)

    def _begin_line(self, state: State) -> None:
        """Begin the interval that the next line is about."""
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        self._line_time = self._training_time()
        self._line_batch = state.timestamp.batch.value
        self._line_sample = state.timestamp.sample.value

    def _training_time(self) -> float:
        """Return seconds on batches until now, from an arbitrary start; only differences have a meaning."""
        return time.monotonic() - self.measurement.seconds_excluded

    @staticmethod
    def _loss(state: State) -> str:
        """Return text such as 'loss 0.123', or '' if the batch was skipped."""
        loss = state.total_loss_dict.get('loss/train/total')
        if loss is None:
            return ''
        return f'loss {float(loss):.3f}'
