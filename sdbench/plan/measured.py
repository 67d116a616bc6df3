"""Give each part of a plan its speed: the forecast, corrected by measurements, with the range that the evidence allows.

A correction is measured speed / forecast speed of the same setup. A measurement that equals its forecast changes no
speed, but its range becomes smaller. Nothing here needs torch.
"""
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from sdbench.forecast.forecast import Forecast, forecast
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.gpus import CARDS, Card, short_name
from sdbench.plan.parts import CORRECTED, ENCODE, MEASURED, TRAIN, Speed
from sdbench.records.expected import expected_of
from sdbench.records.read import MEASURED as RELIABLE
from sdbench.records.read import Row
from sdbench.records.summary import MUCH_WAITING_FOR_DATA
from sdbench.setup import Setup

# The same card, batch and code differ by 2 to 4 % between MLPerf submitters.
MEASURED_ERROR = 0.05
# The largest published error of a forecast of this kind on a GPU that its authors had not measured: 27.9 % (NeuSight,
# training of transformers).
UNSEEN_ERROR = 0.28

forecast = cache(forecast)


class Measurement(NamedTuple):
    """A measured run.

    Attributes:
        kind: ENCODE or TRAIN.
        setup: its setup.
        network: network between its machines; None on one machine.
        images_per_sec: measured speed of all GPUs together.
        ratio: measured speed / forecast speed; None if it corrects nothing.
        date: date of the record; '' if it states none.
    """
    kind: str
    setup: Setup
    network: Any
    images_per_sec: float
    ratio: float | None
    date: str


class Run(NamedTuple):
    """A training on some GPUs: its setup with the microbatch, and its speed."""
    setup: Setup
    speed: Speed


def network_of(setup: Setup) -> Any:
    """Return what connects the machines of a run; None if the interconnect of the GPUs joins all of them."""
    return (setup.network_gbits or 'not stated') if setup.needs_network else None


def same_run(setup: Setup, network: Any) -> Setup:
    """Return the setup with equal values for what has no effect on a run, or what the run finds by itself."""
    return replace(setup, microbatch=None, network_gbits=network, gpus_per_node=None,
                   allreduce_precision=setup.allreduce_precision if setup.num_devices > 1 else None)


def read_measurements(rows: Sequence[Row], model_name: str) -> tuple[list[Measurement], list[str]]:
    """Return the measurements of a model among the rows of records, and a sentence about each that corrects nothing.

    Only time in which the GPUs worked counts, so a run that waited for its data corrects nothing.
    """
    found = []
    sentences = []
    for row in rows:
        record, kind = row.record, row.stage
        if row.status != RELIABLE or kind not in (TRAIN, ENCODE) or record['device'] not in CARDS:
            continue
        of_another_model = record.get('model_name', model_name) != model_name
        if of_another_model:
            setup, speed, why_not = None, math.nan, f'its model is {record["model_name"]}'
        else:
            setup, speed, why_not = expected_of(record)
        waited = record.get('data_wait_fraction') or 0
        if not why_not and waited > MUCH_WAITING_FOR_DATA:
            why_not = f'it waited for its data {100 * waited:.0f} % of the time'
        if why_not:
            sentences.append(f'{record["num_devices"]} x {short_name(record["device"])}, {kind} '
                             f'{record["image_size"]} px, corrects nothing, because {why_not}.')
        if setup:
            ratio = None if why_not else record['images_per_sec'] / speed
            found.append(Measurement(kind, setup, network_of(setup), record['images_per_sec'], ratio,
                                     str(record.get('date', ''))))
    return sorted(found, key=lambda each: each.date), sentences


@dataclass(frozen=True)
class Speeds:
    """Makes the speed of each part of a plan.

    Attributes:
        measurements: the user's measurements, which correct forecasts; the newest last.
        evidence: all measurements known, which decide how wide a range is.
    """
    measurements: list[Measurement] = field(default_factory=list)
    evidence: list[Measurement] = field(default_factory=list)

    def training(self, setup: Setup, card: Card) -> Run:
        """Return a training with its speed. Raises DoesNotFit if the card has too little memory."""
        expected = forecast(setup, card)
        network = network_of(expected.setup)
        run = same_run(expected.setup, network)
        same = [each for each in self.measurements if each.kind == TRAIN and each.ratio is not None
                and same_run(each.setup, each.network) == run]
        if same:
            # The run finds its microbatch by itself, so it will have the one that was measured.
            if setup.microbatch is None and same[-1].setup.microbatch is not None:
                expected = forecast(replace(setup, microbatch=same[-1].setup.microbatch), card)
            speed = self.corrected(expected.images_per_sec, same[-1:], MEASURED, MEASURED_ERROR)
            return Run(expected.setup, speed)
        # Without a measurement of this --compile, one of another corrects it, too. Otherwise a GPU that is slower than
        # its forecast would make the setups win that nobody has measured on it.
        of_card = [each for each in self.measurements if each.kind == TRAIN and each.ratio is not None
                   and (each.setup.device, each.network) == (card.name, network)]
        alike = [each for each in of_card if each.setup.compile == expected.setup.compile] or of_card
        missing = () if expected.is_tested else self.never_measured(expected.setup)
        error = UNSEEN_ERROR if missing else LARGEST_ERROR
        speed = Speed(expected.images_per_sec, error)
        if alike:
            speed = self.corrected(expected.images_per_sec, alike, CORRECTED, error)
        speed = replace(speed, missing=tuple(missing))
        return Run(expected.setup, speed)

    def encoding(self, setup: Setup, card: Card) -> Speed:
        """Return the speed at which all GPUs encode. GPUs encode independently, so any GPU count corrects any other."""
        expected: Forecast = forecast(setup, card)
        alike = [each for each in self.measurements if each.kind == ENCODE and each.ratio is not None
                 and (each.setup.device, bool(each.setup.compile)) == (card.name, bool(setup.compile))]
        same = [each for each in alike if (each.setup.image_size, each.setup.encoder_precision)
                == (setup.image_size, expected.setup.encoder_precision)]
        if same:
            return self.corrected(expected.encode_images_per_sec, same[-1:], MEASURED, MEASURED_ERROR)
        if alike:
            return self.corrected(expected.encode_images_per_sec, alike, CORRECTED, LARGEST_ERROR)
        known = any(each.kind == ENCODE and each.setup.device == card.name for each in self.evidence)
        if known:
            return Speed(expected.encode_images_per_sec, LARGEST_ERROR)
        return Speed(expected.encode_images_per_sec, UNSEEN_ERROR, missing=('encoding',))

    def corrected(self, images_per_sec: float, measurements: Sequence[Measurement], source: str, error: float) -> Speed:
        """Return a forecast speed multiplied by the median ratio of some measurements."""
        ratio = statistics.median(each.ratio for each in measurements)
        return Speed(images_per_sec * ratio, error, source, ratio)

    def never_measured(self, setup: Setup) -> list[str]:
        """Return in words what no record measures of a training: its GPU, several GPUs, its input with its compiler."""
        of_card = [each.setup for each in self.evidence
                   if each.kind == TRAIN and each.setup.device == setup.device]
        if not of_card:
            return ['this GPU']
        missing = []
        if setup.num_devices > 1 and all(other.num_devices == 1 for other in of_card):
            missing.append('several of these GPUs')
        if all((other.latents, bool(other.compile)) != (setup.latents, bool(setup.compile)) for other in of_card):
            how = 'with' if setup.compile else 'without'
            missing.append(f'{"latents" if setup.latents else "images"} {how} the compiler')
        return missing
