"""When the speed of a record is not to be relied on yet: too short a window, or a speed that has not settled.

The summary of a run and report.py ask here, so nothing needs torch.
"""
from errors.messages import plural

QUEUES_IN_WINDOW = 5  # a window this many times as long as the loader's queue shows the loader, not its queue
FEWEST_BATCHES = 20   # a window that is shorter says little
MUCH_DRIFT = 0.1      # within a window: another would show another speed


def fewest_batches(queue_batches: int) -> int:
    """The shortest window that shows the speed of a run whose loader prepares so many batches ahead."""
    return max(FEWEST_BATCHES, QUEUES_IN_WINDOW * queue_batches)


def why_unreliable(record: dict) -> str:
    """Why the speed in a record is not to be relied on, in a few words; '' where it is, or where nothing is known."""
    batches = record.get('measured_batches')
    drift = record.get('drift')
    if batches is not None and batches < fewest_batches(record.get('queue_batches') or 0):
        return f'only {plural(batches, "measured batch", "measured batches")}'
    if drift is not None and abs(drift) > MUCH_DRIFT:
        return f'speed changed by {drift:+.1%}'
    return ''


def remedy(record: dict) -> str:
    """What to do about the `why_unreliable` of a record."""
    least = fewest_batches(record.get('queue_batches') or 0)
    if record['measured_batches'] < least:
        return f'use --measure_batches {least} or more, and where --max_duration is given, a longer one'
    if record['drift'] > 0:
        return 'the start was slow; use more --warmup_batches'
    return 'the speed has not settled; use more --measure_batches, or a longer --max_duration'
