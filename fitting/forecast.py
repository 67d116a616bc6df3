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

from models.peaks import peak_of


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


class Card(NamedTuple):
    """A GPU by its documents.

    Attributes:
        name: as torch has it.
        gigabytes_per_sec: of its memory.
        gib: of its memory that torch finds.
        multiprocessors: that are enabled.
        gigahertz: of their clock, at which the peak holds.
    """
    name: str
    gigabytes_per_sec: float
    gib: float
    multiprocessors: int
    gigahertz: float

    def seconds(self, work: Work, peak_tflops: float, constants: Constants = CONSTANTS) -> float:
        """Seconds that work takes, where tensor cores have this dense peak."""
        memory = constants.bandwidth_share * self.gigabytes_per_sec * 1e9
        multiprocessors = constants.bytes_a_cycle * self.multiprocessors * self.gigahertz * 1e9
        return (work.flops / (constants.peak_share * peak_tflops * 1e12)
                + work.nbytes / min(memory, multiprocessors)
                + work.kernels * constants.seconds_a_kernel)

    def seconds_by_kind(self, step: StepWork, microbatch: int, images: int, precision: str,
                        constants: Constants = CONSTANTS) -> dict[str, float]:
        """Seconds of a step by kind of operator, in a precision in which the card's peak is known."""
        peak = peak_of(self.name, precision)
        works = step.of_step(microbatch, images)
        return {kind: self.seconds(work, peak, constants) for kind, work in works.items()}

    def images_per_sec(self, step: StepWork, microbatch: int, images: int, precision: str,
                       constants: Constants = CONSTANTS) -> float:
        """Of one GPU, in a precision in which its peak is known."""
        return images / sum(self.seconds_by_kind(step, microbatch, images, precision, constants).values())


def kept_on(num_devices: int) -> float:
    """The share of its speed that a GPU keeps among so many: all of it in one node."""
    nodes = max(1, num_devices / GPUS_A_NODE)
    doublings = math.log2(nodes)
    return KEPT_PER_DOUBLING ** doublings


# By NVIDIA's documents: bandwidth in GB/s, multiprocessors, clock; GiB as torch finds them. Peaks: models/peaks.py
CARDS = {card.name: card for card in (
    Card('NVIDIA A100-SXM4-40GB', 1555, 39.4, 108, 1.41),
    Card('NVIDIA A100-SXM4-80GB', 2039, 79.2, 108, 1.41),
    Card('NVIDIA A100-PCIE-40GB', 1555, 39.4, 108, 1.41),
    Card('NVIDIA A100 80GB PCIe', 1935, 79.2, 108, 1.41),
    Card('NVIDIA H100 80GB HBM3', 3352, 79.2, 132, 1.83),
    Card('NVIDIA H100 PCIe', 2039, 79.2, 114, 1.62),
    Card('NVIDIA H100 NVL', 3938, 93.1, 132, 1.55),
    Card('NVIDIA H200', 4800, 139.8, 132, 1.83),
    Card('NVIDIA H200 NVL', 4800, 139.8, 132, 1.55),
    Card('NVIDIA GH200 480GB', 4000, 94.5, 132, 1.83),
    Card('NVIDIA B200', 8000, 178, 148, 1.86),
    Card('NVIDIA A10', 600, 22.1, 72, 1.70),
    Card('NVIDIA A30', 933, 23.5, 56, 1.44),
    Card('NVIDIA A40', 696, 44.4, 84, 1.74),
    Card('NVIDIA L4', 300, 22.0, 58, 2.04),
    Card('NVIDIA L40', 864, 44.4, 142, 2.49),
    Card('NVIDIA L40S', 864, 44.4, 142, 2.52),
    Card('NVIDIA RTX A6000', 768, 47.4, 84, 1.80),
    Card('NVIDIA GeForce RTX 3090', 936, 23.6, 82, 1.70),
    Card('NVIDIA RTX 6000 Ada Generation', 960, 47.4, 142, 2.51),
    Card('NVIDIA GeForce RTX 4090', 1008, 23.5, 128, 2.52),
    Card('NVIDIA GeForce RTX 5090', 1792, 31.4, 170, 2.41),
    Card('Tesla V100-SXM2-16GB', 900, 15.8, 80, 1.53),
    Card('Tesla V100-SXM2-32GB', 900, 31.7, 80, 1.53),
    Card('Tesla V100-PCIE-16GB', 900, 15.8, 80, 1.38),
    Card('Tesla V100-PCIE-32GB', 900, 31.7, 80, 1.38),
    Card('Tesla V100S-PCIE-32GB', 1134, 31.7, 80, 1.60),
    Card('Tesla T4', 320, 14.6, 40, 1.59),
)}
