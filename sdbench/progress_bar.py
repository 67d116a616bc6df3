"""Show the progress of a command as a bar."""
import shutil
import sys

from tqdm import tqdm

SECONDS_BETWEEN_BARS = 60  # in a log


def progress_bar(total: int, unit: str, done: int = 0, doing: str | None = None, hidden: bool = False) -> tqdm:
    """Make a progress bar on stderr. In a log, where there is no terminal, it prints a line each minute.

    Args:
        total: units of the whole work.
        unit: name of the unit behind a number, such as ' images'; bytes are 'B', and shown with prefixes.
        done: units that an earlier run has done.
        doing: text before the bar.
        hidden: whether nothing is shown.
    """
    columns = shutil.get_terminal_size().columns  # 80 where the terminal does not say
    seconds, delay = (0.1, 0) if sys.stderr.isatty() else (SECONDS_BETWEEN_BARS, SECONDS_BETWEEN_BARS)
    return tqdm(desc=doing, total=total, initial=done, unit=unit, unit_scale=unit == 'B', disable=hidden,
                ncols=columns, nrows=20, mininterval=seconds, maxinterval=max(10, seconds), delay=delay)
