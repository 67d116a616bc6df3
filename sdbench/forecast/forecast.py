"""Forecast the memory and the speed of a training: a function of its setup and a GPU.

A forecast is calculated where it is needed, and stored nowhere. It needs torch only if its step was never traced.
"""
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sdbench.flags.commands import Encode
from sdbench.flags.train import SD2_BASE, divisors
from sdbench.forecast.compiling import compiled_memory, compiled_work
from sdbench.forecast.speed import (
    CONSTANTS,
    LARGEST_ERROR,
    TESTED,
    BatchSplit,
    StepWork,
    images_per_sec,
    seconds_by_kind,
)
from sdbench.forecast.stored import has_same_unet, step_of
from sdbench.gpus import GIB, NETWORK_SHARE, Card, peak_of
from sdbench.setup import Setup, largest_that_fits

# GPU memory that the count does not include, as a fraction of the count: CUDA itself, workspaces of its libraries, and
# fragmentation of the allocator. On milabench's H200 NVML shows 55 GiB for 49.7 counted, and 115.6 GiB for 106.2.
UNCOUNTED_SHARE = 0.12
COUNT_ERROR = 0.02  # largest relative error of the count on all runs on GPUs so far (test_front_page.py)


@dataclass(frozen=True)
class Forecast:
    """The forecast for a setup on a GPU."""
    setup: Setup  # with its defaults, the device and the microbatch filled in
    card: Card
    gib: float  # memory that the run takes on each GPU, with the part that the count does not include
    images_per_sec: float  # on all GPUs; NaN if the peak of the GPU in this precision is not known
    seconds: Counter  # of a step, by kind of operator
    encode_images_per_sec: float  # on all GPUs when encode.py encodes images before the training
    is_tested: bool  # whether a published run has tested the forecast for a run like this one

    def speed_of(self, stage: str) -> float:
        """Return the images per second of a stage, train or encode."""
        return self.images_per_sec if stage == 'train' else self.encode_images_per_sec

    @property
    def images_per_sec_range(self) -> tuple[float, float] | None:
        """Return the slowest and the fastest speed that published runs make credible; None if none tested it."""
        if not self.is_tested:
            return None
        return self.images_per_sec / (1 + LARGEST_ERROR), self.images_per_sec * (1 + LARGEST_ERROR)


class DoesNotFit(Exception):
    """A GPU has too little memory for a setup, whose smallest possible microbatch takes `gib_needed` GiB."""

    def __init__(self, microbatch: int, gib_needed: float, card: Card):
        super().__init__(f'a microbatch of {microbatch} takes {gib_needed:.1f} GiB, and the {card.name} has '
                         f'{card.gib:g}')
        self.microbatch = microbatch
        self.gib_needed = gib_needed


def forecast(setup: Setup, card: Card) -> Forecast:
    """Forecast a training on a GPU, with defaults for what its setup does not state.

    Without a microbatch, the forecast is for the largest that fits. A given microbatch may have been measured, with
    less uncounted memory than usual, so it is refused only if the counted bytes alone do not fit.

    Raises DoesNotFit if the GPU has too little memory, and UserError if the model is not known.
    """
    setup = replace(setup, device=card.name).with_defaults()
    if peak_of(card.name, setup.precision) is None:
        card = card._replace(tflops=math.nan)
    step = step_of(setup)
    microbatch = setup.microbatch
    if microbatch is None:
        sizes = divisors(setup.device_batch_size)
        microbatch = largest_that_fits(sizes, lambda size: gib_taken(setup, size) <= card.gib)
    elif sum(bytes_needed(setup, microbatch).values()) > (1 + COUNT_ERROR) * card.gib * GIB:
        microbatch = None
    if microbatch is None:
        smallest = setup.microbatch or 1
        raise DoesNotFit(smallest, gib_taken(setup, smallest), card)

    # The speed of the training
    setup = replace(setup, microbatch=microbatch)
    constants = CONSTANTS.for_mode(setup.compile)
    step_work = compiled_work(step.work, setup) if setup.compile else step.work
    update, _ = step.updates[setup.fused_optimizer]
    if setup.use_ema:
        update = update | step.ema_update
    work = step_work._replace(update=update, encoder={} if setup.latents else step_work.encoder)
    split = BatchSplit(microbatch, setup.device_batch_size, setup.num_devices, setup.allreduce_precision,
                       network_rate(setup, card))
    seconds = seconds_by_kind(card, work, split, constants)
    speed = float(setup.batch_size / seconds.total())

    # The speed of encoding, for which GPUs share nothing
    split = BatchSplit(Encode.batch_size, Encode.batch_size)
    encoding = float(images_per_sec(card, StepWork(step_work.encoder), split, constants) * setup.num_devices)
    is_tested = was_published(setup, card) and not math.isnan(speed)
    return Forecast(setup, card, gib_taken(setup, microbatch), speed, seconds, encoding, is_tested)


