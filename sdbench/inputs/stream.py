"""Stream the shards of a dataset, and compare each shard with index.json before it is read.

Training uses VerifiedDataset. encode.py, which reads whole shards, uses only VerifiedStream.

Each method that overrides Streaming 0.13.0 has a docstring that says what goes wrong without the override, and names
the test that shows it. When Streaming fixes the problem, the override can be deleted.
"""
import contextlib
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from composer.utils import dist
from streaming import Stream, StreamingDataset
from streaming.base.compression import decompress
from streaming.base.constant import LOCALS, TICK
from streaming.base.dataset import _ShardState
from streaming.base.format import FileInfo
from streaming.base.format.mds.reader import MDSReader
from streaming.base.hashing import get_hash
from streaming.base.shared import SharedMemory
from streaming.base.util import bytes_to_int
from streaming.base.world import World

from sdbench.errors import DataError, UserError, one_line, unreadable_shard
from sdbench.files import INDEX, atomic_write
from sdbench.inputs.shards import index_hash
from sdbench.stores import download
from sdbench.stores.addresses import PATIENT, Retry

# Numbers for the names of shared memory. Other programs with Streaming count from 0, and macOS limits the length.
MEMORY_NUMBERS = range(10 ** 6, 2 ** 31)


class VerifiedStream(Stream):
    """A stream of shards that reads a shard only if its size and hashes match index.json.

    Uncompressed shards in a folder are read in place, and nothing is written there. Compressed shards, and shards in an
    object store, are copied into a cache.

    Args:
        index: the index.json of the dataset.
        remote: folder or object store with the shards. None: the shards are in `local`.
        local: folder for the cache, which is a subfolder of it. None: see `cache_folder`.
        cache_limit: size of the cache in bytes, or a text such as 500gb, above which the oldest copies are deleted.
    """

    def __init__(self, index: dict, remote: str | None, local: str | None, cache_limit: int | str | None = None,
                 retry: Retry = PATIENT):
        # Read the shards in place if possible, else from a cache. Streaming downloads nothing if `remote` is None.
        if remote is None:
            remote, local = local, None
        if local is None and is_readable_in_place(remote, index['shards']):
            remote, local = None, remote
        else:
            local = cache_folder(local, index, remote)
        super().__init__(remote=remote, local=local, keep_zip=False)
        self.retry = retry
        self.cache_limit = bytes_to_int(cache_limit) if cache_limit and remote is not None else None

    def set_up_local(self, shards: list[MDSReader], cache_usage_per_shard: np.ndarray) -> None:
        """Override Streaming's search of the cache: do nothing, so every shard is missing until it is verified.

        Without this: Streaming trusts any file with a shard's name.
        Test: test_no_sample_comes_from_a_shard_that_does_not_match_the_index.
        """
        if self.remote is None:
            return
        # Streaming does not count the copies of an earlier run towards the limit, so remove them.
        if self.cache_limit and sum(shard.raw_data.bytes for shard in shards) > self.cache_limit:
            for shard in shards:
                shard.evict()

    def prepare_shard(self, shard: MDSReader) -> int:
        """Verify a shard, download it first if necessary, and return its size in bytes.

        Raises DataError if the shard is missing, damaged, or cannot be downloaded.
        """
        path = cached = os.path.join(shard.dirname, shard.raw_data.basename)
        try:
            mismatch = find_mismatch(cached, shard.raw_data)
            if mismatch and self.remote is not None:
                path = os.path.join(self.remote, (shard.zip_data or shard.raw_data).basename)
                mismatch = self._fetch(shard, path, Path(cached))
        except FileNotFoundError:
            mismatch = 'is not there'
        except Exception as error:  # storage clients and decompressors have many error types
            raise unreadable_shard(error, path) from None
        if mismatch:
            raise DataError(f'shard {path} {mismatch}; put a good copy in its place')
        return shard.raw_data.bytes

    def _fetch(self, shard: MDSReader, remote: str, path: Path) -> str | None:
        """Download a shard into a temporary folder, and move it to `path` in the cache if it matches index.json.

        Return a description of the mismatch if it does not match, else None.

        Without this: Streaming downloads into the cache directly, retries a missing file for minutes, and never ends if
        a store answers with status 400.
        Tests: test_an_epoch_ends_with_an_error_if_a_shard_is_missing,
        test_a_request_for_a_shard_is_tried_again_if_the_error_may_be_temporary.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix='fetched-', dir=os.path.abspath(self.local)) as folder:
            fetched = Path(folder, 'shard')
            download(remote, str(fetched), remote, self.retry, in_threads=False)
            if shard.zip_data:
                fetched.write_bytes(decompress(shard.compression, fetched.read_bytes()))
            mismatch = find_mismatch(fetched, shard.raw_data)
            if mismatch is None:
                os.replace(fetched, path)  # atomic, so no other process reads an incomplete shard
            return mismatch


class VerifiedDataset(StreamingDataset):
    """A StreamingDataset that reads only verified shards, and whose epochs never end early without an error.

    It takes the arguments of StreamingDataset, but those about the stream, such as `remote`, have no effect.
    """
    failure = None  # exception that a background thread raised

    def __init__(self, stream: VerifiedStream, **kwargs):
        try:
            with own_shared_memory():
                super().__init__(streams=[stream], cache_limit=stream.cache_limit, **kwargs)
        except ValueError as error:  # for a limit below four times the largest shard, or below the index
            if 'cache limit' not in str(error).lower():
                raise
            raise UserError(f'--cache_limit {stream.cache_limit} bytes: {one_line(error)}') from None

    def get_item(self, sample_id: int, retry: int = 7) -> dict:
        """Return a sample by its index, from a shard that was compared with index.json.

        Raises DataError if the shard is missing, damaged, or cannot be downloaded.

        Without this: `dataset[index]` can return a sample from a shard that was not verified.
        Test: test_no_sample_comes_from_a_shard_that_does_not_match_the_index.
        """
        if self.failure is not None:
            raise self.failure
        shard_id, _ = self.spanner[sample_id]
        while self._shard_states[shard_id] != _ShardState.LOCAL:
            self.prepare_shard(shard_id)
        return super().get_item(sample_id, retry)

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Verify a shard, and download it first if necessary. If that fails, let processes that wait for it fail, too.

        Without this: the other processes wait for that shard forever.
        Test: test_an_epoch_ends_with_an_error_if_a_shard_is_missing.
        """
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception:
            self._shard_states[shard_id] = _ShardState.REMOTE  # the other processes then try, and fail as well
            self._cache_filelock.release(force=True)
            raise

    def _evict_coldest_shard(self) -> None:
        """Delete the least recently read copy to keep the cache limit, or correct the count if no copy is left.

        Without this: a copy that another run or the system has deleted counts towards the limit forever, and the run
        ends with the error that its cache limit is too low.
        Test: test_a_small_cache_outlives_the_deletion_of_its_copies.
        """
        if self.cache_usage > 0 and _ShardState.LOCAL not in self._shard_states.numpy():
            self.cache_usage = 0
            return
        with contextlib.suppress(FileNotFoundError):  # another run was faster
            super()._evict_coldest_shard()

    def on_exception(self, future) -> None:
        """Keep the exception of a background thread. `get_item` raises it at the next sample.

        Without this: the epoch ends early without an error, and an incomplete run looks complete.
        Test: test_an_epoch_ends_with_an_error_if_a_shard_is_missing.
        """
        if future.exception():
            self.failure = future.exception()
            self._iterator.on_exit()  # the failed thread did not call it

    def _ready_thread(self, it) -> None:
        """Mark all samples as ready immediately, because `get_item` itself waits for the shard of a sample.

        Streaming runs three loops during an epoch. `_prepare_thread` fetches shards up to `predownload` samples ahead,
        and ends when `ready_index` reaches the total. `_ready_thread` waits for the shard of each sample in turn, and
        increases `ready_index`. The iterator yields samples up to `ready_index`, and increases `yield_index`. This
        `_ready_thread` waits for no shard: it marks all samples but the last one as ready, and the last one when the
        iterator has yielded the others.

        Without this: an epoch waits forever for a shard that is missing, or that a small --cache_limit deleted before
        it was read. (Seen with a limit of 12 shards, although Streaming asks for only 4.)
        Tests: test_an_epoch_ends_with_an_error_if_a_shard_is_missing,
        test_a_small_cache_serves_the_whole_dataset.
        """
        # Stay one below the total, because `_prepare_thread` stops fetching shards at the total.
        it.ready_index = it.total - 1
        while it.yield_index < it.ready_index and not it.should_exit():
            time.sleep(TICK)
        it.ready_index = it.total
        it.on_exit()

    def resume_at(self, epoch: int, sample_in_epoch: int) -> None:
        """Let the next iteration begin at this sample of this epoch. Samples are counted over all ranks.

        Without this: a checkpoint that Composer saves at the end of an epoch contains that epoch, and a resume repeats
        its order. (This program saves at a number of batches, but other programs may save at the end of an epoch.)
        Test: test_the_order_equals_streamings_in_every_epoch_and_after_a_resume.
        """
        state = self.state_dict(sample_in_epoch, from_beginning=True)
        state['epoch'] = epoch
        self.load_state_dict(state)


