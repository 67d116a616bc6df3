"""A Stream of Streaming whose shards are those of index.json when they are read, whatever a remote or a cache holds.

A shard is fetched under a name of its own, compared with index.json, and only then given its name. `open_shards` is for
programs that read whole shards, without a StreamingDataset.
"""
import glob
import os
import re
import uuid
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import cramjam
import numpy as np
from streaming.base.format import get_index_basename, reader_from_json
from streaming.base.format.mds.reader import MDSReader
from streaming.base.stream import Stream, streams_registry
from streaming.base.world import World

from inputs.cache import cache_folder, is_read_in_place
from inputs.errors import DataError, one_line, unreadable_shard
from inputs.shards import fault_of_bytes, fault_of_shard

VERIFIED = 'verified'  # its name in Streaming's registry
PART = '.part'  # in the name of a file that is being fetched; clients add endings of their own while they do
# Each writes into a buffer of the size that index.json says, and fails where that is too small.
UNPACKERS = {
    'br': cramjam.brotli.decompress_into,
    'bz2': cramjam.bzip2.decompress_into,
    'gz': cramjam.gzip.decompress_into,
    'snappy': cramjam.snappy.decompress_raw_into,
    'zstd': cramjam.zstd.decompress_into,
}


class VerifiedStream(Stream):
    """Shards that are what index.json says.

    Without a remote they are read where they are: nothing is written there, and nothing removed.

    Args:
        index: that of the remote, or of the folder where there is no remote (inputs.shards.read_index).
        kwargs: for Stream; `split` must be part of `remote` and `local`.
    """

    def __init__(self, *, index: dict, **kwargs):
        super().__init__(**kwargs)
        self.index = index

    def get_shards(self, world: World, allow_unsafe_types: bool) -> list[MDSReader]:
        """Readers of all shards, from the index that was given: that of a cache may be older."""
        readers = [reader_from_json(self.local, self.split, entry) for entry in self.index['shards']]
        for reader in readers:
            reader.validate(allow_unsafe_types)
        self.index = None  # the readers have it
        return readers

    def get_index_size(self) -> int:
        """Bytes of the index in the cache."""
        if self.remote is None:
            return 0
        return os.path.getsize(os.path.join(self.local, get_index_basename()))

    def set_up_local(self, shards: list[MDSReader], cache_usage_per_shard: np.ndarray) -> None:
        """Say of each shard (int64, bytes) what it takes in the cache, without a look at what is in it."""
        if self.remote is None:
            return
        present = set()
        for folder, _, files in os.walk(self.local):
            present.update(os.path.join(folder, name) for name in files)
        for number, shard in enumerate(shards):
            if path_of(shard) in present:
                cache_usage_per_shard[number] = shard.raw_data.bytes

    def prepare_shard(self, shard: MDSReader) -> int:
        """Make a shard present and verified; returns the bytes that it takes. Raises DataError if it cannot be had.

        What is on disk already is looked at once more: a process that was killed, or a disk, may have left less.
        """
        path = path_of(shard)
        try:
            fault = fault_of_shard(path, shard.raw_data, shard.samples)
            if fault is None:
                return shard.raw_data.bytes
        except FileNotFoundError:
            fault = 'is not there'
        except OSError as error:
            raise unreadable_shard(error, path) from None
        if self.remote is None:
            raise DataError(f'shard {path} {fault}; put a good copy in its place')
        for _ in range(2):  # a transfer may have gone wrong
            fault = self._fetch(shard)
            if fault is None:
                return shard.raw_data.bytes
        file = shard.zip_data or shard.raw_data
        raise DataError(f'shard {os.path.join(self.remote, file.basename)} {fault}, fetched twice; put a good copy in '
                        'its place')

    def _fetch(self, shard: MDSReader) -> str | None:
        """Download a shard, and give it its name if it is good; else what is wrong with it."""
        path = path_of(shard)
        unpacked = f'{path}.{uuid.uuid4().hex[:8]}{PART}'
        packed = f'{unpacked}.packed'
        try:
            if shard.zip_data:
                self._download(shard.zip_data.basename, packed)
                fault = unpack(packed, unpacked, shard)
                if fault:
                    return fault
            else:
                self._download(shard.raw_data.basename, unpacked)
            fault = fault_of_shard(unpacked, shard.raw_data, shard.samples)
            if fault is None:
                os.replace(unpacked, path)
            return fault
        except OSError as error:  # of the disk
            raise unreadable_shard(error, path) from None
        finally:
            for leftover in (unpacked, packed):
                Path(leftover).unlink(missing_ok=True)

    def _download(self, basename: str, path: str) -> None:
        """Download a file of the remote. Raises DataError if it cannot be had."""
        try:
            self._download_file(basename, os.path.relpath(path, self.local))
        except Exception as error:  # every storage client has its own
            for unfinished in glob.glob(f'{glob.escape(path)}.*'):  # as the client has named it
                os.unlink(unfinished)
            raise unreadable_shard(error, os.path.join(self.remote, basename)) from None


