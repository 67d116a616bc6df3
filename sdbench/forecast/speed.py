"""Forecast the speed of a training on a card that nobody has rented yet, from the work of its operators.

A kernel computes, moves bytes and takes some time to start. The time of a step is the sum over all its kernels:

    seconds = FLOPs / (PEAK_SHARE * peak) + bytes / rate + kernels * SECONDS_A_KERNEL

where rate is the smaller of BANDWIDTH_SHARE * bandwidth and BYTES_A_CYCLE * multiprocessors * clock. Computing and
moving bytes overlap in part, and the constants include that. benchmarks/forecast/ fits the constants to published
speeds and prints their errors.

Several GPUs all-reduce their gradients while the last backward pass of a step is still computing others. A ring of n
GPUs moves 2 (n - 1) / n times the bytes of the gradients over the interconnect of each GPU, and once through the
network of each machine, however many GPUs it has. The slower of the two sets the pace. The part of the all-reduce
that is not finished when the backward pass ends is added to the step.
"""
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sdbench.gpus import Card

IN_GRAPHS = 'reduce-overhead'  # the mode of --compile that replays CUDA graphs


@dataclass(frozen=True)
class Constants:
    """The constants that are fitted."""
    peak_share: float  # fraction of the dense peak that matrix products, convolutions and attention reach
    bandwidth_share: float  # bytes that kernels move per byte of memory bandwidth; above 1, as caches serve some
    bytes_a_cycle: float  # bytes that a multiprocessor can move per clock cycle, however fast the memory is
    seconds_a_kernel: float  # time of a kernel besides its work: its launch, and its first and last blocks
    seconds_in_a_graph: float  # the same in a CUDA graph, which launches nothing; MLPerf's compiled steps ran in one

    def for_mode(self, compile: bool | str) -> 'Constants':
        """Return the constants for steps with this --compile. No published point tests its default mode."""
        if not compile:
            return self
        seconds = self.seconds_in_a_graph if compile == IN_GRAPHS else self.seconds_a_kernel
        return replace(self, bytes_a_cycle=math.inf, seconds_a_kernel=seconds)  # memory alone limits Triton's kernels


CONSTANTS = Constants(peak_share=0.495, bandwidth_share=1.25, bytes_a_cycle=13.2, seconds_a_kernel=1.36e-05,
                      seconds_in_a_graph=3.34e-06)
# The largest relative error, in either direction, on a published point from a source that was not used to fit the
# constants. Leaving out each source in turn gives 11.7 % for eager steps and 6.5 % for compiled ones. Five points on
# several machines, published later, give 13.3 %.
LARGEST_ERROR = 0.14
# The published points, all of Stable Diffusion 2: by the mode of --compile, then by card, image size and whether the
# training was on latents, pairs of the GPU count and the images per GPU in a step. A pair is omitted if another
# one has at least as many GPUs and at most as many images per GPU, because that one tests more.
TESTED = {
    False: {('NVIDIA A100-SXM4-40GB', 512, False): [(128, 16)], ('NVIDIA A100-SXM4-80GB', 256, True): [(128, 16)],
            ('NVIDIA A100-SXM4-80GB', 512, False): [(8, 256)], ('NVIDIA A100-SXM4-80GB', 512, True): [(128, 16)],
            ('NVIDIA H100 80GB HBM3', 512, False): [(1, 1), (8, 256)], ('NVIDIA H200', 512, False): [(8, 32)],
            ('NVIDIA L40S', 512, False): [(1, 1)]},
    IN_GRAPHS: {('NVIDIA B200', 512, True): [(64, 8)], ('NVIDIA GB200', 512, True): [(72, 8)],
                ('NVIDIA H100 80GB HBM3', 512, True): [(64, 16)], ('NVIDIA H200', 512, True): [(16, 32)],
                ('NVIDIA L40S', 512, True): [(64, 16)]},
}
WAITING = 'all-reduce after the backward pass'

# The work of operators by kind: float (4,), FLOPs per image (1 multiply-add = 2), bytes read and written per image,
# other bytes, and kernels. The last two do not depend on the number of images.
Work = dict[str, np.ndarray]


