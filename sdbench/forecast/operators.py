"""What each operator of a step asks of a GPU: arithmetic, bytes and kernels, from the shapes of its tensors alone.

Bytes are those that its kernels read and write, whatever a cache may hold. The operators are those of a CPU's trace.
Where CUDA's kernels do more, it is said here: each rule names what they do.
"""
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

PRODUCTS = 'matrix products'
CONVOLUTIONS = 'convolutions'
ATTENTION = 'attention'
NORMS = 'norms'
CASTS = 'casts between precisions'
POINTWISE = 'pointwise, sums and copies'
UPDATE = 'optimizer'
AVERAGE = 'average of the weights'
FUSED = 'fused pointwise kernels'  # of a compiled step, as Inductor fuses what is not for a library
FUSED_REDUCTIONS = 'fused reductions'  # the same with sums over a tensor in them, as norms have
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


class Operator(NamedTuple):
    """One call.

    Attributes:
        kind: of the table of where the time goes.
        flops: 1 multiply-add = 2.
        sizes: bytes of each tensor that is read or written, once for each time.
        kernels: that CUDA launches.
    """
    kind: str
    flops: int
    sizes: list[int]
    kernels: int


def count_operator(function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], result: Any
                   ) -> Operator | None:
    """Return what a call asks of a GPU; None where nothing is computed: a view, or memory without content."""
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    name = function.overloadpacket.__name__
    if is_without_kernel(function, name, read, written):
        return None
    sizes = sizes_of([*read, *written])
    if name.startswith(('_foreach_', '_fused_')):
        return multi_tensor_operator(function, args, sizes)

    kind = KIND_BY_NAME.get(name, POINTWISE)
    kernels = KERNELS_BY_NAME.get(name, 1)
    flops = 0
    if kind == ATTENTION:
        flops = attention_flops(name, read)
    elif function.overloadpacket in flop_registry:
        flops = flop_registry[function.overloadpacket](*args, **kwargs, out_val=result)

    # kernels that CUDA runs and a CPU's trace does not show
    if name == 'convolution':
        image, weight, bias = args[:3]  # (B, C, H, W), (D, C, k, k), (D,)
        sizes = sizes_of([image, weight, result])
        if bias is not None:  # is added by a kernel of its own
            sizes += sizes_of([result, result])
            kernels += 1
        copied = copies_for_layout([image, result], is_channels_last)
    elif name == 'convolution_backward':
        sizes, kernels, copied = convolution_backward(args, result)
    elif kind == NORMS and 'group' in name:
        sizes += sizes_of(read[:2] if 'backward' in name else read[:1])  # are read for the statistics first
        copied = copies_for_layout([read[0], written[0]], torch.Tensor.is_contiguous)
    elif name == 'native_layer_norm_backward':
        sizes += sizes_of(read[:2])  # of the input, then of weight and bias
        copied = []
    elif name == '_safe_softmax':  # looks for rows that are all masked, and writes its result once more with them at 0
        sizes += sizes_of([read[0], result, result])
        copied = []
    else:
        copied = []
    return Operator(kind, flops, sizes + copied, kernels + len(copied) // 2)


def is_without_kernel(function: torch._ops.OpOverload, name: str, read: list[torch.Tensor],
                      written: list[torch.Tensor]) -> bool:
    """Tell whether a call is a view, or gives memory without content."""
    if function._schema.is_mutable:
        return False
    if not written or name.startswith(('empty', 'new_empty', 'detach', 'lift_fresh', '_local_scalar')):
        return True
    storages = {tensor.untyped_storage()._cdata for tensor in read}
    return written[0].untyped_storage()._cdata in storages


def sizes_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the bytes of each; what an expanded tensor repeats lies in memory once."""
    return [min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors]


def multi_tensor_operator(function: torch._ops.OpOverload, args: tuple, sizes: list[int]) -> Operator:
    """Count an operator on lists of tensors, such as a step of AdamW: those that it changes are written as well."""
    arguments = function._schema.arguments
    for argument, value in zip(arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            sizes += sizes_of(value)
    elements = sum(tensor.numel() for tensor in args[0])
    return Operator(UPDATE, 0, sizes, math.ceil(elements / MULTI_TENSOR_ELEMENTS))


def attention_flops(name: str, read: list[torch.Tensor]) -> int:
    """Return the FLOPs of fused attention, which torch's counter does not know by its name on a CPU."""
    shapes = [tensor.shape for tensor in read]
    if name.endswith('backward'):
        return sdpa_backward_flop_count(*shapes[:4])  # gradient, queries, keys, values
    return sdpa_flop_count(*shapes[:3])


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
    return sizes, kernels, copies_for_layout(images, is_channels_last)


def copies_for_layout(images: list[torch.Tensor], is_as_needed) -> list[int]:
    """Return the bytes of reading and writing each image that a kernel needs in the other layout.

    cuDNN's convolutions in half precision work on channels_last, torch's group norm on channels first.
    """
    sizes = []
    for image in images:
        if not is_as_needed(image):
            sizes += sizes_of([image, image])
    return sizes


def is_channels_last(image: torch.Tensor) -> bool:
    """Tell whether an image is laid out as tensor cores read it."""
    return image.is_contiguous(memory_format=torch.channels_last)
