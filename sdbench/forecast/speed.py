"""How fast a step should be on a card that nobody has rented yet: arithmetic on what its operators ask for.

A kernel computes, moves bytes and takes a while to start. Their sum over all kernels of a step is its time:

    seconds = FLOPs / (PEAK_SHARE * peak) + bytes / rate + kernels * SECONDS_A_KERNEL

where rate is the smaller of BANDWIDTH_SHARE * bandwidth and BYTES_A_CYCLE * multiprocessors * clock. What of it runs at
the same time is in the constants. benchmarks/forecast/ fits them to published speeds and prints them with their error.

Several GPUs exchange their gradients while the last backward pass of a step is still computing others. A ring moves
2 (n - 1) / n times the bytes of the gradients over the link of each of n GPUs. What of that is left when the backward
pass is over is added to the step.
"""
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sdbench.gpus import Card, peak_of


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


CONSTANTS = Constants(peak_share=0.495, bandwidth_share=1.24, bytes_a_cycle=13.0, seconds_a_kernel=1.35e-05)
# Of a compiled step, whose kernels by Triton are bound by the memory alone. No published point tests the default mode.
COMPILED = replace(CONSTANTS, bytes_a_cycle=math.inf)
# The same within a CUDA graph, where nothing is launched: a fifth figure, fitted to MLPerf's compiled points
IN_A_GRAPH = replace(COMPILED, seconds_a_kernel=3.27e-06)
# The largest error of a published point of an eager step, either way, when the constants are fitted without its source.
# Compiled ones are met twice as well, but all of one program: their range is the same.
LARGEST_ERROR = 0.12
# The fitted points, all of Stable Diffusion 2, by card, image size and whether they were on latents: on how many GPUs,
# and how many images a step on each. Those are left out that another one has in it, with as many GPUs or more and as
# few images or less.
TESTED = {('NVIDIA A100-SXM4-40GB', 512, False): [(128, 16)], ('NVIDIA A100-SXM4-80GB', 256, True): [(128, 16)],
          ('NVIDIA A100-SXM4-80GB', 512, False): [(8, 256)], ('NVIDIA A100-SXM4-80GB', 512, True): [(128, 16)],
          ('NVIDIA H100 80GB HBM3', 512, False): [(1, 1), (8, 256)], ('NVIDIA H200', 512, False): [(8, 32)],
          ('NVIDIA L40S', 512, False): [(1, 1)]}
# The same of compiled points
TESTED_IN_A_GRAPH = {('NVIDIA B200', 512, True): [(64, 8)], ('NVIDIA H100 80GB HBM3', 512, True): [(64, 16)],
                     ('NVIDIA H200', 512, True): [(16, 32)]}
WAITING = 'exchange beyond the backward pass'


class Work(NamedTuple):
    """What operators ask of a GPU: FLOPs (1 multiply-add = 2), bytes read and written, kernels."""
    flops: float = 0
    nbytes: float = 0
    kernels: float = 0

    def __add__(self, other: 'Work') -> 'Work':
        return Work(*(mine + others for mine, others in zip(self, other, strict=True)))

    def __sub__(self, other: 'Work') -> 'Work':
        return self + other * -1

    def __mul__(self, times: float) -> 'Work':
        return Work(*(mine * times for mine in self))


class BatchSplit(NamedTuple):
    """How a batch is spread over GPUs and microbatches.

    Attributes:
        microbatch: images that go through the model at once.
        images: of each GPU in a step; the last microbatch may be smaller.
        num_devices: GPUs.
        allreduce_precision: fp32 or bf16, in which they exchange gradients.
    """
    microbatch: int
    images: int
    num_devices: int = 1
    allreduce_precision: str = 'fp32'

    @property
    def microbatches(self) -> int:
        """Return how many there are in a step."""
        return math.ceil(self.images / self.microbatch)

    @property
    def last_microbatch(self) -> int:
        """Return the images of the last one."""
        return self.images - (self.microbatches - 1) * self.microbatch


class Bucket(NamedTuple):
    """Gradients that are sent together.

    Attributes:
        nbytes: of them in float32.
        fixed: the work of the backward pass that is left when they are there, whatever the microbatch.
        per_image: the work that is left, in addition, for each image of the microbatch.
    """
    nbytes: int
    fixed: Work
    per_image: Work


