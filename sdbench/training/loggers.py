"""Log the curves of a run with Composer's own loggers, and record a trace with torch's profiler."""
import os

import torch
from composer import Callback
from composer.callbacks import SpeedMonitor
from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist
from torch.profiler import profile, schedule, tensorboard_trace_handler

from sdbench.errors import DataError, one_line
from sdbench.flags.train import Run
from sdbench.gpus import peak_of

TRACE_WARMUP = 1   # batches for the warm-up of the profiler itself
TRACED_BATCHES = 3


def build_loggers(settings: Run, name: str) -> list[LoggerDestination]:
    """Return Composer's loggers for the flags. A resume has the same `name`, so it continues the curves."""
    loggers = []
    if settings.tensorboard:
        loggers.append(TensorBoard(settings.tensorboard))
    if settings.wandb_name or settings.wandb_project:
        options = {'id': name, 'resume': 'allow',
                   'settings': {'quiet': True}}  # without this, 70 lines follow the result of the run
        loggers.append(WandB(settings.wandb_project, name=settings.wandb_name, init_kwargs=options))
    return loggers


class TensorBoard(TensorboardLogger):
    """Composer's TensorBoard logger, whose curves do not repeat the batches that a resumed run trains again."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Tell TensorBoard to drop the batches after the checkpoint: otherwise the curves would show them twice."""
        if self.writer is not None and state.timestamp.batch.value > 0:
            self.writer.close()
            self.writer.purge_step = state.timestamp.batch.value  # written into the next event file


class WandB(WandBLogger):
    """Composer's W&B logger. If it cannot start, the run ends with a one-line error before its first batch."""

    def init(self, state: State, logger: Logger) -> None:
        try:
            super().init(state, logger)
        except Exception as error:  # wandb raises many kinds, for a missing login or an unreachable server
            raise DataError('--wandb_name and --wandb_project: Weights & Biases cannot start a run '
                            f'({one_line(error, 200)}); log in by `wandb login` or WANDB_API_KEY, or set '
                            'WANDB_MODE=offline to log to this machine') from None


class Throughput(SpeedMonitor):
    """Composer's curves of speed and time, with the peak of the GPU, because Composer does not know every GPU.

    `EndOfBatch` evaluates within a batch, whose time Composer then counts, and must not add to the total again.
    """

    def __init__(self, settings: Run):
        peak = peak_of(torch.cuda.get_device_name(), settings.precision) if torch.cuda.is_available() else None
        super().__init__(min(10, settings.measure_batches or 10), (peak or 0) * 1e12)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Do not count the evaluation."""


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
