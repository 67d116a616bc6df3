"""Count memory and work of a step while its operators are called, on tensors that may have no memory.

One trace serves every microbatch, because it is of 1009 images. 1009 is a prime, and divides the size of nothing in the
model: so a tensor whose bytes it divides holds something for each image, and any other one is as large however many
images there are. A trace of two steps of different sizes would say the same, and take twice as long. For example, the
first convolution of the UNet reads and writes these:

    what it is            shape                 bytes          divided by 1009
    latents in bf16       (1009, 4, 64, 64)     33,062,912     32,768, so 32,768 for each image
    its weight            (320, 4, 3, 3)        23,040         22.8, so 23,040 whatever the microbatch
    its result            (1009, 320, 64, 64)   2,645,032,960  2,621,440, so as many for each image

A microbatch of 32 images then moves 32 x (32,768 + 2,621,440) + 23,040 bytes there, and a result that is kept for the
backward pass takes 32 x 2,621,440.

What each operator asks of a GPU, arithmetic, bytes and kernels, follows from the shapes of its tensors alone. Bytes are
those that its kernels read and write, whatever a cache may hold, but for LAYOUTS. The operators are those of a CPU's
trace. Where CUDA's kernels do more, it is said here: each rule names what they do.
"""
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

PRODUCTS = 'matrix products'
CONVOLUTIONS = 'convolutions'
ATTENTION = 'attention'
NORMS = 'norms'
LAYOUTS = 'scattered reads'  # beyond an image itself, where a group norm changes its layout
CASTS = 'casts between precisions'
POINTWISE = 'pointwise, sums and copies'
UPDATE = 'optimizer'
AVERAGE = 'average of the weights'
FUSED = 'fused kernels'  # of a compiled step: all that is left to no library
EXCHANGE = 'sums of gradients'  # over microbatches, and to and from the buckets that GPUs exchange

KIND_BY_NAME = {'mm': PRODUCTS, 'addmm': PRODUCTS, 'bmm': PRODUCTS, 'baddbmm': PRODUCTS,
                'convolution': CONVOLUTIONS, 'convolution_backward': CONVOLUTIONS,
                '_scaled_dot_product_flash_attention_for_cpu': ATTENTION,
                '_scaled_dot_product_flash_attention_for_cpu_backward': ATTENTION,
                'native_group_norm': NORMS, 'native_group_norm_backward': NORMS,
                'native_layer_norm': NORMS, 'native_layer_norm_backward': NORMS, '_to_copy': CASTS}
KERNELS_BY_NAME = {'native_group_norm': 2, 'native_group_norm_backward': 4, 'native_layer_norm_backward': 3,
                   '_scaled_dot_product_flash_attention_for_cpu_backward': 3, 'slice_backward': 2, '_safe_softmax': 4}
# Elements that one kernel of torch's multi-tensor operators takes: 320 blocks of 65,536
MULTI_TENSOR_ELEMENTS = 320 * 65_536

# Bytes that torch's copy reads for each element where it changes the layout of a group norm's image. It writes in
# order, and the next element to read lies in another sector of memory, of 32 bytes; caches answer some of these reads.
# Fitted to two runs on an H100 (docs/forecast.md).
READ_FOR_AN_ELEMENT = 22

ITEMS = ('gradients', 'cast weights', 'activations', 'working memory')
TRACED_IMAGES = 1009  # a prime: see above


