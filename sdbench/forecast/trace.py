"""Find the memory and the work of a run on tensors that have shapes but no memory: without a GPU and without weights.

The model takes a training step under torch's FakeTensorMode: forward, backward and update. At each operator count.py
notes the bytes in use and the work. So the peak of the memory is the real one, and not the sum of the largest items at
different times. One trace gives memory and work for every microbatch.

The tests compare it with torch's own MemTracker, which cannot replace it: it counts a single microbatch, and it takes
no model with frozen weights (torch 2.7).
"""
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from composer import ComposerModel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from sdbench.flags.train import Train
from sdbench.forecast.compiling import compiled_memory
from sdbench.forecast.count import TRACED_IMAGES, StepCounter, multi_tensor_kernels
from sdbench.forecast.speed import StepWork, Work
from sdbench.forecast.step import EMA_UPDATE, GRADIENT_COPIES, OPTIMIZER, Step, StepMemory
from sdbench.models.loading import AUTOCAST_DTYPES, find_model
from sdbench.setup import Setup, settings_of_setup
from sdbench.training.microbatch import blank_batch

BUCKET_BYTES = 25 * 2**20  # gradients that DistributedDataParallel collects before it sends them


def trace(setup: Setup, build_model: Callable, build_optimizer: Callable) -> Step:
    """Trace an eager step. Of its memory, keep the operators at which a peak can be.

    The peaks are of the eager step and of the compiled steps that compiling.py derives from it.
    """
    settings = settings_of_setup(setup)
    model = build_on_meta(settings, build_model)
    memory, work = trace_step(model, settings.precision, settings.attention)
    peaks = memory.rows_of_peaks()
    for compile_blocks in (False, True):
        peaks |= compiled_memory(memory, replace(setup, compile_blocks=compile_blocks)).rows_of_peaks()

    # Count an update by the usual optimizer and by the fused one.
    updates = []
    for is_fused in (False, True):
        optimizer = build_optimizer(model, replace(settings, fused_optimizer=is_fused))
        update = work_of_update(OPTIMIZER, optimizer.step)
        state = tree_leaves(list(optimizer.state.values()))
        updates.append((update, sum(tensor.nbytes for tensor in state if isinstance(tensor, torch.Tensor))))
    nbytes = {name: sum(weight.nbytes for weight in getattr(model, name).parameters())
              for name in ('unet', 'text_encoder', 'vae')}
    return Step(memory.at(peaks), work, updates, ema_update(model), nbytes)


def ema_update(model: ComposerModel) -> Work:
    """Return the work of moving the EMA weights: read them and the raw weights, and write the EMA weights."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    kernels = multi_tensor_kernels(sum(weight.numel() for weight in weights))
    return work_by_kind([(EMA_UPDATE, 0, 0, 3 * sum(weight.nbytes for weight in weights), kernels)])


def build_on_meta(settings: Train, build_model: Callable[..., ComposerModel]) -> ComposerModel:
    """Build the model of a run on the meta device, always with the VAE.

    `build_model` also builds the real model, so every switch of the run has its real effect on the count.
    """
    return build_model(settings, False, torch.device('meta'), find_model(settings.model_name))


def trace_step(meta_model: ComposerModel, precision: str, attention: str = 'sdpa') -> tuple[StepMemory, StepWork]:
    """Return the memory and the work of a step without its update, in half precision on a GPU or in float32.

    Fused attention never stores the matrix of all queries and keys. The CPU's kernel represents the GPU's kernels,
    because it keeps the same tensors: queries, keys, values, the result and one number per query. --attention math is
    traced as its products and softmax, which write, read and keep the matrix. The tensors of `meta_model` become fake
    ones.
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


def work_of_update(kind: str, update: Callable) -> Work:
    """Return the work of a function that changes fake tensors once per step, such as an optimizer's.

    It is called twice, and its second call counts, because the first call also creates the optimizer state.
    """
    update()
    counter = StepCounter([])
    with counter:
        update()
    return work_by_kind((kind, *work) for _, _, *work in counter.work)


def work_by_kind(rows: Iterable[tuple]) -> Work:
    """Return the sums, by kind, of rows (kind, and the four amounts of Work)."""
    work = {}
    for kind, *amounts in rows:
        work[kind] = work.get(kind, 0) + np.array(amounts, dtype=float)
    return work


def memory_and_work(model: ComposerModel, counter: StepCounter) -> tuple[StepMemory, StepWork]:
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
