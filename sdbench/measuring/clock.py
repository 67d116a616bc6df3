"""Measure the speed of a run, batch by batch, or of the data loader alone, and record a trace with torch's profiler.

The loader's workers prefetch batches into a queue. After a slow first step, for example one that compiles, the queue is
full, and the first batches come from it faster than the workers make new ones. Therefore the clock starts only after
the run has taken as many batches as the queue holds. If the queue then shrinks during the measured window, some batches
of the window were made before it, and do not count.

    batches in the queue
    queue_batches |    .......
                  |  ..       .....
    at the start  | .              .....
                  |                |    ........       queue_loss: the difference between
    at the end    |                |            ....   the start and the end of the window
                  +---------+------+----------------+
                    warm-up  pre-       window
                             fetched
"""
import itertools
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from composer import Callback
from composer.core import DataSpec, State
from composer.utils import dist, get_device
from torch.profiler import profile, schedule, tensorboard_trace_handler

from sdbench.flags.train import Run
from sdbench.gpus import GIB
from sdbench.measuring.power import GpuMonitor, gather_gpu_figures
from sdbench.records.metrics import LOADER_LINES, summary_lines
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, QUEUES_IN_WINDOW, caution_about

EXCLUDED = ('checkpoint', 'evaluation', 'sampling')  # work between batches, which does not count in the speed
TRACE_WARMUP = 1   # batches for the warm-up of the profiler itself
TRACED_BATCHES = 3


@dataclass
class Window:
    """The measurements of one rank in the window. The lists have one number per batch.

    Attributes:
        batch_seconds: seconds from the end of the batch before to the end of this one.
        wait_seconds: the part of batch_seconds spent waiting for the loader.
        excluded_seconds: the part of batch_seconds spent on the work of EXCLUDED.
        seconds_of: seconds for each name of EXCLUDED, over all batches.
        samples: samples of all ranks.
        queue_batches: batches in the loader's queue when it is full.
        queue_loss: how many batches shorter the queue is than at the start of the window. They were made before it.
    """
    batch_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    excluded_seconds: list[float] = field(default_factory=list)
    seconds_of: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EXCLUDED, 0.0))
    samples: int = 0
    queue_batches: int = 0
    queue_loss: int = 0

    @property
    def fraction_made(self) -> float:
        """Return the fraction of the samples that the loader made during the window; 1 if the window is too short."""
        batches = len(self.batch_seconds)
        if batches <= self.queue_batches:
            return 1.0
        return (batches - self.queue_loss) / batches


class Stopwatch:
    """Counts the seconds that a run spends on work between batches, separately for each kind of work and each lap.

    Attributes:
        name: the kind of work that the time counts as now; None while the watch is paused.
    """

    def __init__(self, names: Sequence[str]):
        self.name: str | None = None
        self._lap = dict.fromkeys(names, 0.0)
        self._since = 0.0  # the time since then is not counted yet

    def count_as(self, name: str | None) -> None:
        """Count the time from now on as `name`; None pauses the watch."""
        now = time.perf_counter()
        if self.name is not None:
            self._lap[self.name] += now - self._since
        self.name = name
        self._since = now

    def end_lap(self) -> dict[str, float]:
        """End a lap, and return its seconds by name."""
        self.count_as(self.name)  # counts the time until now
        lap = self._lap
        self._lap = dict.fromkeys(lap, 0.0)
        return lap


