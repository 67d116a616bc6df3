"""Let torch compile for a GPU where there is none: answer what its compiler asks of one, without a driver or Triton.

The names of torch that are replaced here are no interface. They are the same in torch 2.7.0 and 2.15.0.
"""
import contextlib
import copy
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface
import torch._inductor.compile_fx
import torch._inductor.scheduler
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate

GPU = torch.device('cuda:0')
# What Inductor asks of its GPU: here an H100, since its choices are hardly others for another card
PROPERTIES = types.SimpleNamespace(
    name='NVIDIA H100 80GB HBM3', major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20, gcnArchName='')
INTERFACE = torch._dynamo.device_interface.CudaInterface


def layout_of_cudnn(image: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """Return the layout in which a convolution of cuDNN writes its result."""
    for tensor in (image, weight):
        if tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format


ANSWERS = [
    (torch.cuda, 'is_available', lambda: True),
    (torch.cuda, 'device_count', lambda: 1),
    (torch.cuda, 'current_device', lambda: 0),
    (torch.cuda, 'get_device_properties', lambda device=None: PROPERTIES),
    (torch.cuda, 'get_device_capability', lambda device=None: (PROPERTIES.major, PROPERTIES.minor)),
    (torch.cuda, 'synchronize', lambda device=None: None),
    (torch.cuda, 'get_rng_state', lambda device=None: torch.zeros(16, dtype=torch.uint8)),
    (torch.cuda, 'set_rng_state', lambda *args: None),
    (torch.cuda, '_exchange_device', lambda device: 0),
    (torch.cuda, '_maybe_exchange_device', lambda device: 0),
    (torch._subclasses.fake_tensor, 'init_gpu_context', lambda *args: None),
    (INTERFACE, 'is_available', staticmethod(lambda: True)),
    (INTERFACE, 'current_device', staticmethod(lambda: 0)),
    (INTERFACE, 'get_device_properties', staticmethod(lambda device=None: PROPERTIES)),
    (INTERFACE, 'get_compute_capability', staticmethod(lambda device=None: 90)),
    (INTERFACE.Worker, 'get_device_properties', staticmethod(lambda device=None: PROPERTIES)),
    (INTERFACE.Worker, 'current_device', staticmethod(lambda: 0)),
    (torch._C, '_select_conv_backend', lambda *args, **kwargs: None),
    (torch._C, '_conv_determine_backend_memory_format', layout_of_cudnn),
    (torch._inductor.scheduler, 'has_triton', lambda: True),
]


@contextlib.contextmanager
def a_gpu() -> Iterator[None]:
    """Answer torch's questions as if there were a GPU, within this context."""
    with contextlib.ExitStack() as stack:
        for place, name, answer in ANSWERS:
            stack.enter_context(mock.patch.object(place, name, answer))
        yield


def module_on_gpu(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a graph that makes its tensors on the GPU."""
    def gpu_for_cpu(argument: Any) -> Any:
        if isinstance(argument, torch.device) and argument.type == 'cpu':
            return GPU
        return argument

    module = copy.deepcopy(module)
    for node in module.graph.nodes:
        node.args = map_aggregate(node.args, gpu_for_cpu)
        node.kwargs = map_aggregate(node.kwargs, gpu_for_cpu)
    module.recompile()
    return module


def tensor_on_gpu(value: Any, mode: FakeTensorMode) -> Any:
    """Return a fake tensor of the GPU for one of the CPU, without autograd, which would ask for the GPU."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.utils._python_dispatch._disable_current_modes():
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device='meta')
    return FakeTensor(mode, meta, GPU)
