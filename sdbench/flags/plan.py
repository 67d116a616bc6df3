"""Define the flags of plan.py. Nothing here needs torch."""
import argparse
import os
import re
import shlex
from dataclasses import dataclass

from sdbench.costs import Prices
from sdbench.errors import UserError
from sdbench.flags.commands import Files
from sdbench.flags.parser import amount, count, flag, flags, picture, positional, positive
from sdbench.flags.times import LONGEST_INTERVAL, time_in
from sdbench.flags.train import Machines, pixels, price

GPUS = 8  # GPU count of a plan for which --gpu gives none
SD2_SCHEDULE = ((550_000, 256), (850_000, 512))  # steps and image sizes, from the model card of Stable Diffusion 2
SD2_IMAGES = (790_000_000, 300_000_000)  # different images in each phase of mosaicml/diffusion
HOURS_BETWEEN_PREEMPTIONS = 6.0  # assumed for spot machines, because no cloud states a number


def gpus_wanted(text: str) -> tuple[int, str]:
    """Convert the GPUs of a plan, such as '16 L40S', to their count and name. A name alone means GPUS of that GPU."""
    if os.path.isfile(text):
        raise argparse.ArgumentTypeError(f'{text} is a file; give records before the first flag')
    found = re.fullmatch(r'\s*(?:([1-9][0-9]{0,5})(?:\s*x\s*|\s+))?(\S.*?)\s*', text)
    if found is None or found[2].isdecimal() and len(found[2]) < 4:  # such as the 8 of an unquoted 8 H100
        raise argparse.ArgumentTypeError(f"{text} is not a GPU count and a GPU name in quotes, such as '16 L40S'")
    return int(found[1] or GPUS), found[2]


def phase(text: str) -> tuple[int, int]:
    """Convert a phase of the training, STEPS@SIZE, to its optimizer steps and its image size in pixels."""
    steps, _, size = text.partition('@')
    if not (steps.isdecimal() and int(steps) > 0 and size.isdecimal()):
        raise argparse.ArgumentTypeError(f'{text} is not STEPS@SIZE, such as 550000@256')
    return int(steps), pixels(size)


def shell_words(text: str) -> tuple[str, ...]:
    """Convert flags in one text to words, as a shell does."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'{text} is not one or several flags: {error}') from None


@flags('plan')
class PlanFlags:
    records: tuple[str, ...] = positional('files of --results with measurements, by which the forecasts for the same '
                                          'GPUs are corrected (default: none)', nargs='*', default=())
    gpu: tuple[tuple[int, str], ...] = flag((), "GPUs to plan for, each as a count and a name in quotes, such as '8 "
                                            "H100' '16 L40S' (default: 8 of each known GPU)", type=gpus_wanted,
                                            nargs='+', metavar="'COUNT NAME'")
    images: tuple[int, ...] = flag(SD2_IMAGES, 'number of different images, one for all phases or one for each; the '
                                   'training repeats them, and latents are encoded once (default: 790000000 300000000, '
                                   'as mosaicml/diffusion had for Stable Diffusion 2)', type=count, nargs='+')
    schedule: tuple[tuple[int, int], ...] = flag(SD2_SCHEDULE, 'phases of the training, each with its optimizer steps '
                                                 'and its image size in pixels (default: 550000@256 850000@512, as for '
                                                 'Stable Diffusion 2)', type=phase, nargs='+', metavar='STEPS@SIZE')
    figure: str | None = flag(None, 'file for a plot of the days and dollars of each plan, with their ranges and '
                              'limits (default: no plot)', type=picture)
    training_flags: tuple[str, ...] = flag((), 'flags for benchmark.py, such as --training_flags=\'--no-compile\' with '
                                           'the =, after those of recipes/fastest.txt and --use_ema; the search leaves '
                                           'them as they are', type=shell_words, metavar="'FLAGS'")


@flags('limits and prices')
class Money:
    max_dollars: float | None = flag(None, 'limit for the whole cost in dollars (default: no limit)', type=positive,
                                     metavar='DOLLARS')
    max_days: float | None = flag(None, 'limit for the duration in days (default: no limit)', type=positive,
                                  metavar='DAYS')
    prices: str | None = flag(None, 'CSV file of prices per GPU-hour; for each GPU the last row counts whose machine '
                              'has enough GPUs (default: recipes/prices.csv)', metavar='FILE')
    dollars_per_gpu_hour: Prices = flag((), 'your own price per GPU-hour in dollars, for every GPU or by GPU name, '
                                        'which replaces the one in --prices, such as H100=2.5 4090=0', type=price,
                                        nargs='+', metavar='PRICE')
    spot: bool = flag(False, 'plan for spot machines: their prices, and preemptions')
    hours_between_preemptions: float | None = flag(None, 'mean hours between two preemptions of one machine (default: '
                                                   f'{HOURS_BETWEEN_PREEMPTIONS:g} with --spot, else no preemptions)',
                                                   type=positive, metavar='HOURS')
    save_interval: str = flag(f'{LONGEST_INTERVAL}ba', 'steps between two checkpoints, such as 400ba; a preemption '
                              'repeats half of them', type=time_in('ba'))
    dollars_per_tb_month: float = flag(23.0, 'price of storing a TB for a month in dollars (default: 23, as for the '
                                       'first 50 TB in Amazon S3 Standard)', type=amount, metavar='DOLLARS')
    dollars_per_tb_read: float = flag(0.0, 'price of reading a TB from the store in dollars (default: 0, as within one '
                                      'cloud; 50 to 90 from another cloud)', type=amount, metavar='DOLLARS')


@dataclass(frozen=True, kw_only=True)
class PlanSettings(PlanFlags, Machines, Money, Files):
    """All flags of plan.py."""

    def check(self) -> None:
        if len(self.images) not in (1, len(self.schedule)):
            raise UserError(f'--images has {len(self.images)} numbers and --schedule {len(self.schedule)} phases; give '
                            'one number, or one for each phase')
        sizes = [size for _, size in self.schedule]
        for size in sizes:
            if sizes.count(size) > 1:  # its images would be encoded and paid for twice
                raise UserError(f'--schedule has two phases at {size} pixels; give one with the steps of both')
