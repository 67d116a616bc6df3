"""Find the memory and the work of a run on tensors that have shapes but no memory: without a GPU and without weights.

The model takes a training step under torch's FakeTensorMode: forward, backward and update. At each operator count.py
notes the bytes in use and the work. So the peak of the memory is the real one, and not the sum of the largest items at
different times. One trace gives memory and work for every microbatch.

The tests compare it with torch's own MemTracker, which cannot replace it: it counts a single microbatch, and it takes
no model with frozen weights (torch 2.7).
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

from sdbench.flags.commands import Encode
from sdbench.flags.train import SD2_BASE, Train
from sdbench.forecast.compiling import compiled
from sdbench.forecast.count import (
    EMA_UPDATE,
    GRADIENT_COPIES,
    OPTIMIZER,
    TRACED_IMAGES,
    StepCounter,
    StepMemory,
    multi_tensor_kernels,
)
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

# GPU memory that the count does not include, as a fraction of the count: CUDA itself, workspaces of its libraries, and
# fragmentation of the allocator. On milabench's H200 NVML shows 55 GiB for 49.7 counted, and 115.6 GiB for 106.2.
UNCOUNTED_SHARE = 0.12
COUNT_ERROR = 0.02  # largest relative error of the count on all runs on GPUs so far (test_front_page.py)
BUCKET_BYTES = 25 * 2**20  # gradients that DistributedDataParallel collects before it sends them


@dataclass(frozen=True)
class Estimate:
    """Memory and work of one GPU in a run.

    Attributes:
        settings: settings of the run.
        model: the model without memory.
        lasting: bytes by item that do not depend on the microbatch.
        step: memory of a step.
        work: work of a step, including the encoding of its images.
    """
    settings: Train
    model: ComposerModel
    lasting: dict[str, int]
    step: StepMemory
    work: StepWork

    @classmethod
    def of(cls, settings: Train, build_model: Callable, build_optimizer: Callable) -> 'Estimate':
        """Count the memory and the work of a GPU for the model and the optimizer that these functions build.

        Runs share a trace if they differ only in settings that do not change it.
        """
        # Give settings that do not change the trace the same value in all runs. All fused attention, such as xformers',
        # is counted in the same way. compiling.py derives compiled steps from one kind of eager step. The GPU count and
        # the network matter only when a speed is calculated from the trace.
        attention = 'math' if settings.attention == 'math' else 'sdpa'
        traced_settings = dataclasses.replace(
            settings, attention=attention, compile=False, compile_blocks=False, batch_size=1,
            device_train_microbatch_size='auto', encoders=None, use_ema=True, cudnn_benchmark=False,
            allreduce_precision='fp32', dry_run=None, num_devices=1, batches_per_epoch=None, network_gbits=None,
            gpus_per_node=None)
        if settings.compile:
            traced_settings = dataclasses.replace(traced_settings, channels_last=True, half_precision_norms=True)
        model, step, work, optimizer_state = traced(traced_settings, build_model, build_optimizer)

        # Add what the other settings change.
        if settings.compile:
            step, work = compiled(step, work, settings)
        if settings.use_ema:
            work = work._replace(update=work.update | ema_update(model))
        return cls(settings, model, lasting_bytes(settings, model, optimizer_state), step, work)

    @property
    def constants(self) -> Constants:
        """Return the constants for the mode of --compile."""
        return {False: CONSTANTS, IN_GRAPHS: IN_A_GRAPH}.get(self.settings.compile, COMPILED)

    def needed(self, microbatch: int) -> dict[str, int]:
        """Return the counted bytes of a GPU, by item, at the peak of a step."""
        return self.lasting | self.step.peak(
            microbatch, accumulated=microbatch < self.settings.device_batch_size, latents=self.settings.latents)

    def taken(self, microbatch: int) -> float:
        """Return the GiB that a run takes on a GPU, including UNCOUNTED_SHARE."""
        return sum(self.needed(microbatch).values()) * (1 + UNCOUNTED_SHARE) / GIB

    def microbatch_on(self, card: Card) -> int | None:
        """Return the given microbatch, or the largest that fits for `auto`; None if the card has too little memory.

        A given microbatch may have been measured on this GPU model, where it took less uncounted memory than
        UNCOUNTED_SHARE. So it is refused only if the counted bytes alone do not fit.
        """
        given = self.settings.device_train_microbatch_size
        if isinstance(given, int):
            counted = sum(self.needed(given).values()) / GIB
            return given if counted <= (1 + COUNT_ERROR) * card.gib else None
        return largest_that_fits(self.settings.microbatch_sizes, lambda size: self.taken(size) <= card.gib)

    def gpus_per_node(self, card: Card) -> int:
        """Return how many GPUs each machine of the run has."""
        return self.settings.gpus_per_node or card.gpus_per_node

    def machines_on(self, card: Card) -> int:
        """Return the number of machines in the run."""
        return machines_for(self.settings.num_devices, self.gpus_per_node(card))

    def needs_network(self, card: Card) -> bool:
        """Tell whether gradients cross a network, because the interconnect of the card does not join all GPUs."""
        return self.machines_on(card) > 1 and not is_one_nvlink_domain(card.name, self.settings.num_devices)

    def network_on(self, card: Card) -> float:
        """Return the GB/s that a gradient all-reduce reaches between machines, as in BatchSplit.

        Machines that share an interconnect use their networks together.
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
        """Return images/s on all GPUs together; NaN on a card whose peak is not known."""
        return self.settings.batch_size / self.seconds_on(card, microbatch).total()

    def encoding_speed_on(self, card: Card) -> float:
        """Return images/s on all GPUs together when encode.py encodes images before a training."""
        split = BatchSplit(Encode.batch_size, Encode.batch_size)  # one GPU, because encoding GPUs share nothing
        return images_per_sec(card, StepWork(self.work.encoder), split, self.constants) * self.settings.num_devices

    def is_tested(self, card: Card) -> bool:
        """Tell whether a published run has tested the forecast for a run like this one on this card.

        That published run had the same model, input, image size and mode of --compile, at least as many GPUs of this
        card on at least as many machines, and at most as many images per GPU in a step. So the all-reduce and the
        update took at least the same fraction of its time. The networks of published runs are not stated, so a network
        that is slower than the interconnect of the card is not tested.
        """
        settings = self.settings
        if settings.gradient_checkpointing or settings.attention == 'math' or settings.compile_blocks:
            return False
        for key, value in find_model(SD2_BASE).configs['unet'].items():
            is_shape = key not in ('_class_name', 'sample_size')
            if is_shape and json.dumps(self.model.unet.config.get(key)) != json.dumps(value):  # a tuple equals a list
                return False
        if self.network_on(card) < card.link_gigabytes_per_sec:
            return False
        published = TESTED.get(settings.compile, {}).get((card.name, settings.image_size, settings.latents), [])
        return any(settings.num_devices <= devices and settings.device_batch_size >= images
                   and self.machines_on(card) <= math.ceil(devices / card.gpus_per_node)
                   for devices, images in published)


