"""Estimate the memory and the speed of a run on GPUs that are not there.

Parameters and arithmetic are counted by torch, memory and work of a step as fake_step.py does it, and speed follows
from its work as speed.py says.
"""
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from composer import ComposerModel

from sdbench.flags.commands import Encode
from sdbench.flags.train import Train
from sdbench.forecast.compiled_step import trace_compiled_step
from sdbench.forecast.fake_step import trace_step, updater
from sdbench.forecast.measured import is_stable_diffusion_2
from sdbench.forecast.memory import build_on_meta, lasting_bytes
from sdbench.forecast.operators import AVERAGE
from sdbench.forecast.speed import (
    COMPILED,
    CONSTANTS,
    IN_A_GRAPH,
    TESTED_SIZE,
    BatchSplit,
    Constants,
    StepWork,
    images_per_sec,
    is_tested,
)
from sdbench.forecast.step_counter import StepMemory
from sdbench.gpus import Card
from sdbench.measuring.power import GIB
from sdbench.models.loading import find_model
from sdbench.training.microbatch import sizes_to_try

# What a GPU takes beside the tensors that are counted: CUDA itself, its libraries' workspaces, and memory that the
# allocator holds in pieces. milabench's H200, by NVML: 55 GiB where 49.7 are counted, 115.6 where 106.2 are.
UNCOUNTED_SHARE = 0.12
IN_GRAPHS = 'reduce-overhead'  # the mode of --compile that replays CUDA graphs


@dataclass(frozen=True)
class Estimate:
    """Memory and work of a device with one set of flags.

    Attributes:
        title: the flags, for people.
        settings: of the run, with these flags.
        latents: whether it is on latents, which were encoded before.
        model: without memory.
        lasting: bytes by item that do not depend on the microbatch.
        step: bytes of a step.
        work: of a step, with that of encoding its images.
        constants: of the forecast.
    """
    title: str
    settings: Train
    latents: bool
    model: ComposerModel
    lasting: dict[str, int]
    step: StepMemory
    work: StepWork
    constants: Constants = CONSTANTS

    @property
    def work_of_run(self) -> StepWork:
        """The work of a step of the run: on latents without the VAE's encoder."""
        return self.work.on_latents() if self.latents else self.work

    @property
    def device_batch_size(self) -> int:
        """Images of a batch on each device."""
        return self.settings.batch_size // self.settings.dry_run

    def needed(self, microbatch: int) -> dict[str, int]:
        """Return the bytes by item at the peak of a step, which is within a microbatch."""
        return self.lasting | self.step.peak(
            microbatch, accumulated=microbatch < self.device_batch_size, latents=self.latents)

    def taken(self, microbatch: int) -> float:
        """Return the GiB that are taken of a GPU, with what cannot be counted."""
        return sum(self.needed(microbatch).values()) * (1 + UNCOUNTED_SHARE) / GIB

    def largest_microbatch(self, gib: float) -> int | None:
        """Return the largest microbatch that fits into so much memory; None: not even one image does."""
        return max((size for size in sizes_to_try(self.device_batch_size) if self.taken(size) <= gib), default=None)

    def microbatch_on(self, card: Card) -> int | None:
        """Return the microbatch that was asked for, or the largest; None: it does not fit."""
        asked = self.settings.device_train_microbatch_size
        if isinstance(asked, int):
            return asked if self.taken(asked) <= card.gib else None
        return self.largest_microbatch(card.gib)

    def split(self, microbatch: int) -> BatchSplit:
        """Return how the batch of the run is spread."""
        return BatchSplit(microbatch, self.device_batch_size, self.settings.dry_run, self.settings.allreduce_precision)

    def images_per_sec(self, card: Card, microbatch: int) -> float:
        """Return the speed of all devices together, of a card that can be forecast in this precision."""
        speed = images_per_sec(card, self.work_of_run, self.split(microbatch), self.constants)
        return speed * self.settings.dry_run

    def encoded_per_sec(self, card: Card) -> float:
        """Return how many images all devices together encode a second, when encode.py does it once."""
        split = BatchSplit(Encode.batch_size, Encode.batch_size)  # devices share nothing
        return images_per_sec(card, self.work.of_encoder(), split, self.constants) * self.settings.dry_run

    def is_tested(self, card: Card) -> bool:
        """Tell whether the error of the forecast is known for such a run."""
        settings = self.settings
        if settings.gradient_checkpointing or settings.attention == 'math':
            return False
        if settings.image_size != TESTED_SIZE or not is_stable_diffusion_2(self.model.unet.config):
            return False
        if not settings.compile:
            return is_tested(card, settings.dry_run, self.device_batch_size)
        # published compiled runs were on latents, with the whole UNet in a CUDA graph
        in_a_graph = settings.compile == IN_GRAPHS and not settings.compile_blocks and self.latents
        return in_a_graph and is_tested(card, settings.dry_run, self.device_batch_size, in_a_graph=True)