def bytes_needed(setup: Setup, microbatch: int) -> dict[str, int]:
    """Return the counted bytes of a GPU, by item, at the peak of a step of a setup with defaults."""
    # What does not depend on the microbatch
    step = step_of(setup)
    unet = step.nbytes['unet']
    needed = {'weights': unet, 'gradients': unet, 'optimizer state': step.updates[setup.fused_optimizer][1]}
    if setup.use_ema:
        needed['EMA weights'] = unet
    if setup.num_devices > 1:
        needed['gradient buckets'] = unet  # DistributedDataParallel holds a copy of the gradients
    needed['text encoder'] = step.nbytes['text_encoder']
    if not setup.latents:
        needed['VAE'] = step.nbytes['vae']

    # What the step adds at its peak
    memory = compiled_memory(step.memory, setup) if setup.compile else step.memory
    return needed | memory.peak(microbatch, accumulated=microbatch < setup.device_batch_size, latents=setup.latents)


def gib_taken(setup: Setup, microbatch: int) -> float:
    """Return the GiB that a run takes on a GPU, including UNCOUNTED_SHARE."""
    return sum(bytes_needed(setup, microbatch).values()) * (1 + UNCOUNTED_SHARE) / GIB


def network_rate(setup: Setup, card: Card) -> float:
    """Return the GB/s that a gradient all-reduce reaches between machines, as in BatchSplit.

    Machines that share an interconnect use their networks together.
    """
    if setup.network_gbits is None or not setup.needs_network:
        return math.inf
    machines = max(1, (card.gpus_per_link or 0) // (setup.gpus_per_node or card.gpus_per_node))
    return machines * setup.network_gbits / 8 * NETWORK_SHARE


def network_sentence(setups: Iterable[Setup]) -> str:
    """Return a sentence about the network that forecasts for these setups assume; '' if gradients cross none."""
    crossing = [setup for setup in setups if setup.needs_network]
    if not crossing:
        return ''
    if crossing[0].network_gbits is None:
        return ('The network between machines is assumed to be as fast as the interconnect of their GPUs; give its '
                'speed with --network_gbits.')
    return (f'The network of each machine has {crossing[0].network_gbits:g} Gbit/s, of which the forecast uses '
            f'{100 * NETWORK_SHARE:.0f} %.')


def was_published(setup: Setup, card: Card) -> bool:
    """Tell whether a published run of Stable Diffusion 2 tests the speed of a setup with defaults on this card.

    That published run had the same input, image size and mode of --compile, at least as many GPUs of this card on at
    least as many machines, and at most as many images per GPU in a step. So the all-reduce and the update took at least
    the same fraction of its time. The networks of published runs are not stated, so a network that is slower than the
    interconnect of the card is not tested.
    """
    if setup.gradient_checkpointing or setup.attention == 'math' or setup.compile_blocks:
        return False
    if not has_same_unet(setup.model_name, SD2_BASE):
        return False
    if network_rate(setup, card) < card.link_gigabytes_per_sec:
        return False
    published = TESTED.get(setup.compile, {}).get((card.name, setup.image_size, setup.latents), [])
    return any(setup.num_devices <= devices and setup.device_batch_size >= images
               and setup.machines <= math.ceil(devices / card.gpus_per_node) for devices, images in published)
