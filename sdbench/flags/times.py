"""Parse and convert the times in flags: batches, epochs or a fraction of the run. Nothing here needs torch."""
import argparse
import math
import re
from collections.abc import Callable
from fractions import Fraction

# Patterns for the number in front of each unit: ba (batches), ep (epochs), dur (a fraction of the run).
NUMBER_OF_UNIT = {'ba': '[1-9][0-9]{0,14}', 'ep': '[1-9][0-9]{0,14}', 'dur': '0?[.][0-9]+|1'}
EXAMPLES = {'ba': '5000ba', 'ep': '2ep', 'dur': '0.5dur'}
LONGEST_INTERVAL = 1000  # default batches between two checkpoints, evaluations or image generations


def time_in(units: str) -> Callable[[str], str]:
    """Return a converter for times in any of `units`, such as 'ba ep'. It returns the text unchanged."""
    allowed = units.split()
    pattern = '|'.join(f'({NUMBER_OF_UNIT[unit]}){unit}' for unit in allowed)
    examples = ' or '.join(EXAMPLES[unit] for unit in allowed)

    def convert(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f'{text} is not a time such as {examples}')
        return text

    convert.metavar = 'TIME'
    return convert


def to_batches(time: str, batches_per_epoch: int | None = None, batches_of_run: int | None = None) -> int:
    """Convert a time such as 1000ba, 2ep or 0.5dur to batches. A fraction is rounded down, to at least one batch.

    Only epochs need `batches_per_epoch`, the length of the data loader, and only a fraction needs `batches_of_run`.
    """
    unit = time.lstrip('0123456789.')
    number = Fraction(time.removesuffix(unit))  # a float would make 0.29 of 100 batches 28
    if unit == 'ba':
        return int(number)
    if unit == 'ep':
        return int(number) * batches_per_epoch
    return max(1, math.floor(number * batches_of_run))


def is_due(batch: int, interval: str, end: str) -> bool:
    """Tell whether an action for every `interval` and for the `end` is due after `batch`; both times are in batches."""
    return batch % to_batches(interval) == 0 or batch >= to_batches(end)
