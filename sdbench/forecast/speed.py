"""How fast a step should be on a card that nobody has rented yet: arithmetic on what its operators ask for.

A kernel computes, moves bytes and takes a while to start. Their sum over all kernels of a step is its time:

    seconds = FLOPs / (PEAK_SHARE * peak) + bytes / rate + kernels * SECONDS_A_KERNEL

where rate is the smaller of BANDWIDTH_SHARE * bandwidth and BYTES_A_CYCLE * multiprocessors * clock. What of it runs at
the same time is in the constants. benchmarks/forecast/ fits them to published speeds and prints them with their error.

Several GPUs exchange their gradients while the last backward pass of a step is still computing others. A ring moves
2 (n - 1) / n times the bytes of the gradients over the link of each of n GPUs, and as many once through the network of
each machine, however many GPUs it has. The slower of the two sets the pace. What is left of the exchange when the
backward pass is over is added to the step.
"""
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sdbench.gpus import Card


@dataclass(frozen=True)
class Constants:
    """The figures that are fitted.

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


CONSTANTS = Constants(peak_share=0.495, bandwidth_share=1.25, bytes_a_cycle=13.2, seconds_a_kernel=1.36e-05)
# Of a compiled step, whose kernels by Triton are bound by the memory alone. No published point tests the default mode.
COMPILED = replace(CONSTANTS, bytes_a_cycle=math.inf)
# The same within a CUDA graph, where nothing is launched: a fifth figure, fitted to MLPerf's compiled points
IN_A_GRAPH = replace(COMPILED, seconds_a_kernel=3.34e-06)
# The largest error of a published point, either way, whose source the constants have not seen: 11.7 % of eager steps
# and 6.5 % of compiled ones, each source left out in turn, and 13.3 % of five on several machines that came later.
LARGEST_ERROR = 0.14
IN_GRAPHS = 'reduce-overhead'  # the mode of --compile that replays CUDA graphs
# The published points, all of Stable Diffusion 2, by the mode of --compile, then by card, image size and whether they
# were on latents: on how many GPUs, and how many images a step on each. Those are left out that another one has in it,
# with as many GPUs or more and as few images or less.
TESTED = {
    False: {('NVIDIA A100-SXM4-40GB', 512, False): [(128, 16)], ('NVIDIA A100-SXM4-80GB', 256, True): [(128, 16)],
            ('NVIDIA A100-SXM4-80GB', 512, False): [(8, 256)], ('NVIDIA A100-SXM4-80GB', 512, True): [(128, 16)],
            ('NVIDIA H100 80GB HBM3', 512, False): [(1, 1), (8, 256)], ('NVIDIA H200', 512, False): [(8, 32)],
            ('NVIDIA L40S', 512, False): [(1, 1)]},
    IN_GRAPHS: {('NVIDIA B200', 512, True): [(64, 8)], ('NVIDIA GB200', 512, True): [(72, 8)],
                ('NVIDIA H100 80GB HBM3', 512, True): [(64, 16)], ('NVIDIA H200', 512, True): [(16, 32)],
                ('NVIDIA L40S', 512, True): [(64, 16)]},
}
WAITING = 'exchange beyond the backward pass'

# What operators ask of a GPU, by kind: float (4,), the FLOPs (1 multiply-add = 2) and the bytes, read and written, for
# each image, and other bytes and kernels, however many images there are.
Work = dict[str, np.ndarray]


class BatchSplit(NamedTuple):
    """How a batch is spread over GPUs and microbatches.

    Attributes:
        microbatch: images that go through the model at once.
        images: of each GPU in a step; the last microbatch may be smaller.
        num_devices: GPUs.
        allreduce_precision: fp32 or bf16, in which they exchange gradients.
        network_gigabytes_per_sec: that an exchange reaches between machines; infinite where there is one machine, or
            the network is taken to be as fast as the link of the GPUs.
    """
    microbatch: int
    images: int
    num_devices: int = 1
    allreduce_precision: str = 'fp32'
    network_gigabytes_per_sec: float = math.inf

    @property
    def microbatches(self) -> int:
        """Return how many there are in a step."""
        return math.ceil(self.images / self.microbatch)

    @property
    def last_microbatch(self) -> int:
        """Return the images of the last one."""
        return self.images - (self.microbatches - 1) * self.microbatch


class StepWork(NamedTuple):
    """The work of a step, by kind.

    Attributes:
        model: of each microbatch, without the VAE's encoder.
        encoder: what that adds, unless latents were stored.
        accumulation: of adding a microbatch's gradients to those of an earlier one.
        update: once a step.
        exchange: once a step where there are several GPUs: of copying gradients to the buckets and back.
        buckets: float (buckets, 1 + 4), of gradients that are sent together, in the order in which the backward pass
            fills them: the bytes in float32, then the work of the backward pass that is left.
    """
    model: Work
    encoder: Work = {}
    accumulation: Work = {}
    update: Work = {}
    exchange: Work = {}
    buckets: np.ndarray = np.empty((0, 5))


def seconds_of(card: Card, work: np.ndarray, images: int, times: int, constants: Constants = CONSTANTS) -> np.ndarray:
    """Return the seconds (...) that work (..., 4) takes on a card, done so many times, for so many images."""
    arithmetic = constants.peak_share * card.tflops * 1e12
    memory = constants.bandwidth_share * card.gigabytes_per_sec * 1e9
    multiprocessors = constants.bytes_a_cycle * card.multiprocessors * card.gigahertz * 1e9
    rate = min(memory, multiprocessors)
    costs = np.array([images / arithmetic, images / rate, times / rate, times * constants.seconds_a_kernel])
    return work @ costs


def seconds_of_waiting(card: Card, step: StepWork, split: BatchSplit, constants: Constants = CONSTANTS) -> float:
    """Return the seconds for which a step waits for the exchange of gradients when its last backward pass is over.

    Buckets travel one after the other, each as soon as it is full. So the exchange is over when the backward pass has
    filled some bucket, and that one and all after it have travelled: the bucket for which this is latest decides.
    """
    if split.num_devices == 1:
        return 0.0
    moved = 2 * (split.num_devices - 1) / split.num_devices  # bytes for each byte of gradients, by a ring
    if split.allreduce_precision == 'bf16':
        moved /= 2
    rate = min(card.link_gigabytes_per_sec, split.network_gigabytes_per_sec) * 1e9
    sent = step.buckets[::-1, 0].cumsum()[::-1]  # each with all after it
    travelling = sent * moved / rate
    computing = seconds_of(card, step.buckets[:, 1:], split.last_microbatch, 1, constants)
    return max(0.0, (travelling - computing).max())


def seconds_by_kind(card: Card, step: StepWork, split: BatchSplit, constants: Constants = CONSTANTS) -> Counter:
    """Return the seconds of a step by kind of operator, and those of WAITING."""
    parts = [(step.model, split.microbatches), (step.encoder, split.microbatches),
             (step.accumulation, split.microbatches - 1), (step.update, 1), (step.exchange, split.num_devices > 1)]
    seconds = Counter({WAITING: seconds_of_waiting(card, step, split, constants)})
    for work, times in parts:
        for kind, amounts in work.items():
            seconds[kind] += seconds_of(card, amounts, split.images, times, constants)
    return seconds


def images_per_sec(card: Card, step: StepWork, split: BatchSplit, constants: Constants = CONSTANTS) -> float:
    """Return the images per second of all GPUs together."""
    return split.num_devices * split.images / seconds_by_kind(card, step, split, constants).total()
