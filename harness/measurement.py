"""How fast a run is: the clock of its batches, the figures that follow from it, and the loader's alone."""
import itertools
import math
import resource
import time

import numpy as np
import torch
from composer import Callback
from composer.core import DataSpec
from composer.utils import dist

from harness.gpu_monitor import GpuMonitor

GIB = 2 ** 30


class Measurement(Callback):
    """Wall clock of up to `measure_batches` after the warm-up, and of the wait for their data, on this rank.

    Composer reads the loss on the CPU before BATCH_END, so that the device has finished the batch by then. The warm-up
    counts from where the run starts or resumes.

    Attributes:
        batches: trained by this process, with the warm-up.
        batch_seconds: of each measured batch, from the end of the one before.
        wait_seconds: of each, the part that was spent waiting for the loader.
        samples: of the measured batches, on all ranks.
        loss: of the last measured batch whose loss is finite.
        gpu: watches this rank's GPU during the measured batches.
    """

    def __init__(self, warmup_batches: int, measure_batches: int):
        self.warmup_batches = warmup_batches
        self.last_batch = warmup_batches + measure_batches
        self.batches = 0
        self.batch_seconds: list[float] = []
        self.wait_seconds: list[float] = []
        self.samples = 0
        self.loss: float | None = None
        self.gpu = GpuMonitor()
        self._asked: float | None = None  # when the loader was asked for the batch to come

    def fit_start(self, state, logger) -> None:
        self._previous_end = time.perf_counter()

    def before_dataloader(self, state, logger) -> None:
        if self._asked is None:  # at an epoch's end the loader is asked twice
            self._asked = time.perf_counter()

    def after_dataloader(self, state, logger) -> None:
        self._waited = time.perf_counter() - self._asked
        self._asked = None

    def batch_end(self, state, logger) -> None:
        now = time.perf_counter()
        self.batches += 1
        if self.warmup_batches < self.batches <= self.last_batch:
            self.batch_seconds.append(now - self._previous_end)
            self.wait_seconds.append(self._waited)
            self.samples += state.timestamp.sample.value - state.previous_timestamp.sample.value
            loss = state.total_loss_dict.get('loss/train/total', math.nan)  # Composer keeps none of a step it dropped
            if math.isfinite(loss):
                self.loss = loss
        elif self.batches <= self.warmup_batches and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # the search for a microbatch size fills the memory
        if self.batches == self.warmup_batches:
            self.gpu.start()
        elif self.batches == self.last_batch:
            self.gpu.stop()
        self._previous_end = now


def figures(measurement: Measurement, all_ranks: bool = True, bad_samples: set[int] | frozenset = frozenset()) -> dict:
    """The record's figures; a batch takes as long as on its slowest rank. None where no batch was measured.

    Args:
        measurement: this rank's.
        all_ranks: ask the other ranks for theirs; False where the run broke off and they may be gone.
        bad_samples: those that this rank met.
    """
    ranks = [(measurement.batch_seconds, measurement.wait_seconds, peak_memory_gib(), bad_samples)]
    if all_ranks:
        ranks = dist.all_gather_object(ranks[0])
    seconds, waits, memory, bad = zip(*ranks, strict=True)
    num_bad = len(set().union(*bad))
    if not measurement.batch_seconds:
        return {'images_per_sec': None, 'measured_batches': 0, 'bad_samples': num_bad}
    seconds = np.array(seconds)  # (ranks, batches)
    waits = np.array(waits)  # (ranks, batches)
    slowest = seconds.max(axis=0)  # (batches,)
    images_per_sec = measurement.samples / seconds.sum(axis=1).max()
    return {
        'images_per_sec': images_per_sec,
        'images_per_sec_per_device': images_per_sec / dist.get_world_size(),
        'batch_seconds_median': float(np.median(slowest)),
        'batch_seconds_p10': float(np.percentile(slowest, 10)),
        'batch_seconds_p90': float(np.percentile(slowest, 90)),
        'drift': drift(slowest),
        'data_wait_fraction': float((waits.sum(axis=1) / seconds.sum(axis=1)).max()),
        'peak_memory_gib': max(memory),
        'measured_batches': len(slowest),
        'bad_samples': num_bad,
        'loss': measurement.loss,
    }


def drift(batch_seconds: np.ndarray) -> float | None:
    """By what share the last third of the batches is faster than the first; negative where it is slower.

    None where there are fewer than three batches.
    """
    third = len(batch_seconds) // 3
    if third == 0:
        return None
    return float(batch_seconds[:third].sum() / batch_seconds[-third:].sum() - 1)


def loader_figures(data: DataSpec, warmup_batches: int, measure_batches: int, num_workers: int) -> dict[str, float]:
    """Throughput of the loader alone, over all ranks: the batches after the warm-up, as fast as they come."""
    epochs = itertools.chain.from_iterable(itertools.repeat(data.dataloader))  # one after the other
    batches = map(data.batch_transforms, epochs)
    for _ in range(warmup_batches):
        next(batches)
    start = time.perf_counter()
    my_images = sum(len(next(batches)['caption']) for _ in range(measure_batches))
    my_seconds = time.perf_counter() - start
    ranks = dist.all_gather_object((my_images, my_seconds, data.batch_transforms.found))
    images, seconds, bad = zip(*ranks, strict=True)
    images_per_sec = sum(images) / max(seconds)
    return {'loader_images_per_sec': images_per_sec,
            'measured_batches': measure_batches,
            'bad_samples': len(set.union(*bad)),
            'loader_images_per_sec_per_worker': images_per_sec / (len(ranks) * max(1, num_workers))}


def peak_memory_gib() -> float:
    """Most memory this rank took: reserved on its GPU, or resident on the host where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
