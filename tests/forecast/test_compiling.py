"""What is counted of a compiled step is what torch's compiler would run on a GPU, and what is forecast is near it."""
import copy
import re
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks.forecast import shares
from benchmarks.forecast.compiled import COMPILED_IMAGES, CompiledStepCounter, Compiler
from sdbench.forecast.compiling import compiled
from sdbench.forecast.count import ATTENTION, FUSED
from sdbench.forecast.trace import with_fake_tensors, work_by_kind
from sdbench.models.loading import SD2_BASE
from sdbench.models.switches import compile_in_place

pytestmark = pytest.mark.usefixtures('dynamo')


class Model(torch.nn.Module):
    """Layers on the meta device, in channels_last."""

    def __init__(self, *layers: torch.nn.Module):
        super().__init__()
        self.layers = torch.nn.Sequential(*layers).to(device='meta', memory_format=torch.channels_last)

    def forward(self, tensor):
        return self.layers(tensor)


def counted(module: torch.nn.Module, *shape: int) -> CompiledStepCounter:
    """Count a compiled step of a module on the meta device, for images float32 (COMPILED_IMAGES, *shape)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with_fake_tensors(module, mode)
    compiler = Compiler(mode)
    compile_in_place([module], True, compiler)
    torch._dynamo.reset()
    with mode:
        inputs = torch.empty(COMPILED_IMAGES, *shape, device='cpu').to(memory_format=torch.channels_last)
        gradient = torch.empty_like(module(inputs))
        torch.autograd.backward(module(inputs), gradient)  # all is compiled now
        counter = CompiledStepCounter(list(module.parameters()), COMPILED_IMAGES)
        compiler.counter = counter
        with counter:
            torch.autograd.backward(module(inputs), gradient)
    return counter


def launches_in_code(module: torch.nn.Module, *shape: int) -> list[float]:
    """Bytes of each launch of a kernel in the code that Inductor writes for a step of a module, by its own estimate."""
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    from benchmarks.forecast import inductor_schedule  # which takes seconds to import, as do those
    from benchmarks.forecast.absent_gpu import a_gpu, module_on_gpu, tensor_on_gpu
    code = []
    # its estimate has a buffer that a kernel writes in place as read, even where the kernel does not read it
    settings = {'profile_bandwidth': True, 'inplace_buffers': False, 'fx_graph_cache': False}

    def write(lowered) -> None:
        text = lowered.codegen()[0]
        code.append(getattr(text, 'value', text))
        raise inductor_schedule.Scheduled([])

    def write_code(graph: torch.fx.GraphModule, inputs: list, mode: FakeTensorMode, options: dict) -> list:
        options.pop('cudagraphs', None)
        inputs = [tensor_on_gpu(value, mode) for value in inputs]
        with a_gpu(), mock.patch.object(GraphLowering, 'compile_to_module', write), \
                inductor_config.patch(settings), pytest.raises(inductor_schedule.Scheduled):
            compile_fx_inner(module_on_gpu(graph), inputs, **options)
        return []

    with mock.patch.object(inductor_schedule, 'schedule', write_code), \
            mock.patch('torch.utils._triton.triton_hash_with_backend', return_value=''):  # which needs a driver
        counted(module, *shape)
    launches = []
    for text in code:
        kernels = re.findall(r"async_compile\.triton\('(\w+)'.*?'kernel_num_gb': ([\d.e-]+)", text, re.DOTALL)
        gigabytes = dict(kernels)
        launches += [float(gigabytes[name]) * 1e9 for name in re.findall(r'(\w+)\.run\(', text)]
    return launches


@pytest.mark.long
def test_kernels_and_bytes_are_those_of_the_code_that_inductor_writes():
    norms_and_convolutions = Model(torch.nn.GroupNorm(4, 32), torch.nn.SiLU(), torch.nn.Conv2d(32, 64, 3, padding=1),
                                   torch.nn.GroupNorm(4, 64), torch.nn.SiLU(), torch.nn.Conv2d(64, 32, 3, padding=1))
    launches = launches_in_code(copy.deepcopy(norms_and_convolutions), 32, 16, 16)
    counter = counted(norms_and_convolutions, 32, 16, 16)
    fused = work_by_kind(work for _, *work in counter.work).loc[FUSED]
    nbytes = COMPILED_IMAGES * fused['image_bytes'] + fused['other_bytes']
    assert fused['kernels'] == len(launches) > 10
    assert nbytes == pytest.approx(sum(launches), rel=0.02)


# A step

def assert_forecast_as_counted(model_name: str, image_size: int, flags: list[str], speed: float, memory: float) -> None:
    """Check the images/s and the memory of a compiled step within these shares."""
    settings = shares.settings_of(model_name, image_size, '--compile', *flags)
    *eager, lasting = shares.count_eager(model_name, image_size)
    counted = shares.count_compiled(settings)
    errors = shares.figures_of(*compiled(*eager, settings), lasting) / shares.figures_of(*counted, lasting) - 1
    assert errors.filter(like='images/s').abs().max() < speed
    assert errors.filter(like='memory').abs().max() < memory


@pytest.mark.long
@pytest.mark.parametrize('flags', [['--compile_blocks'], ['--no-compile_blocks', '--no-half_precision_norms']], ids=str)
def test_a_compiled_step_is_forecast_as_the_compiler_would_run_it(flags):
    assert_forecast_as_counted('tiny', 64, flags, speed=0.06, memory=0.08)


@pytest.mark.long
def test_stable_diffusion_2_on_latents_is_3150_kernels_and_6_7_gigabytes_an_image_compiled():
    settings = shares.settings_of(SD2_BASE, 512, '--compile', '--no-compile_blocks')
    memory, work = shares.count_compiled(settings)
    assert work.model['kernels'].sum() == pytest.approx(3150, rel=0.02)
    assert work.model['image_bytes'].sum() == pytest.approx(6.7e9, rel=0.03)
    published = 2408.7e9 + 45.1e9  # of UNet and text encoder, without the scores that attention computes again
    flops = work.model['image_flops']
    assert flops.sum() == pytest.approx(published + flops[ATTENTION] / 6, rel=0.01)
    assert memory.peak(64, accumulated=False)['activations'] == pytest.approx(64 * 0.71 * 2 ** 30, rel=0.02)
    # and is forecast so
    *eager, lasting = shares.count_eager(SD2_BASE, 512)
    errors = shares.figures_of(*compiled(*eager, settings), lasting) / shares.figures_of(memory, work, lasting) - 1
    assert errors.abs().max() < 0.02
