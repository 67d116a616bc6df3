"""Measure how fast a run is: the clock of its batches, the figures that follow from it, the loader alone, and a trace.

The loader's workers make batches ahead, into a queue. After a slow first step, such as one that compiles, it is full,
and the first batches come from it faster than the loader makes them. So the clock starts when as many batches as the
queue holds have been taken. What the queue loses in the window was not made in it either.

    batches in the queue
    queue_batches |    .......
                  |  ..       .....
    at the start  | .              .....
                  |                |    ........       queue_loss: the difference between
    at the end    |                |            ....   the start and the end of the window
                  +---------+------+----------------+
                    warm-up turnover     window
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

from sdbench.flags.train import Train
from sdbench.gpus import GIB
from sdbench.measuring.power import GpuMonitor, gather_gpu_figures
from sdbench.records.figures import LOADER_LINES, summary_lines
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, QUEUES_IN_WINDOW, caution_about

EXCLUDED = ('checkpoint', 'evaluation', 'sampling')  # what a run does between batches, in no figure but its own seconds
TRACE_WARMUP = 1   # batches in which the profiler itself warms up
TRACED_BATCHES = 3


@dataclass
class Window:
    """What one rank measured: for each batch of the window a number in each list, and counts over it.

    Attributes:
        batch_seconds: from the end of the batch before to the end of this one.
        wait_seconds: of these, what was spent waiting for the loader.
        excluded_seconds: of these, what was spent on anything of EXCLUDED, which is no part of a batch.
        seconds_of: the same for each of EXCLUDED, over all batches.
        samples: of all ranks.
        queue_batches: batches that the loader prepares ahead, when its queue is full.
        queue_loss: batches that the queue has fewer than at the start of the window: they were not made in it.
    """
    batch_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    excluded_seconds: list[float] = field(default_factory=list)
    seconds_of: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EXCLUDED, 0.0))
    samples: int = 0
    queue_batches: int = 0
    queue_loss: int = 0

    @property
    def share_not_of_queue(self) -> float:
        """Share of the samples that the loader made in this time; 1 where the window is too short to tell."""
        batches = len(self.batch_seconds)
        if batches <= self.queue_batches:
            return 1.0
        return (batches - self.queue_loss) / batches


class Stopwatch:
    """Counts the seconds that a run spends between its batches, lap by lap, apart for each of several names.

    Attributes:
        name: what the time counts as now; None: the watch is paused.
    """

    def __init__(self, names: Sequence[str]):
        self.name: str | None = None
        self._lap = dict.fromkeys(names, 0.0)
        self._since = 0.0  # what of the time from here on is not counted yet

    def count_as(self, name: str | None) -> None:
        """Count the time from now on as `name`; None: pause."""
        now = time.perf_counter()
        if self.name is not None:
            self._lap[self.name] += now - self._since
        self.name = name
        self._since = now

    def end_lap(self) -> dict[str, float]:
        """Begin another lap; return the seconds of the one that ends, by name."""
        self.count_as(self.name)  # up to now
        lap = self._lap
        self._lap = dict.fromkeys(lap, 0.0)
        return lap


class Measurement(Callback):
    """The clock of a run, on this rank: a warm-up, batches until the loader's queue has turned over, and a window.

    Composer reads the loss on the CPU before BATCH_END, so that the device has finished the batch by then. The warm-up
    counts from where the run starts or resumes.

    Args:
        warmup_batches: before anything is measured.
        measure_batches: length of the window; None is as long as the run goes on.

    Attributes:
        stopwatch: of what is no part of a batch, by the names of EXCLUDED; its laps are the batches.
    """

    def __init__(self, warmup_batches: int, measure_batches: int | None):
        self.warmup_batches = warmup_batches
        self.measure_batches = measure_batches
        self.turnover_batches = 0
        self.batches = 0  # trained by this process, with the warm-up
        self.loss: float | None = None  # the last finite one of the run
        self.window = Window()
        self.gpu = GpuMonitor()  # of the window
        self.stopwatch = Stopwatch(EXCLUDED)
        self._previous_end = 0.0  # of a batch, by the clock
        self._queued_at_start = 0  # batches in the loader's queue when the window began

    def state_dict(self) -> dict:
        return {'loss': self.loss}  # for a run that resumes where nothing is left to train

    def load_state_dict(self, state: dict) -> None:
        self.loss = state['loss']

    def fit_start(self, state: State, logger) -> None:
        # between warm-up and window the loader's queue turns over, if the run is long enough for it
        self.window.queue_batches = state.train_dataloader.queue_length
        batches_left = state.max_duration.value - state.timestamp.batch.value - self.warmup_batches
        if self.measure_batches is None:
            room = batches_left // (1 + QUEUES_IN_WINDOW)
        else:
            room = batches_left - self.measure_batches
        self.turnover_batches = min(self.window.queue_batches, max(0, room))
        self._previous_end = time.perf_counter()

    def before_dataloader(self, state: State, logger) -> None:
        """Pause the stopwatch: the next batch begins."""
        self.stopwatch.count_as(None)

    def eval_before_all(self, state: State, logger) -> None:
        self.stopwatch.count_as('evaluation')

    def eval_after_all(self, state: State, logger) -> None:
        self.stopwatch.count_as(None)

    def batch_checkpoint(self, state: State, logger) -> None:
        """Count what follows a batch: Composer's CheckpointSaver, a later callback than this, may save now."""
        self.stopwatch.count_as('checkpoint')

    def epoch_checkpoint(self, state: State, logger) -> None:
        self.stopwatch.count_as('checkpoint')

    def batch_end(self, state: State, logger) -> None:
        # the batch that has ended
        now = time.perf_counter()
        seconds = now - self._previous_end
        excluded = self.stopwatch.end_lap()
        waited = state.train_dataloader.seconds_waited()
        loss = float(state.total_loss_dict.get('loss/train/total', math.nan))  # none of a step that was left out
        if math.isfinite(loss):
            self.loss = loss

        # it is measured, or before the window
        first = self.warmup_batches + self.turnover_batches
        is_full = self.measure_batches is not None and len(self.window.batch_seconds) >= self.measure_batches
        if self.batches >= first and not is_full:
            self._measure(state, seconds, waited, excluded)
        elif self.batches < self.warmup_batches and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # what comes before the measured steps may take more,
            torch.cuda.reset_accumulated_memory_stats()  # and a search for the microbatch makes the allocator retry

        # the batch that begins, perhaps the first of the window
        self.batches += 1
        self._previous_end = now
        if self.batches == first:
            self._queued_at_start = state.train_dataloader.queued_batches

    def figures(self, all_ranks: bool) -> dict:
        """Return the record's figures of speed, memory, power and loss; `all_ranks` as for `window_figures`."""
        found = window_figures(self.window, all_ranks)
        found |= gather_gpu_figures(self.gpu, found['images_per_sec'], all_ranks)
        return found | {'turnover_batches': self.turnover_batches, 'loss': self.loss}

    def _measure(self, state: State, seconds: float, waited: float, excluded: dict[str, float]) -> None:
        """Add a batch to the window: its seconds, those of them that it waited, and those that are no part of it."""
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
        """Return how many batches the loader's queue has fewer than at the start of the window.

        At an epoch's end it is empty because there is nothing left to make, and at the start of the next it has yet to
        fill, which is not the loader's slowness: there the last number stays.
        """
        if state.timestamp.batch_in_epoch.value < self.window.queue_batches:
            return self.window.queue_loss
        left_in_epoch = int(state.dataloader_len) - state.timestamp.batch_in_epoch.value
        return max(0, min(self._queued_at_start, left_in_epoch) - state.train_dataloader.queued_batches)


