"""Work and memory of a compiled training step, found as those of an eager one are: without a GPU, driver or Triton.

torch's compiler itself says what would run. Dynamo and AOTAutograd trace what the run compiles on fake tensors, as in
fake_step.py. Inductor fuses the operators of each graph into kernels, for a GPU that it is told of, and is stopped
before it writes code: its schedule says what each kernel reads and writes, and when each buffer is freed. Matrix
products, convolutions and attention, which Inductor leaves to libraries, are counted as in operators.py.

Inductor's inside is no interface. What is used of it here is the same in torch 2.7.0 and 2.15.0; whatever goes wrong
with another version is NotCounted.
"""
import contextlib
import copy
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from composer import ComposerModel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map

from sdbench.errors import one_line
from sdbench.flags.train import Train
from sdbench.forecast.fake_step import (
    StepCounter,
    StepMemory,
    counted,
    norms_in_float32,
    take_step,
    trace_update,
    with_fake_tensors,
)
from sdbench.forecast.operators import (
    ATTENTION,
    CONVOLUTIONS,
    FUSED,
    FUSED_REDUCTIONS,
    KIND_BY_NAME,
    POINTWISE,
    PRODUCTS,
    Operator,
    count_operator,
)
from sdbench.forecast.speed import StepWork
from sdbench.models.switches import compile_model

# Images of the step that is traced: a prime that divides the size of nothing else, and so few that 32 bits count the
# elements of each tensor
TRACED_IMAGES = 29
GPU = torch.device('cuda:0')
# What Inductor asks of its GPU: here an H100, since its choices are hardly others for another card
PROPERTIES = types.SimpleNamespace(
    name='NVIDIA H100 80GB HBM3', major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20, gcnArchName='')
OF_LIBRARIES = (PRODUCTS, CONVOLUTIONS, ATTENTION)


class NotCounted(RuntimeError):
    """The compiled step cannot be counted with this version of torch."""


class Step(NamedTuple):
    """A step of Inductor's schedule of a graph.

    Attributes:
        operator: the kernel; None: it is a library's, or there is none.
        allocated: bytes of each buffer that it makes.
        freed: bytes of each buffer of the graph that is read here for the last time.
        last_inputs: names of the graph's inputs that are read here for the last time.
    """
    operator: Operator | None
    allocated: list[int]
    freed: list[int]
    last_inputs: list[str]


class CompiledGraph(NamedTuple):
    """A part of the model that is compiled, forward or backward.

    Attributes:
        module: computes it, operator by operator.
        operators: all kernels.
        steps: of Inductor's schedule.
        inputs: names, in their order.
        is_forward: what it returns is kept for a backward pass.
    """
    module: torch.fx.GraphModule
    operators: list[Operator]
    steps: list[Step]
    inputs: list[str]
    is_forward: bool


class Scheduled(BaseException):
    """Carries a schedule out of Inductor, past its handlers of errors."""

    def __init__(self, steps: list[Step]):
        super().__init__()
        self.steps = steps


def trace_compiled_step(outline: ComposerModel, settings: Train, prepare_update: Callable | None = None
                        ) -> tuple[StepMemory, StepWork]:
    """Count memory and work of a compiled step, as `trace_step` does those of an eager one.

    Args:
        outline: the model on the meta device; its tensors become fake ones.
        settings: of the run, with its --compile and --compile_blocks.
        prepare_update: gives for a model what is called after a step, by kind. None: nothing is.

    Raises NotCounted with the reason.
    """
    try:
        return trace_graphs(outline, settings, prepare_update)
    except Exception as error:  # of any kind: nothing of Inductor's inside is promised
        raise NotCounted(f'torch {torch.__version__}: {one_line(error, 200)}') from error


