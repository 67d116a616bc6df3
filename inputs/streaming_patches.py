"""Every place where Streaming 0.13.0 is made to do otherwise: what goes wrong without it, and the test that shows it.

When Streaming mends one of these, its part here can be deleted. The tests are in tests/inputs/test_streaming_patches.py
and tests/harness/test_checkpoints.py.
"""
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep

from composer.utils import dist
from streaming import StreamingDataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN, TICK
from streaming.base.dataset import _ShardState
from streaming.base.shared import prefix
from streaming.base.util import clean_stale_shared_memory

from inputs.errors import DataError, unreadable_shard

SHARED_MEMORY = '/dev/shm'
STALE_NUMBERS = '[0-9]' * 6  # by which Streaming tells the runs of a host apart


class PatchedStreamingDataset(StreamingDataset):
    """Streaming's dataset, whose failures end an epoch with their reason, and never in silence or in waiting.

    Args:
        beside_another: this process has another one in use, whose shared memory must stay.
        kwargs: for StreamingDataset.
    """

    def __init__(self, beside_another: bool = False, **kwargs):
        if not beside_another:
            clean_shared_memory()
        with starting_alone(), one_number_for_a_node():
            super().__init__(**kwargs)

    def __iter__(self):
        """Samples of this worker's part of an epoch. DataError: a background thread failed.

        Without this: where a shard cannot be had, the epoch ends early and quietly, and a short run looks whole.
        Test: test_an_epoch_ends_with_the_reason_when_both_background_threads_fail.
        """
        yield from super().__iter__()
        if self._event.is_set():
            raise DataError(self.failure)

    def on_exception(self, future) -> None:
        """Keep why a background thread failed, for `__iter__` to raise, and let the epoch end.

        Without this: each failure is a traceback in the log; and where both threads fail at once, Streaming waits for
        one of them for ever. Test: test_an_epoch_ends_with_the_reason_when_both_background_threads_fail.
        """
        error = future.exception()
        if error:
            self.failure = str(unreadable_shard(error))
            self._event.set()
            self._iterator.on_exit()  # for the thread that failed

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard; where that fails, let other workers fail as well.

        Without this: they wait for that shard for ever.
        Test: test_a_shard_that_one_reader_could_not_have_fails_for_those_who_wait_for_it_too.
        """
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception:
            self._shard_states[shard_id] = _ShardState.LOCAL  # so that they look, and fail
            self._cache_filelock.release(force=True)
            raise

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
                if self._shard_states[shard_id] != _ShardState.LOCAL:
                    self.prepare_shard(shard_id)
            it.ready_index += 1
        it.on_exit()

    def resume_at(self, epoch: int, sample_in_epoch: int) -> None:
        """Go on at a sample of an epoch, counted over all ranks, when iterated next.

        Without this: a checkpoint at an epoch's end holds the epoch that is over, and a resume repeats its order.
        Test: test_a_run_killed_again_and_again_equals_one_that_never_was[streamed-1ep-1].
        """
        state = self.state_dict(sample_in_epoch, from_beginning=True)
        state['epoch'] = epoch
        self.load_state_dict(state)


def clean_shared_memory() -> None:
    """Remove the shared memory that killed runs left, unless another run streams on this host now.

    Without this: Streaming's own cleaning takes it from live runs too, which then fail; and it stops at the first
    number that has none, so that after one run that ended well it finds nothing of those that were killed since.
    Tests: test_a_run_that_starts_leaves_the_shared_memory_of_another_alone,
    test_what_killed_runs_left_is_removed_wherever_it_is.
    """
    folder = tempfile.gettempdir()
    if os.path.isdir(SHARED_MEMORY):
        folder = SHARED_MEMORY  # where the memory is: jobs of one host can have temporary folders of their own
    path = os.path.join(folder, f'streaming-{os.getuid()}.lock')
    is_first = dist.get_local_rank() == 0
    if is_first:
        lock = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        if is_first:
            # a POSIX lock ends with its process, and a worker that it forks has none
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_stale_files()
        clean_stale_shared_memory()  # ends in a barrier of all ranks
    except BlockingIOError:
        dist.barrier()
    if is_first:
        fcntl.lockf(lock, fcntl.LOCK_SH)  # never closed: held for as long as this process lives


def remove_stale_files() -> None:
    """Remove shared memory (where Linux shows it) and lock files by which runs of Streaming are known."""
    for folder, names in ((SHARED_MEMORY, SHM_TO_CLEAN), (tempfile.gettempdir(), (BARRIER_FILELOCK, CACHE_FILELOCK))):
        for name in names:
            for path in Path(folder).glob(f'{STALE_NUMBERS}_{name}'):
                with contextlib.suppress(OSError):  # another user's
                    path.unlink()


@contextlib.contextmanager
def starting_alone():
    """One run after the other on a host, for as long as this lasts.

    Without this: two runs that start at once give their shared memory the same names (`File exists`).
    Test: test_a_run_chooses_its_shared_memory_when_no_other_does.
    """
    if dist.get_local_rank() != 0:
        yield
        return
    with open(os.path.join(tempfile.gettempdir(), f'streaming-{os.getuid()}.start'), 'a') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield


@contextlib.contextmanager
def one_number_for_a_node():
    """All ranks of a node take the number for their shared memory that its first rank finds.

    Without this: each looks for the first free one by itself, and where another run starts or ends meanwhile, they find
    different ones, and the run ends (`shared memory registered does not match local leader`).
    Test: test_ranks_take_one_number_though_another_run_starts_meanwhile.
    """
    find = prefix._check_and_find_retrying
    prefix._check_and_find_retrying = partial(find_together, find)
    try:
        yield
    finally:
        prefix._check_and_find_retrying = find


def find_together(find: Callable[..., int], *args, **kwargs) -> int:
    """What `find` gives on the first rank of this node. ValueError: what it raised there."""
    found = None
    if dist.get_local_rank() == 0:
        try:
            found = find(*args, **kwargs)
        except ValueError as error:
            found = str(error)
    found = dist.all_gather_object(found)[dist.get_global_rank() - dist.get_local_rank()]
    if isinstance(found, str):
        raise ValueError(found)
    return found
