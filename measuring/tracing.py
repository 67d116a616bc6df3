"""What runs within a step: a trace of some batches for --profile, and which kernels computed attention."""
import contextlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from composer import Callback
from composer.core import State
from composer.profiler import JSONTraceHandler, Profiler, ProfilerAction

from settings.train import Train

TRACE_WARMUP = 1   # batches in which the profiler itself warms up
TRACED_BATCHES = 3
NO_MESSAGE = 5  # level of torch's tracer, Kineto, above that of its errors
PROFILED = 'profiled'  # the status of a run that was traced: its speed is that of a run with a profiler
# of torch, which calls some of them through others, and of the package xformers
ATTENTION_OPERATOR = re.compile(r'_scaled_dot_product_\w+|\S*_attention_forward\w*|xformers\w*::flash_fwd\w*')


def build_profiler(settings: Train) -> Profiler | None:
    """Composer's profiler for --profile DIR, or None.

    Each rank writes `DIR/torch/rank0.N.pt.trace.json`, with what the CPU and the GPU did, and under `DIR/composer` the
    same with the events of Composer's loop; N is the last batch that was traced.
    """
    if not settings.profile:
        return None
    if not torch.cuda.is_available():
        os.environ.setdefault('KINETO_LOG_LEVEL', str(NO_MESSAGE))  # its only one is the error that there is no GPU
    folder = Path(settings.profile)
    events = JSONTraceHandler(folder=str(folder / 'composer'), remote_file_name=None, merged_trace_filename=None,
                              merged_trace_remote_file_name=None)
    return Profiler(schedule=TraceSchedule(settings.warmup_batches), trace_handlers=[events], sys_prof_cpu=False,
                    torch_prof_folder=str(folder / 'torch'), torch_prof_remote_file_name=None,
                    torch_prof_memory_remote_file_name=None)


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """A context in which Composer does not warn of the profiler that was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'The profiler is enabled')
        yield


def where_to_look(folder: str) -> str:
    """Where the trace of --profile lies, and what shows it."""
    return (f'{folder}/torch holds what CPU and GPU did, {folder}/composer the events of the loop as well; '
            'https://ui.perfetto.dev opens both')


class TraceSchedule:
    """The batches to trace, once, counted from where the run starts or resumes."""

    def __init__(self, warmup_batches: int):
        self.warmup_batches = warmup_batches
        self.first_batch: int | None = None  # of this process

    def __call__(self, state: State) -> ProfilerAction:
        if self.first_batch is None:
            self.first_batch = state.timestamp.batch.value
        since_warmup = state.timestamp.batch.value - self.first_batch - self.warmup_batches
        if not 0 <= since_warmup < TRACE_WARMUP + TRACED_BATCHES:
            return ProfilerAction.SKIP
        if since_warmup < TRACE_WARMUP:
            return ProfilerAction.WARMUP
        if since_warmup < TRACE_WARMUP + TRACED_BATCHES - 1:
            return ProfilerAction.ACTIVE
        return ProfilerAction.ACTIVE_AND_SAVE


class AttentionKernels(Callback):
    """Which kernels computed attention in the forward pass of a microbatch, the first of the last batch of the warm-up.

    torch chooses them by shape, type and GPU, and so do its compiler and xformers; so they are seen when they run. The
    batches that are measured are left alone.

    Args:
        last_batch: of the warm-up, from 0, counted from where the run starts or resumes.
    """

    def __init__(self, last_batch: int):
        self.last_batch = last_batch
        self.found: dict[str, int] | None = None  # calls of each kernel; None before
        self._batches = 0
        self._profile: torch.profiler.profile | None = None

    def before_forward(self, state: State, logger) -> None:
        if self._batches == self.last_batch and self.found is None:  # reading what it saw takes half a second
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profile.start()

    def after_forward(self, state: State, logger) -> None:
        if self._profile is not None:
            self._profile.stop()
            self.found = kernels_of_attention(event.name for event in self._profile.events())
            self._profile = None

    def batch_end(self, state: State, logger) -> None:
        self._batches += 1


def kernels_of_attention(operators: Iterable[str]) -> dict[str, int]:
    """How often each operator of attention is among the names of `operators`; torch's own lose their namespace."""
    names = (name.removeprefix('aten::') for name in operators)
    return dict(sorted(Counter(name for name in names if ATTENTION_OPERATOR.fullmatch(name)).items()))


def tracing_callbacks(settings: Train) -> list[Callback]:
    """On a GPU, where there is a choice of kernels, and unless another profiler runs."""
    if not torch.cuda.is_available() or settings.profile:
        return []
    return [AttentionKernels(settings.warmup_batches - 1)]


def attention_kernels(callbacks: list[Callback]) -> dict[str, int] | None:
    """What the one of `callbacks` that looks for it has found."""
    for callback in callbacks:
        if isinstance(callback, AttentionKernels):
            return callback.found
    return None
