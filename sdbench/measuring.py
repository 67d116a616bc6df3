"""Measure a run: its speed batch by batch, the power of its GPUs, or the speed of its data loader alone.

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
import contextlib
import itertools
import math
import re
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from composer.core import DataSpec, State
from composer.utils import dist, get_device

from sdbench.flags.train import Run
from sdbench.gpus import GIB
from sdbench.records.metrics import LOADER_LINES, summary_lines
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, QUEUES_IN_WINDOW, caution_about

EXCLUDED = ('checkpoint', 'evaluation', 'sampling')  # work between batches, which does not count in the speed
SECONDS_BETWEEN_SAMPLES = 1.0  # of a GPU's power and clock
# What is sampled: for each quantity a function that asks NVIDIA's library, and how many of its units are one of ours.
QUANTITIES = {'gpu_power_watts': (torch.cuda.power_draw, 1000), 'gpu_sm_clock_mhz': (torch.cuda.clock_rate, 1)}
GPU_METRICS = {  # how the ranks that know a metric combine it; a maximum of samples shows a card that throttles
    'gpu_power_watts_mean': mean, 'gpu_power_watts_max': max, 'gpu_sm_clock_mhz_mean': mean,
    'gpu_sm_clock_mhz_max': max, 'peak_memory_allocated_gib': max, 'allocator_retries': sum}


class Measurement:
    """Measures the batches of a run on this rank, after a warm-up and after the first prefetched batches.

    The time of a batch includes the work on the device: Composer reads the loss on the CPU before the end of a batch,
    and waits for the device to do so. The warm-up counts from the batch at which the run starts or resumes.

    Args:
        warmup_batches: batches before the clock starts.
        measure_batches: batches of the window; None measures until the run ends.
        loss: the last loss of the resumed run: this run may have no batch left, and still records a loss.
    """

    def __init__(self, warmup_batches: int, measure_batches: int | None, loss: float | None = None):
        self.warmup_batches = warmup_batches
        self.measure_batches = measure_batches
        self.prefetched_batches = 0  # batches between the warm-up and the window
        self.batches = 0  # batches that this process has trained, including the warm-up
        self.loss = loss  # the last finite loss
        # The window: for each batch the seconds since the end of the batch before, the part of them spent waiting for
        # the loader, and the parts spent on the work of EXCLUDED.
        self.seconds = array('d')
        self.samples = 0  # of all ranks
        self.queue_batches = 0  # batches in the loader's queue when it is full
        self.queue_loss = 0  # how many batches shorter the queue is than at the start of the window
        self.gpu = GpuMonitor()
        self._excluded = dict.fromkeys(EXCLUDED, 0.0)  # seconds since the last batch
        self._previous_end = 0.0  # time at which the last batch ended
        self._queued_at_start = 0  # batches in the loader's queue when the window began

    def begin(self, state: State) -> None:
        """Start the clock, and decide how many prefetched batches to skip: a full queue, if the run is long enough."""
        self.queue_batches = state.train_dataloader.queue_length
        batches_left = state.max_duration.value - state.timestamp.batch.value - self.warmup_batches
        if self.measure_batches is None:
            room = batches_left // (1 + QUEUES_IN_WINDOW)
        else:
            room = batches_left - self.measure_batches
        self.prefetched_batches = min(self.queue_batches, max(0, room))
        self._excluded = dict.fromkeys(EXCLUDED, 0.0)
        self._previous_end = time.perf_counter()

    @contextlib.contextmanager
    def excluded(self, kind: str) -> Iterator[None]:
        """Exclude the time of this context, which is one of EXCLUDED, from the batch that has begun."""
        start = time.perf_counter()
        yield
        self._excluded[kind] += time.perf_counter() - start

    def end_batch(self, state: State) -> None:
        """Time the batch that ended, and add it to the window if it belongs there."""
        # Read all clocks. A skipped step has a NaN loss, so keep the last finite one.
        now = time.perf_counter()
        seconds = [now - self._previous_end, state.train_dataloader.seconds_waited(), *self._excluded.values()]
        loss = float(state.total_loss_dict.get('loss/train/total', math.nan))
        if math.isfinite(loss):
            self.loss = loss

        # Add the batch to the window. During the warm-up, reset the memory statistics instead: the first batches may
        # need more memory than later ones, and the search for the microbatch raises the allocator's retry count.
        window = self.batches - self.warmup_batches - self.prefetched_batches  # batches since its start
        if window >= 0 and (self.measure_batches is None or window < self.measure_batches):
            self.seconds.extend(seconds)
            self.samples += state.timestamp.sample.value - state.previous_timestamp.sample.value
            self._note_queue_loss(state)
            self.gpu.sample()
        elif self.batches < self.warmup_batches and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()

        # Start the clock of the next batch. If that batch is the first in the window, note the length of the queue.
        self.batches += 1
        self._excluded = dict.fromkeys(EXCLUDED, 0.0)
        self._previous_end = now
        if window == -1:
            self._queued_at_start = state.train_dataloader.queued_batches

    def _note_queue_loss(self, state: State) -> None:
        """Note by how many batches the loader's queue has shrunk since the start of the window.

        Near the end of an epoch the loader has few batches left to make, so a shorter queue is expected. At the start
        of the next epoch the queue has to fill again, so the last value is kept until it may be full.
        """
        batch = state.timestamp.batch_in_epoch.value
        if batch >= self.queue_batches:
            expected = min(self._queued_at_start, int(state.dataloader_len) - batch)
            self.queue_loss = max(0, expected - state.train_dataloader.queued_batches)

    def metrics(self, all_ranks: bool) -> dict:
        """Return speed, memory, power and loss for the record. The time of a batch is its time on the slowest rank.

        With `all_ranks` it collects the windows of all ranks; without it, because the run failed and other ranks may
        be gone, it has only this rank's. If no batch was measured, `images_per_sec` is None and others are missing.
        """
        found = self._window_metrics(all_ranks)
        found |= self.gpu.metrics(found['images_per_sec'], all_ranks)
        return found | {'turnover_batches': self.prefetched_batches, 'loss': self.loss}

    def _window_metrics(self, all_ranks: bool) -> dict:
        # Take the slowest rank for each batch. The other ranks wait for a rank that saves or evaluates, so the longest
        # excluded time applies to all ranks.
        rows = np.array(self.seconds).reshape(-1, 2 + len(EXCLUDED))  # (batches, seconds: all, waiting, EXCLUDED)
        excluded = highest_of_ranks(rows[:, 2:].sum(axis=1), all_ranks)  # (batches,)
        seconds = rows[:, 0] - excluded  # (batches,)
        slowest = highest_of_ranks(seconds, all_ranks)  # (batches,)
        excluded_by_kind = highest_of_ranks(rows[:, 2:].sum(axis=0), all_ranks)  # (EXCLUDED,)

        # Collect the totals of each rank. Samples in the queue at the start of the window were not made during it.
        batches = len(rows)
        fraction_made = (batches - self.queue_loss) / batches if batches > self.queue_batches else 1.0
        mine = (seconds.sum(), rows[:, 1].sum(), fraction_made, peak_memory_gib())
        ranks = dist.all_gather_object(mine) if all_ranks else [mine]
        totals, waits, fractions, memory = zip(*ranks, strict=True)
        if batches == 0:
            return {'images_per_sec': None, 'measured_batches': 0}
        return {
            'images_per_sec': float(self.samples * min(fractions) / max(totals)),
            'batch_seconds_median': float(np.median(slowest)),
            'batch_seconds_p10': float(np.percentile(slowest, 10)),
            'batch_seconds_p90': float(np.percentile(slowest, 90)),
            'drift': drift(slowest),
            'data_wait_fraction': float(max(wait / total for wait, total in zip(waits, totals, strict=True))),
            **{f'{kind}_seconds': float(spent) for kind, spent in zip(EXCLUDED, excluded_by_kind, strict=True)},
            'peak_memory_gib': max(memory),
            'measured_batches': batches,
            'queue_batches': self.queue_batches,
        }


def highest_of_ranks(values: np.ndarray, all_ranks: bool) -> np.ndarray:
    """Return the maximum over all ranks for each value, (values,).

    It is an all-reduce and not a gather, because a run of days has millions of values.
    """
    if not all_ranks or len(values) == 0:
        return values
    highest = get_device().tensor_to_device(torch.tensor(values, dtype=torch.float64))
    dist.all_reduce(highest, 'MAX')
    return highest.cpu().numpy()


def drift(batch_seconds: np.ndarray) -> float | None:
    """Return by what fraction the last third of three or more batches is faster than the first; negative if slower."""
    third = len(batch_seconds) // 3
    if third == 0:
        return None
    return float(batch_seconds[:third].sum() / batch_seconds[-third:].sum() - 1)


def peak_memory_gib() -> float:
    """Return the peak memory of this rank in GiB: reserved memory on its GPU, or host memory if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / GIB
    status = Path('/proc/self/status').read_text()  # not ru_maxrss, which includes the peak of the parent process
    [peak] = re.findall(r'^VmHWM:\s*(\d+) kB$', status, re.MULTILINE)
    return int(peak) * 1024 / GIB


