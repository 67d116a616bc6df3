"""Memory and work of a run, found on tensors that have shapes but no memory: without a GPU and weights.

The model takes a step, forward, backward and update, under torch's FakeTensorMode. At each operator the bytes that are
alive are noted, and what it asks of a GPU (count.py). So the peak is where it is on a device, and not the sum of what
is alive at different times. One trace tells memory and work of every microbatch.
torch's own MemTracker, with which the tests compare it, counts one microbatch, and no model with frozen weights (torch
2.7).
"""
import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from composer import ComposerModel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from ema import ShadowModel, compute_ema
from sdbench.flags.commands import Encode
from sdbench.flags.train import SD2_BASE, Train
from sdbench.forecast.compiling import compiled
from sdbench.forecast.count import AVERAGE, EXCHANGE, TRACED_IMAGES, UPDATE, StepCounter, StepMemory
from sdbench.forecast.speed import (
    COMPILED,
    CONSTANTS,
    IN_A_GRAPH,
    IN_GRAPHS,
    TESTED,
    BatchSplit,
    Constants,
    StepWork,
    Work,
    images_per_sec,
    seconds_by_kind,
)
from sdbench.gpus import GIB, NETWORK_SHARE, Card, is_one_nvlink_domain, machines_for
from sdbench.models.loading import AUTOCAST_DTYPES, find_model
from sdbench.training.microbatch import blank_batch, largest_that_fits

# What a GPU takes beside the tensors that are counted: CUDA itself, its libraries' workspaces, and memory that the
# allocator holds in pieces. milabench's H200, by NVML: 55 GiB where 49.7 are counted, 115.6 where 106.2 are.
UNCOUNTED_SHARE = 0.12
COUNT_ERROR = 0.02  # of counted bytes; those of all runs on GPUs were met within this (test_memory.py)
BUCKET_BYTES = 25 * 2**20  # that DistributedDataParallel fills before it sends them


