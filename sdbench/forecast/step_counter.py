"""Count memory and work of a step while its operators are called, on tensors that may have no memory."""
import weakref
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sdbench.forecast.operators import Operator, count_operator
from sdbench.forecast.speed import Work

ITEMS = ('gradients', 'cast weights', 'activations', 'working memory')
# Images of the step that is traced, a prime that divides the size of nothing else: a storage whose bytes it divides
# holds something for each image.
TRACED_IMAGES = 1009


@dataclass(frozen=True)
class StepMemory:
    """Bytes that are alive at each operator of a step, apart from the weights, as a function of the microbatch.

    Attributes:
        fixed: int64 (operators, ITEMS), whatever the microbatch.
        per_image: int64 (operators, ITEMS), for each image of the microbatch.
        in_encoder: bool (operators,), those of the VAE's encoder, which a step on latents has not.
        gradients: of all weights together.
    """
    fixed: np.ndarray
    per_image: np.ndarray
    in_encoder: np.ndarray
    gradients: int

    def peak(self, microbatch: int, accumulated: bool, latents: bool = False) -> dict[str, int]:
        """Return the bytes by item where most are alive.

        activations: what autograd keeps for the backward pass. cast weights: those in half precision. working memory:
        what operators hand each other, the encoders' included, and with gradient checkpointing what is computed again.

        Args:
            microbatch: images that go through the model at once.
            accumulated: the gradients of an earlier microbatch are there. Else they come as the activations go.
            latents: the images were encoded before. Themselves, 6 MiB each at 512 pixels, they stay counted.
        """
        alive = self.fixed + microbatch * self.per_image
        if latents:
            alive = alive[~self.in_encoder]
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
        in_encoder: whether the VAE's encoder is at work. `encoder_rows` has it for each of `rows`.
        arrivals: of each gradient its bytes, and the work until it was there, fixed and for each image.
        fixed, per_image: the work of all operators by kind, whatever the microbatch, and for each image of it, but for
            that of the VAE's encoder.
        encoder_fixed, encoder_per_image: the same of the VAE's encoder.
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
        self.in_encoder = False
        self.encoder_rows: list[bool] = []
        self.arrivals: list[tuple[int, Work, Work]] = []
        self.fixed = defaultdict(Work)
        self.per_image = defaultdict(Work)
        self.encoder_fixed = defaultdict(Work)
        self.encoder_per_image = defaultdict(Work)

    def watch_encoder(self, vae: AutoencoderKL) -> None:
        """Count from now on what a VAE's encoder does apart from all else."""
        encode = vae.encode

        def watched(image: torch.Tensor) -> AutoencoderKLOutput:
            self.in_encoder = True
            encoded = encode(image)
            self.in_encoder = False
            return encoded

        vae.encode = watched

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call an operator, and count what it asks of a GPU and what is alive after it."""
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.prim.device.default:  # two of three calls; it has no tensors
            return result
        operator = count_operator(function, args, kwargs or {}, result)
        if operator is not None:
            self.add_work(operator)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.notice(tensor)
        if function is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights:
            self.count_as('cast weights', result)
        self.note_row()
        return result

    def note_row(self) -> None:
        """Note what is alive now."""
        self.rows.append(self.now.copy())
        self.encoder_rows.append(self.in_encoder)

    def add_work(self, operator: Operator) -> None:
        """Add an operator to the work of its kind: bytes that the number of images divides are those of images."""
        of_images = sum(size for size in operator.sizes if size % self.images == 0)
        of_step = sum(operator.sizes) - of_images
        fixed, per_image = self.fixed, self.per_image
        if self.in_encoder:
            fixed, per_image = self.encoder_fixed, self.encoder_per_image
        fixed[operator.kind] += Work(0, of_step, operator.kernels)
        per_image[operator.kind] += Work(operator.flops / self.images, of_images / self.images, 0)

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
        """Count as another item from now on what was counted as working memory."""
        storage = tensor.untyped_storage()
        if self.items.get(storage._cdata) == 'working memory':
            self.items[storage._cdata] = item
            self.add('working memory', -storage.nbytes())
            self.add(item, storage.nbytes())

    def free(self, address: int, size: int) -> None:
        """Count a storage no longer."""
        self.add(self.items.pop(address), -size)

    def add(self, item: str, size: int) -> None:
        """Add bytes to what is alive of an item: for each image if the number of images divides them."""
        column = ITEMS.index(item)
        if size % self.images == 0:
            self.now[1, column] += size // self.images
        else:
            self.now[0, column] += size