def window_figures(window: Window, all_ranks: bool = True) -> dict:
    """Return the figures of a window; a batch takes as long as on its slowest rank.

    Args:
        window: this rank's.
        all_ranks: ask the other ranks for theirs; False where the run broke off and they may be gone.

    Where no batch was measured there is nothing but that.
    """
    # of each batch, the seconds on the slowest rank
    excluded = highest_of_ranks(window.excluded_seconds, all_ranks)  # (batches,): the other ranks wait for that one
    seconds = np.array(window.batch_seconds) - excluded  # (batches,)
    slowest = highest_of_ranks(seconds, all_ranks)  # (batches,)
    seconds_of = highest_of_ranks(list(window.seconds_of.values()), all_ranks)  # (names of EXCLUDED,)

    # of the whole window, what each rank has
    mine = (seconds.sum(), sum(window.wait_seconds), window.share_not_of_queue, peak_memory_gib())
    ranks = dist.all_gather_object(mine) if all_ranks else [mine]
    totals, waits, shares, memory = zip(*ranks, strict=True)

    # the figures
    if not window.batch_seconds:
        return {'images_per_sec': None, 'measured_batches': 0}
    return {
        'images_per_sec': float(window.samples * min(shares) / max(totals)),
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
    """Return of each value the highest of all ranks, (values,).

    A run of days has millions of values: those of all ranks are never gathered.
    """
    if not all_ranks or len(values) == 0:
        return np.array(values, dtype=float)
    highest = get_device().tensor_to_device(torch.tensor(values, dtype=torch.float64))
    dist.all_reduce(highest, 'MAX')
    return highest.cpu().numpy()


def drift(batch_seconds: np.ndarray) -> float | None:
    """Return by what share the last third of the batches is faster than the first; negative where it is slower.

    None where there are fewer than three batches.
    """
    third = len(batch_seconds) // 3
    if third == 0:
        return None
    return float(batch_seconds[:third].sum() / batch_seconds[-third:].sum() - 1)


def measure_loader(settings: Train, data: DataSpec) -> dict:
    """Measure the loader alone, over all ranks: what it makes after the warm-up, taken as fast as it comes.

    Keeps and prints the record, and returns it.
    """
    # the warm-up, and the queue after it
    loader = data.dataloader
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))  # one after the other
    batches = map(data.batch_transforms, epochs)
    for _ in range(settings.warmup_batches + loader.queue_length):
        next(batches)

    # the measured batches
    measured = settings.measure_batches
    queued_at_start = loader.queued_batches
    start = time.perf_counter()
    images = sum(len(next(batches)['caption']) for _ in range(measured))
    seconds = time.perf_counter() - start
    made = measured + loader.queued_batches - queued_at_start  # in this time: several come at once

    # the slowest rank decides
    mine = (images * made / measured, seconds, data.batch_transforms.found)
    images, seconds, bad = zip(*dist.all_gather_object(mine), strict=True)
    record = make_record('loader', settings, {
        'status': COMPLETE, 'loader_images_per_sec': sum(images) / max(seconds), 'measured_batches': measured,
        'bad_samples': len(set.union(*bad))})
    summary = summary_lines(LOADER_LINES, record | {'caution': caution_about(record)})
    return append_record(record, '\n'.join(summary), settings.results_file)


