"""Data loaders that measure how long the training waits for batches, and how many batches lie in their queues."""
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import RawArray

from streaming import StreamingDataLoader
from torch.utils.data import DataLoader, get_worker_info

from sdbench.process import end_with_parent

BATCHES_PER_WORKER = 2  # that each worker prepares ahead: torch's default prefetch_factor


def begin_worker(worker: int) -> None:
    """Prepare a loader's worker process (`worker_init_fn`): it ends with its parent, and Ctrl-C does not reach it.

    Without the first, the workers of a run whose ranks were all killed at the start of an epoch wait for one another
    forever. The second lets the run answer Ctrl-C before its workers do: the worker is in a process group of its own.
    """
    os.setpgrp()
    end_with_parent(signal.SIGKILL)


class CountedCollate:
    """A collate function that counts the batches that each worker of a loader has made.

    Args:
        collate: makes a batch of a list of samples.
        num_workers: worker processes of the loader.
    """

    def __init__(self, collate: Callable[[list], dict], num_workers: int):
        self.collate = collate
        self.made = RawArray('q', max(1, num_workers))  # a slot for each: a killed worker could hold a lock forever

    def __call__(self, samples: list) -> dict:
        batch = self.collate(samples)
        worker = get_worker_info()
        if worker is not None:
            self.made[worker.id] += 1
        return batch


class TimedIteration:
    """A mixin that times the `next` of a DataLoader alone, without what Composer does around it."""
    _seconds_waited = 0.0
    _batches_taken = 0

    def __iter__(self) -> Iterator[dict]:
        start = time.perf_counter()
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._seconds_waited += time.perf_counter() - start
            self._batches_taken += 1
            yield batch  # the training's own time, which is not counted
            start = time.perf_counter()

    def seconds_waited(self) -> float:
        """Return the seconds spent waiting for batches since the last call."""
        seconds = self._seconds_waited
        self._seconds_waited = 0.0
        return seconds

    @property
    def queue_length(self) -> int:
        """Number of batches that the workers prepare ahead, when the queue is full."""
        return self.num_workers * BATCHES_PER_WORKER

    @property
    def queued_batches(self) -> int:
        """Number of batches in the queue, ready to be taken; 0 without workers."""
        if self.num_workers == 0:
            return 0
        return sum(self.collate_fn.made) - self._batches_taken


class TimedDataLoader(TimedIteration, DataLoader):
    """torch's own loader, timed."""


class TimedStreamingDataLoader(TimedIteration, StreamingDataLoader):
    """Streaming's loader, timed; its `collate_fn` is a CountedCollate."""