def trace_graphs(outline: ComposerModel, settings: Train, prepare_update: Callable | None
                 ) -> tuple[StepMemory, StepWork]:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())  # the scheduler's tables are real
    model = with_fake_tensors(outline, mode)
    counter = CompiledStepCounter(list(model.parameters()), TRACED_IMAGES)
    compiler = Compiler(mode, counter)
    torch._dynamo.reset()
    compile_model(model, settings, compiler)  # in the place of Inductor, which the model was given as it was built
    with norms_in_float32(), norms_as_on_a_gpu(), mode:
        # The first step compiles. The second one, in which nothing is compiled any more, is counted.
        take_step(model, settings.precision, counter, settings.attention)
        model.zero_grad()
        graphs = compiler.graphs
        counter.arrivals.clear()
        with counter:
            take_step(model, settings.precision, counter, settings.attention)
    if compiler.graphs != graphs:
        raise NotCounted('a second step is compiled anew')
    return counted(model, counter, trace_update(model, prepare_update, mode))


class CompiledStepCounter(StepCounter):
    """Counts a compiled graph by its schedule, and the operators between graphs as those of an eager step.

    Attributes:
        graph: that is being called.
    """
    graph: CompiledGraph | None = None
    is_entered = False

    def __enter__(self):
        self.is_entered = True
        return super().__enter__()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # Dynamo calls what it has compiled under no other modes

    @torch.compiler.disable  # or Dynamo compiles it where a graph breaks
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.graph is not None:
            return function(*args, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)

    def call(self, graph: CompiledGraph, inputs: list) -> Any:
        """Count a call of a graph; returns what it computes."""
        for operator in graph.operators:
            self.add_work(operator)
        self.add_rows(graph, inputs)
        self.graph = graph
        try:
            outputs = graph.module(*inputs)
        finally:
            self.graph = None
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self.notice(tensor)
                if graph.is_forward and tensor.untyped_storage().nbytes() % self.images:
                    self.count_as('cast weights', tensor)  # is as large for any number of images
        return outputs

    def add_rows(self, graph: CompiledGraph, inputs: list) -> None:
        """Note what is alive at each step of a graph: its own buffers, and those inputs that it is the last to read."""
        storages = {}
        for name, tensor in zip(graph.inputs, inputs, strict=True):
            if isinstance(tensor, torch.Tensor) and not name.startswith('primals'):  # others hold the inputs of forward
                storages[name] = tensor.untyped_storage()
        readers = Counter(storage._cdata for storage in storages.values())  # inputs can share their memory
        before = self.now.copy()
        for step in graph.steps:
            for size in step.allocated:
                self.add('working memory', size)
            self.rows.append(self.now.copy())
            for size in step.freed:
                self.add('working memory', -size)
            for name in step.last_inputs:
                if name not in storages:
                    continue
                storage = storages[name]
                readers[storage._cdata] -= 1
                if readers[storage._cdata] == 0 and storage._cdata in self.items:
                    self.add(self.items[storage._cdata], -storage.nbytes())
        self.now = before


class Compiler:
    """A backend of torch.compile that lets Inductor schedule each graph, and calls the graph itself, on fake tensors.

    Attributes:
        mode: of the fake tensors.
        counter: counts the graphs that are called while it is entered.
        graphs: that were compiled.
    """

    def __init__(self, mode: FakeTensorMode, counter: CompiledStepCounter):
        self.mode = mode
        self.counter = counter
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list, **options) -> Callable:
        from torch._inductor.compile_fx import compile_fx
        torch._guards.TracingContext.get().fake_mode = self.mode  # of the inputs; Dynamo has made another
        # a bias has its gradient by a sum of its own there, and attention without dropout draws nothing
        with mock.patch('torch._inductor.decomposition.is_gpu', return_value=True), \
                mock.patch('torch._functorch.partitioners.has_recomputable_rng_ops', return_value=False):
            return compile_fx(module, inputs, inner_compile=self.compile)

    def compile(self, module: torch.fx.GraphModule, inputs: list, is_backward: bool = False,
                is_inference: bool = False, **options) -> Callable:
        """Return a function that computes a graph of AOTAutograd, and is counted."""
        self.graphs += 1
        steps = schedule(on_gpu(module), [self.as_on_gpu(value) for value in inputs],
                         dict(options, is_backward=is_backward, is_inference=is_inference))
        operators = library_operators(module)
        operators += [step.operator for step in steps if step.operator is not None]
        names = [node.name for node in module.graph.nodes if node.op == 'placeholder']
        graph = CompiledGraph(module, operators, steps, names, not is_backward and not is_inference)

        def call(inputs: list) -> Any:
            given = list(inputs)
            inputs.clear()  # as AOTAutograd has it: what nobody else holds is freed after the call
            if self.counter.is_entered:
                return self.counter.call(graph, given)
            return module(*given)

        call._boxed_call = True
        return call

    def as_on_gpu(self, value: Any) -> Any:
        """Return a fake tensor of the GPU for one of the CPU, without autograd, which would ask for the GPU."""
        if not isinstance(value, torch.Tensor):
            return value
        with torch.utils._python_dispatch._disable_current_modes():
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device='meta')
        return FakeTensor(self.mode, meta, GPU)