def is_readable_in_place(remote: str, entries: list[dict]) -> bool:
    """Return whether shards can be read without a copy, because they are in a folder and not compressed."""
    return os.path.isdir(remote) and not any(entry['zip_data'] for entry in entries)


def cache_folder(parent: str | None, index: dict, remote: str) -> str:
    """Return the cache folder for a dataset's shards. If it is missing, make it, with a copy of index.json.

    The folder's name is a hash of index.json. Therefore a dataset that was made again never uses the old copies. Two
    datasets without hashes of their shards can have the same index.json, so their names are also hashes of `remote`.

    If `parent` is None, the parent is mds-cache-UID in the system's folder for temporary files.

    Raises UserError if `parent` is None and other users can write to mds-cache-UID.
    """
    # Make the default parent a folder where no other user can put shards.
    if parent is None:
        parent = os.path.join(tempfile.gettempdir(), f'mds-cache-{os.getuid()}')
        Path(parent).mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(parent)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise UserError(f'{parent}, for copies of shards, is not a folder that only you can write to; '
                            'give --local a folder, or set TMPDIR')

    # Make the folder of this dataset. With its index.json it is a complete dataset when all shards are cached.
    identity = index
    if not all(shard['raw_data'].get('hashes') for shard in index['shards']):
        identity = {**index, 'remote': remote}
    folder = Path(parent, index_hash(identity)[:16])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / INDEX).exists():
        with atomic_write(folder / INDEX) as file:
            file.write(json.dumps(index).encode())
    return str(folder)


