"""Memory and work of a training step, found on tensors that have shapes but no memory: without a GPU and weights.

The model takes a step, forward, backward and update, under torch's FakeTensorMode. At each operator the bytes that are
alive are noted (step_counter.py): so the peak is where it is on a device, and not the sum of what is alive at different
times. What each operator asks of a GPU is counted in the same trace (operators.py). One trace tells memory and work of
every microbatch.
torch's own MemTracker, with which the tests compare it, counts one microbatch, and no model with frozen weights (torch
2.7).
"""
import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from composer import ComposerModel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from ema import ShadowModel, compute_ema
from sdbench.forecast.operators import AVERAGE, EXCHANGE, UPDATE
from sdbench.forecast.speed import Bucket, StepWork, Work
from sdbench.forecast.step_counter import StepCounter, StepMemory
from sdbench.models.loading import AUTOCAST_DTYPES
from sdbench.training.microbatch import blank_batch

BUCKET_BYTES = 25 * 2**20  # that DistributedDataParallel fills before it sends them


def trace_step(meta_model: ComposerModel, precision: str, prepare_update: Callable | None = None,
               attention: str = 'sdpa') -> tuple[StepMemory, StepWork]:
    """Return memory and work of a step, on a GPU in half precision, or in float32 anywhere.

    Attention is computed by a kernel that keeps no matrix of all queries and keys. A CPU's stands for a GPU's: both
    keep queries, keys, values, the result and one number a query. With --attention math it is the products and the
    softmax that they are made of, and the matrix is written, read and kept.

    Args:
        meta_model: the model on the meta device; its tensors become fake ones.
        precision: amp_bf16, amp_fp16 or fp32.
        prepare_update: gives for a model what is called after a step, by kind. None: nothing is.
        attention: as --attention has it.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the scheduler's tables are real
    model = with_fake_tensors(meta_model, mode)
    counter = StepCounter(list(model.parameters()))
    with mode, counter, torch.compiler.set_stance('force_eager'), norms_in_float32():
        forward_and_backward(model, precision, counter, attention)
    return memory_and_work(model, counter, trace_update(model, prepare_update, mode))


def with_fake_tensors(meta_model: ComposerModel, mode: FakeTensorMode) -> ComposerModel:
    """Give a model on the meta device fake tensors of a CPU, and return it in training mode.

    It is what Module.to_empty does, which takes seconds under the mode; torch 2.15 changes no type of a fake parameter.
    """
    cpu = torch.device('cpu')
    return meta_model.train()._apply(lambda tensor: FakeTensor(mode, tensor.detach(), cpu))


def forward_and_backward(model: ComposerModel, precision: str, counter: StepCounter, attention: str = 'sdpa') -> None:
    """Take a step of as many images as are counted, forward and backward."""
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        counter.count_as('activations', tensor)
        return tensor

    if model.vae is not None:
        counter.watch_encoder(model.vae)
    backend = SDPBackend.MATH if attention == 'math' else SDPBackend.FLASH_ATTENTION
    autocast = torch.autocast('cpu', AUTOCAST_DTYPES.get(precision), enabled=precision in AUTOCAST_DTYPES)
    batch = blank_batch(model, counter.images, torch.float32, 'cpu')
    composers_copy = tree_map(torch.clone, batch)  # which its Trainer keeps through the step
    with sdpa_kernel(backend), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast:
            outputs = model(batch)
            loss = model.loss(outputs, batch)
        loss.backward()
    del composers_copy


def memory_and_work(model: ComposerModel, counter: StepCounter, update: dict[str, Work]) -> tuple[StepMemory, StepWork]:
    """Return memory and work of the step that `counter` has seen, with the work of the update after it."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = sum(weight.nbytes for weight in trainable)
    work = StepWork(dict(counter.fixed), dict(counter.per_image),
                    accumulation={EXCHANGE: Work(0, 3 * gradients, len(trainable))},  # read two, write their sum
                    update=update,
                    exchange={EXCHANGE: Work(0, 4 * gradients, 2 * len(trainable))},  # read and write, there and back
                    buckets=fill_buckets(counter.arrivals, *counter.work_so_far()),
                    encoder_fixed=dict(counter.encoder_fixed), encoder_per_image=dict(counter.encoder_per_image))
    rows = np.array(counter.rows)  # (operators, 2, ITEMS)
    return StepMemory(rows[:, 0], rows[:, 1], np.array(counter.encoder_rows), gradients), work


def fill_buckets(arrivals: list[tuple[int, Work, Work]], fixed: Work, per_image: Work) -> list[Bucket]:
    """Return the buckets that DistributedDataParallel fills with gradients as they come, and sends one by one.

    Args:
        arrivals: of each gradient its bytes, and the work until it was there, fixed and for each image.
        fixed: all work of a microbatch, whatever its size.
        per_image: in addition, all work of each of its images.
    """
    buckets = []
    nbytes = 0
    for number, (size, fixed_so_far, per_image_so_far) in enumerate(arrivals, start=1):
        nbytes += size
        if nbytes >= BUCKET_BYTES or number == len(arrivals):
            buckets.append(Bucket(nbytes, fixed - fixed_so_far, per_image - per_image_so_far))
            nbytes = 0
    return buckets


def trace_update(model: ComposerModel, prepare_update: Callable | None, mode: FakeTensorMode) -> dict[str, Work]:
    """Count what happens once a step: the second update, since the first makes the optimizer's state."""
    if prepare_update is None:
        return {}
    works = {}
    with mode:
        for kind, update in prepare_update(model).items():
            update()
            counter = StepCounter([])
            with counter:
                update()
            works[kind] = sum(counter.fixed.values(), Work())
    return works


def updater(fused: bool, use_ema: bool) -> Callable:
    """Return for `trace_step` AdamW in one kernel or in several, and the average of the weights, as a run has them."""
    def prepare(model: ComposerModel) -> dict[str, Callable]:
        optimizer = torch.optim.AdamW(model.unet.parameters(), fused=fused, foreach=not fused)
        updates = {UPDATE: optimizer.step}
        if use_ema:
            average = ShadowModel(model)
            updates[AVERAGE] = lambda: compute_ema(model, average, 0.999)
        return updates
    return prepare


@contextlib.contextmanager
def norms_in_float32() -> Iterator[None]:
    """Let autocast on a CPU compute group and layer norms in float32, as CUDA's autocast does.

    A CPU's leaves them in half precision. All other operators of the model keep the same for the backward pass.
    """
    def cast(module: torch.nn.Module, inputs: tuple) -> tuple | None:
        if type(module) in (torch.nn.GroupNorm, torch.nn.LayerNorm) and torch.is_autocast_enabled('cpu'):
            return tuple(tensor.float() for tensor in inputs)
        return None

    hook = torch.nn.modules.module.register_module_forward_pre_hook(cast)
    try:
        yield
    finally:
        hook.remove()
