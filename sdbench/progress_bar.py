"""A bar that shows how far a command is."""
import shutil
import sys

from tqdm import tqdm

SECONDS_BETWEEN_BARS = 60  # where there is no terminal


def progress_bar(total: int, unit: str, done: int = 0, doing: str | None = None, hidden: bool = False) -> tqdm:
    """A bar on stderr for `total` units, of which an earlier run has done some; without a terminal a line now and then.
    """
    columns = shutil.get_terminal_size().columns  # 80 where the terminal does not say
    seconds, delay = (0.1, 0) if sys.stderr.isatty() else (SECONDS_BETWEEN_BARS, SECONDS_BETWEEN_BARS)
    return tqdm(desc=doing, total=total, initial=done, unit=unit, unit_scale=unit == 'B', disable=hidden,
                ncols=columns, nrows=20, mininterval=seconds, maxinterval=max(10, seconds), delay=delay)
