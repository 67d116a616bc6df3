"""Data loaders that measure how long training waits for batches and how many batches are prefetched; their workers."""
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import RawArray

from streaming import StreamingDataLoader
from torch.utils.data import DataLoader, get_worker_info

from sdbench.complete import BATCHES_PER_WORKER
from sdbench.errors import DataError
from sdbench.process import end_with_parent


def begin_worker(worker: int) -> None:
    """Protect a loader's worker process from Ctrl-C, and let it end with its parent. Use it as `worker_init_fn`."""
    # Leave the process group of the run. Otherwise Ctrl-C kills the workers, and the run fails before it can save a
    # checkpoint.
    os.setpgrp()

    # End with the parent. If all ranks are killed at the start of an epoch, Streaming's workers would otherwise wait
    # for one another forever.
    end_with_parent(signal.SIGKILL)


class CountedCollate:
    """A collate function that counts the batches that each worker of a loader has made."""

    def __init__(self, collate: Callable[[list], dict], num_workers: int):
        self.collate = collate
        self.made = RawArray('q', max(1, num_workers))  # one per worker: a killed worker could hold a lock forever

    def __call__(self, samples: list) -> dict:
        batch = self.collate(samples)
        worker = get_worker_info()
        if worker is not None:
            self.made[worker.id] += 1
        return batch


class TimedIteration:
    """A mixin that times only `next` of a DataLoader, without the work that Composer does around it.

    It raises a DataError of a worker with the worker's own message. torch makes the worker's traceback the message.
    """
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
            except DataError as error:
                raise DataError(str(error).rpartition('DataError: ')[2].strip()) from None
            finally:
                self._seconds_waited += time.perf_counter() - start
            self._batches_taken += 1
            yield batch  # the time until the next batch is requested belongs to training, so it is not counted
            start = time.perf_counter()

    def seconds_waited(self) -> float:
        """Return the seconds spent waiting for batches since the last call."""
        seconds = self._seconds_waited
        self._seconds_waited = 0.0
        return seconds

    @property
    def queue_length(self) -> int:
        """Number of prefetched batches when the queue is full."""
        return self.num_workers * BATCHES_PER_WORKER

    @property
    def queued_batches(self) -> int:
        """Number of batches that are prefetched now; 0 without workers."""
        if self.num_workers == 0:
            return 0
        return sum(self.collate_fn.made) - self._batches_taken


class TimedDataLoader(TimedIteration, DataLoader):
    """torch's DataLoader, timed."""


class TimedStreamingDataLoader(TimedIteration, StreamingDataLoader):
    """Streaming's DataLoader, timed. Its `collate_fn` must be a CountedCollate."""