@dataclass(frozen=True)
class StepWork:
    """The work of a step by kind of operator.

    Attributes:
        fixed: of a microbatch, whatever its size, but for the VAE's encoder.
        per_image: in addition, of each of its images.
        accumulation: of adding a microbatch's gradients to those of an earlier one.
        update: once a step.
        exchange: once a step where there are several GPUs: of copying gradients to the buckets and back.
        buckets: in the order in which the backward pass fills them.
        encoder_fixed, encoder_per_image: what the VAE's encoder adds to `fixed` and `per_image`, unless its latents
            were stored.
    """
    fixed: dict[str, Work]
    per_image: dict[str, Work]
    accumulation: dict[str, Work]
    update: dict[str, Work]
    exchange: dict[str, Work] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    encoder_fixed: dict[str, Work] = field(default_factory=dict)
    encoder_per_image: dict[str, Work] = field(default_factory=dict)

    def on_latents(self) -> 'StepWork':
        """Return the work of a step whose images were encoded before."""
        return replace(self, encoder_fixed={}, encoder_per_image={})

    def of_encoder(self) -> 'StepWork':
        """Return the work of encoding a batch of images once, as encode.py does."""
        return StepWork(self.encoder_fixed, self.encoder_per_image, accumulation={}, update={})

    def of_step(self, split: BatchSplit) -> dict[str, Work]:
        """Return the work of a step on one GPU by kind."""
        parts = [(self.fixed, split.microbatches), (self.per_image, split.images),
                 (self.encoder_fixed, split.microbatches), (self.encoder_per_image, split.images),
                 (self.accumulation, split.microbatches - 1), (self.update, 1)]
        if split.num_devices > 1:
            parts.append((self.exchange, 1))
        total = {}
        for works, times in parts:
            for kind, work in works.items():
                total[kind] = total.get(kind, Work()) + work * times
        return total


def can_forecast(card: Card, precision: str) -> bool:
    """Tell whether the constants are of such cards, and the peak of this one is known in the precision."""
    return card.multiprocessors is not None and peak_of(card.name, precision) is not None


def seconds_of(card: Card, work: Work, constants: Constants = CONSTANTS) -> float:
    """Return the seconds that work takes on a card."""
    memory = constants.bandwidth_share * card.gigabytes_per_sec * 1e9
    multiprocessors = constants.bytes_a_cycle * card.multiprocessors * card.gigahertz * 1e9
    return (work.flops / (constants.peak_share * card.tflops * 1e12)
            + work.nbytes / min(memory, multiprocessors)
            + work.kernels * constants.seconds_a_kernel)


def seconds_of_waiting(card: Card, step: StepWork, split: BatchSplit, constants: Constants = CONSTANTS) -> float:
    """Return the seconds for which a step waits for the exchange of gradients when its last backward pass is over.

    Buckets travel one after the other, each as soon as it is full. So the exchange is over when the backward pass has
    filled some bucket, and that one and all after it have travelled: the bucket for which this is latest decides.
    """
    if split.num_devices == 1:
        return 0.0
    over_link = 2 * (split.num_devices - 1) / split.num_devices  # bytes for each byte of gradients, by a ring
    if split.allreduce_precision == 'bf16':
        over_link /= 2
    waiting = 0.0
    travelling = 0.0  # seconds of this bucket and all after it
    for bucket in reversed(step.buckets):
        travelling += bucket.nbytes * over_link / (card.link_gigabytes_per_sec * 1e9)
        computing = seconds_of(card, bucket.fixed + bucket.per_image * split.last_microbatch, constants)
        waiting = max(waiting, travelling - computing)
    return waiting


def seconds_by_kind(card: Card, step: StepWork, split: BatchSplit, constants: Constants = CONSTANTS
                    ) -> dict[str, float]:
    """Return the seconds of a step by kind of operator, and for several GPUs those of WAITING."""
    seconds = {kind: seconds_of(card, work, constants) for kind, work in step.of_step(split).items()}
    if split.num_devices > 1:
        seconds[WAITING] = seconds_of_waiting(card, step, split, constants)
    return seconds


def images_per_sec(card: Card, step: StepWork, split: BatchSplit, constants: Constants = CONSTANTS) -> float:
    """Return the images per second of all GPUs together."""
    return split.num_devices * split.images / sum(seconds_by_kind(card, step, split, constants).values())
