"""CUDA's rules of autocast on a machine without CUDA: which operators it computes in half precision, and which not.

    with cuda_rules(), torch.autocast('cpu', torch.bfloat16):   # casts as torch.autocast('cuda', torch.bfloat16) does
        loss = model.loss(model(batch), batch)

torch keeps a list of operators for each device. A CPU's differ from CUDA's: a CPU leaves group_norm, layer_norm and
softmax in half precision, CUDA computes them in float32, and so autograd keeps them in float32. The lists come from
torch's own header, so that they are those of the torch that is installed. They are put in the place of the CPU's at the
same point of the dispatcher, above autograd, so that gradients are cast back as on a GPU.
"""
import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves, tree_map

HEADER = Path(torch.__file__).parent / 'include/ATen/autocast_mode.h'
KEY = torch._C.DispatchKey.AutocastCPU


def cuda_lists() -> dict[str, list[str]]:
    """CUDA's operators by the rule that autocast has for them, such as 'group_norm' or 'softmax.int'.

    lower_precision: computed in half precision. fp32: in float32. fp32_set_opt_dtype: the result is float32, unless
    another is asked for. fp32_append_dtype: the same, where the overload has no such argument. promote: in the widest
    type of the inputs.
    """
    text = HEADER.read_text()
    macros = {'lower_precision': 'LOWER_PRECISION_FP', 'fp32': 'FP32', 'fp32_set_opt_dtype': 'FP32_SET_OPT_DTYPE',
              'promote': 'PROMOTE'}
    lists = {}
    for rule, macro in macros.items():
        [body] = re.findall(rf'#define AT_FORALL_{macro}\(_\)\s*\\\n((?:.*\\\n)*.*)', text)
        entries = re.findall(r'_\(\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)', body)
        lists[rule] = ['.'.join(filter(None, entry)) for entry in entries]
    lists['fp32_append_dtype'] = re.findall(r'"(norm\.\w+)"', text)
    return lists


def operator(name: str):
    """torch's operator 'softmax.int' or, without an overload, 'group_norm'."""
    packet, _, overload = name.partition('.')
    return getattr(getattr(torch.ops.aten, packet), overload or 'default')


def cast(arguments, dtype: torch.dtype):
    """Arguments with every floating tensor but those of float64, in lists as well, in `dtype`."""
    return tree_map(lambda value: value.to(dtype) if is_eligible(value) else value, arguments)


def is_eligible(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def lower_precision(op, args, kwargs):
    dtype = torch.get_autocast_dtype('cpu')
    return op(*cast(args, dtype), **cast(kwargs, dtype))


def fp32(op, args, kwargs):
    return op(*cast(args, torch.float32), **cast(kwargs, torch.float32))


def fp32_set_opt_dtype(op, args, kwargs):
    position = [argument.name for argument in op._schema.arguments].index('dtype')
    is_given = kwargs.get('dtype') is not None or (len(args) > position and args[position] is not None)
    if is_eligible(args[0]) and not is_given:
        return op(*args[:position], **{**kwargs, 'dtype': torch.float32})
    return op(*args, **kwargs)


def fp32_append_dtype(op, args, kwargs):
    tensor, power, *others = args
    if not is_eligible(tensor):
        return op(*args, **kwargs)
    return torch.norm(tensor, power, *others, **kwargs, dtype=torch.float32)


def promote(op, args, kwargs):
    dtypes = {value.dtype for value in tree_leaves((args, kwargs)) if is_eligible(value)}
    dtype = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype('cpu')
    return op(*cast(args, dtype), **cast(kwargs, dtype))


RULES = {'lower_precision': lower_precision, 'fp32': fp32, 'fp32_set_opt_dtype': fp32_set_opt_dtype,
         'fp32_append_dtype': fp32_append_dtype, 'promote': promote}


def kernel(rule: Callable, op) -> Callable:
    """The autocast of an operator: its rule, with no other cast below it."""
    def call(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KEY)):
            return rule(op, args, kwargs)
    return call


@contextlib.contextmanager
def cuda_rules(cache: bool = False) -> Iterator[None]:
    """Within it torch.autocast('cpu', dtype) casts as torch.autocast('cuda', dtype) does on a GPU.

    Meta tensors are cast as well, so that a model of any size can be asked what it would compute in which type.

    Args:
        cache: weights that were cast stay in memory until the outermost autocast ends, as on a GPU. Tensors have to be
            on the CPU then, real ones or fake ones: torch casts the inputs of matrix products by itself there.
    """
    library = torch.library.Library('aten', 'IMPL')
    of_cpu = set(registered('AutocastCPU'))
    cpu_only = set(of_cpu)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that kernels are replaced is the point
        for rule, names in cuda_lists().items():
            cpu_only.difference_update(names)
            for name in names:
                if cache and rule == 'lower_precision' and name in of_cpu:
                    continue  # the same rule on both, and torch's own kernel keeps the weights that it casts
                library.impl(operator(name), kernel(RULES[rule], operator(name)), 'AutocastCPU')
        for name in cpu_only:
            library.impl(operator(name), torch.library.fallthrough_kernel, 'AutocastCPU')
    guard = contextlib.nullcontext()
    if not cache:
        guard = torch._C._IncludeDispatchKeyGuard(KEY)  # for meta tensors, which have no autocast of their own
    try:
        with guard:
            yield
    finally:
        library._destroy()


def registered(key: str) -> list[str]:
    """The operators of torch that autocast has a rule for on a device, as torch's dispatcher knows them."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return [name.removeprefix('aten::') for name in names if name.startswith('aten::')]
