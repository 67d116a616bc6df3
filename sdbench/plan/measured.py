"""Give each part of a plan its speed: the forecast, corrected by measurements, with the range that the evidence allows.

A correction is measured speed / forecast speed of the same setup. A measurement that equals its forecast changes no
speed, but its range becomes smaller. Nothing here needs torch.
"""
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from sdbench.errors import UserError
from sdbench.forecast.forecast import forecast
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.forecast.stored import has_same_unet
from sdbench.gpus import Card, short_name
from sdbench.models.folders import BUILT_IN
from sdbench.plan.parts import CORRECTED, ENCODE, MEASURED, TRAIN, Speed
from sdbench.records.expected import expected_of
from sdbench.records.read import MEASURED as RELIABLE
from sdbench.records.read import Row
from sdbench.records.status import why_unreliable
from sdbench.records.summary import MUCH_WAITING_FOR_DATA
from sdbench.setup import Setup

# The same card, batch and code differ by 2 to 4 % between MLPerf submitters.
MEASURED_ERROR = 0.05
# The largest published error of a forecast of this kind on a GPU that its authors had not measured: 27.9 % (NeuSight,
# training of transformers).
UNSEEN_ERROR = 0.28

forecast = cache(forecast)


class Measurement(NamedTuple):
    """A measured run: ENCODE or TRAIN, its setup, and its measured speed / forecast speed."""
    kind: str
    setup: Setup
    ratio: float


def read_measurements(rows: Sequence[Row], model_name: str) -> tuple[list[Measurement], list[str]]:
    """Return the measurements of a model among the rows of records, and a sentence about each that corrects nothing.

    The rows are sorted as `read_all` does: the newest is last. Only time in which the GPUs worked counts, so a run that
    waited for its data corrects nothing.
    """
    found = []
    sentences = []
    for row in rows:
        record, kind = row.record, row.stage
        if kind not in (TRAIN, ENCODE):
            continue
        waited = record.get('data_wait_fraction') or 0
        name = str(record.get('model_name') or model_name)
        if row.on_cpu:
            why_not = 'it ran on a CPU'
        elif row.status != RELIABLE:
            why_not = why_unreliable(record) or f'its status is {row.status}'
        elif not is_same_model(name, model_name):
            why_not = f'its model is {name}'
        elif waited > MUCH_WAITING_FOR_DATA:
            why_not = f'it waited for its data {100 * waited:.0f} % of the time'
        else:
            setup, speed, why_not = expected_of(record | {'model_name': model_name})
        if why_not:
            sentences.append(f'{record["num_devices"]} x {short_name(record["device"])}, {kind} '
                             f'{record["image_size"]} px, corrects nothing, because {why_not}.')
        else:
            found.append(Measurement(kind, setup, record['images_per_sec'] / speed))
    return found, sentences


def is_same_model(name: str, other: str) -> bool:
    """Tell whether two models are the same for a forecast: a copy of one on this machine, under another name, is."""
    if name == other or not (name in BUILT_IN or os.path.isdir(name)):
        return name == other
    try:
        return has_same_unet(name, other)
    except UserError:  # the folder does not contain a model
        return False


@dataclass(frozen=True)
class Speeds:
    """Makes the speed of each part of a plan."""
    measurements: list[Measurement] = field(default_factory=list)  # the user's, which correct forecasts; newest last
    evidence: list[Measurement] = field(default_factory=list)  # all that are known, which decide how wide a range is

    def of(self, kind: str, setup: Setup, card: Card) -> Speed:
        """Return the speed at which all GPUs train or encode. Raises DoesNotFit if the card has too little memory."""
        expected = forecast(setup, card)
        complete = expected.setup
        network = network_of(complete)
        alike = [each for each in self.measurements if each.kind == kind and each.setup.device == card.name
                 and (kind == ENCODE or network_of(each.setup) in (None, network))]

        # A training finds its microbatch by itself, unless a flag gives it, so it will have the one that was measured.
        is_fixed = setup.microbatch is not None
        work = work_of(kind, complete, is_fixed)
        same = [each for each in alike if work_of(kind, each.setup, is_fixed) == work]
        if same:
            newest = same[-1]
            if kind == TRAIN:
                expected = forecast(replace(setup, microbatch=newest.setup.microbatch), card)
            return Speed(expected.speed_of(kind) * newest.ratio, MEASURED_ERROR, MEASURED, newest.ratio)

        # Without a measurement over this network, one on a single machine corrects it, too, and without one of this
        # --compile, one of another. Otherwise a GPU that is slower than its forecast would make the setups win that
        # nobody has measured on it.
        missing = () if kind == TRAIN and expected.is_tested else self.never_measured(kind, complete)
        error = UNSEEN_ERROR if missing else LARGEST_ERROR
        if kind == TRAIN:
            alike = [each for each in alike if network_of(each.setup) == network] or alike
        alike = [each for each in alike if each.setup.compile == complete.compile] or alike
        if not alike:
            return Speed(expected.speed_of(kind), error, missing=missing)
        ratio = statistics.median(each.ratio for each in alike)
        return Speed(expected.speed_of(kind) * ratio, error, CORRECTED, ratio, missing)

    def never_measured(self, kind: str, setup: Setup) -> tuple[str, ...]:
        """Return in words what no record measures of a part, such as its GPU, or its input with the compiler."""
        of_card = [each.setup for each in self.evidence if (each.kind, each.setup.device) == (kind, setup.device)]
        if kind == ENCODE:
            return () if of_card else ('encoding',)
        if not of_card:
            return ('this GPU',)
        missing = []
        if setup.num_devices > 1 and all(other.num_devices == 1 for other in of_card):
            missing.append('several of these GPUs')
        elif network_of(setup) and all(network_of(other) is None for other in of_card):
            missing.append('several machines with this GPU')
        if all((other.latents, bool(other.compile)) != (setup.latents, bool(setup.compile)) for other in of_card):
            how = 'with' if setup.compile else 'without'
            missing.append(f'{"latents" if setup.latents else "images"} {how} the compiler')
        return tuple(missing)


def network_of(setup: Setup) -> Any:
    """Return what connects the machines of a run; None if the interconnect of the GPUs joins all of them."""
    return (setup.network_gbits or 'not stated') if setup.needs_network else None


def work_of(kind: str, setup: Setup, is_microbatch_fixed: bool) -> tuple:
    """Return what two runs must share so that one measures the other. GPUs encode independently of each other."""
    if kind == ENCODE:
        return setup.image_size, setup.encoder_precision, setup.compile
    several = setup.num_devices > 1
    without_effect = {'network_gbits': None, 'gpus_per_node': None,
                      'microbatch': setup.microbatch if is_microbatch_fixed else None,
                      'allreduce_precision': setup.allreduce_precision if several else None}
    return replace(setup, **without_effect), network_of(setup)
