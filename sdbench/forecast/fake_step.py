"""Memory and work of a training step, found on tensors that have shapes but no memory: without a GPU and weights.

The model takes a step, forward, backward and update, under torch's FakeTensorMode. At each operator the bytes that are
alive are noted: so the peak is where it is on a device, and not the sum of what is alive at different times. What each
operator asks of a GPU is counted in the same trace (operators.py). One trace tells memory and work of every microbatch.
torch's own MemTracker, with which the tests compare it, counts one microbatch, and no model with frozen weights (torch
2.7).
"""
import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from composer import ComposerModel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ema import ShadowModel, compute_ema
from sdbench.forecast.operators import AVERAGE, EXCHANGE, UPDATE, Operator, count_operator
from sdbench.forecast.speed import Bucket, StepWork, Work
from sdbench.models.loading import AUTOCAST_DTYPES
from sdbench.training.microbatch import blank_batch

ITEMS = ('gradients', 'cast weights', 'activations', 'working memory')
# Images of the step that is traced, a prime that divides the size of nothing else: a storage whose bytes it divides
# holds something for each image.
TRACED_IMAGES = 1009
BUCKET_BYTES = 25 * 2**20  # that DistributedDataParallel fills before it sends them


@dataclass(frozen=True)
class StepMemory:
    """Bytes that are alive at each operator of a step, beside the weights, as a function of the microbatch.

    Attributes:
        fixed: int64 (operators, ITEMS), whatever the microbatch.
        per_image: int64 (operators, ITEMS), for each image of the microbatch.
        gradients: of all weights together.
    """
    fixed: np.ndarray
    per_image: np.ndarray
    gradients: int

    def peak(self, microbatch: int, accumulated: bool) -> dict[str, int]:
        """Bytes by item where most are alive.

        activations: what autograd keeps for the backward pass. cast weights: those in half precision. working memory:
        what operators hand each other, the encoders' included, and with gradient checkpointing what is computed again.

        Args:
            microbatch: images that go through the model at once.
            accumulated: the gradients of an earlier microbatch are there. Else they come as the activations go.
        """
        alive = self.fixed + microbatch * self.per_image
        if accumulated:
            alive[:, ITEMS.index('gradients')] = self.gradients
        row = alive[alive.sum(axis=1).argmax()]
        return dict(zip(ITEMS, row.tolist(), strict=True))


