"""Forecast the memory and the speed of a training: a function of its setup and a GPU.

A forecast is calculated where it is needed. It is stored nowhere.
"""
import math
from collections import Counter
from dataclasses import dataclass, replace

from sdbench.gpus import Card, peak_of
from sdbench.setup import Setup, settings_of_setup


@dataclass(frozen=True)
class Forecast:
    """The forecast for a setup on a GPU.

    Attributes:
        setup: the setup with its defaults, the device and the microbatch filled in.
        card: the GPU.
        machines: number of machines.
        gib: GPU memory that the run takes on each GPU, with the part that the count does not include.
        images_per_sec: images per second on all GPUs; NaN if the peak of the GPU in this precision is not known.
        seconds: seconds of a step, by kind of operator.
        encode_images_per_sec: images per second on all GPUs when encode.py encodes images before the training.
        is_tested: whether a published run has tested the forecast for a run like this one.
    """
    setup: Setup
    card: Card
    machines: int
    gib: float
    images_per_sec: float
    seconds: Counter
    encode_images_per_sec: float
    is_tested: bool


class DoesNotFit(Exception):
    """A GPU has too little memory for a setup.

    Attributes:
        microbatch: the smallest microbatch that the setup allows.
        gib_needed: GiB that it takes, with the part that the count does not include.
        card: the GPU.
    """

    def __init__(self, microbatch: int, gib_needed: float, card: Card):
        super().__init__(f'a microbatch of {microbatch} takes {gib_needed:.1f} GiB, and the {card.name} has '
                         f'{card.gib:g}')
        self.microbatch = microbatch
        self.gib_needed = gib_needed
        self.card = card


def forecast(setup: Setup, card: Card) -> Forecast:
    """Forecast a training on a GPU, with defaults for what its setup does not state.

    Without a microbatch, the forecast is for the largest that fits. A given microbatch may have been measured, with
    less uncounted memory than usual, so it is refused only if the counted bytes alone do not fit.

    Raises DoesNotFit if the GPU has too little memory.
    """
    from benchmark import build_model, build_optimizer
    from sdbench.forecast.trace import Estimate

    setup = replace(setup, device=card.name).with_defaults()
    card = card._replace(tflops=peak_of(card.name, setup.precision) or math.nan)
    estimate = Estimate.of(settings_of_setup(setup), build_model, build_optimizer)
    microbatch = estimate.microbatch_on(card)
    if microbatch is None:
        smallest = setup.microbatch or 1
        raise DoesNotFit(smallest, estimate.taken(smallest), card)
    seconds = estimate.seconds_on(card, microbatch)
    speed = setup.batch_size / seconds.total()
    return Forecast(replace(setup, microbatch=microbatch), card, estimate.machines_on(card), estimate.taken(microbatch),
                    float(speed), seconds, estimate.encoding_speed_on(card),
                    estimate.is_tested(card) and not math.isnan(speed))
