"""What a GPU does to numbers, on a CPU: CUDA's rules of autocast, its loss scaling, DDP, and faults in gradients.

    with cuda_rules(), torch.autocast('cpu', torch.bfloat16):   # casts as torch.autocast('cuda', torch.bfloat16) does
        loss = model.loss(model(batch), batch)

torch keeps a list of operators for each device. A CPU's differ from CUDA's: a CPU leaves group_norm, layer_norm and
softmax in half precision, CUDA computes them in float32. The lists come from torch's own header, so that they are those
of the torch that is installed. They are put in the place of the CPU's at the same point of the dispatcher, above
autograd, so that gradients are cast back as on a GPU. What this cannot show: TF32, the kernels of cuDNN and cuBLAS and
their order of summation, and the memory of a GPU.

`Dtypes` tells what was computed in which precision, whoever cast it. `composer_on_a_gpu` lets Composer's Trainer run
with amp_bf16 and amp_fp16 on a CPU. `one_rank` is for DDP. `Fault` spoils gradients in a backward pass.
"""
import contextlib
import functools
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HEADER = Path(torch.__file__).parent / 'include/ATen/autocast_mode.h'
HALF = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}
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
def cuda_rules() -> Iterator[None]:
    """Within it torch.autocast('cpu', dtype) casts as torch.autocast('cuda', dtype) does on a GPU.

    Meta tensors are cast as well, so that a model of any size can be asked what it would compute in which type.
    """
    library = torch.library.Library('aten', 'IMPL')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that kernels are replaced is the point
        cpu_only = set(registered('AutocastCPU'))
        for rule, names in cuda_lists().items():
            for name in names:
                cpu_only.discard(name)
                library.impl(operator(name), kernel(RULES[rule], operator(name)), 'AutocastCPU')
        for name in cpu_only:
            library.impl(operator(name), torch.library.fallthrough_kernel, 'AutocastCPU')
    try:
        with torch._C._IncludeDispatchKeyGuard(KEY):  # for meta tensors, which have no autocast of their own
            yield
    finally:
        library._destroy()


def registered(key: str) -> list[str]:
    """The operators of torch that autocast has a rule for on a device, as torch's dispatcher knows them."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return [name.removeprefix('aten::') for name in names if name.startswith('aten::')]


class Dtypes(TorchDispatchMode):
    """The floating types that each operator computed in, forward and backward, below autocast and autograd.

        with Dtypes() as dtypes: ...
        dtypes.of('native_group_norm') == {torch.float32}
    """

    def __init__(self):
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = defaultdict(set)

    def of(self, *names: str) -> set[torch.dtype]:
        """Of all operators of these names together."""
        return set().union(*(self.seen.get(name, set()) for name in names))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = tree_leaves((args, kwargs))
        self.seen[function._schema.name.removeprefix('aten::')] |= {value.dtype for value in inputs
                                                                   if isinstance(value, torch.Tensor)
                                                                   and value.is_floating_point()}
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def composer_on_a_gpu(monkeypatch) -> Iterator[None]:
    """Composer's Trainer takes amp_bf16 and amp_fp16 on this CPU, casts by CUDA's rules, and scales losses."""
    from composer.trainer import trainer

    @contextlib.contextmanager
    def precision_context(precision, *_, **__):
        dtype = HALF.get(str(getattr(precision, 'value', precision)))
        with torch.autocast('cpu', dtype or torch.bfloat16, enabled=dtype is not None):
            yield

    monkeypatch.setattr(trainer, '_validate_precision', lambda precision, device: None)
    monkeypatch.setattr(trainer, 'get_precision_context', precision_context)
    monkeypatch.setattr(trainer, 'GradScaler', functools.partial(torch.amp.GradScaler, 'cpu'))
    with cuda_rules():
        yield


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, over gloo, so that DDP wraps a model as it does on several."""
    if torch.distributed.is_initialized():  # an earlier run in this process has left one
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group('gloo', init_method=f'file://{folder}/store', rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


class Fault:
    """Spoils the gradient that leaves a module in some of its backward passes, as an overflow does.

    Args:
        module: one whose output is a tensor.
        passes: the numbers of the backward passes to spoil, from 0.
        value: that the gradient becomes, or an exception that is raised in its place.
    """

    def __init__(self, module: torch.nn.Module, passes: set[int], value: float | Exception = float('inf')):
        self.passes = passes
        self.value = value
        self.count = 0
        module.register_forward_hook(self._watch)

    def _watch(self, module, inputs, output) -> None:
        if output.requires_grad:
            output.register_hook(self._spoil)

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        number = self.count
        self.count += 1
        if number not in self.passes:
            return gradient
        if isinstance(self.value, Exception):
            raise self.value
        return torch.full_like(gradient, self.value)
