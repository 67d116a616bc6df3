"""What is counted of a compiled step is what torch's compiler would run on a GPU."""
import re
from unittest import mock

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import benchmark
from sdbench.forecast import compiled_step
from sdbench.forecast.compiled_step import TRACED_IMAGES, CompiledStepCounter, Compiler, NotCounted, trace_compiled_step
from sdbench.forecast.fake_step import StepMemory, trace_step, updater, with_fake_tensors
from sdbench.forecast.memory import build_on_meta
from sdbench.forecast.operators import CONVOLUTIONS, FUSED, FUSED_REDUCTIONS, PRODUCTS
from sdbench.forecast.speed import StepWork, Work
from sdbench.models.compiling import compile_in_place
from sdbench.models.loading import find_model
from tests.runs import settings_of


@pytest.fixture(autouse=True)
def dynamo():
    """A compiler that has seen nothing yet, as in a process of its own."""
    settings = torch._dynamo.config.save_config()
    yield
    torch._dynamo.config.load_config(settings)
    torch._dynamo.reset()


def counted(module: torch.nn.Module, *shape: int, backward: bool = False) -> CompiledStepCounter:
    """The work of a compiled module on the meta device, for an input float32 (TRACED_IMAGES, *shape)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with_fake_tensors(module, mode)
    counter = CompiledStepCounter(list(module.parameters()), TRACED_IMAGES)
    compile_in_place([module], True, Compiler(mode, counter))
    torch._dynamo.reset()
    with mode, torch.set_grad_enabled(backward):
        inputs = torch.empty(TRACED_IMAGES, *shape, device='cpu')
        gradient = None
        for context in (mode, counter):
            with context:
                result = module(inputs)
                if backward:
                    gradient = torch.empty_like(result) if gradient is None else gradient
                    torch.autograd.backward(result, gradient)
    return counter


def total(works: dict[str, Work]) -> Work:
    return sum(works.values(), Work())


class Pointwise(torch.nn.Module):
    def forward(self, tensor):
        return torch.relu(tensor * 2 + 1) - tensor


def test_pointwise_operators_are_one_kernel_that_reads_and_writes_once():
    counter = counted(Pointwise(), 8)
    assert counter.fixed == {FUSED: Work(0, 0, 1)}
    assert counter.per_image == {FUSED: Work(0, 2 * 4 * 8, 0)}


def test_a_norm_is_one_kernel_and_a_product_stays_a_librarys():
    with torch.device('meta'):
        module = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.ReLU())
    counter = counted(module, 8)
    assert {kind: work.kernels for kind, work in counter.fixed.items()} == {FUSED_REDUCTIONS: 1, PRODUCTS: 1, FUSED: 1}
    assert counter.per_image[FUSED_REDUCTIONS].nbytes == 2 * 4 * 8
    assert counter.per_image[PRODUCTS] == Work(2 * 8 * 16, 4 * (8 + 16), 0)
    assert counter.per_image[FUSED].nbytes == pytest.approx(2 * 4 * 16)


def test_the_bias_of_a_convolution_is_added_by_what_comes_after_it():
    with torch.device('meta'):
        module = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.ReLU())
    counter = counted(module, 8, 16, 16)
    assert {kind: work.kernels for kind, work in counter.fixed.items()} == {CONVOLUTIONS: 1, FUSED: 1}


def wrapper_of(module: torch.nn.Module, *shape: int) -> list[str]:
    """The calls of kernels in the code that Inductor writes for the forward and backward graphs of a module."""
    calls = []

    def write(lowered) -> None:
        code = lowered.codegen()[0]
        code = getattr(code, 'value', code)
        calls.extend(re.findall(r'(triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.aten\.\w+)', code))
        raise compiled_step.Scheduled([])

    original = mock.patch.object
    def patch(place, name, value):
        return original(place, name, write if name == 'compile_to_module' else value)

    with mock.patch.object(compiled_step.mock.patch, 'object', patch):
        counted(module, *shape, backward=True)
    return calls