def with_less_memory(settings: Train, latents: bool) -> list[tuple[str, Train, bool]]:
    """Return the run with each change that takes less memory: in words, its settings, and whether it is on latents."""
    half = settings.image_size // 16 * 8
    changes = {}
    if settings.encoder_precision != 'bf16':
        changes['--encoder_precision bf16'] = {'encoder_precision': 'bf16'}
    if not settings.half_precision_norms and settings.precision != 'fp32':
        changes['--half_precision_norms'] = {'half_precision_norms': True}
    if not settings.gradient_checkpointing:
        changes['--gradient_checkpointing'] = {'gradient_checkpointing': True}
    if settings.use_ema:
        changes['without --use_ema'] = {'use_ema': False}
    if half >= 64:
        changes[f'--image_size {half}'] = {'image_size': half}

    if settings.compile:  # most others would each be traced for minutes
        changes = {words: change for words, change in changes.items() if words == 'without --use_ema'}

    runs = []
    for words, change in changes.items():
        runs.append((words, dataclasses.replace(settings, **change), latents))
    if not latents:
        runs.append(('latents (encode.py)', settings, True))
    return runs


def estimate(title: str, settings: Train, latents: bool, build_model: Callable,
             traced_before: Estimate | None = None) -> Estimate:
    """Count the memory and the work of a device for the model that is built with these settings.

    What is the same in `traced_before` is not traced again: all of the step where it differs in the average or in its
    input alone, and else the update. Raises NotCounted if this version of torch cannot say what a compiled step does.
    """
    files = find_model(settings.model_name)
    model = build_on_meta(settings, files, build_model)  # sizes need no weights
    lasting = lasting_bytes(settings, latents, model, settings.dry_run)
    constants = constants_of(settings.compile)
    if traced_before is None:
        update = updater(settings.fused_optimizer, settings.use_ema)
        if settings.compile:
            memory, work = trace_compiled_step(model, settings, update)
        else:
            memory, work = trace_step(model, settings.precision, update, settings.attention)
    elif latents != traced_before.latents:
        memory, work = traced_before.step, traced_before.work
    elif settings.use_ema != traced_before.settings.use_ema:
        update = {kind: work for kind, work in traced_before.work.update.items() if kind != AVERAGE}
        memory, work = traced_before.step, dataclasses.replace(traced_before.work, update=update)
    else:
        memory, work = trace_step(model, settings.precision, attention=settings.attention)
        work = dataclasses.replace(work, update=traced_before.work.update)
    return Estimate(title, settings, latents, model, lasting, memory, work, constants)


def constants_of(compile: bool | str) -> Constants:
    """Return the constants of the forecast for a mode of --compile."""
    if not compile:
        return CONSTANTS
    if compile == IN_GRAPHS:
        return IN_A_GRAPH
    return COMPILED
