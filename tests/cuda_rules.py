"""What a GPU does to numbers, on a CPU: its types under autocast, and its loss scaling.

`Dtypes` tells what was computed in which precision, whoever cast it. `composer_on_a_gpu` lets Composer's Trainer run
with amp_bf16 and amp_fp16 on a CPU, with norms in float32 as CUDA's autocast has them. What they cannot show: TF32,
the kernels of cuDNN and cuBLAS and their order of summation, and the memory of a GPU.
"""
import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sdbench.forecast.trace import norms_in_float32

HALF = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}


class Dtypes(TorchDispatchMode):
    """The floating types that each operator computed in, forward and backward, below autocast and autograd.

        with Dtypes() as dtypes: ...
        dtypes.of('native_group_norm') == {torch.float32}
    """

    def __init__(self):
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = defaultdict(set)

    def of(self, *names: str) -> set[torch.dtype]:
        """Return the types of all operators of these names together."""
        return set().union(*(self.seen.get(name, set()) for name in names))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = tree_leaves((args, kwargs))
        self.seen[function._schema.name.removeprefix('aten::')] |= {value.dtype for value in inputs
                                                                   if isinstance(value, torch.Tensor)
                                                                   and value.is_floating_point()}
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def composer_on_a_gpu(monkeypatch) -> Iterator[None]:
    """Let Composer's Trainer take amp_bf16 and amp_fp16 on this CPU, compute norms in float32, and scale losses."""
    from composer.trainer import trainer

    @contextlib.contextmanager
    def precision_context(precision, *_, **__):
        dtype = HALF.get(str(getattr(precision, 'value', precision)))
        with torch.autocast('cpu', dtype or torch.bfloat16, enabled=dtype is not None):
            yield

    monkeypatch.setattr(trainer, '_validate_precision', lambda precision, device: None)
    monkeypatch.setattr(trainer, 'get_precision_context', precision_context)
    monkeypatch.setattr(trainer, 'GradScaler', functools.partial(torch.amp.GradScaler, 'cpu'))
    with norms_in_float32():
        yield