def peak_memory_gib() -> float:
    """Return the GiB of memory that this rank took at most: reserved on its GPU, or of the host where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / GIB
    status = Path('/proc/self/status').read_text()  # ru_maxrss is at least that of the process that started this one
    [peak] = re.findall(r'^VmHWM:\s*(\d+) kB$', status, re.MULTILINE)
    return int(peak) * 1024 / GIB


class Trace(Callback):
    """Traces TRACED_BATCHES batches of a run, on each rank, by torch's profiler: what the CPU and the GPU did in them.

    They follow the warm-up, from where the run starts or resumes, and TRACE_WARMUP batches of the profiler's own. The
    file is `rankN.TIME.pt.trace.json`, so that it is never written over.

    Args:
        folder: for the file.
        warmup_batches: of the run.
    """

    def __init__(self, folder: str, warmup_batches: int):
        os.makedirs(folder, exist_ok=True)  # where that is refused, it is before the run
        steps = schedule(skip_first=warmup_batches, wait=0, warmup=TRACE_WARMUP, active=TRACED_BATCHES, repeat=1)
        self.profiler = profile(schedule=steps, profile_memory=True, with_flops=True,
                                on_trace_ready=tensorboard_trace_handler(folder, f'rank{dist.get_global_rank()}'))

    def fit_start(self, state: State, logger) -> None:
        self.profiler.start()

    def batch_end(self, state: State, logger) -> None:
        self.profiler.step()

    def fit_end(self, state: State, logger) -> None:
        self.profiler.stop()