class BatchSplit(NamedTuple):
    """How a batch is spread over GPUs and microbatches."""
    microbatch: int  # images that go through the model together
    images: int  # per GPU in a step; the last microbatch may be smaller
    num_devices: int = 1
    allreduce_precision: str = 'fp32'  # or bf16
    # Rate that the all-reduce reaches between machines; infinite on one machine, and if the network is assumed to be as
    # fast as the interconnect of the GPUs
    network_gigabytes_per_sec: float = math.inf

    @property
    def microbatches(self) -> int:
        return math.ceil(self.images / self.microbatch)

    @property
    def last_microbatch(self) -> int:
        return self.images - (self.microbatches - 1) * self.microbatch


class StepWork(NamedTuple):
    """The work of a step, by kind."""
    model: Work  # of each microbatch, without the VAE encoder
    encoder: Work = {}  # of the VAE encoder in each microbatch, unless the training is on latents
    accumulation: Work = {}  # of adding the gradients of a microbatch to the earlier ones
    update: Work = {}  # of the optimizer and the EMA, once per step
    exchange: Work = {}  # of copying gradients to the all-reduce buckets and back, once per step on several GPUs
    # Float (buckets, 1 + 4), a row for gradients that are all-reduced together, in the order in which the backward pass
    # fills them: their bytes in float32, and the work of the backward pass that then remains
    buckets: np.ndarray = np.empty((0, 5))


def seconds_of(card: Card, work: np.ndarray, images: int, times: int, constants: Constants) -> np.ndarray:
    """Return the seconds (...) that a card takes for work (..., 4) on `images` images, in `times` repetitions."""
    arithmetic = constants.peak_share * card.tflops * 1e12
    memory = constants.bandwidth_share * card.gigabytes_per_sec * 1e9
    multiprocessors = constants.bytes_a_cycle * card.multiprocessors * card.gigahertz * 1e9
    rate = min(memory, multiprocessors)
    # Seconds for one of each of the four amounts of Work
    costs = np.array([images / arithmetic, images / rate, times / rate, times * constants.seconds_a_kernel])
    return work @ costs


def seconds_of_waiting(card: Card, step: StepWork, split: BatchSplit, constants: Constants) -> float:
    """Return the seconds for which a step waits for the gradient all-reduce after its last backward pass.

    Buckets are sent one after another, each as soon as it is full. When a bucket is full, this bucket and all later
    ones are left to send, while the rest of the backward pass is left to compute. The wait is the largest (time left to
    send - time left to compute) over all buckets.
    """
    if split.num_devices == 1:
        return 0.0
    bytes_per_gradient_byte = 2 * (split.num_devices - 1) / split.num_devices  # sent by each GPU of a ring
    if split.allreduce_precision == 'bf16':
        bytes_per_gradient_byte /= 2
    rate = min(card.link_gigabytes_per_sec, split.network_gigabytes_per_sec) * 1e9

    # Columns of step.buckets: gradient bytes in float32, then the four amounts of Work that remain.
    gradient_bytes, remaining_work = step.buckets[:, 0], step.buckets[:, 1:]
    bytes_to_send = gradient_bytes[::-1].cumsum()[::-1]  # of each bucket and all later ones
    sending = bytes_to_send * bytes_per_gradient_byte / rate
    computing = seconds_of(card, remaining_work, split.last_microbatch, times=1, constants=constants)
    return max(0.0, (sending - computing).max())


def seconds_by_kind(card: Card, step: StepWork, split: BatchSplit, constants: Constants) -> Counter:
    """Return the seconds of a step by kind of operator; the key WAITING has the wait for the all-reduce."""
    # Each kind of work, and how many times it is done in a step
    parts = [(step.model, split.microbatches), (step.encoder, split.microbatches),
             (step.accumulation, split.microbatches - 1), (step.update, 1), (step.exchange, split.num_devices > 1)]
    seconds = Counter({WAITING: seconds_of_waiting(card, step, split, constants)})
    for work, times in parts:
        for kind, amounts in work.items():
            seconds[kind] += seconds_of(card, amounts, split.images, times, constants)
    return seconds


def images_per_sec(card: Card, step: StepWork, split: BatchSplit, constants: Constants) -> float:
    """Return the images per second of all GPUs together."""
    return split.num_devices * split.images / seconds_by_kind(card, step, split, constants).total()