class Measurement(Callback):
    """Measures the batches of a run on this rank, after a warm-up and after the first prefetched batches.

    The time of a batch includes the work on the device: Composer reads the loss on the CPU before BATCH_END, and waits
    for the device to do so. The warm-up counts from the batch at which the run starts or resumes.

    The window has `measure_batches` batches; None measures until the run ends.

    Attributes:
        stopwatch: counts the work between batches by the names of EXCLUDED. A lap is a batch.
    """

    def __init__(self, warmup_batches: int, measure_batches: int | None):
        self.warmup_batches = warmup_batches
        self.measure_batches = measure_batches
        self.prefetched_batches = 0  # batches between the warm-up and the window
        self.batches = 0  # batches that this process has trained, including the warm-up
        self.loss: float | None = None  # the last finite loss of the run
        self.window = Window()
        self.gpu = GpuMonitor()
        self.stopwatch = Stopwatch(EXCLUDED)
        self._previous_end = 0.0  # time at which the last batch ended
        self._queued_at_start = 0  # batches in the loader's queue when the window began

    def state_dict(self) -> dict:
        return {'loss': self.loss}  # a resumed run may have no batch left, and still record a loss

    def load_state_dict(self, state: dict) -> None:
        self.loss = state.get('loss')

    def fit_start(self, state: State, logger) -> None:
        """Decide how many prefetched batches to skip before the window: a full queue, if the run is long enough."""
        self.window.queue_batches = state.train_dataloader.queue_length
        batches_left = state.max_duration.value - state.timestamp.batch.value - self.warmup_batches
        if self.measure_batches is None:
            room = batches_left // (1 + QUEUES_IN_WINDOW)
        else:
            room = batches_left - self.measure_batches
        self.prefetched_batches = min(self.window.queue_batches, max(0, room))
        self._previous_end = time.perf_counter()

    def before_dataloader(self, state: State, logger) -> None:
        """Pause the stopwatch: the next batch begins."""
        self.stopwatch.count_as(None)

    def eval_before_all(self, state: State, logger) -> None:
        self.stopwatch.count_as('evaluation')

    def eval_after_all(self, state: State, logger) -> None:
        self.stopwatch.count_as(None)

    def batch_checkpoint(self, state: State, logger) -> None:
        """Count the time after a batch as a checkpoint: a later callback may save one now."""
        self.stopwatch.count_as('checkpoint')

    def epoch_checkpoint(self, state: State, logger) -> None:
        self.stopwatch.count_as('checkpoint')

    def batch_end(self, state: State, logger) -> None:
        """Time the batch that ended, and add it to the window if it belongs there."""
        # Read all clocks. A skipped step has a NaN loss, so keep the last finite one.
        now = time.perf_counter()
        seconds = now - self._previous_end
        excluded = self.stopwatch.end_lap()  # seconds by name of EXCLUDED
        waited = state.train_dataloader.seconds_waited()
        loss = float(state.total_loss_dict.get('loss/train/total', math.nan))
        if math.isfinite(loss):
            self.loss = loss

        # Add the batch to the window. During the warm-up, reset the memory statistics instead: the first batches may
        # need more memory than later ones, and the search for the microbatch raises the allocator's retry count.
        first_measured = self.warmup_batches + self.prefetched_batches
        is_full = self.measure_batches is not None and len(self.window.batch_seconds) >= self.measure_batches
        if self.batches >= first_measured and not is_full:
            self._measure(state, seconds, waited, excluded)
        elif self.batches < self.warmup_batches and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()

        # Start the clock of the next batch. If that batch is the first in the window, note the length of the queue.
        self.batches += 1
        self._previous_end = now
        if self.batches == first_measured:
            self._queued_at_start = state.train_dataloader.queued_batches

    def figures(self, all_ranks: bool) -> dict:
        """Return speed, memory, power and loss for the record; `all_ranks` as for `window_figures`."""
        found = window_figures(self.window, all_ranks)
        found |= gather_gpu_figures(self.gpu, found['images_per_sec'], all_ranks)
        return found | {'turnover_batches': self.prefetched_batches, 'loss': self.loss}

    def _measure(self, state: State, seconds: float, waited: float, excluded: dict[str, float]) -> None:
        """Add a batch to the window. `waited` and `excluded`, by name of EXCLUDED, are parts of its `seconds`."""
        window = self.window
        window.batch_seconds.append(seconds)
        window.wait_seconds.append(waited)
        window.excluded_seconds.append(sum(excluded.values()))
        for name, spent in excluded.items():
            window.seconds_of[name] += spent
        window.samples += state.timestamp.sample.value - state.previous_timestamp.sample.value
        window.queue_loss = self._queue_loss(state)
        self.gpu.batch_end()

    def _queue_loss(self, state: State) -> int:
        """Return by how many batches the loader's queue has shrunk since the start of the window.

        Near the end of an epoch the loader has few batches left to make, so a shorter queue is expected. At the start
        of the next epoch the queue has to fill again, so the last value is kept until it may be full.
        """
        if state.timestamp.batch_in_epoch.value < self.window.queue_batches:
            return self.window.queue_loss
        left_in_epoch = int(state.dataloader_len) - state.timestamp.batch_in_epoch.value
        return max(0, min(self._queued_at_start, left_in_epoch) - state.train_dataloader.queued_batches)


