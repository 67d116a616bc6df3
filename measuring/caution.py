"""When the speed of a record is not to be relied on yet: too short a window, or a speed that has not settled.

The summary of a run and report.py ask here, so nothing needs torch.
"""
from inputs.words import counted

QUEUES_IN_WINDOW = 5  # a window this many times as long as the loader's queue shows the loader, not its queue
FEWEST_BATCHES = 20   # a window that is shorter says little
MUCH_DRIFT = 0.1      # within a window: another would show another speed
MUCH_OTHER_LOAD = 0.25  # of the cores of a machine, used by other programs


def fewest_batches(queue_batches: int) -> int:
    """The shortest window that shows the speed of a run whose loader prepares so many batches ahead."""
    return max(FEWEST_BATCHES, QUEUES_IN_WINDOW * queue_batches)


def load_of_others(record: dict) -> str:
    """How much of the machine other programs used while a CPU was measured, where that was much; else ''."""
    load = record.get('other_load')
    cores = record.get('cpu_cores')
    if load is None or cores is None or load <= MUCH_OTHER_LOAD * cores:
        return ''
    return f'other programs used {load:.1f} of the {cores} cores'


def doubt(record: dict) -> str:
    """Why the speed in a record is not to be relied on, in a few words; '' where it is, or where nothing is known."""
    batches = record.get('measured_batches')
    drift = record.get('drift')
    if batches is not None and batches < fewest_batches(record.get('queue_batches') or 0):
        return f'only {counted(batches, "measured batch", "measured batches")}'
    if drift is not None and abs(drift) > MUCH_DRIFT:
        return f'drift {drift:+.1%}'
    return load_of_others(record)
