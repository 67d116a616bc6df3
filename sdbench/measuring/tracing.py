"""--profile: a trace of some batches by Composer's profiler."""
from pathlib import Path

from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule

from sdbench.flags.train import Train
from sdbench.paths import without_placeholders

TRACE_WARMUP = 1   # batches in which the profiler itself warms up
TRACED_BATCHES = 3


def build_profiler(settings: Train) -> Profiler | None:
    """Build Composer's profiler for --profile DIR; None without the flag.

    Each rank writes `DIR/torch/rank0.N.pt.trace.json`, with what the CPU and the GPU did, and under `DIR/composer` the
    same with the events of Composer's loop; N is the last batch that was traced. It does so in each epoch.
    """
    if not settings.profile:
        return None
    folder = Path(without_placeholders(settings.profile))
    events = JSONTraceHandler(folder=str(folder / 'composer'), remote_file_name=None, merged_trace_filename=None,
                              merged_trace_remote_file_name=None)
    schedule = cyclic_schedule(skip_first=settings.warmup_batches, warmup=TRACE_WARMUP, active=TRACED_BATCHES)
    return Profiler(schedule=schedule, trace_handlers=[events], sys_prof_cpu=False,
                    torch_prof_folder=str(folder / 'torch'), torch_prof_remote_file_name=None,
                    torch_prof_memory_remote_file_name=None)