def on_gpu(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
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


def schedule(module: torch.fx.GraphModule, inputs: list, options: dict[str, Any]) -> list[Step]:
    """Return what Inductor would run for a graph on the GPU; nothing for a graph without operators."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    def stop(lowered: GraphLowering) -> None:
        lowered.init_wrapper_code()
        lowered._update_scheduler()
        raise Scheduled([step_of(node, lowered) for node in lowered.scheduler.nodes])

    options.pop('cudagraphs', None)
    with a_gpu(), mock.patch.object(GraphLowering, 'compile_to_module', stop), \
            config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        try:
            compile_fx_inner(module, inputs, **options)
        except Scheduled as scheduled:
            return scheduled.steps
    return []


def step_of(node: Any, lowered: Any) -> Step:
    """Read a node of Inductor's scheduler: several operators that are fused, one of a library, or none.

    A fused kernel keeps in registers what only it needs: that is neither written nor read again. Of each buffer it
    moves what it indexes, and no element twice.
    """
    from torch._inductor import ir, scheduler

    # the buffers that it makes, but for those that nothing outside of it needs
    fused = set(node.get_nodes())
    made = {buffer.get_name(): buffer for buffer in node.get_outputs()}
    written = {name for name, buffer in made.items() if {user.node for user in buffer.users} - fused}
    allocated = [own_bytes(made[name]) for name in written]

    # what is read for the last time
    buffers = lowered.scheduler.name_to_buf
    freed = [own_bytes(buffers[name]) for name in node.last_usage if name in buffers and name not in made]
    freed += [own_bytes(made[name]) for name in written & set(node.last_usage)]
    last_inputs = [name for name in node.last_usage if name in lowered.graph_inputs]

    if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
        return Step(None, allocated, freed, last_inputs)
    if isinstance(node, scheduler.ExternKernelSchedulerNode) and is_of_library(node.node):
        return Step(None, allocated, freed, last_inputs)

    # what is moved
    moved = Counter()
    for dependency in node.read_writes.reads | node.read_writes.writes:
        if dependency.name not in made or dependency.name in written:
            moved[dependency.name] += dependency.numbytes_hint()
    sizes = [min(size, buffer_bytes(name, lowered)) for name, size in moved.items()]
    kind = POINTWISE
    if not isinstance(node, scheduler.ExternKernelSchedulerNode):
        kind = FUSED_REDUCTIONS if node.is_reduction() else FUSED
    return Step(Operator(kind, 0, sizes, 1), allocated, freed, last_inputs)


def own_bytes(buffer: Any) -> int:
    """The memory of a buffer of Inductor's; 0: it is a part of another one, or several."""
    from torch._inductor import ir
    layout = buffer.node.layout
    if type(layout) not in (ir.FixedLayout, ir.FlexibleLayout):
        return 0
    return int(buffer.node.get_numel()) * layout.dtype.itemsize


def buffer_bytes(name: str, lowered: Any) -> int:
    return int(lowered.get_numel(name)) * lowered.get_dtype(name).itemsize


def is_of_library(kernel: Any) -> bool:
    """Whether a kernel that Inductor does not write is one of those that `library_operators` counts."""
    return any(kind_of(node) in OF_LIBRARIES for node in kernel.origins)


def kind_of(node: torch.fx.Node) -> str | None:
    overload = getattr(node.target, 'overloadpacket', None)
    return overload and KIND_BY_NAME.get(overload.__name__)


def library_operators(module: torch.fx.GraphModule) -> list[Operator]:
    """Count the products, convolutions and attention of a graph.

    Inductor has all images in channels_last, and adds the bias of a convolution in a kernel of its own.
    """
    def value_of(node: torch.fx.Node) -> Any:
        return node.meta['val']

    def in_channels_last(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim == 4:
            return value.contiguous(memory_format=torch.channels_last)
        return value

    operators = []
    for node in module.graph.nodes:
        kind = kind_of(node)
        if kind not in OF_LIBRARIES:
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
        result = node.meta['val']
        if kind == CONVOLUTIONS:
            args, result = tree_map(in_channels_last, (args, result))
            if node.target == torch.ops.aten.convolution.default:
                image, weight, _, *others = args
                args = (image, weight, None, *others)
        operators.append(count_operator(node.target, args, kwargs, result))
    return operators


@contextlib.contextmanager
def norms_as_on_a_gpu() -> Iterator[None]:
    """A context in which group norms make channels first of what they get, as those of CUDA do before torch 2.15."""
    def contiguous(module: torch.nn.Module, inputs: tuple) -> tuple | None:
        if isinstance(module, torch.nn.GroupNorm):
            return tuple(tensor.contiguous() for tensor in inputs)
        return None

    if torch.__version__ >= (2, 15):
        yield
        return
    hook = torch.nn.modules.module.register_module_forward_pre_hook(contiguous)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def a_gpu() -> Iterator[None]:
    """A context in which torch answers Inductor's questions as if there were a GPU."""
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.compile_fx
    import torch._inductor.scheduler

    def layout_of(image: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        """As cuDNN's convolutions choose it."""
        for tensor in (image, weight):
            if tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
                return torch.channels_last
        return torch.contiguous_format

    interface = interfaces.CudaInterface
    capability = (PROPERTIES.major, PROPERTIES.minor)
    answers = [
        (torch.cuda, 'is_available', lambda: True),
        (torch.cuda, 'device_count', lambda: 1),
        (torch.cuda, 'current_device', lambda: 0),
        (torch.cuda, 'get_device_properties', lambda device=None: PROPERTIES),
        (torch.cuda, 'get_device_capability', lambda device=None: capability),
        (torch.cuda, 'synchronize', lambda device=None: None),
        (torch.cuda, 'get_rng_state', lambda device=None: torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, 'set_rng_state', lambda *args: None),
        (torch.cuda, '_exchange_device', lambda device: 0),
        (torch.cuda, '_maybe_exchange_device', lambda device: 0),
        (torch._subclasses.fake_tensor, 'init_gpu_context', lambda *args: None),
        (interface, 'is_available', staticmethod(lambda: True)),
        (interface, 'current_device', staticmethod(lambda: 0)),
        (interface, 'get_device_properties', staticmethod(lambda device=None: PROPERTIES)),
        (interface, 'get_compute_capability', staticmethod(lambda device=None: 90)),
        (interface.Worker, 'get_device_properties', staticmethod(lambda device=None: PROPERTIES)),
        (interface.Worker, 'current_device', staticmethod(lambda: 0)),
        (torch._C, '_select_conv_backend', lambda *args, **kwargs: None),
        (torch._C, '_conv_determine_backend_memory_format', layout_of),
        (torch._inductor.scheduler, 'has_triton', lambda: True),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, answer in answers:
            stack.enter_context(mock.patch.object(place, name, answer))
        yield