def count_operator(function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], result: Any
                   ) -> tuple[str, int, list[int], int, list[int]] | None:
    """Return what a call asks of a GPU; None where nothing is computed: a view, or memory without content.

    That is its kind, FLOPs (1 multiply-add = 2), the bytes of each tensor that is read or written, once for each time,
    the kernels that CUDA launches, and the bytes that are read in vain for each image whose layout changes for a group
    norm.
    """
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    name = function.overloadpacket.__name__
    if not function._schema.is_mutable:
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        without_content = name.startswith(('empty', 'new_empty', 'detach', 'lift_fresh', '_local_scalar'))
        if not written or without_content or written[0].untyped_storage()._cdata in storages:
            return None
    sizes = sizes_of([*read, *written])
    if name.startswith(('_foreach_', '_fused_')):  # on lists of tensors: those that it changes are written as well
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                sizes += sizes_of(value)
        elements = sum(tensor.numel() for tensor in args[0])
        return UPDATE, 0, sizes, math.ceil(elements / MULTI_TENSOR_ELEMENTS), []

    kind = KIND_BY_NAME.get(name, POINTWISE)
    kernels = KERNELS_BY_NAME.get(name, 1)
    flops = 0
    shapes = [tensor.shape for tensor in read]
    if kind == ATTENTION and name.endswith('backward'):  # torch's counter does not know a CPU's names of attention
        flops = sdpa_backward_flop_count(*shapes[:4])  # gradient, queries, keys, values
    elif kind == ATTENTION:
        flops = sdpa_flop_count(*shapes[:3])
    elif function.overloadpacket in flop_registry:
        flops = flop_registry[function.overloadpacket](*args, **kwargs, out_val=result)

    # kernels that CUDA runs and a CPU's trace does not show
    copied = []
    in_vain = []
    if name == 'convolution':
        image, weight, bias = args[:3]  # (B, C, H, W), (D, C, k, k), (D,)
        sizes = sizes_of([image, weight, result])
        if bias is not None:  # is added by a kernel of its own
            sizes += sizes_of([result, result])
            kernels += 1
        copied = copies_for_layout([image, result], torch.channels_last)
    elif name == 'convolution_backward':
        sizes, kernels, copied = convolution_backward(args, result)
    elif kind == NORMS and 'group' in name:
        sizes += sizes_of(read[:2] if 'backward' in name else read[:1])  # are read for the statistics first
        copied = copies_for_layout([read[0], written[0]], torch.contiguous_format)
        in_vain = [size // read[0].element_size() * READ_FOR_AN_ELEMENT - size for size in copied[::2]]
    elif name == 'native_layer_norm_backward':
        sizes += sizes_of(read[:2])  # of the input, then of weight and bias
    elif name == '_safe_softmax':  # looks for rows that are all masked, and writes its result once more with them at 0
        sizes += sizes_of([read[0], result, result])
    return kind, flops, sizes + copied, kernels + len(copied) // 2, in_vain


def sizes_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the bytes of each; what an expanded tensor repeats lies in memory once."""
    return [min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors]


def convolution_backward(args: tuple, result: tuple) -> tuple[list[int], int, list[int]]:
    """Return sizes, kernels and sizes of copies: the gradients of image, weight and bias have a kernel each."""
    gradient, image, weight = args[:3]
    of_image, of_weight, of_bias = result
    sizes = []
    kernels = 0
    images = [gradient, image]
    if of_image is not None:
        sizes += sizes_of([gradient, weight, of_image])
        kernels += 1
        images.append(of_image)
    if of_weight is not None:
        sizes += sizes_of([gradient, image, of_weight])
        kernels += 1
    if of_bias is not None:
        sizes += sizes_of([gradient])
        kernels += 1
    return sizes, kernels, copies_for_layout(images, torch.channels_last)


def copies_for_layout(images: list[torch.Tensor], layout: torch.memory_format) -> list[int]:
    """Return the bytes of reading and writing each image that is not in the layout that a kernel needs.

    cuDNN's convolutions in half precision work on channels_last, torch's group norm on channels first.
    """
    sizes = []
    for image in images:
        if not image.is_contiguous(memory_format=layout):
            sizes += sizes_of([image, image])
    return sizes


@dataclass(frozen=True)
class StepMemory:
    """Bytes that are alive at each operator of a step, apart from the weights, as a function of the microbatch.

    Attributes:
        alive: int64 (operators, 2, ITEMS), whatever the microbatch, and for each image of it.
        in_encoder: bool (operators,), those of the VAE's encoder, which a step on latents has not.
        gradients: of all weights together.
    """
    alive: np.ndarray
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
        alive = self.alive[:, 0] + microbatch * self.alive[:, 1]
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
        items: of each storage that is alive, by its address.
        now: int64 (2, ITEMS), what is alive whatever the microbatch, and for each image of it.
        rows: `now` after each operator.
        in_encoder: whether the VAE's encoder is at work. `encoder_rows` has it for each of `rows`.
        work: of each operator that computes something whether it is the encoder's, its kind, and the four amounts of
            Work in speed.py.
        arrivals: of each gradient its bytes, and how much of `work` was done when it was there.
    """

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.weights = {weight.untyped_storage()._cdata for weight in weights}
        for weight in weights:
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self.notice_gradient)
        self.items: dict[int, str] = {}
        self.now = np.zeros((2, len(ITEMS)), dtype=np.int64)
        self.rows: list[np.ndarray] = []
        self.in_encoder = False
        self.encoder_rows: list[bool] = []
        self.work: list[tuple[bool, str, float, float, float, int]] = []
        self.arrivals: list[tuple[int, int]] = []

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
        if function is torch.ops.prim.device.default:  # two of three calls, for which torch's own answer takes long
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        operator = count_operator(function, args, kwargs or {}, result)
        if operator is not None:
            *operator, in_vain = operator
            self.add_work(*operator)
            if in_vain:
                self.add_work(LAYOUTS, 0, in_vain, 0)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.notice(tensor)
        if function is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights:
            self.count_as('cast weights', result)
        self.rows.append(self.now.copy())
        self.encoder_rows.append(self.in_encoder)
        return result

    def add_work(self, kind: str, flops: int, sizes: list[int], kernels: int) -> None:
        """Add an operator to the work: bytes that the number of images divides are those of images."""
        of_images = sum(size for size in sizes if size % TRACED_IMAGES == 0)
        self.work.append((self.in_encoder, kind, flops / TRACED_IMAGES, of_images / TRACED_IMAGES,
                          sum(sizes) - of_images, kernels))

    def notice_gradient(self, weight: torch.Tensor) -> None:
        """Count a gradient that is there now, and note when it came."""
        self.count_as('gradients', weight.grad)
        self.arrivals.append((weight.nbytes, len(self.work)))

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
        if size % TRACED_IMAGES == 0:
            self.now[1, column] += size // TRACED_IMAGES
        else:
            self.now[0, column] += size
