"""Work and memory of a compiled training step, found as those of an eager one are: without a GPU, driver or Triton.

torch's compiler itself says what would run. Dynamo and AOTAutograd trace what the run compiles on fake tensors, as in
trace.py. Inductor schedules each graph for a GPU that it is told of (inductor_schedule.py): this says what each kernel
reads and writes, and when each buffer is freed. Products, convolutions and attention, which Inductor leaves to
libraries, are counted as in count.py.

Inductor's inside is no interface. What is used of it is the same in torch 2.7.0 and 2.15.0.
"""
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from composer import ComposerModel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from sdbench.flags.train import Train
from sdbench.forecast.count import StepCounter, StepMemory
from sdbench.forecast.speed import StepWork
from sdbench.forecast.trace import (
    forward_and_backward,
    memory_and_work,
    norms_in_float32,
    with_fake_tensors,
)
from sdbench.models.switches import compile_model

# Images of the step that is traced: a prime that divides the size of nothing else, and so few that 32 bits count the
# elements of each tensor
COMPILED_IMAGES = 29


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
    operators: list
    steps: list
    inputs: list[str]
    is_forward: bool


def trace_compiled_step(meta_model: ComposerModel, settings: Train) -> tuple[StepMemory, StepWork]:
    """Count memory and work of a compiled step, as `trace_step` does those of an eager one, but for its update.

    The model is compiled in a first step, and a second one is counted, in which nothing is compiled any more.

    Args:
        meta_model: the model on the meta device; its tensors become fake ones.
        settings: of the run, with its --compile and --compile_blocks.
    """
    # the model, with a compiler in the place of Inductor, which it was given as it was built
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())  # the scheduler's tables are real
    model = with_fake_tensors(meta_model, mode)
    compiler = Compiler(mode)
    torch._dynamo.reset()
    compile_model(model, settings, compiler)

    # both steps, with the same norms, or all would be compiled again
    with norms_in_float32(), norms_as_on_a_gpu(), mode:
        forward_and_backward(model, settings.precision, StepCounter([], COMPILED_IMAGES), settings.attention)
        model.zero_grad()
        counter = CompiledStepCounter(list(model.parameters()), COMPILED_IMAGES)
        compiler.counter = counter
        with counter, torch.compiler.set_stance('fail_on_recompile'):
            forward_and_backward(model, settings.precision, counter, settings.attention)
    return memory_and_work(model, counter)


class CompiledStepCounter(StepCounter):
    """Counts a compiled graph by its schedule, and the operators between graphs as those of an eager step."""
    is_within_graph = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # Dynamo calls what it has compiled under no other modes

    @torch.compiler.disable  # or Dynamo compiles it where a graph breaks
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.is_within_graph:
            return function(*args, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)

    def call(self, graph: CompiledGraph, inputs: list) -> Any:
        """Count a call of a graph; returns what it computes."""
        for operator in graph.operators:
            self.add_work(operator)
        self.add_rows(graph, inputs)

        # compute its results, which are fake, and note what is kept of them
        self.is_within_graph = True
        outputs = graph.module(*inputs)
        self.is_within_graph = False
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self.notice(tensor)
                if graph.is_forward and tensor.untyped_storage().nbytes() % self.images:
                    self.count_as('cast weights', tensor)  # is as large for any number of images
        return outputs

    def add_rows(self, graph: CompiledGraph, inputs: list) -> None:
        """Note what is alive at each step of a graph: its own buffers, and those inputs that it is the last to read."""
        # inputs that nothing else holds: all but those of forward, which share their memory at times
        storages = {}
        for name, tensor in zip(graph.inputs, inputs, strict=True):
            if isinstance(tensor, torch.Tensor) and not name.startswith('primals'):
                storages[name] = tensor.untyped_storage()
        readers = Counter(storage._cdata for storage in storages.values())

        before = self.now.copy()
        for step in graph.steps:
            for size in step.allocated:
                self.add('working memory', size)
            self.note_row()
            for size in step.freed:
                self.add('working memory', -size)
            for name in step.last_inputs:
                if name not in storages:
                    continue
                storage = storages[name]
                readers[storage._cdata] -= 1
                if readers[storage._cdata] == 0 and storage._cdata in self.items:
                    self.add(self.items[storage._cdata], -storage.nbytes())
        self.now = before  # what it returns is noted by `call`


class Compiler:
    """A backend of torch.compile that has Inductor schedule each graph, and computes the graph itself, on fake tensors.

    Attributes:
        mode: of the fake tensors.
        counter: counts the graphs that are called; None: they are not counted yet.
    """

    def __init__(self, mode: FakeTensorMode):
        self.mode = mode
        self.counter: CompiledStepCounter | None = None

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
        from benchmarks.forecast.inductor_schedule import library_operators, schedule  # which take seconds to import
        options |= {'is_backward': is_backward, 'is_inference': is_inference}
        steps = schedule(module, inputs, self.mode, options)
        operators = library_operators(module) + [step.kernel for step in steps if step.kernel is not None]
        names = [node.name for node in module.graph.nodes if node.op == 'placeholder']
        graph = CompiledGraph(module, operators, steps, names, not is_backward and not is_inference)

        def call(inputs: list) -> Any:
            given = list(inputs)
            inputs.clear()  # as AOTAutograd has it: what nobody else holds is freed after the call
            if self.counter is None:
                return module(*given)
            return self.counter.call(graph, given)

        call._boxed_call = True
        return call


@contextlib.contextmanager
def norms_as_on_a_gpu() -> Iterator[None]:
    """Let group norms make channels first of what they get, as those of CUDA do before torch 2.15."""
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