def find_mismatch(path: str | Path, expected: FileInfo) -> str | None:
    """Compare a file with its size and hashes in index.json. Return a description of the mismatch, or None."""
    try:
        size = os.stat(path).st_size  # checked before the file is opened, because opening a pipe would block
    except FileNotFoundError:
        return 'is not there'
    if size != expected.bytes:
        return f'is cut short or damaged: {size:,} bytes, not the {expected.bytes:,} of index.json'
    for algorithm, digest in expected.hashes.items():
        if get_hash(algorithm, Path(path).read_bytes()) != digest:
            return f'fails its {algorithm} hash: its bytes have changed'
    return None


@contextlib.contextmanager
def own_shared_memory() -> Iterator[None]:
    """Let a dataset that is opened in this context use shared memory with a random name, which no other run uses.

    Without this: runs that start at the same time choose the same names (`File exists`), and the ranks of a run choose
    different names if another run starts at that moment.
    Test: test_two_runs_stream_on_one_host_at_the_same_time_after_a_killed_run.
    """
    def choose_prefix(streams_local: list[str], streams_remote: list[str | None], world: World
                      ) -> tuple[int, SharedMemory]:
        numbers = dist.all_gather_object(secrets.choice(MEMORY_NUMBERS))
        number = numbers[dist.get_global_rank() - dist.get_local_rank()]  # the number from the node's first rank
        return number, SharedMemory(f'{number:06}_{LOCALS}', size=4)

    with mock.patch('streaming.base.dataset.get_shm_prefix', choose_prefix):
        yield
