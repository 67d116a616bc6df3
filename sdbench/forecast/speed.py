"""How fast a step should be on a card that nobody has rented yet: arithmetic on what its operators ask for.

A kernel computes, moves bytes and takes a while to start. Their sum over all kernels of a step is its time:

    seconds = FLOPs / (PEAK_SHARE * peak) + bytes / rate + kernels * SECONDS_A_KERNEL

where rate is the smaller of BANDWIDTH_SHARE * bandwidth and BYTES_A_CYCLE * multiprocessors * clock. What of it runs at
the same time is in the constants. benchmarks/forecast.py fits them to published speeds and prints them with their
error. Links between GPUs are not counted: within a node the exchange runs beside the backward pass.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

from sdbench.gpus import Card, peak_of


@dataclass(frozen=True)
class Constants:
    """The four figures that are fitted.

    Attributes:
        peak_share: part of the dense peak that products, convolutions and attention reach while they compute.
        bandwidth_share: bytes that are counted for each one that the memory can move; above 1 where caches answer.
        bytes_a_cycle: that a multiprocessor can move in a cycle of its clock, however fast the memory is.
        seconds_a_kernel: of a kernel beside its work: its launch, its first and its last blocks.
    """
    peak_share: float
    bandwidth_share: float
    bytes_a_cycle: float
    seconds_a_kernel: float


CONSTANTS = Constants(peak_share=0.503, bandwidth_share=1.14, bytes_a_cycle=12.6, seconds_a_kernel=13e-6)
# The largest error of a published point, either way, when the constants are fitted without its source
LARGEST_ERROR = 0.21
# Of the speed of a GPU that is left at twice as many, from 8 on: 128 of the published A100s (published.csv) had 78.9 %
KEPT_PER_DOUBLING = 0.942
GPUS_A_NODE = 8


class Work(NamedTuple):
    """What operators ask of a GPU: FLOPs (1 multiply-add = 2), bytes read and written, kernels."""
    flops: float = 0
    nbytes: float = 0
    kernels: float = 0

    def __add__(self, other: 'Work') -> 'Work':
        return Work(*(mine + others for mine, others in zip(self, other, strict=True)))

    def __mul__(self, times: float) -> 'Work':
        return Work(*(mine * times for mine in self))


@dataclass(frozen=True)
class StepWork:
    """The work of a step by kind of operator.

    Attributes:
        fixed: of a microbatch, whatever its size.
        per_image: of each of its images beside.
        accumulation: of adding a microbatch's gradients to those of an earlier one.
        update: once a step.
    """
    fixed: dict[str, Work]
    per_image: dict[str, Work]
    accumulation: dict[str, Work]
    update: dict[str, Work]

    def of_step(self, microbatch: int, images: int) -> dict[str, Work]:
        """The work of a step by kind, on a device that has so many images of it.

        Args:
            microbatch: images that go through the model at once.
            images: of the device in a step; the last microbatch may be smaller.
        """
        microbatches = math.ceil(images / microbatch)
        parts = [(self.fixed, microbatches), (self.per_image, images), (self.accumulation, microbatches - 1),
                 (self.update, 1)]
        total = {}
        for works, times in parts:
            for kind, work in works.items():
                total[kind] = total.get(kind, Work()) + work * times
        return total


def can_forecast(card: Card, precision: str) -> bool:
    """Whether the constants are of such cards, and the peak of this one is known in the precision."""
    return card.multiprocessors is not None and peak_of(card.name, precision) is not None


def seconds_of(card: Card, work: Work, constants: Constants = CONSTANTS) -> float:
    """Seconds that work takes on a card."""
    memory = constants.bandwidth_share * card.gigabytes_per_sec * 1e9
    multiprocessors = constants.bytes_a_cycle * card.multiprocessors * card.gigahertz * 1e9
    return (work.flops / (constants.peak_share * card.tflops * 1e12)
            + work.nbytes / min(memory, multiprocessors)
            + work.kernels * constants.seconds_a_kernel)


def seconds_by_kind(card: Card, step: StepWork, microbatch: int, images: int, constants: Constants = CONSTANTS
                    ) -> dict[str, float]:
    """Seconds of a step by kind of operator."""
    works = step.of_step(microbatch, images)
    return {kind: seconds_of(card, work, constants) for kind, work in works.items()}


def images_per_sec(card: Card, step: StepWork, microbatch: int, images: int, constants: Constants = CONSTANTS
                   ) -> float:
    """Of one GPU."""
    return images / sum(seconds_by_kind(card, step, microbatch, images, constants).values())


def kept_on(num_devices: int) -> float:
    """The share of its speed that a GPU keeps among so many: all of it in one node."""
    nodes = max(1, num_devices / GPUS_A_NODE)
    doublings = math.log2(nodes)
    return KEPT_PER_DOUBLING ** doublings
