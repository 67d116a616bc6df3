"""Count the memory and the work of a training step while its operators are called, on tensors that may have no memory.

One trace serves every microbatch size, because it is a step with 1009 images. 1009 is prime and divides no size in the
model. So if 1009 divides the bytes of a tensor, the tensor holds something for each image, and any other tensor has the
same size for any number of images. For example, the first convolution of the UNet reads and writes these tensors:

    tensor            shape                 bytes          divided by 1009
    latents in bf16   (1009, 4, 64, 64)     33,062,912     32,768, so 32,768 per image
    weight            (320, 4, 3, 3)        23,040         22.8, so 23,040 for any microbatch
    result            (1009, 320, 64, 64)   2,645,032,960  2,621,440, so 2,621,440 per image

With a microbatch of 32 images this convolution therefore moves 32 x (32,768 + 2,621,440) + 23,040 bytes, and its result
takes 32 x 2,621,440 bytes until the backward pass. Two traces, with 2 and with 3 images, give the same memory,
and bytes that differ by at most 0.23 % for one kind of operator, but they take nearly twice as long.

The arithmetic, the bytes and the kernels of an operator follow from the shapes of its tensors. All bytes that its
kernels read and write count, whether or not a cache holds them, except for LAYOUTS. The trace runs on a CPU, so it
shows the operators of a CPU. Where CUDA runs more kernels than the trace shows, a rule below adds them.
"""
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from sdbench.forecast.step import ATTENTION, CASTS, CONVOLUTIONS, ITEMS, LAYOUTS, NORMS, OPTIMIZER, POINTWISE, PRODUCTS

KIND_BY_NAME = {'mm': PRODUCTS, 'addmm': PRODUCTS, 'bmm': PRODUCTS, 'baddbmm': PRODUCTS,
                'convolution': CONVOLUTIONS, 'convolution_backward': CONVOLUTIONS,
                '_scaled_dot_product_flash_attention_for_cpu': ATTENTION,
                '_scaled_dot_product_flash_attention_for_cpu_backward': ATTENTION,
                'native_group_norm': NORMS, 'native_group_norm_backward': NORMS,
                'native_layer_norm': NORMS, 'native_layer_norm_backward': NORMS, '_to_copy': CASTS}
KERNELS_BY_NAME = {'native_group_norm': 2, 'native_group_norm_backward': 4, 'native_layer_norm_backward': 3,
                   '_scaled_dot_product_flash_attention_for_cpu_backward': 3, 'slice_backward': 2, '_safe_softmax': 4}
# Elements per kernel of torch's multi-tensor operators: 320 blocks with 65,536 elements each
MULTI_TENSOR_ELEMENTS = 320 * 65_536

# Bytes that torch's copy kernel reads per element when it changes the layout of a feature map for a group norm. It
# writes in order, but each element that it reads lies in another memory sector of 32 bytes. Caches serve some of these
# reads, so the figure was fitted to two runs on an H100 (docs/forecast-model.md).
BYTES_READ_PER_ELEMENT = 22

TRACED_IMAGES = 1009  # a prime, see above


def multi_tensor_kernels(elements: int) -> int:
    """Return the number of kernels that a multi-tensor operator launches for this many elements."""
    return math.ceil(elements / MULTI_TENSOR_ELEMENTS)


class OperatorWork(NamedTuple):
    """The work of one operator call on a GPU."""
    kind: str  # such as PRODUCTS
    flops: int  # 1 multiply-add = 2
    sizes: list[int]  # bytes of each tensor, once for each time that it is read or written
    kernels: int  # that CUDA launches
    in_vain: Sequence[int] = ()  # bytes read in vain for each feature map whose layout changes for a group norm