@dataclass(frozen=True)
class Estimate:
    """Memory and work of a device in a run.

    Attributes:
        settings: of the run.
        model: without memory.
        lasting: bytes by item that do not depend on the microbatch.
        step: bytes of a step.
        work: of a step, with that of encoding its images.
    """
    settings: Train
    model: ComposerModel
    lasting: dict[str, int]
    step: StepMemory
    work: StepWork

    @classmethod
    def of(cls, settings: Train, build_model: Callable, build_optimizer: Callable) -> 'Estimate':
        """Count the memory and the work of a device for the model and the optimizer that these functions build.

        Runs that differ in nothing that bears on a step share a trace.
        """
        # what bears on a trace. Fused attention is counted alike, that of xformers too; what compiling changes is said
        # of one kind of step. How many GPUs there are, and what joins them, bears on what is made of it
        attention = 'math' if settings.attention == 'math' else 'sdpa'
        alike = dataclasses.replace(settings, attention=attention, compile=False, compile_blocks=False, batch_size=1,
                                    device_train_microbatch_size='auto', encoders=None, use_ema=True,
                                    cudnn_benchmark=False, allreduce_precision='fp32', dry_run=None, num_devices=1,
                                    batches_per_epoch=None, network_gbits=None, gpus_per_node=None)
        if settings.compile:
            alike = dataclasses.replace(alike, channels_last=True, half_precision_norms=True)
        model, step, work, optimizer_state = traced(alike, build_model, build_optimizer)

        # what does not
        if settings.compile:
            step, work = compiled(step, work, settings)
        if not settings.use_ema:
            work = work._replace(update={UPDATE: work.update[UPDATE]})
        return cls(settings, model, lasting_bytes(settings, model, optimizer_state), step, work)

    @property
    def constants(self) -> Constants:
        """The constants of the forecast."""
        return {False: CONSTANTS, IN_GRAPHS: IN_A_GRAPH}.get(self.settings.compile, COMPILED)

    def needed(self, microbatch: int) -> dict[str, int]:
        """Return the bytes by item at the peak of a step, which is within a microbatch."""
        return self.lasting | self.step.peak(
            microbatch, accumulated=microbatch < self.settings.device_batch_size, latents=self.settings.latents)

    def taken(self, microbatch: int) -> float:
        """Return the GiB that are taken of a GPU, with what cannot be counted."""
        return sum(self.needed(microbatch).values()) * (1 + UNCOUNTED_SHARE) / GIB

    def microbatch_on(self, card: Card) -> int | None:
        """Return the microbatch that was given, or the largest that fits; None if it, or not even one image, fits.

        A given microbatch may have been found on such a GPU, where it took less than UNCOUNTED_SHARE beside what is
        counted. It is refused only where what is counted alone cannot fit.
        """
        given = self.settings.device_train_microbatch_size
        if isinstance(given, int):
            counted = sum(self.needed(given).values()) / GIB
            return given if counted <= (1 + COUNT_ERROR) * card.gib else None
        return largest_that_fits(self.settings.microbatch_sizes, lambda size: self.taken(size) <= card.gib)

    def gpus_per_node(self, card: Card) -> int:
        """Return how many of a card are in each machine of the run."""
        return self.settings.gpus_per_node or card.gpus_per_node

    def machines_on(self, card: Card) -> int:
        """Return how many machines have the GPUs of the run."""
        return machines_for(self.settings.num_devices, self.gpus_per_node(card))

    def needs_network(self, card: Card) -> bool:
        """Tell whether gradients go over a network: to GPUs that the link of the card does not join."""
        return self.machines_on(card) > 1 and not is_one_nvlink_domain(card.name, self.settings.num_devices)

    def network_on(self, card: Card) -> float:
        """Return the GB/s that an exchange of gradients reaches between machines, as BatchSplit has it.

        Machines that one link joins send with the networks of all of them.
        """
        if self.settings.network_gbits is None or not self.needs_network(card):
            return math.inf
        machines = max(1, (card.gpus_per_link or 0) // self.gpus_per_node(card))
        return machines * self.settings.network_gbits / 8 * NETWORK_SHARE

    def seconds_on(self, card: Card, microbatch: int) -> Counter:
        """Return the seconds of a step by kind of operator; NaN on a card whose peak is not known."""
        settings = self.settings
        split = BatchSplit(microbatch, settings.device_batch_size, settings.num_devices, settings.allreduce_precision,
                           self.network_on(card))
        work = self.work._replace(encoder={}) if settings.latents else self.work
        return seconds_by_kind(card, work, split, self.constants)

    def speed_on(self, card: Card, microbatch: int) -> float:
        """Return images/s of all devices together; NaN on a card whose peak is not known."""
        return self.settings.batch_size / self.seconds_on(card, microbatch).total()

    def encoding_speed_on(self, card: Card) -> float:
        """Return how many images all devices together encode a second, when encode.py does it once."""
        split = BatchSplit(Encode.batch_size, Encode.batch_size)  # devices share nothing
        return images_per_sec(card, StepWork(self.work.encoder), split, self.constants) * self.settings.num_devices

    def is_tested(self, card: Card) -> bool:
        """Tell whether the error of the forecast is known for such a run.

        A published run must have had as many of these GPUs or more, on as many machines or more, and as many images a
        step on each or fewer, so that the exchange of gradients and the update weighed as much as here, or more. Their
        networks are not stated: a slower one than the link of the card is not tested.
        """
        settings = self.settings
        if settings.gradient_checkpointing or settings.attention == 'math' or settings.compile_blocks:
            return False
        for key, value in find_model(SD2_BASE).configs['unet'].items():
            is_shape = key not in ('_class_name', 'sample_size')
            if is_shape and json.dumps(self.model.unet.config.get(key)) != json.dumps(value):  # where a tuple is a list
                return False
        if self.network_on(card) < card.link_gigabytes_per_sec:
            return False
        layouts = TESTED.get(settings.compile, {}).get((card.name, settings.image_size, settings.latents), [])
        return any(settings.num_devices <= devices and settings.device_batch_size >= images
                   and self.machines_on(card) <= math.ceil(devices / card.gpus_per_node)
                   for devices, images in layouts)


@functools.cache
def traced(settings: Train, build_model: Callable, build_optimizer: Callable
           ) -> tuple[ComposerModel, StepMemory, StepWork, int]:
    """Trace a step of a run with the average once.

    Returns its model, which has no memory, what the step takes, and the bytes that the optimizer keeps between steps.
    """
    model = build_on_meta(settings, build_model)
    memory, work = trace_step(model, settings.precision, settings.attention)
    optimizer = build_optimizer(model, settings)
    average = ShadowModel(model)
    update = work_of_update({UPDATE: optimizer.step, AVERAGE: lambda: compute_ema(model, average, 0.999)})
    kept = tree_leaves(list(optimizer.state.values()))
    optimizer_state = sum(tensor.nbytes for tensor in kept if isinstance(tensor, torch.Tensor))
    return model, memory, work._replace(update=update), optimizer_state


def build_on_meta(settings: Train, build_model: Callable[..., ComposerModel]) -> ComposerModel:
    """Build the model of a run with its switches on the meta device: shapes and types alone, always with the VAE.

    So a switch changes what is counted by what it does. `build_model` makes the real one.
    """
    return build_model(settings, False, torch.device('meta'), find_model(settings.model_name))


def lasting_bytes(settings: Train, model: ComposerModel, optimizer_state: int) -> dict[str, int]:
    """Count the bytes of a device, by item, that stay from step to step, whatever the microbatch, and the gradients.

    A model without memory will do. On latents its VAE is not counted. `optimizer_state` is what the optimizer keeps.
    """
    def nbytes(module: torch.nn.Module) -> int:
        return sum(parameter.nbytes for parameter in module.parameters())

    unet = nbytes(model.unet)
    needed = {'weights': unet, 'gradients': unet, 'optimizer state': optimizer_state}
    if settings.use_ema:
        needed['average of the weights'] = unet
    if settings.num_devices > 1:
        needed['gradient buckets'] = unet  # of DistributedDataParallel, beside the gradients
    needed['text encoder'] = nbytes(model.text_encoder)
    if not settings.latents:
        needed['VAE'] = nbytes(model.vae)
    return needed


def trace_step(meta_model: ComposerModel, precision: str, attention: str = 'sdpa') -> tuple[StepMemory, StepWork]:
    """Return memory and work of a step without its update, on a GPU in half precision, or in float32 anywhere.

    Attention is computed by a kernel that keeps no matrix of all queries and keys. A CPU's stands for a GPU's: both
    keep queries, keys, values, the result and one number a query. With --attention math it is the products and the
    softmax that they are made of, and the matrix is written, read and kept.

    Args:
        meta_model: the model on the meta device; its tensors become fake ones.
        precision: amp_bf16, amp_fp16 or fp32.
        attention: as --attention has it.
    """
    # What Module.to_empty does, which takes seconds under the mode. torch 2.15 changes no type of a fake parameter.
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the scheduler's tables are real
    cpu = torch.device('cpu')
    model = meta_model.train()._apply(lambda tensor: FakeTensor(mode, tensor.detach(), cpu))

    # What is counted: each operator, what autograd keeps for the backward pass, and apart the VAE's encoder.
    counter = StepCounter(list(model.parameters()))
    if model.vae is not None:
        counter.watch_encoder(model.vae)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        counter.count_as('activations', tensor)
        return tensor

    # The step.
    backend = SDPBackend.MATH if attention == 'math' else SDPBackend.FLASH_ATTENTION
    autocast = torch.autocast('cpu', AUTOCAST_DTYPES.get(precision), enabled=precision in AUTOCAST_DTYPES)
    with (mode, counter, torch.compiler.set_stance('force_eager'), norms_in_float32(), sdpa_kernel(backend),
          torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)):
        batch = blank_batch(model, TRACED_IMAGES, 'cpu')
        composers_copy = tree_map(torch.clone, batch)  # which its Trainer keeps through the step
        with autocast:
            outputs = model(batch)
            loss = model.loss(outputs, batch)
        loss.backward()
    del composers_copy
    return memory_and_work(model, counter)


