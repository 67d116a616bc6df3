"""Record a trace with torch's profiler: --profile."""
import os

from composer import Callback
from composer.core import State
from composer.utils import dist
from torch.profiler import profile, schedule, tensorboard_trace_handler

TRACE_WARMUP = 1   # batches for the warm-up of the profiler itself
TRACED_BATCHES = 3


class Trace(Callback):
    """Traces TRACED_BATCHES batches of a run on each rank with torch's profiler, which records CPU and GPU activity.

    They follow the warm-up of the run and TRACE_WARMUP batches of the profiler's own warm-up. The file is called
    `rankN.TIME.pt.trace.json`, so no run overwrites the trace of another.
    """

    def __init__(self, folder: str, warmup_batches: int):
        os.makedirs(folder, exist_ok=True)  # now, because an error would otherwise come only after the warm-up
        steps = schedule(skip_first=warmup_batches, wait=0, warmup=TRACE_WARMUP, active=TRACED_BATCHES, repeat=1)
        self.profiler = profile(schedule=steps, profile_memory=True, with_flops=True,
                                on_trace_ready=tensorboard_trace_handler(folder, f'rank{dist.get_global_rank()}'))

    def fit_start(self, state: State, logger) -> None:
        self.profiler.start()

    def batch_end(self, state: State, logger) -> None:
        self.profiler.step()

    def fit_end(self, state: State, logger) -> None:
        self.profiler.stop()
