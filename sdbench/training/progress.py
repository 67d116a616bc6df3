"""How far a run is: a bar on a terminal, a plain line now and then in a log."""
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
    """Such as 'batch 120 of 2000'."""
    return f'batch {state.timestamp.batch.value} of {total}'


class Progress(Callback):
    """Shows on rank 0 how far the whole training is, its loss, its speed and the time that is left.

    Composer's own bar counts the batches of an epoch, and in a log, where there is no terminal, it writes a line for
    each batch. The speed in a log is that of the batches, without checkpoints, evaluations and drawing, as in the
    record.

    Args:
        measurement: of the run, which knows how long these took; it comes before this among the callbacks.
    """

    def __init__(self, measurement: Measurement):
        self.measurement = measurement
        self.bar: tqdm | None = None
        self._total = 0  # batches
        self._next_line = 0.0  # when it is due, by the clock
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
        """Leave the bar's line, so that what is printed next stands in one of its own."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _print_line(self, state: State) -> None:
        """On rank 0: batch, loss, speed and time left."""
        batch = state.timestamp.batch.value
        seconds = self._training_time() - self._line_time
        batches_per_second = (batch - self._line_batch) / seconds
        images = state.timestamp.sample.value - self._line_sample
        parts = [self._loss(state), f'{images / seconds:.4g} images/s']
        if batch < state.max_duration.value:  # which a signal brings forward to this batch
            seconds_left = (self._total - batch) / batches_per_second
            parts.append(f'{tqdm.format_interval(seconds_left)} left')
        if dist.get_global_rank() == 0:
            where = batches_in_words(state, self._total)
            print(f'{where}: {", ".join(filter(None, parts))}', file=sys.stderr, flush=True)
        self._begin_line(state)

    def _begin_line(self, state: State) -> None:
        """The next line says what happens from here on."""
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        self._line_time = self._training_time()
        self._line_batch = state.timestamp.batch.value
        self._line_sample = state.timestamp.sample.value

    def _training_time(self) -> float:
        """Seconds that this process has spent on batches until now, from some moment before its first."""
        return time.monotonic() - self.measurement.seconds_excluded

    @staticmethod
    def _loss(state: State) -> str:
        loss = state.total_loss_dict.get('loss/train/total')  # none of a step that was left out
        if loss is None:
            return ''
        return f'loss {float(loss):.3f}'
