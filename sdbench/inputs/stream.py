"""Stream the shards of a dataset, each compared with index.json before it is read.

A training uses VerifiedDataset; encode.py, which reads whole shards, has a VerifiedStream alone.

Where Streaming 0.13.0 is overridden, a docstring says what goes wrong without the override, and names the test that
shows it. When Streaming fixes one of these, its override can be deleted.
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

from sdbench.errors import DataError, UserError, unreadable_shard
from sdbench.files import atomic_write
from sdbench.inputs.shards import index_hash
from sdbench.paths import INDEX
from sdbench.stores import download

DOWNLOADS = 14  # tries of each request for a shard: a minute and a half in the mean, two to three at most
MEMORY_NUMBERS = range(10 ** 6, 2 ** 31)  # others count from 0, and longer names are more than macOS takes


class VerifiedStream(Stream):
    """Shards whose size and hashes are those of index.json.

    Uncompressed shards of a folder are read in place, and nothing is written there. Compressed ones, and those of a
    store, are copied into a cache.

    Args:
        index: the index.json of the dataset.
        remote: folder or object store with the shards; None: they are in `local`.
        local: folder in which the cache makes a folder of its own. None: see `cache_folder`.
        cache_limit: bytes of the cache, or a text such as 500gb, above which the oldest copies are dropped.
        download_retry: tries of each request to a store that speaks S3.
        download_timeout: seconds without a byte, after which a request is tried again.

    Raises UserError if `cache_limit` is no size, or if there is no cache that it could limit.
    """

    def __init__(self, index: dict, remote: str | None, local: str | None, cache_limit: int | str | None = None,
                 download_retry: int = DOWNLOADS, download_timeout: float = 60):
        # where the shards are, and where they are read: in place, then without a remote, or from a cache
        if remote is None:
            remote, local = local, None
        if local is None and is_readable_in_place(remote, index['shards']):
            remote, local = None, remote
        else:
            local = cache_folder(local, index)
        super().__init__(remote=remote, local=local, keep_zip=False, download_retry=download_retry,
                         download_timeout=download_timeout)
        self.cache_limit = bytes_to_int(cache_limit) if cache_limit is not None else None
        if self.cache_limit == 0:
            raise UserError(f'--cache_limit {cache_limit} leaves no room for a shard; leave it out for no limit')
        if self.cache_limit and remote is None:
            raise UserError(f'--cache_limit has no cache to bound: {local} is read in place; give --local a folder, '
                            'or leave the limit out')

    def set_up_local(self, shards: list[MDSReader], cache_usage_per_shard: np.ndarray) -> None:
        """Report no shard as present, so that each is verified before its first sample is read.

        Without this: Streaming reads whatever file has the name of a shard.
        Test: test_no_sample_comes_from_a_shard_that_is_not_the_one_of_the_index.
        """
        if self.remote is None:
            return
        if self.cache_limit and sum(shard.raw_data.bytes for shard in shards) > self.cache_limit:
            for shard in shards:
                shard.evict()  # else copies of an earlier run would take space that this one does not count

    def prepare_shard(self, shard: MDSReader) -> int:
        """Verify a shard, and download it if need be; return its bytes. Raises DataError if it cannot be had."""
        path = shard_path(shard)
        try:
            fault = fault_of_file(path, shard.raw_data)
            if fault and self.remote is not None:
                path = os.path.join(self.remote, (shard.zip_data or shard.raw_data).basename)
                fault = self._fetch(shard, path)
        except FileNotFoundError:
            fault = 'is not there'
        except Exception as error:  # also of what unpacks it
            raise unreadable_shard(error, path) from None
        if fault:
            raise DataError(f'shard {path} {fault}; put a good copy in its place')
        return shard.raw_data.bytes

    def _fetch(self, shard: MDSReader, remote: str) -> str | None:
        """Download a shard into a folder of this process, and rename it if it is good; else return what is wrong.

        Without this: Streaming downloads into the cache itself, retries for minutes what does not exist, and never ends
        where a store answers 400.
        Tests: test_an_epoch_whose_shard_cannot_be_had_ends_with_the_reason, test_the_same_answer_of_a_store_is_said.
        """
        path = Path(shard_path(shard))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix='fetched-', dir=os.path.abspath(self.local)) as folder:
            fetched = Path(folder, 'shard')
            download(remote, str(fetched), remote, self.download_retry, self.download_timeout, in_threads=False)
            if shard.zip_data:
                fetched.write_bytes(decompress(shard.compression, fetched.read_bytes()))
            fault = fault_of_file(fetched, shard.raw_data)
            if fault is None:
                os.replace(fetched, path)  # at once: no other process reads half a shard
            return fault


class VerifiedDataset(StreamingDataset):
    """Streaming's dataset, which reads verified shards only, and whose epochs never end early without an error.

    Args:
        stream: of its shards.
        kwargs: of StreamingDataset; those that make a stream do nothing.
    """
    failure = None  # the exception of a background thread

    def __init__(self, stream: VerifiedStream, **kwargs):
        with own_shared_memory():
            super().__init__(streams=[stream], cache_limit=stream.cache_limit, **kwargs)

    def get_item(self, sample_id: int, retry: int = 7) -> dict:
        """Return a sample by its index, from a shard that was compared with index.json.

        Raises DataError if its shard cannot be had.

        Without this: a sample that is read by its index comes from a shard that was not verified.
        Test: test_no_sample_comes_from_a_shard_that_is_not_the_one_of_the_index.
        """
        if self.failure is not None:
            raise self.failure
        shard_id, _ = self.spanner[sample_id]
        while self._shard_states[shard_id] != _ShardState.LOCAL:
            self.prepare_shard(shard_id)
        return super().get_item(sample_id, retry)

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Verify a shard, and download it if need be; if that fails, let the processes that wait for it fail too.

        Without this: they wait for that shard forever.
        Test: test_an_epoch_whose_shard_cannot_be_had_ends_with_the_reason.
        """
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception:
            self._shard_states[shard_id] = _ShardState.REMOTE  # so that the others try as well, and fail
            self._cache_filelock.release(force=True)
            raise

    def on_exception(self, future) -> None:
        """Keep the exception of a background thread, which `get_item` raises at the next sample.

        Without this: the epoch ends early without an error, and a run that was cut short looks complete.
        Test: test_an_epoch_whose_shard_cannot_be_had_ends_with_the_reason.
        """
        if future.exception():
            self.failure = future.exception()
            self._iterator.on_exit()  # for the thread that failed

    def _ready_thread(self, it) -> None:
        """Mark all samples as ready at once, because `get_item` itself waits for their shard.

        Streaming runs three loops for an epoch: `_prepare_thread` fetches shards up to `predownload` samples ahead and
        ends where `ready_index` is the total; `_ready_thread` waits for the shard of each sample in turn, and counts
        `ready_index` up; the iterator yields samples up to `ready_index`, and counts `yield_index` up. Here the second
        waits for no shard: it lets all but the last sample be taken, and the last one when those are.

        Without this: an epoch waits forever for a shard that cannot be had, or that was dropped for a small
        --cache_limit before it was read (of 12 shards at once, where Streaming asks for 4).
        Tests: test_an_epoch_whose_shard_cannot_be_had_ends_with_the_reason,
        test_a_small_cache_serves_the_whole_dataset.
        """
        # one below the total, at which nothing more would be fetched in the background
        it.ready_index = it.total - 1
        while it.yield_index < it.ready_index and not it.should_exit():
            time.sleep(TICK)
        it.ready_index = it.total
        it.on_exit()

    def resume_at(self, epoch: int, sample_in_epoch: int) -> None:
        """Let the next iteration begin at a sample of an epoch, counted over all ranks.

        Without this: a checkpoint that Composer saves at the end of an epoch, as programs of others have it, holds that
        epoch, and a resume repeats its order. (This program saves at batches.)
        Test: test_the_order_is_streamings_own_in_every_epoch_and_after_a_resume.
        """
        state = self.state_dict(sample_in_epoch, from_beginning=True)
        state['epoch'] = epoch
        self.load_state_dict(state)


