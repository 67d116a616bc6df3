"""Every place where Streaming 0.13.0 is made to do otherwise: what goes wrong without it, and the test that shows it.

When Streaming mends one of these, its part here can be deleted. The tests are in tests/inputs/test_streaming_patches.py
and tests/training/test_checkpoints.py. inputs/shared_memory.py holds one more.
"""
import os
import weakref
from time import sleep

import numpy as np
from composer.utils import dist
from filelock import FileLock
from streaming import StreamingDataset
from streaming.base.constant import TICK
from streaming.base.dataset import _ShardState

from inputs.cache import hold_cache, share_cache
from inputs.errors import DataError, unreadable_shard
from inputs.shared_memory import checked_shards, own_shared_memory, refuse_too_many_samples
from inputs.verified_stream import VERIFIED, remove_leftovers


class PatchedStreamingDataset(StreamingDataset):
    """Streaming's dataset, whose failures end an epoch with their reason, and never in silence or in waiting.

    Every shard is compared with index.json once on each node before it is read, and again after it was fetched anew.

    Args:
        index: the index.json of `remote`, or of `local` where there is no remote.
        remote: folder or object store with the shards; None: they are read in `local`.
        local: folder with the shards, or for copies of them.
        cache_limit: bytes of the copies.
        kwargs: for StreamingDataset.

    Raises ValueError if another run uses `local`, and one of the two drops shards from it.
    """
    failure = None  # why a background thread failed

    def __init__(self, index: dict, remote: str | None, local: str, cache_limit: int | None = None, **kwargs):
        if remote is not None and dist.get_local_rank() == 0:
            lock, is_alone = hold_cache(local, alone=bool(cache_limit))
            weakref.finalize(self, os.close, lock)
            if is_alone:
                remove_leftovers(local, index)
                if not cache_limit:
                    share_cache(lock)
        with own_shared_memory() as held:
            super().__init__(remote=remote, local=local, cache_limit=cache_limit, stream_name=VERIFIED,
                             stream_config={'index': index}, **kwargs)
        for file in held:
            weakref.finalize(self, os.close, file)
        self._checked = checked_shards(self._shm_prefix_int, self.num_shards)

    def __iter__(self):
        """Samples of this worker's part of an epoch. Raises DataError if a background thread failed.

        Without this: where a shard cannot be had, the epoch ends early and quietly, and a short run looks whole.
        Test: test_an_epoch_ends_with_the_reason_when_both_background_threads_fail.
        """
        self.refuse_after_failure()
        yield from super().__iter__()
        self.refuse_after_failure()

    def on_exception(self, future) -> None:
        """Keep why a background thread failed, for `__iter__` to raise, and let the epoch end.

        Without this: each failure is a traceback in the log; and where both threads fail at once, Streaming waits for
        one of them for ever. Test: test_an_epoch_ends_with_the_reason_when_both_background_threads_fail.
        """
        error = future.exception()
        if error:
            self.failure = str(error if isinstance(error, DataError) else unreadable_shard(error))
            self._event.set()
            self._iterator.on_exit()  # for the thread that failed

    def refuse_after_failure(self) -> None:
        """Raises DataError if a background thread failed.

        Without this: `Background thread failed. Check other traceback.`, where there is none.
        Test: test_a_sample_after_a_failure_says_what_failed.
        """
        if self.failure is not None:
            raise DataError(self.failure)

    def get_item(self, sample_id: int, retry: int = 7) -> dict:
        """A sample by its number, of a shard that was compared with index.json. Raises DataError if it cannot be had.

        Without this: Streaming reads whatever lies in the place of a shard.
        Test: test_no_sample_comes_from_a_shard_that_is_not_the_one_of_the_index.
        """
        self.refuse_after_failure()
        shard_id, _ = self.spanner[sample_id]
        while not self.is_ready(shard_id):
            self.prepare_shard(shard_id)
        try:
            return super().get_item(sample_id, retry)
        except RuntimeError as error:  # a background thread failed meanwhile, or a small cache drops it each time
            self.failure = self.failure or str(unreadable_shard(error))
            raise DataError(self.failure) from None

    def is_ready(self, shard_id: int) -> bool:
        """Whether a shard is there, and was compared with index.json by a process of this node."""
        return bool(self._checked[shard_id]) and self._shard_states[shard_id] == _ShardState.LOCAL

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Make a shard present and verified; where that fails, let other workers fail as well.

        Without this: they wait for that shard for ever.
        Test: test_a_shard_that_one_reader_could_not_have_fails_for_those_who_wait_for_it_too.
        """
        if not self._checked[shard_id]:
            self.check_when_prepared(shard_id)
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception:
            self._shard_states[shard_id] = _ShardState.REMOTE  # so that they try, and fail
            self._cache_filelock.release(force=True)
            raise

    def check_when_prepared(self, shard_id: int) -> None:
        """Let Streaming prepare a shard that was on disk when the run began, as if it were not."""
        with FileLock(self._cache_filelock_path):
            if self._checked[shard_id]:
                return  # another process was faster
            if self._shard_states[shard_id] == _ShardState.LOCAL:
                self._shard_states[shard_id] = _ShardState.REMOTE
                self.cache_usage -= self.shards[shard_id].raw_data.bytes
            self._checked[shard_id] = True  # after the state: it is read before it

    def _ready_thread(self, it) -> None:
        """Wait until the samples that come next are there; what a small cache has dropped is fetched again.

        Without this: with a small --cache_limit it waits for ever for a shard that was dropped before it was read.
        Test: test_a_small_cache_serves_the_whole_dataset.
        """
        while not it.should_exit() and it.ready_index < it.total and not self._event.is_set():
            if self.predownload is not None and it.ready_index - it.yield_index > self.predownload:
                sleep(TICK)
                continue
            sample_id = it.sample_ids[it.ready_index]
            if sample_id != -1:  # else it is padding
                shard_id = self.spanner[sample_id][0]
                if not self.is_ready(shard_id):
                    self.prepare_shard(shard_id)
            it.ready_index += 1
        it.on_exit()

    def _share_work(self, sample_ids: np.ndarray):
        """Share an epoch's order (int64, five dimensions) with the other processes of the node.

        Without this: where it does not fit into the shared memory, the process ends with a bus error.
        Test: test_an_epoch_too_large_for_the_shared_memory_is_a_sentence.
        """
        try:
            refuse_too_many_samples(sample_ids.size)
        except ValueError as error:
            raise DataError(str(error)) from None
        return super()._share_work(sample_ids)

    def resume_at(self, epoch: int, sample_in_epoch: int) -> None:
        """Go on at a sample of an epoch, counted over all ranks, when iterated next.

        Without this: a checkpoint at an epoch's end holds the epoch that is over, and a resume repeats its order.
        Test: test_a_run_killed_again_and_again_equals_one_that_never_was[streamed-1ep-1].
        """
        state = self.state_dict(sample_in_epoch, from_beginning=True)
        state['epoch'] = epoch
        self.load_state_dict(state)