class StepCounter(TorchDispatchMode):
    """Counts at each operator the bytes of all storages that are alive, but for those of the weights, and its work.

    A gradient is told from other memory by a hook of its weight.

    Attributes:
        images: of the step.
        items: of each storage that is alive, by its address.
        now: int64 (2, ITEMS), what is alive whatever the microbatch, and for each image of it.
        rows: `now` after each operator.
        arrivals: of each gradient its bytes, and the work until it was there, fixed and for each image.
        fixed, per_image: the work of all operators by kind, whatever the microbatch, and for each image of it.
    """

    def __init__(self, weights: list[torch.Tensor], images: int = TRACED_IMAGES):
        super().__init__()
        self.images = images
        self.weights = {weight.untyped_storage()._cdata for weight in weights}
        for weight in weights:
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self.notice_gradient)
        self.items: dict[int, str] = {}
        self.now = np.zeros((2, len(ITEMS)), dtype=np.int64)
        self.rows: list[np.ndarray] = []
        self.arrivals: list[tuple[int, Work, Work]] = []
        self.fixed = defaultdict(Work)
        self.per_image = defaultdict(Work)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.prim.device.default:  # two of three calls; it has no tensors
            return result
        self.count_work(function, args, kwargs or {}, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.notice(tensor)
        if function is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights:
            self.count_as('cast weights', result)
        self.rows.append(self.now.copy())
        return result

    def count_work(self, function, args: tuple, kwargs: dict, result) -> None:
        """Add what a call asks of a GPU to the work of its kind."""
        operator = count_operator(function, args, kwargs, result)
        if operator is not None:
            self.add_work(operator)

    def add_work(self, operator: Operator) -> None:
        of_images = sum(size for size in operator.sizes if size % self.images == 0)
        of_step = sum(operator.sizes) - of_images
        self.fixed[operator.kind] += Work(0, of_step, operator.kernels)
        self.per_image[operator.kind] += Work(operator.flops / self.images, of_images / self.images, 0)

    def notice_gradient(self, weight: torch.Tensor) -> None:
        """Count a gradient that is there now, and note when it came."""
        self.count_as('gradients', weight.grad)
        self.arrivals.append((weight.nbytes, *self.work_so_far()))

    def work_so_far(self) -> tuple[Work, Work]:
        """Return the work of all kinds, whatever the microbatch, and for each image of it."""
        return sum(self.fixed.values(), Work()), sum(self.per_image.values(), Work())

    def notice(self, tensor: torch.Tensor) -> None:
        """Count a storage that is new, until it is freed."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.weights or address in self.items:
            return
        self.items[address] = 'working memory'
        self.add('working memory', storage.nbytes())
        weakref.finalize(storage, self.free, address, storage.nbytes())

    def count_as(self, item: str, tensor: torch.Tensor) -> None:
        """From now on, what was counted as working memory is another item."""
        storage = tensor.untyped_storage()
        if self.items.get(storage._cdata) == 'working memory':
            self.items[storage._cdata] = item
            self.add('working memory', -storage.nbytes())
            self.add(item, storage.nbytes())

    def free(self, address: int, size: int) -> None:
        self.add(self.items.pop(address), -size)

    def add(self, item: str, size: int) -> None:
        column = ITEMS.index(item)
        if size % self.images == 0:
            self.now[1, column] += size // self.images
        else:
            self.now[0, column] += size


def trace_step(outline: ComposerModel, precision: str, prepare_update: Callable | None = None,
               attention: str = 'sdpa') -> tuple[StepMemory, StepWork]:
    """Return memory and work of a step, on a GPU in half precision, or in float32 anywhere.

    Attention is computed by a kernel that keeps no matrix of all queries and keys. A CPU's stands for a GPU's: both
    keep queries, keys, values, the result and one number a query. With --attention math it is the products and the
    softmax that they are made of, and the matrix is written, read and kept.

    Args:
        outline: the model on the meta device; its tensors become fake ones.
        precision: amp_bf16, amp_fp16 or fp32.
        prepare_update: gives for a model what is called after a step, by kind. None: nothing is.
        attention: as --attention has it.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the scheduler's tables are real
    model = with_fake_tensors(outline, mode)
    counter = StepCounter(list(model.parameters()))
    with mode, counter, torch.compiler.set_stance('force_eager'), norms_in_float32():
        take_step(model, precision, counter, attention)
    return counted(model, counter, trace_update(model, prepare_update, mode))


def with_fake_tensors(outline: ComposerModel, mode: FakeTensorMode) -> ComposerModel:
    """Give a model on the meta device fake tensors of a CPU, and return it in training mode.

    It is what Module.to_empty does, which takes seconds under the mode; torch 2.15 changes no type of a fake parameter.
    """
    cpu = torch.device('cpu')
    return outline.train()._apply(lambda tensor: FakeTensor(mode, tensor.detach(), cpu))


def take_step(model: ComposerModel, precision: str, counter: StepCounter, attention: str = 'sdpa') -> None:
    """Take a step of as many images as are counted, forward and backward."""
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        counter.count_as('activations', tensor)
        return tensor

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


def counted(model: ComposerModel, counter: StepCounter, update: dict[str, Work]) -> tuple[StepMemory, StepWork]:
    """Return memory and work of the step that `counter` has seen, with the work of the update after it."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = sum(weight.nbytes for weight in trainable)
    work = StepWork(dict(counter.fixed), dict(counter.per_image),
                    accumulation={EXCHANGE: Work(0, 3 * gradients, len(trainable))},  # read two, write their sum
                    update=update,
                    exchange={EXCHANGE: Work(0, 4 * gradients, 2 * len(trainable))},  # read and write, there and back
                    buckets=fill_buckets(counter.arrivals, *counter.work_so_far()))
    rows = np.array(counter.rows)  # (operators, 2, ITEMS)
    return StepMemory(rows[:, 0], rows[:, 1], gradients), work


def fill_buckets(arrivals: list[tuple[int, Work, Work]], fixed: Work, per_image: Work) -> list[Bucket]:
    """Return the buckets that DistributedDataParallel fills with gradients as they come, and sends one by one.

    Args:
        arrivals: of each gradient its bytes, and the work until it was there, fixed and for each image.
        fixed: all work of a microbatch, whatever its size.
        per_image: all work of each of its images beside.
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
    """What happens once a step: the work of the second update, since the first makes the optimizer's state."""
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
    """For `trace_step`: AdamW in one kernel or in several, and the average of the weights, as a run has them."""
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
    """A context in which autocast on a CPU computes group and layer norms in float32, as CUDA's autocast does.

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