def work_of_update(updates: dict[str, Callable]) -> Work:
    """Return the work of what happens to fake tensors once a step, by kind: of the second call of each.

    The first makes the state of an optimizer.
    """
    rows = []
    for kind, update in updates.items():
        update()
        counter = StepCounter([])
        with counter:
            update()
        rows += [(kind, *work) for _, _, *work in counter.work]
    return work_by_kind(rows)


def work_by_kind(rows: Iterable[tuple]) -> Work:
    """Return work summed by kind, of rows that are each a kind and its four amounts."""
    work = {}
    for kind, *amounts in rows:
        work[kind] = work.get(kind, 0) + np.array(amounts, dtype=float)
    return work


def memory_and_work(model: ComposerModel, counter: StepCounter) -> tuple[StepMemory, StepWork]:
    """Return memory and work of the step that `counter` has seen."""
    # the buckets that DistributedDataParallel fills with gradients as they come, and sends one by one
    amounts = np.array([amounts for _, _, *amounts in counter.work], dtype=float)  # (operators, 4)
    buckets = []
    nbytes = 0
    for number, (size, done) in enumerate(counter.arrivals, start=1):
        nbytes += size
        if nbytes >= BUCKET_BYTES or number == len(counter.arrivals):
            buckets.append([nbytes, *amounts[done:].sum(axis=0)])
            nbytes = 0

    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = sum(weight.nbytes for weight in trainable)
    work = StepWork(
        model=work_by_kind(row for in_encoder, *row in counter.work if not in_encoder),
        encoder=work_by_kind(row for in_encoder, *row in counter.work if in_encoder),
        accumulation=work_by_kind([(EXCHANGE, 0, 0, 3 * gradients, len(trainable))]),  # read two, write their sum
        exchange=work_by_kind([(EXCHANGE, 0, 0, 4 * gradients, 2 * len(trainable))]),  # read, write, there and back
        buckets=np.array(buckets))
    return StepMemory(np.array(counter.rows), np.array(counter.encoder_rows), gradients), work


def norms_in_float32() -> RemovableHandle:
    """Let autocast on a CPU compute group and layer norms in float32, as CUDA's autocast does, within a `with`.

    A CPU's leaves them in half precision. All other operators of the model keep the same for the backward pass.
    """
    def cast(module: torch.nn.Module, inputs: tuple) -> tuple | None:
        if type(module) in (torch.nn.GroupNorm, torch.nn.LayerNorm) and torch.is_autocast_enabled('cpu'):
            return tuple(tensor.float() for tensor in inputs)
        return None

    return torch.nn.modules.module.register_module_forward_pre_hook(cast)