def window_figures(window: Window, all_ranks: bool = True) -> dict:
    """Return the figures of a window for the record. The time of a batch is its time on the slowest rank.

    With `all_ranks` it collects the windows of all ranks; without it, because the run failed and other ranks may be
    gone, it has only this rank's. If no batch was measured, `images_per_sec` is None and the other figures are missing.
    """
    # Take the slowest rank for each batch. The other ranks wait for a rank that saves or evaluates, so the longest
    # excluded time applies to all ranks.
    excluded = highest_of_ranks(window.excluded_seconds, all_ranks)  # (batches,)
    seconds = np.array(window.batch_seconds) - excluded  # (batches,)
    slowest = highest_of_ranks(seconds, all_ranks)  # (batches,)
    seconds_of = highest_of_ranks(list(window.seconds_of.values()), all_ranks)  # (names of EXCLUDED,)

    # Collect the totals of each rank.
    mine = (seconds.sum(), sum(window.wait_seconds), window.fraction_made, peak_memory_gib())
    ranks = dist.all_gather_object(mine) if all_ranks else [mine]
    totals, waits, fractions, memory = zip(*ranks, strict=True)

    # Speed counts only samples that the slowest loader made during the window.
    if not window.batch_seconds:
        return {'images_per_sec': None, 'measured_batches': 0}
    return {
        'images_per_sec': float(window.samples * min(fractions) / max(totals)),
        'batch_seconds_median': float(np.median(slowest)),
        'batch_seconds_p10': float(np.percentile(slowest, 10)),
        'batch_seconds_p90': float(np.percentile(slowest, 90)),
        'drift': drift(slowest),
        'data_wait_fraction': float(max(wait / total for wait, total in zip(waits, totals, strict=True))),
        **{f'{name}_seconds': float(spent) for name, spent in zip(window.seconds_of, seconds_of, strict=True)},
        'peak_memory_gib': max(memory),
        'measured_batches': len(slowest),
        'queue_batches': window.queue_batches,
    }


def highest_of_ranks(values: Sequence[float], all_ranks: bool) -> np.ndarray:
    """Return the maximum over all ranks for each value, (values,).

    It is an all-reduce and not a gather, because a run of days has millions of values.
    """
    if not all_ranks or len(values) == 0:
        return np.array(values, dtype=float)
    highest = get_device().tensor_to_device(torch.tensor(values, dtype=torch.float64))
    dist.all_reduce(highest, 'MAX')
    return highest.cpu().numpy()


def drift(batch_seconds: np.ndarray) -> float | None:
    """Return by what fraction the last third of three or more batches is faster than the first; negative if slower."""
    third = len(batch_seconds) // 3
    if third == 0:
        return None
    return float(batch_seconds[:third].sum() / batch_seconds[-third:].sum() - 1)


def measure_loader(settings: Run, data: DataSpec) -> dict:
    """Measure the loader alone, on all ranks, by taking its batches as fast as possible after the warm-up.

    Appends the record to --results, prints it, and returns it.
    """
    # Take the batches of the warm-up, and as many as are prefetched during the warm-up.
    loader = data.dataloader
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))  # an endless sequence of batches
    batches = map(data.batch_transforms, epochs)
    for _ in range(settings.warmup_batches + loader.queue_length):
        next(batches)

    # Measure. If the queue gets shorter, the missing batches were made before the measurement, and do not count.
    measured = settings.measure_batches
    queued_at_start = loader.queued_batches
    start = time.perf_counter()
    images = sum(len(next(batches)['caption']) for _ in range(measured))
    seconds = time.perf_counter() - start
    made = measured + loader.queued_batches - queued_at_start

    # Divide the images of all ranks by the seconds of the slowest rank.
    mine = (images * made / measured, seconds, data.batch_transforms.found)
    images, seconds, bad = zip(*dist.all_gather_object(mine), strict=True)
    record = make_record('loader', settings, {
        'status': COMPLETE, 'loader_images_per_sec': sum(images) / max(seconds), 'measured_batches': measured,
        'bad_samples': len(set.union(*bad))})
    summary = summary_lines(LOADER_LINES, record | {'caution': caution_about(record)})
    return append_record(record, '\n'.join(summary), settings.results)


def peak_memory_gib() -> float:
    """Return the peak memory of this rank in GiB: reserved memory on its GPU, or host memory if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / GIB
    status = Path('/proc/self/status').read_text()  # not ru_maxrss, which includes the peak of the parent process
    [peak] = re.findall(r'^VmHWM:\s*(\d+) kB$', status, re.MULTILINE)
    return int(peak) * 1024 / GIB


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
