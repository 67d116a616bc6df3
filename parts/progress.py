"""How far a command is that works through parts: a bar on a terminal, a plain line a minute elsewhere."""
import io
import sys

from tqdm import tqdm

SECONDS_TO_FIRST_LINE = 10
SECONDS_BETWEEN_LINES = 60


class PlainLines(tqdm):
    """A bar without a terminal: each state of it is a line of its own."""

    @staticmethod
    def status_printer(file):
        """What prints a state."""
        def print_state(text: str) -> None:
            if text:
                print(text, file=file, flush=True)
        return print_state

    def display(self, *args, **options) -> bool:
        """Print a line; the next one is due a while later."""
        self.mininterval = SECONDS_BETWEEN_LINES
        return super().display(*args, **options)

    def close(self) -> None:
        """Leave the lines as they are."""
        self.fp = io.StringIO()  # for what moves a terminal's cursor
        self.sp = self.status_printer(self.fp)
        super().close()


def progress_bar(total: int, unit: str, done: int = 0) -> tqdm:
    """A bar for `total` units, of which an earlier run has done some. A short run shows no plain line."""
    if sys.stderr.isatty():
        return tqdm(total=total, initial=done, unit=unit, unit_scale=True, dynamic_ncols=True)
    return PlainLines(total=total, initial=done, unit=unit, unit_scale=True, ncols=0, ascii=True, leave=False,
                      mininterval=SECONDS_TO_FIRST_LINE, maxinterval=SECONDS_BETWEEN_LINES, delay=1)