def count_operator(function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], result: Any
                   ) -> OperatorWork | None:
    """Return the work of one operator call on a GPU; None if it computes nothing: a view, or uninitialized memory."""
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    name = function.overloadpacket.__name__
    if not function._schema.is_mutable:
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        without_content = name.startswith(('empty', 'new_empty', 'detach', 'lift_fresh', '_local_scalar'))
        if not written or without_content or written[0].untyped_storage()._cdata in storages:
            return None
    sizes = sizes_of([*read, *written])

    # Operators of the optimizer work on lists of tensors, and also write the ones that they change in place.
    if name.startswith(('_foreach_', '_fused_')):
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                sizes += sizes_of(value)
        kernels = multi_tensor_kernels(sum(tensor.numel() for tensor in args[0]))
        return OperatorWork(OPTIMIZER, 0, sizes, kernels)

    # Arithmetic. torch's FLOP counter does not know the names of attention on a CPU.
    kind = KIND_BY_NAME.get(name, POINTWISE)
    kernels = KERNELS_BY_NAME.get(name, 1)
    flops = 0
    shapes = [tensor.shape for tensor in read]
    if kind == ATTENTION and name.endswith('backward'):
        flops = sdpa_backward_flop_count(*shapes[:4])  # gradient, queries, keys, values
    elif kind == ATTENTION:
        flops = sdpa_flop_count(*shapes[:3])
    elif function.overloadpacket in flop_registry:
        flops = flop_registry[function.overloadpacket](*args, **kwargs, out_val=result)

    # Add bytes and kernels that CUDA needs and the CPU's trace does not show. `copied` has two sizes for each copy, of
    # reading and of writing.
    copied = []
    in_vain = []
    if name == 'convolution':
        feature_map, weight, bias = args[:3]  # (B, C, H, W), (D, C, k, k), (D,)
        sizes = sizes_of([feature_map, weight, result])
        if bias is not None:  # a separate kernel adds the bias
            sizes += sizes_of([result, result])
            kernels += 1
        copied = copies_for_layout([feature_map, result], torch.channels_last)
    elif name == 'convolution_backward':
        sizes, kernels, copied = convolution_backward(args, result)
    elif kind == NORMS and 'group' in name:
        sizes += sizes_of(read[:2] if 'backward' in name else read[:1])  # a first pass reads them for the statistics
        copied = copies_for_layout([read[0], written[0]], torch.contiguous_format)
        in_vain = [size // read[0].element_size() * BYTES_READ_PER_ELEMENT - size for size in copied[::2]]
    elif name == 'native_layer_norm_backward':
        sizes += sizes_of(read[:2])  # once for the input's gradient, and again for the gradients of weight and bias
    elif name == '_safe_softmax':  # looks for rows that are fully masked, and writes its result again with zeros there
        sizes += sizes_of([read[0], result, result])
    return OperatorWork(kind, flops, sizes + copied, kernels + len(copied) // 2, in_vain)


def sizes_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the bytes of each tensor in memory. The repeated elements of an expanded tensor count only once."""
    return [min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors]


def convolution_backward(args: tuple, result: tuple) -> tuple[list[int], int, list[int]]:
    """Return sizes, kernels and sizes of copies: the gradients of input, weight and bias each have their own kernel."""
    gradient, input, weight = args[:3]
    input_gradient, weight_gradient, bias_gradient = result
    sizes = []
    kernels = 0
    feature_maps = [gradient, input]
    if input_gradient is not None:
        sizes += sizes_of([gradient, weight, input_gradient])
        kernels += 1
        feature_maps.append(input_gradient)
    if weight_gradient is not None:
        sizes += sizes_of([gradient, input, weight_gradient])
        kernels += 1
    if bias_gradient is not None:
        sizes += sizes_of([gradient])
        kernels += 1
    return sizes, kernels, copies_for_layout(feature_maps, torch.channels_last)


def copies_for_layout(feature_maps: list[torch.Tensor], layout: torch.memory_format) -> list[int]:
    """Return the bytes read and written to convert each tensor that is not in `layout`: two entries per tensor.

    cuDNN's convolutions in half precision need channels_last, and torch's group norm needs channels first.
    """
    sizes = []
    for tensor in feature_maps:  # (B, C, H, W)
        if not tensor.is_contiguous(memory_format=layout):
            sizes += sizes_of([tensor, tensor])
    return sizes


class StepCounter(TorchDispatchMode):
    """Counts, at each operator that is called in its context, the memory in use and the work.

    Memory is the storage of all tensors except the weights. A hook on each weight tells which storages are gradients.
    """

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.weights = {weight.untyped_storage()._cdata for weight in weights}
        for weight in weights:
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self.notice_gradient)
        self.items: dict[int, str] = {}  # the item of each storage in use, by the address of the storage
        # Bytes in use, (2, ITEMS): those that do not depend on the microbatch, and those per image
        self.now = np.zeros((2, len(ITEMS)), dtype=np.int64)
        self.rows: list[np.ndarray] = []  # `now` after each operator
        self.in_encoder = False  # whether the VAE encoder is running
        self.encoder_rows: list[bool] = []  # `in_encoder` at each operator
        # For each operator that computes something: `in_encoder`, its kind, and the four amounts of Work in speed.py
        self.work: list[tuple[bool, str, float, float, float, int]] = []
        # For each gradient in the order of the backward pass: its bytes, and the length of `work` at that time
        self.arrivals: list[tuple[int, int]] = []

    def watch_encoder(self, vae: AutoencoderKL) -> None:
        """Mark the work and the memory of a VAE's encoder from now on, because training on latents skips them."""
        encode = vae.encode

        def watched(image: torch.Tensor) -> AutoencoderKLOutput:
            self.in_encoder = True
            encoded = encode(image)
            self.in_encoder = False
            return encoded

        vae.encode = watched

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call an operator, and count its work on a GPU and the memory that is in use after it."""
        if function is torch.ops.prim.device.default:  # two of three calls; torch's own answer takes long
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        operator = count_operator(function, args, kwargs or {}, result)
        if operator is not None:
            self.add_work(operator)
            if operator.in_vain:
                self.add_work(OperatorWork(LAYOUTS, 0, operator.in_vain, 0))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.notice(tensor)
        if function is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights:
            self.count_as('cast weights', result)
        self.rows.append(self.now.copy())
        self.encoder_rows.append(self.in_encoder)
        return result

    def add_work(self, operator: OperatorWork) -> None:
        # Sizes that TRACED_IMAGES divides are bytes for images.
        bytes_for_images = sum(size for size in operator.sizes if size % TRACED_IMAGES == 0)
        self.work.append((self.in_encoder, operator.kind, operator.flops / TRACED_IMAGES,
                          bytes_for_images / TRACED_IMAGES, sum(operator.sizes) - bytes_for_images, operator.kernels))

    def notice_gradient(self, weight: torch.Tensor) -> None:
        """Count the gradient of a weight, which has just been computed, and note when it came."""
        self.count_as('gradients', weight.grad)
        self.arrivals.append((weight.nbytes, len(self.work)))

    def notice(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until it is freed, unless it is counted already."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.weights or address in self.items:
            return
        self.items[address] = 'working memory'
        self.add('working memory', storage.nbytes())
        weakref.finalize(storage, self.free, address, storage.nbytes())

    def count_as(self, item: str, tensor: torch.Tensor) -> None:
        """Move the storage of a tensor from working memory to another item."""
        storage = tensor.untyped_storage()
        if self.items.get(storage._cdata) == 'working memory':
            self.items[storage._cdata] = item
            self.add('working memory', -storage.nbytes())
            self.add(item, storage.nbytes())

    def free(self, address: int, size: int) -> None:
        self.add(self.items.pop(address), -size)

    def add(self, item: str, size: int) -> None:
        """Add bytes to the memory in use for an item: per image if TRACED_IMAGES divides them."""
        column = ITEMS.index(item)
        if size % TRACED_IMAGES == 0:
            self.now[1, column] += size // TRACED_IMAGES
        else:
            self.now[0, column] += size
