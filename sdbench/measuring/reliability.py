"""When the speed of a record is not to be relied on yet: too short a window, or a speed that has not settled.

The summary of a run and report.py ask here, so nothing needs torch.
"""
import os
from pathlib import Path

from sdbench.errors import plural

QUEUES_IN_WINDOW = 5  # in a shorter window many of its batches were made before it began
FEWEST_BATCHES = 20   # a window that is shorter says little
MUCH_DRIFT = 0.1      # within a window: another would show another speed
MUCH_WAITING_FOR_CORES = 0.5  # of a process's time


def fewest_batches(queue_batches: int) -> int:
    """Return the batches of the shortest window that shows the speed of a run whose loader prepares so many ahead."""
    return max(FEWEST_BATCHES, QUEUES_IN_WINDOW * queue_batches)


def why_unreliable(record: dict) -> str:
    """Say in a few words why the speed in a record is not to be relied on; '' where it is, or nothing is known."""
    batches = record.get('measured_batches')
    drift = record.get('drift')
    if batches is not None and batches < fewest_batches(record.get('queue_batches') or 0):
        return f'only {plural(batches, "measured batch", "measured batches")}'
    if drift is not None and abs(drift) > MUCH_DRIFT:
        return f'speed changed by {drift:+.1%}'
    return ''


def busy_cores(schedstat: str = '/proc/self/schedstat') -> str | None:
    """Return a caution where this process has waited for a core much of its time, and None where it has not.

    Args:
        schedstat: a file of Linux, which says how many nanoseconds a process has run and has waited.
    """
    if not os.path.exists(schedstat):  # as in some containers
        return None
    ran, waited, _ = map(int, Path(schedstat).read_text().split())
    share = waited / max(1, ran + waited)
    if share < MUCH_WAITING_FOR_CORES:
        return None
    return f'this run waited {share:.0%} of the time for a core; measure again while fewer programs run'


def remedy(record: dict, busy: str | None = None) -> str:
    """Return what to do about the `why_unreliable` of a record; `busy` is what `busy_cores` says of its process."""
    least = fewest_batches(record.get('queue_batches') or 0)
    if record['measured_batches'] < least:
        return f'use --measure_batches {least} or more, and where --max_duration is given, a longer one'
    if busy:
        return busy
    if record['drift'] > 0:
        return 'the start was slow; use more --warmup_batches'
    return 'the speed has not settled; use more --measure_batches, or a longer --max_duration'
