"""What Inductor would run for a graph on a GPU: its kernels, and the memory that they need, one after the other.

Inductor lowers and fuses a graph as it always does, for the GPU of absent_gpu.py, and is stopped before it writes code.
"""
from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._inductor import config, ir, scheduler
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from benchmarks.forecast.absent_gpu import a_gpu, module_on_gpu, tensor_on_gpu
from sdbench.forecast.count import (
    ATTENTION,
    CONVOLUTIONS,
    FUSED,
    KIND_BY_NAME,
    PRODUCTS,
    Operator,
    count_operator,
)

OF_LIBRARIES = (PRODUCTS, CONVOLUTIONS, ATTENTION)


class Step(NamedTuple):
    """A step of Inductor's schedule of a graph.

    Attributes:
        kernel: that Inductor writes; None: it is a library's, or there is none.
        allocated: bytes of each buffer that it makes.
        freed: bytes of each buffer of the graph that is read here for the last time.
        last_inputs: names of the graph's inputs that are read here for the last time.
    """
    kernel: Operator | None
    allocated: list[int]
    freed: list[int]
    last_inputs: list[str]


class Scheduled(BaseException):
    """Carries a schedule out of Inductor, past its handlers of errors."""

    def __init__(self, steps: list[Step]):
        super().__init__()
        self.steps = steps


def schedule(module: torch.fx.GraphModule, inputs: list, mode: FakeTensorMode, options: dict[str, Any]) -> list[Step]:
    """Return what Inductor would run for a graph on the GPU; nothing for a graph without operators.

    Args:
        module: the graph, of operators on a CPU.
        inputs: fake tensors of the CPU, and numbers.
        mode: of the fake tensors.
        options: that AOTAutograd gives to compile_fx_inner.
    """
    def stop(lowered: GraphLowering) -> None:
        lowered.init_wrapper_code()
        lowered._update_scheduler()
        raise Scheduled([step_of(node, lowered) for node in lowered.scheduler.nodes])

    options = {name: value for name, value in options.items() if name != 'cudagraphs'}
    with a_gpu(), mock.patch.object(GraphLowering, 'compile_to_module', stop), \
            config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        try:
            compile_fx_inner(module_on_gpu(module), [tensor_on_gpu(value, mode) for value in inputs], **options)
        except Scheduled as scheduled:
            return scheduled.steps
    return []


def step_of(node: Any, lowered: GraphLowering) -> Step:
    """Read a node of Inductor's scheduler: several operators that are fused, one of a library, or none."""
    # the buffers that it makes, but for those that nothing outside of it needs: they stay in registers
    fused = set(node.get_nodes())
    made = {buffer.get_name(): buffer for buffer in node.get_outputs()}
    written = {name for name, buffer in made.items() if {user.node for user in buffer.users} - fused}
    allocated = [own_bytes(made[name]) for name in written]

    # what is read for the last time
    buffers = lowered.scheduler.name_to_buf
    freed = []
    for name in node.last_usage:
        if name in written or name in buffers and name not in made:
            freed.append(own_bytes(buffers[name]))
    last_inputs = [name for name in node.last_usage if name in lowered.graph_inputs]
    return Step(kernel_of(node, made.keys() - written, lowered), allocated, freed, last_inputs)


def kernel_of(node: Any, in_registers: set[str], lowered: GraphLowering) -> Operator | None:
    """Return the kernel that Inductor writes for a node: of each buffer it moves what it indexes, no element twice."""
    if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
        return None
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        if any(kind_of(operator) in OF_LIBRARIES for operator in node.node.origins):
            return None

    moved = Counter()
    for dependency in node.read_writes.reads | node.read_writes.writes:
        if dependency.name not in in_registers:
            moved[dependency.name] += dependency.numbytes_hint()
    sizes = []
    for name, indexed in moved.items():
        whole = int(lowered.get_numel(name)) * lowered.get_dtype(name).itemsize
        sizes.append(min(indexed, whole))
    return Operator(FUSED, 0, sizes, 1)


def own_bytes(buffer: Any) -> int:
    """Return the memory of a buffer of Inductor's; 0: it is a part of another one, or several."""
    layout = buffer.node.layout
    if type(layout) not in (ir.FixedLayout, ir.FlexibleLayout):
        return 0
    return int(buffer.node.get_numel()) * layout.dtype.itemsize


def kind_of(node: torch.fx.Node) -> str | None:
    """Return the kind of operator that a node of a graph calls; None: of no kind that has a name."""
    overload = getattr(node.target, 'overloadpacket', None)
    return overload and KIND_BY_NAME.get(overload.__name__)


def library_operators(module: torch.fx.GraphModule) -> list[Operator]:
    """Count the products, convolutions and attention of a graph, which Inductor leaves to libraries.

    It has all images in channels_last, and adds the bias of a convolution in a kernel of its own.
    """
    def in_channels_last(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim == 4:
            return value.contiguous(memory_format=torch.channels_last)
        return value

    operators = []
    for node in module.graph.nodes:
        kind = kind_of(node)
        if kind not in OF_LIBRARIES:
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda input: input.meta['val'])
        result = node.meta['val']
        if kind == CONVOLUTIONS:
            args, result = tree_map(in_channels_last, (args, result))
            if node.target == torch.ops.aten.convolution.default:
                image, weight, _, *others = args
                args = (image, weight, None, *others)
        operators.append(count_operator(node.target, args, kwargs, result))
    return operators
