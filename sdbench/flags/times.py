"""Every time that a flag gives becomes a number of batches, once. Nothing here needs torch.

Composer counts a share of a run in whole epochs where the run's length is in epochs, and moves an average whose
half-life is in epochs once an epoch. A run that is told nothing but batches has none of these cases.
"""
import dataclasses
import math
from fractions import Fraction

from sdbench.flags.train import Train

LONGEST_INTERVAL = 1000  # batches, of intervals that are not given, each with the flag without which it is none
INTERVALS = {'save_interval': 'save_folder', 'eval_interval': 'eval_remote', 'sample_interval': 'sample_prompts'}
TIMES = ('save_interval', 'lr_warmup', 'ema_half_life', 'ema_start', 'eval_interval', 'sample_interval')


def to_batches(time: str, batches_per_epoch: int | None = None, batches_of_run: int | None = None) -> int:
    """A time such as 1000ba, 2ep or 0.5dur in batches; a share is rounded down, to one batch at least.

    Args:
        time: as a flag has taken it.
        batches_per_epoch: of the loader; a time in batches does without.
        batches_of_run: what a share of the run is a share of; other times do without.
    """
    if time.endswith('ba'):
        return int(time.removesuffix('ba'))
    if time.endswith('ep'):
        return int(time.removesuffix('ep')) * batches_per_epoch
    share = Fraction(time.removesuffix('dur'))  # exact, so that 0.29 of 100 is 29
    return max(1, math.floor(share * batches_of_run))


def is_young(half_life: str | None, batches: int) -> bool:
    """Whether an average is still near the weights that it started from.

    False where its half-life is not in batches, as that of a checkpoint of an earlier version.
    """
    if half_life is None or not half_life.endswith('ba'):
        return False
    return 4 * to_batches(half_life) > batches


def times_in_batches(settings: Train, batches_per_epoch: int) -> Train:
    """The settings of a training with every time in batches, such as 1000ba.

    Raises ValueError if the average would start when the run is over.
    """
    batches_of_run = to_batches(settings.max_duration, batches_per_epoch)
    in_batches = {'max_duration': f'{batches_of_run}ba'}
    for flag in TIMES:
        time = getattr(settings, flag)
        if time is not None:
            in_batches[flag] = f'{to_batches(time, batches_per_epoch, batches_of_run)}ba'
    for flag, of in INTERVALS.items():
        if getattr(settings, of) and getattr(settings, flag) is None:  # a short run is saved and judged as well
            in_batches[flag] = f'{min(LONGEST_INTERVAL, math.ceil(batches_of_run / 4))}ba'
    if settings.ema_start is not None and to_batches(in_batches['ema_start']) >= batches_of_run:
        raise ValueError(f'--ema_start {settings.ema_start} is not before the end of the run, --max_duration '
                         f'{settings.max_duration}: there would be no average; give an earlier time')
    return dataclasses.replace(settings, **in_batches)