@functools.cache
def traced(settings: Train, build_model: Callable, build_optimizer: Callable
           ) -> tuple[ComposerModel, StepMemory, StepWork, int]:
    """Trace a step without EMA, and keep the result for later calls with the same settings.

    Returns the model, which has no memory; the memory and the work of the step; and the bytes of optimizer state.
    """
    model = build_on_meta(settings, build_model)
    memory, work = trace_step(model, settings.precision, settings.attention)
    optimizer = build_optimizer(model, settings)
    update = work_of_update({OPTIMIZER: optimizer.step})
    state = tree_leaves(list(optimizer.state.values()))
    optimizer_state = sum(tensor.nbytes for tensor in state if isinstance(tensor, torch.Tensor))
    return model, memory, work._replace(update=update), optimizer_state


def ema_update(model: ComposerModel) -> Work:
    """Return the work of moving the EMA weights: read them and the raw weights, and write the EMA weights."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    kernels = multi_tensor_kernels(sum(weight.numel() for weight in weights))
    return work_by_kind([(EMA_UPDATE, 0, 0, 3 * sum(weight.nbytes for weight in weights), kernels)])


def build_on_meta(settings: Train, build_model: Callable[..., ComposerModel]) -> ComposerModel:
    """Build the model of a run on the meta device, with shapes and types alone, and always with the VAE.

    `build_model` is the function that builds the real model, so every switch of the run has its real effect on the
    count.
    """
    return build_model(settings, False, torch.device('meta'), find_model(settings.model_name))


def lasting_bytes(settings: Train, model: ComposerModel, optimizer_state: int) -> dict[str, int]:
    """Return the bytes per GPU that do not depend on the microbatch, by item.

    Args:
        settings: settings of the run; training on latents needs no VAE.
        model: the model; it may be on the meta device.
        optimizer_state: bytes of the optimizer's state.
    """
    def nbytes(module: torch.nn.Module) -> int:
        return sum(parameter.nbytes for parameter in module.parameters())

    unet = nbytes(model.unet)
    needed = {'weights': unet, 'gradients': unet, 'optimizer state': optimizer_state}
    if settings.use_ema:
        needed['EMA weights'] = unet
    if settings.num_devices > 1:
        needed['gradient buckets'] = unet  # DistributedDataParallel holds a copy of the gradients
    needed['text encoder'] = nbytes(model.text_encoder)
    if not settings.latents:
        needed['VAE'] = nbytes(model.vae)
    return needed


def trace_step(meta_model: ComposerModel, precision: str, attention: str = 'sdpa') -> tuple[StepMemory, StepWork]:
    """Return the memory and the work of a step without its update, in half precision on a GPU or in float32.

    Fused attention never stores the matrix of all queries and keys. The CPU's kernel represents the GPU's kernels,
    because it keeps the same tensors: queries, keys, values, the result and one number per query. --attention math is
    traced as its products and softmax, which write, read and keep the matrix.

    Args:
        meta_model: the model on the meta device; its tensors become fake ones.
        precision: amp_bf16, amp_fp16 or fp32.
        attention: sdpa, or math for the unfused attention.
    """
    # Make fake tensors of the weights directly: Module.to_empty takes seconds under FakeTensorMode, and with torch 2.15
    # a fake parameter cannot change its type.
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the scheduler's tables are real tensors
    cpu = torch.device('cpu')
    model = meta_model.train()._apply(lambda tensor: FakeTensor(mode, tensor.detach(), cpu))

    # Count every operator. Mark the VAE encoder's operators, and the tensors that autograd keeps for the backward pass.
    counter = StepCounter(list(model.parameters()))
    if model.vae is not None:
        counter.watch_encoder(model.vae)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        counter.count_as('activations', tensor)
        return tensor

    # Take a step as Composer's Trainer does.
    backend = SDPBackend.MATH if attention == 'math' else SDPBackend.FLASH_ATTENTION
    autocast = torch.autocast('cpu', AUTOCAST_DTYPES.get(precision), enabled=precision in AUTOCAST_DTYPES)
    with (mode, counter, torch.compiler.set_stance('force_eager'), norms_in_float32(), sdpa_kernel(backend),
          torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)):
        batch = blank_batch(model, TRACED_IMAGES, 'cpu')
        composers_copy = tree_map(torch.clone, batch)  # the Trainer keeps a copy of the batch during the step
        with autocast:
            outputs = model(batch)
            loss = model.loss(outputs, batch)
        loss.backward()
    del composers_copy
    return memory_and_work(model, counter)


def work_of_update(updates: dict[str, Callable]) -> Work:
    """Return the work, by kind, of functions that change fake tensors once per step, such as an optimizer's.

    Each function is called twice, and its second call counts, because the first call also creates the optimizer state.
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
    """Return the sums, by kind, of rows (kind, and the four amounts of Work)."""
    work = {}
    for kind, *amounts in rows:
        work[kind] = work.get(kind, 0) + np.array(amounts, dtype=float)
    return work


