"""How far a run is: a bar on a terminal, a plain line now and then in a log."""
import sys
import time

from composer import Callback
from composer.core import State
from composer.utils import dist
from tqdm import tqdm

from measuring.measurement import Measurement, total_batches

SECONDS_TO_FIRST_LINE = 10
SECONDS_BETWEEN_LINES = 60


def batches_in_words(state: State) -> str:
    """Such as 'batch 120 of 2000', or 'batch 120' where the total is not known."""
    words = f'batch {state.timestamp.batch.value}'
    total = total_batches(state)
    if total is not None:
        words += f' of {total}'
    return words


def time_in_words(seconds: float) -> str:
    """A time in its two largest units, such as '3 min', '2 h 5 min' or '1 d 4 h'."""
    minutes = round(seconds / 60)
    hours = round(seconds / 3600)
    if seconds < 90:
        return f'{seconds:.0f} s'
    if minutes < 60:
        return f'{minutes} min'
    if minutes < 24 * 60:
        return f'{minutes // 60} h {minutes % 60} min'
    return f'{hours // 24} d {hours % 24} h'


class Progress(Callback):
    """Shows on rank 0 how far the whole training is, its loss, its speed and the time that is left.

    Composer's own bar counts the batches of an epoch, and in a log, where there is no terminal, it writes a line for
    each batch. What is shown here is for people; the figures of the record come from `Measurement`. The speed is that
    of the batches, without checkpoints, evaluations and drawing, as in the record; the time that is left has them.

    Args:
        measurement: of the run, which knows how long these took; it comes before this among the callbacks.
        seconds_to_first_line: in a log; a run that is shorter leaves only its last line.
        seconds_between_lines: after that.
    """

    def __init__(self, measurement: Measurement, seconds_to_first_line: float = SECONDS_TO_FIRST_LINE,
                 seconds_between_lines: float = SECONDS_BETWEEN_LINES):
        self.measurement = measurement
        self.seconds_to_first_line = seconds_to_first_line
        self.seconds_between_lines = seconds_between_lines
        self.bar: tqdm | None = None
        self._is_shown = False
        self._start = 0.0  # of this process's training, by the clock
        self._start_share = 0.0  # of the training that was done by then
        self._next_line = 0.0  # when it is due, by the clock
        self._line_training_time = 0.0  # seconds on batches alone, when the last one was printed
        self._line_samples = 0  # trained by then
        self._line_batch = 0

    def fit_start(self, state: State, logger) -> None:
        self._is_shown = dist.get_global_rank() == 0
        self._start = time.monotonic()
        self._start_share = self._share(state)
        self._next_line = self._start + self.seconds_to_first_line
        self._line_training_time = self._training_time(self._start)
        self._line_samples = state.timestamp.sample.value
        self._line_batch = state.timestamp.batch.value
        if self._is_shown and sys.stderr.isatty():
            self.bar = tqdm(total=total_batches(state), initial=state.timestamp.batch.value, unit=' batches',
                            file=sys.stderr, dynamic_ncols=True)

    def batch_end(self, state: State, logger) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(self._loss(state), refresh=False)
            self.bar.update()
        elif self._is_shown and time.monotonic() >= self._next_line:
            self._print_line(state)

    def fit_end(self, state: State, logger) -> None:
        if self._is_shown and self.bar is None and state.timestamp.batch.value > self._line_batch:
            self._print_line(state)
        self.stop()

    def stop(self) -> None:
        """Leave the bar's line, so that what is printed next stands in one of its own."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _print_line(self, state: State) -> None:
        now = time.monotonic()
        training_time = self._training_time(now)
        samples = state.timestamp.sample.value
        speed = (samples - self._line_samples) / (training_time - self._line_training_time)
        parts = [self._loss(state), f'{speed:.4g} images/s']
        seconds_left = self._seconds_left(state, now)
        if seconds_left:
            parts.append(f'{time_in_words(seconds_left)} left')
        print(f'{batches_in_words(state)}: {", ".join(filter(None, parts))}', file=sys.stderr, flush=True)
        self._next_line = now + self.seconds_between_lines
        self._line_training_time = training_time
        self._line_samples = samples
        self._line_batch = state.timestamp.batch.value

    def _training_time(self, now: float) -> float:
        """Seconds that this process has spent on batches until now, from some moment before its first."""
        return now - self.measurement.seconds_excluded

    def _seconds_left(self, state: State, now: float) -> float:
        """At the pace of this process, from where it started or resumed."""
        share = self._share(state)
        if share <= self._start_share:
            return 0.0
        return (now - self._start) * (1 - share) / (share - self._start_share)

    @staticmethod
    def _share(state: State) -> float:
        """Of the training that is done."""
        total = total_batches(state)
        if total is not None:
            return state.timestamp.batch.value / total
        return float(state.get_elapsed_duration().value)

    @staticmethod
    def _loss(state: State) -> str:
        loss = state.total_loss_dict.get('loss/train/total')  # none of a step that was left out
        if loss is None:
            return ''
        return f'loss {float(loss):.3f}'

