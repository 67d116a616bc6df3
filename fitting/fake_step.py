"""The memory of a training step, found on tensors that have shapes but no memory. No GPU is needed, and no weights.

The model takes a step, forward and backward, under torch's FakeTensorMode. For each operator it is noted which storages
are alive, and what they are: so the peak is where it is on a device, and not the sum of what is alive at different
times.
"""
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from composer import ComposerModel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fitting.cuda_autocast import cuda_rules

AUTOCAST_DTYPES = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}
ITEMS = ('gradients', 'cast weights', 'activations', 'working memory')
# Images of the step that is traced, a prime that divides the size of nothing else: a storage whose bytes it divides
# holds something for each image.
TRACED_IMAGES = 1009


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape alone."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@dataclass(frozen=True)
class FakeModel:
    """A model whose tensors have shapes but no memory, and the mode that they live in."""
    model: ComposerModel
    mode: FakeTensorMode


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


class LiveStorages(TorchDispatchMode):
    """Notes for each storage between which operators it was alive.

    Attributes:
        born, died: the number of the operator that made it, and of the last one before it was freed; from 0.
        size: in bytes.
        casts: the storages that hold a weight in another type.
        operators: how many there were.
    """

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.weights = {weight.untyped_storage()._cdata for weight in weights}
        self.serials: dict[int, int] = {}  # of the storages that are alive, by their address
        self.born: list[int] = []
        self.died: list[int | None] = []
        self.size: list[int] = []
        self.casts: set[int] = set()
        self.operators = 0

    def serial(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage; None for a weight's, and for one that was there before."""
        return self.serials.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        if function is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights:
            self.casts.add(self.serial(result))
        self.operators += 1
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self.weights or address in self.serials:
            return
        self.serials[address] = len(self.born)
        self.born.append(self.operators)
        self.died.append(None)
        self.size.append(storage.nbytes())
        weakref.finalize(storage, self.free, address)

    def free(self, address: int) -> None:
        self.died[self.serials.pop(address)] = max(0, self.operators - 1)

    def alive(self, items: dict[str, set[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that are alive at each operator, whatever the microbatch and for each image of it, both int64
        (operators, ITEMS); what is in no item is working memory.
        """
        fixed = np.zeros((self.operators + 1, len(ITEMS)), dtype=np.int64)
        per_image = np.zeros_like(fixed)
        for serial, size in enumerate(self.size):
            names = [name for name, serials in items.items() if serial in serials]
            column = ITEMS.index(names[0] if names else 'working memory')
            change = fixed
            if size % TRACED_IMAGES == 0:
                change = per_image
                size //= TRACED_IMAGES
            change[self.born[serial], column] += size
            if self.died[serial] is not None:
                change[self.died[serial] + 1, column] -= size
        return fixed.cumsum(axis=0)[:-1], per_image.cumsum(axis=0)[:-1]


def build_fake(outline: ComposerModel) -> FakeModel:
    """A model of the meta device on a CPU without its memory.

    It is made there first and faked then, since torch 2.15 changes no type of a fake parameter.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the scheduler's tables are real
    cpu = torch.device('cpu')
    # what Module.to_empty does, which takes seconds under the mode
    return FakeModel(outline.train()._apply(lambda tensor: FakeTensor(mode, tensor.detach(), cpu)), mode)


def trace_step(fake: FakeModel, make_batch: Callable[[int], dict[str, torch.Tensor]], precision: str,
               fused_attention: bool = True) -> StepMemory:
    """The memory of forward and backward, on a GPU in half precision, or in float32 anywhere.

    Args:
        fake: it is left without gradients.
        make_batch: a microbatch of so many images, as the model takes it.
        precision: amp_bf16, amp_fp16 or fp32.
        fused_attention: attention by a kernel that keeps no matrix of all queries and keys. A CPU's stands for a GPU's:
            both keep queries, keys, values, the result and one number a query.
    """
    model = fake.model
    live = LiveStorages(list(model.parameters()))
    kept = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(live.serial(tensor))
        return tensor

    backends = [SDPBackend.FLASH_ATTENTION] if fused_attention else [SDPBackend.MATH]
    with fake.mode, no_collection(), live, sdpa_kernel(backends), torch.compiler.set_stance('force_eager'):
        batch = make_batch(TRACED_IMAGES)
        composers_copy = tree_map(torch.clone, batch)  # which its Trainer keeps through the step
        with cuda_rules(cache=True), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast('cpu', AUTOCAST_DTYPES.get(precision), enabled=precision in AUTOCAST_DTYPES):
                outputs = model(batch)
                loss = model.loss(outputs, batch)
            loss.backward()
    del composers_copy
    gradients = {live.serial(weight.grad) for weight in model.parameters() if weight.grad is not None}
    fixed, per_image = live.alive({'gradients': gradients, 'cast weights': live.casts, 'activations': kept})
    model.zero_grad(set_to_none=True)
    return StepMemory(fixed, per_image, sum(weight.nbytes for weight in model.parameters() if weight.requires_grad))


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python frees what nothing refers to, and looks for no cycles: so every trace frees at the same points."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