def memory_and_work(model: ComposerModel, counter: StepCounter) -> tuple[StepMemory, StepWork]:
    """Return memory and work of the step that `counter` has counted."""
    # DistributedDataParallel fills buckets with gradients in the order of the backward pass, and sends each bucket when
    # it is full. For each bucket, add up the work of the backward pass that remains at that time.
    amounts = np.array([amounts for _, _, *amounts in counter.work], dtype=float)  # (operators, 4)
    buckets = []
    nbytes = 0
    for number, (size, operators_done) in enumerate(counter.arrivals, start=1):
        nbytes += size
        if nbytes >= BUCKET_BYTES or number == len(counter.arrivals):
            buckets.append([nbytes, *amounts[operators_done:].sum(axis=0)])
            nbytes = 0

    # Adding gradients reads two tensors and writes their sum: 3 times their bytes. Copying gradients to the buckets and
    # back reads and writes them twice: 4 times.
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = sum(weight.nbytes for weight in trainable)
    work = StepWork(
        model=work_by_kind(row for in_encoder, *row in counter.work if not in_encoder),
        encoder=work_by_kind(row for in_encoder, *row in counter.work if in_encoder),
        accumulation=work_by_kind([(GRADIENT_COPIES, 0, 0, 3 * gradients, len(trainable))]),
        exchange=work_by_kind([(GRADIENT_COPIES, 0, 0, 4 * gradients, 2 * len(trainable))]),
        buckets=np.array(buckets))
    return StepMemory(np.array(counter.rows), np.array(counter.encoder_rows), gradients), work


def norms_in_float32() -> RemovableHandle:
    """Compute group and layer norms in float32 under autocast on a CPU, as CUDA's autocast does, within a `with`.

    Autocast on a CPU leaves norms in half precision. For all other operators of the model it keeps the same tensors
    for the backward pass as CUDA's autocast.
    """
    def cast(module: torch.nn.Module, inputs: tuple) -> tuple | None:
        if type(module) in (torch.nn.GroupNorm, torch.nn.LayerNorm) and torch.is_autocast_enabled('cpu'):
            return tuple(tensor.float() for tensor in inputs)
        return None

    return torch.nn.modules.module.register_module_forward_pre_hook(cast)
