"""Say which statuses a record has, and whether its speed is reliable. Nothing here needs torch."""
from sdbench.errors import plural

# The values of `status` in a record. Reports calculate only with complete runs and forecasts.
COMPLETE = 'complete'
FAILED = 'failed'
INTERRUPTED = 'interrupted'
UNMEASURED = 'unmeasured'
PROFILED = 'profiled'
FORECAST = 'forecast'
NOT_IN_A_FORECAST = ('A forecast does not include waiting for data, checkpoints and evaluations, nor the costs of '
                     'storage and network traffic.')

QUEUES_IN_WINDOW = 5  # shortest measurement, in queues of prefetched batches: the first queue was loaded before it
FEWEST_BATCHES = 20  # shortest measurement in batches
MUCH_DRIFT = 0.1  # fraction: after a larger change of speed, a longer measurement would show another speed
FEWEST_FOR_FID = 10_000  # images: with fewer, FID has a strong upward bias


def fewest_batches(queue_batches: int) -> int:
    """Return how many batches to measure at least, if the loader prefetches `queue_batches` batches."""
    return max(FEWEST_BATCHES, QUEUES_IN_WINDOW * queue_batches)


def why_unreliable(record: dict) -> str:
    """Return why the speed in a record is not reliable; '' if it is, or if the record does not say."""
    batches = record.get('measured_batches')
    drift = record.get('drift')
    if batches is not None and batches < fewest_batches(record.get('queue_batches') or 0):
        return f'only {plural(batches, "measured batch", "measured batches")}'
    if drift is not None and abs(drift) > MUCH_DRIFT:
        return f'speed changed by {drift:+.1%}'
    return ''


def caution_about(record: dict) -> str | None:
    """Return why the speed in a record should not be trusted yet, with the fix; None if it can be trusted."""
    if record.get('status') == PROFILED:
        return 'the speed includes the overhead of --profile, so reports do not use it'
    why = why_unreliable(record)
    if not why:
        return None
    least = fewest_batches(record.get('queue_batches') or 0)
    if record['measured_batches'] < least:
        return f'{why}: use --measure_batches {least} or more, and a longer --max_duration if you gave one'
    return f'{why}: measure again with more --warmup_batches and --measure_batches, while no other program runs'
