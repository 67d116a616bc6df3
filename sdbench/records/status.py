"""The states of a run, and when its speed is not to be relied on yet. docs/measuring.md says what each key means.

The summary of a run and report.py ask here, so nothing needs torch.
"""
from sdbench.errors import plural

# Each `status` of a record. Reports calculate with complete runs and with forecasts.
COMPLETE = 'complete'
FAILED = 'failed'
INTERRUPTED = 'interrupted'
UNMEASURED = 'unmeasured'
PROFILED = 'profiled'
FORECAST = 'forecast'
NOT_IN_A_FORECAST = 'Not in a forecast: waiting for data, checkpoints, evaluations, storage and traffic.'

QUEUES_IN_WINDOW = 5  # in a shorter window many of its batches were made before it began
FEWEST_BATCHES = 20   # a window that is shorter says little
MUCH_DRIFT = 0.1      # within a window: another would show another speed
FEWEST_FOR_FID = 10_000  # pictures: with fewer, FID is biased upwards by much


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


def caution_about(record: dict) -> str | None:
    """Say why the speed in a record should not be trusted yet, and the remedy; None where it can be."""
    if record.get('status') == PROFILED:
        return 'these figures include the cost of the trace, so that no report counts them'
    why = why_unreliable(record)
    if not why:
        return None
    least = fewest_batches(record.get('queue_batches') or 0)
    if record['measured_batches'] < least:
        return f'{why}: use --measure_batches {least} or more, and where --max_duration is given, a longer one'
    return f'{why}: measure again, while no other program runs, with more --warmup_batches and --measure_batches'
