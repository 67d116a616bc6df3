"""The times that flags take: batches, epochs or a share of the run. Nothing here needs torch."""
import argparse
import math
import re
from collections.abc import Callable
from fractions import Fraction

# the numbers that can stand before each unit: ba (batches), ep (epochs), dur (a share of the run)
NUMBER_OF_UNIT = {'ba': '[1-9][0-9]{0,14}', 'ep': '[1-9][0-9]{0,14}', 'dur': '0?[.][0-9]+|1'}
EXAMPLES = {'ba': '5000ba', 'ep': '2ep', 'dur': '0.5dur'}
LONGEST_INTERVAL = 1000  # batches between two checkpoints, evaluations or drawings, where none is given


def time_in(units: str) -> Callable[[str], str]:
    """Make a converter for times in one of `units`, such as 'ba ep'; it returns the text, as Composer takes it."""
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
    """Return a time such as 1000ba, 2ep or 0.5dur in batches; a share is rounded down, to one batch at least.

    Args:
        time: as a flag has taken it.
        batches_per_epoch: of the loader; a time in batches does without.
        batches_of_run: what a share of the run is a share of; other times do without.
    """
    unit = time.lstrip('0123456789.')
    number = Fraction(time.removesuffix(unit))  # exact, so that 0.29 of 100 batches is 29
    if unit == 'ba':
        return int(number)
    if unit == 'ep':
        return int(number) * batches_per_epoch
    return max(1, math.floor(number * batches_of_run))


def is_due(batch: int, interval: str, end: str) -> bool:
    """Tell whether what is done at each interval and at the end is due after a batch; both times are in batches."""
    return batch % to_batches(interval) == 0 or batch >= to_batches(end)