class GpuMonitor:
    """Samples the power and the clock of this rank's GPU, which can explain a drift in speed.

    A sample is taken at the end of a measured batch, when the GPU still runs at the clock of the batch. There are none
    without a GPU, a driver that answers, or the package nvidia-ml-py.
    """

    def __init__(self):
        self.samples: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES}
        self._next_sample = 0.0  # earliest time of the next sample

    def sample(self) -> None:
        """Take a sample, unless the last one is less than SECONDS_BETWEEN_SAMPLES old."""
        now = time.monotonic()
        if not torch.cuda.is_available() or now < self._next_sample:
            return
        self._next_sample = now + SECONDS_BETWEEN_SAMPLES
        for quantity, (ask, unit) in QUANTITIES.items():
            if quantity == 'gpu_power_watts' and 'MIG' in torch.cuda.get_device_name():
                continue  # a MIG slice reports the power of the whole GPU, which others use as well
            with contextlib.suppress(Exception):  # an error of NVIDIA's library must not end the training
                self.samples[quantity].append(ask() / unit)

    def metrics(self, images_per_sec: float | None, all_ranks: bool) -> dict[str, float | None]:
        """Return GPU_METRICS and `joules_per_image`, over all ranks or of this rank only; None if no rank knows it."""
        # Collect the metrics of this rank. A retry of the allocator frees the whole cache in the middle of a batch,
        # so a speed with retries is too low.
        mine = {}
        for quantity, samples in self.samples.items():
            if samples:
                mine |= {f'{quantity}_mean': mean(samples), f'{quantity}_max': max(samples)}
        if torch.cuda.is_available():
            allocator = torch.cuda.memory_stats()
            mine |= {'peak_memory_allocated_gib': allocator['allocated_bytes.all.peak'] / GIB,
                     'allocator_retries': allocator['num_alloc_retries']}

        # Combine the ranks. The energy per image needs the power of every rank.
        ranks = dist.all_gather_object(mine) if all_ranks else [mine]
        together: dict[str, float | None] = dict.fromkeys((*GPU_METRICS, 'joules_per_image'))
        for key, combine in GPU_METRICS.items():
            values = [rank[key] for rank in ranks if key in rank]
            if values:
                together[key] = combine(values)
        power = [rank['gpu_power_watts_mean'] for rank in ranks if 'gpu_power_watts_mean' in rank]
        if images_per_sec and len(power) == dist.get_world_size():
            together['joules_per_image'] = sum(power) / images_per_sec
        return together


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
