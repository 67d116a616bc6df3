"""Loaders that say how long a batch was waited for, and how many batches lie ready."""
import time
from collections.abc import Callable, Iterator
from multiprocessing import RawArray

from streaming import StreamingDataLoader
from torch.utils.data import DataLoader, get_worker_info

BATCHES_PER_WORKER = 2  # that each process of a loader prepares ahead: torch's own default


def queued_batches(num_workers: int) -> int:
    """Batches that a loader prepares ahead of the training."""
    return num_workers * BATCHES_PER_WORKER


class CountedCollate:
    """A collate function that counts, in the processes of a loader, the batches it has made.

    Args:
        collate: makes a batch of a list of samples.
        num_workers: processes of the loader.
    """

    def __init__(self, collate: Callable[[list], dict], num_workers: int):
        self.collate = collate
        self.made = RawArray('q', max(1, num_workers))  # one slot each: a lock could die with its process

    def __call__(self, samples: list) -> dict:
        batch = self.collate(samples)
        worker = get_worker_info()
        if worker is not None:
            self.made[worker.id] += 1
        return batch


class TimedIteration:
    """Mixed into a DataLoader: the clock of its `next`, without what Composer does between its events around it."""
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
            yield batch
            start = time.perf_counter()

    def seconds_waited(self) -> float:
        """Seconds spent waiting for batches since this was last asked."""
        seconds = self._seconds_waited
        self._seconds_waited = 0.0
        return seconds

    @property
    def queue_length(self) -> int:
        """Batches that it prepares ahead."""
        return queued_batches(self.num_workers)

    @property
    def ready_batches(self) -> int:
        """Batches that lie ready to be taken; 0 where each is made when it is asked for."""
        if self.num_workers == 0:
            return 0
        return sum(self.collate_fn.made) - self._batches_taken


class TimedDataLoader(TimedIteration, DataLoader):
    """torch's own loader, timed."""


class TimedStreamingDataLoader(TimedIteration, StreamingDataLoader):
    """Streaming's loader, timed; its `collate_fn` is a CountedCollate."""
