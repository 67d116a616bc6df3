"""What a plan pays: prices of GPU-hours from a file, storage and traffic. Nothing here needs torch."""
import csv
import datetime
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sdbench.costs import Prices, last_price, require_named
from sdbench.errors import UserError
from sdbench.files import read_text
from sdbench.setup import Setup

LIST_PRICES = str(Path(__file__).parents[2] / 'recipes' / 'prices.csv')
ON_DEMAND, SPOT = 'on demand', 'spot'
COLUMNS = ('gpu', 'dollars_per_gpu_hour', 'provider', 'gpus_per_machine', 'kind', 'date', 'source')
OLD_DAYS = 90  # a list price that is older is marked
YOUR_PRICE = 'your price'  # provider of a price that a flag gives
DAYS_PER_MONTH = 365.25 / 12
# Sizes for storage and traffic. JPEGs of 256 and 512 pixels took 17 and 80 KB.
JPEG_BYTES_PER_PIXEL = 0.3
LATENT_BYTES_PER_PIXEL = 0.25  # mean and log variance of 4 channels in float16 for each 8 x 8 pixels
CHECKPOINT_TB = 0.014  # one checkpoint of Stable Diffusion 2 with EMA and pretrained encoders


class Price(NamedTuple):
    """A price per GPU-hour."""
    gpu: str | None  # name of the GPU, as --gpu takes it; None for every GPU
    dollars: float
    provider: str = YOUR_PRICE
    gpus_per_machine: int | None = None  # in the machine that has this price; None for any machine
    date: datetime.date | None = None  # when it was listed; None if its source does not say

    def is_old(self, today: datetime.date) -> bool:
        """Tell whether the price must be checked: a list price that is older than OLD_DAYS, or has no date."""
        return self.provider != YOUR_PRICE and (self.date is None or (today - self.date).days > OLD_DAYS)

    def describe(self, today: datetime.date) -> str:
        """Return the price with its provider and date, such as '$2.95 Nebius 2026-05-18, old'."""
        text = f'${self.dollars:.2f} {self.provider}'
        if self.date:
            return f'{text} {self.date.isoformat()}{", old" if self.is_old(today) else ""}'
        return f'{text} no date' if self.is_old(today) else text


def read_prices(path: str, kind: str, given: Prices) -> list[Price]:
    """Return the prices of one kind in a CSV file, followed by the prices that --dollars_per_gpu_hour gives.

    Raises UserError, with the file and the line, for a file that is not a price list.
    """
    prices = []
    reader = csv.DictReader(io.StringIO(read_text(path, f'--prices {path}')), restval='')
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise UserError(f'--prices {path} has no column {", ".join(missing)}; a price list has the columns '
                        f'{",".join(COLUMNS)}')
    for row in reader:
        try:
            if row['kind'] not in (ON_DEMAND, SPOT):
                raise ValueError(f'kind {row["kind"]!r} is neither {ON_DEMAND!r} nor {SPOT!r}')
            if not row['gpu']:
                raise ValueError('it names no gpu')
            dollars = float(row['dollars_per_gpu_hour'])
            if not 0 <= dollars < math.inf:
                raise ValueError(f'{row["dollars_per_gpu_hour"]} is not a price')
            date = datetime.date.fromisoformat(row['date']) if row['date'] else None
            machine = int(row['gpus_per_machine']) if row['gpus_per_machine'] else None
        except ValueError as error:
            raise UserError(f'--prices {path}, line {reader.line_num}: {error}; fix that line') from None
        if row['kind'] == kind:
            prices.append(Price(row['gpu'], dollars, row['provider'], machine, date))

    require_named((), given)
    return prices + [Price(*price) for price in given]


def price_for(setup: Setup, prices: Sequence[Price]) -> Price | None:
    """Return the last price that applies to the GPU of a setup, in machines with enough of them; None if none does."""
    machine = setup.num_devices // setup.machines
    return last_price(setup.device, [price for price in prices if (price.gpus_per_machine or machine) >= machine])


@dataclass(frozen=True)
class Storage:
    """What a training keeps in an object store and reads from it, in TB."""
    images_tb: float
    latents_tb: float
    checkpoints_tb: float  # an object store keeps all of them
    read_tb: float  # by the encoding and the training, if no cache holds a whole epoch
    dollars_per_tb_month: float
    dollars_per_tb_read: float

    def dollars(self, days: float) -> float:
        """Return the cost of storing everything for some days, and of reading."""
        stored = self.images_tb + self.latents_tb + self.checkpoints_tb
        return stored * self.dollars_per_tb_month * days / DAYS_PER_MONTH + self.read_tb * self.dollars_per_tb_read


def terabytes(images: int, size: int, bytes_per_pixel: float) -> float:
    return images * size ** 2 * bytes_per_pixel / 1e12
