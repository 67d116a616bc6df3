"""A plan is a list of parts: each part has its work and its speed, and every number of the plan follows from the parts.

Titles, prices, table cells, tooltips, CSV and HTML are made from these objects alone, so they cannot disagree. Nothing
here needs torch.
"""
import math
from dataclasses import dataclass, replace

from sdbench.costs import SECONDS_PER_DAY
from sdbench.gpus import Card, short_name
from sdbench.plan.prices import Price, Storage
from sdbench.records.metrics import rounded
from sdbench.setup import Setup

RESTART_HOURS = 0.25  # from a preemption until training goes on: new machine, libraries, checkpoint, compilation
ENCODE, TRAIN = 'encode', 'train'  # kinds of parts
FORECAST, CORRECTED, MEASURED = 'forecast', 'corrected forecast', 'measured'  # sources of a speed


@dataclass(frozen=True)
class Range:
    """A number with its range: the least, the likely and the most. NaN if the number is not known."""
    least: float
    likely: float
    most: float

    def __add__(self, other: 'Range') -> 'Range':
        return Range(self.least + other.least, self.likely + other.likely, self.most + other.most)

    def __mul__(self, factor: float) -> 'Range':
        return Range(self.least * factor, self.likely * factor, self.most * factor)

    def text(self, decimals: int, unit: str = '') -> str:
        """Return the number with its range, such as '25.47 days (19.90 to 32.60)'."""
        likely, least, most = (rounded(value, decimals) for value in (self.likely, self.least, self.most))
        return f'{likely}{unit} ({least} to {most})'


@dataclass(frozen=True)
class Speed:
    """The speed of a part."""
    images_per_sec: float  # likely speed of all GPUs together
    error: float  # the speed may be this much higher or lower, as a fraction
    source: str = FORECAST  # or CORRECTED or MEASURED
    ratio: float = 1.0  # measured speed / forecast speed, by which the forecast was multiplied; 1 for FORECAST
    missing: tuple[str, ...] = ()  # what of this part was never measured, such as 'this GPU'


@dataclass(frozen=True)
class Preemptions:
    """How often the machines of a plan are preempted, and how often a training is saved."""
    hours: float = math.inf  # mean time between two preemptions of one machine
    batches: int = 1000  # training steps between two checkpoints


@dataclass(frozen=True)
class Part:
    """A part of a plan: the encoding of images once, or the training at one image size."""
    kind: str  # ENCODE or TRAIN
    images: int  # that are encoded, or trained on with repeats
    setup: Setup  # as its flags give it: the run finds the defaults and the microbatch
    speed: Speed
    preemptions: Preemptions = Preemptions()

    @property
    def name(self) -> str:
        return f'{self.kind} {self.setup.image_size} px'

    @property
    def steps(self) -> int:
        return self.images // self.setup.batch_size

    @property
    def days(self) -> Range:
        """Return the days that the part takes. The highest speed gives the fewest days."""
        speed = self.speed.images_per_sec
        error = 1 + self.speed.error
        return Range(self.days_at(speed * error), self.days_at(speed), self.days_at(speed / error))

    def days_at(self, images_per_sec: float) -> float:
        """Return the days at a speed, including what preemptions cost; infinite if a preemption comes before a save.

        Each preemption costs a restart, and a training also repeats half of the work between two checkpoints.
        """
        lost = RESTART_HOURS
        if self.kind == TRAIN:
            lost += self.preemptions.batches * self.setup.batch_size / 2 / images_per_sec / 3600
        period = self.preemptions.hours / self.setup.machines  # hours: the preemption of any machine stops all of them
        if lost >= period:
            return math.inf
        return self.images / images_per_sec / SECONDS_PER_DAY / (1 - lost / period)


@dataclass(frozen=True)
class Gpus:
    """The GPUs that an outcome is about: a model and a count."""
    card: Card
    num_devices: int

    @property
    def name(self) -> str:
        return f'{self.num_devices} x {short_name(self.card.name)}'


@dataclass(frozen=True)
class Plan(Gpus):
    """What a training takes on some GPUs."""
    parts: tuple[Part, ...]  # in the order of the work
    price: Price | None  # of a GPU-hour; None if no price applies to this GPU
    storage: Storage

    @property
    def machines(self) -> int:
        return self.parts[-1].setup.machines

    @property
    def days(self) -> Range:
        return sum((part.days for part in self.parts), Range(0, 0, 0))

    @property
    def gpu_hours(self) -> Range:
        return self.days * (24 * self.num_devices)

    @property
    def gpu_dollars(self) -> Range:
        """Return the cost of the GPUs; NaN without a price."""
        return self.gpu_hours * (math.nan if self.price is None else self.price.dollars)

    @property
    def storage_dollars(self) -> Range:
        """Return the cost of storage for the days of the plan, and of traffic."""
        days = self.days
        return Range(*(self.storage.dollars(each) for each in (days.least, days.likely, days.most)))

    @property
    def dollars(self) -> Range:
        """Return the whole cost; NaN without a price."""
        return self.gpu_dollars + self.storage_dollars

    @property
    def training(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.kind == TRAIN)

    @property
    def unmeasured(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.speed.source != MEASURED)

    def text_of(self, metric: str) -> str:
        """Return the 'dollars' or the 'days' with their range, such as '25.47 days (19.90 to 32.60)'."""
        return f'${self.dollars.text(0)}' if metric == 'dollars' else self.days.text(2, ' days')

    def at_speed(self, factor: float) -> 'Plan':
        parts = [replace(part, speed=replace(part.speed, images_per_sec=part.speed.images_per_sec * factor))
                 for part in self.parts]
        return replace(self, parts=tuple(parts))


@dataclass(frozen=True)
class Impossible(Gpus):
    """Why a training cannot run on some GPUs, or not in finite time, and what would help."""
    reason: str
    remedy: str
