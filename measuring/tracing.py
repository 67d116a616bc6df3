"""What runs within a step: a trace of some batches for --profile."""
import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from composer.core import State
from composer.profiler import JSONTraceHandler, Profiler, ProfilerAction

from settings.train import Train

TRACE_WARMUP = 1   # batches in which the profiler itself warms up
TRACED_BATCHES = 3
NO_MESSAGE = 5  # level of torch's tracer, Kineto, above that of its errors
PROFILED = 'profiled'  # the status of a run that was traced: its speed is that of a run with a profiler


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