def is_readable_in_place(remote: str, entries: list[dict]) -> bool:
    """Tell whether shards can be read without a copy: they are in a folder, and not compressed."""
    return os.path.isdir(remote) and not any(entry['zip_data'] for entry in entries)


def cache_folder(parent: str | None, index: dict) -> str:
    """Return the folder for copies of a dataset's shards; make it, with a copy of the index.json, if it is missing.

    Its name is a hash of the index, so that a dataset that was rebuilt never meets the copies of the old one.

    Args:
        parent: folder to make it in. None: mds-cache-UID in the folder for temporary files, which only this user can
            write to.
        index: the index.json of the dataset.

    Raises UserError if `parent` is None and other users can write to that folder.
    """
    # a parent that no other user can put shards into
    if parent is None:
        parent = os.path.join(tempfile.gettempdir(), f'mds-cache-{os.getuid()}')
        Path(parent).mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(parent)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise UserError(f'{parent}, for copies of shards, is not a folder that only you can write to; '
                            'give --local a folder, or set TMPDIR')

    # the folder of this dataset
    folder = Path(parent, index_hash(index)[:16])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / INDEX).exists():
        with atomic_write(folder / INDEX) as file:
            file.write(json.dumps(index).encode())
    return str(folder)


def shard_path(shard: MDSReader) -> str:
    return os.path.join(shard.dirname, shard.raw_data.basename)


def fault_of_file(path: str | Path, expected: FileInfo) -> str | None:
    """Compare a file with its size and hashes in index.json; return what is wrong, or None."""
    try:
        size = os.stat(path).st_size  # before it is opened: opening a pipe would block
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
    """Give a dataset that is opened in this context shared memory with a random name, which no other run has.

    Without this: runs that start at once choose the same names (`File exists`), and the ranks of a run choose different
    ones if another run starts meanwhile.
    Test: test_two_runs_stream_on_one_host_at_once_beside_what_a_killed_run_left.
    """
    def draw_number(streams_local: list[str], streams_remote: list[str | None], world: World
                    ) -> tuple[int, SharedMemory]:
        numbers = dist.all_gather_object(secrets.choice(MEMORY_NUMBERS))
        number = numbers[dist.get_global_rank() - dist.get_local_rank()]  # that of the node's first rank
        return number, SharedMemory(f'{number:06}_{LOCALS}', size=4)

    with mock.patch('streaming.base.dataset.get_shm_prefix', draw_number):
        yield