streams_registry.register(VERIFIED, func=VerifiedStream)


def path_of(shard: MDSReader) -> str:
    """Where a shard is read."""
    return os.path.join(shard.dirname, shard.split, shard.raw_data.basename)


def unpack(packed: str, unpacked: str, shard: MDSReader) -> str | None:
    """Write what a compressed shard holds to a file; what is wrong with it, if anything is.

    It is never more than index.json says: 33 KB of zstd can hold a gigabyte.
    """
    content = Path(packed).read_bytes()
    fault = fault_of_bytes(content, shard.zip_data)
    if fault:
        return fault
    algorithm = shard.compression.partition(':')[0]  # zstd:7
    raw = bytearray(shard.raw_data.bytes)
    try:
        length = UNPACKERS[algorithm](content, raw)
    except cramjam.DecompressionError as error:
        return f'cannot be unpacked by {algorithm} into the {len(raw):,} bytes of index.json ({one_line(error)})'
    Path(unpacked).write_bytes(memoryview(raw)[:length])
    return None


def remove_leftovers(folder: str, index: dict) -> None:
    """Remove what killed processes left of the shards that they were fetching. Nobody else may be using the cache.

    Only what begins with the name of a shard of `index` and goes on as `_fetch` has it is from this program.
    """
    names = {shard['raw_data']['basename'] for shard in index['shards']}
    ours = re.compile(rf'(.+)\.[0-9a-f]{{8}}{re.escape(PART)}(\..+)?')
    for place, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(place, name)
            match = ours.fullmatch(os.path.relpath(path, folder))
            if match and match[1] in names:
                Path(path).unlink(missing_ok=True)


class Shards:
    """The shards of a dataset by their number, each verified when it is fetched. Any number of processes may share a
    folder. See `open_shards`."""

    def __init__(self, stream: VerifiedStream, readers: list[MDSReader]):
        self.stream = stream
        self.readers = readers

    def __len__(self) -> int:
        return len(self.readers)

    def fetch(self, number: int) -> MDSReader:
        """The reader of a shard, which is present and verified from now on. Raises DataError if it cannot be had.

        `len(reader)` is its number of samples, and `reader[0]` the first, a dict of columns.
        """
        reader = self.readers[number]
        self.stream.prepare_shard(reader)
        return reader

    def samples(self, first: int, stop: int) -> Iterator[dict]:
        """The columns of the samples from number `first` up to `stop`, of all of the dataset.

        Raises DataError if a shard cannot be had, or a caption is no text.
        """
        starts = [0, *accumulate(reader.samples for reader in self.readers)]
        for number, (start, end) in enumerate(pairwise(starts)):
            if end <= first or start >= stop:
                continue
            reader = self.fetch(number)
            for sample in range(max(first, start), min(stop, end)):
                try:
                    yield reader[sample - start]
                except UnicodeDecodeError:
                    raise DataError(f'sample {sample}: the caption is not UTF-8; leave that sample out') from None

    def drop(self, number: int) -> None:
        """Remove a shard from the folder, where it is a copy; it can be fetched again."""
        if self.stream.remote is not None:
            Path(path_of(self.readers[number])).unlink(missing_ok=True)


def open_shards(remote: str, folder: str | None, index: dict, download_retry: int = 2,
                download_timeout: float = 120) -> Shards:
    """The shards of `remote`, for programs that take whole shards, in any number of processes on any machines.

    Args:
        remote: folder or object store with the shards. A folder is read where it is, unless a `folder` is given.
        folder: in which the copies have a folder of their own. None: the default one.
        index: the index.json of `remote`.
        download_retry: times that a download is tried.
        download_timeout: seconds for a download.

    Raises ValueError if `folder` cannot be written.
    """
    if folder is None and is_read_in_place(remote, index):
        local, remote = remote, None
    else:
        local = cache_folder(remote, index, folder)
    stream = VerifiedStream(index=index, remote=remote, local=local, download_retry=download_retry,
                            download_timeout=download_timeout, keep_zip=False)
    readers = [reader_from_json(local, '', entry) for entry in index['shards']]
    return Shards(stream, readers)
