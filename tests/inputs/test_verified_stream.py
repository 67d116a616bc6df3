"""No sample comes from a shard that is not the one of index.json, whatever a remote, a network or a cache holds."""
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import zstd
from streaming import MDSWriter
from streaming.base.storage.download import LocalDownloader

from data import StreamingLAIONDataset
from inputs import streaming_patches, verified_stream
from inputs.cache import cache_folder
from inputs.errors import DataError
from inputs.shards import read_index
from inputs.verified_stream import open_shards
from tests.forks import status_of_child
from tests.samples import good


def write(folder, text: str = 'picture', compression: str | None = None) -> str:
    with MDSWriter(out=str(folder), columns={'jpg': 'bytes', 'caption': 'str'}, hashes=['xxh64'], size_limit=1 << 12,
                   compression=compression) as writer:
        for index in range(24):
            writer.write(good(index) | {'caption': f'{text} {index:03}'})
    return str(folder)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def open_dataset(remote, cache, **kwargs) -> StreamingLAIONDataset:
    return StreamingLAIONDataset(str(remote), str(cache), batch_size=1, **kwargs)


@pytest.fixture
def remote(tmp_path) -> Path:
    return Path(write(tmp_path / 'remote'))


@pytest.fixture
def cache(tmp_path, remote) -> Path:
    """Where the shards of `remote` are cached below `tmp_path / 'cache'`."""
    return Path(cache_folder(str(remote), read_index(str(remote)), str(tmp_path / 'cache')))


def test_no_sample_comes_from_a_shard_that_is_not_the_one_of_the_index(tmp_path, remote, cache):
    """One was replaced in the remote by one of the same size, after a small cache had dropped it."""
    dataset = open_dataset(remote, tmp_path / 'cache')
    assert dataset.sample(0)['caption'] == 'picture 000'
    assert dataset.is_ready(0) and not dataset.is_ready(1)
    dataset.evict_shard(0)
    other = Path(write(tmp_path / 'other', 'another'[:7]))
    shutil.copy(other / 'shard.00000.mds', remote / 'shard.00000.mds')
    with pytest.raises(DataError, match=r'^shard /.*/shard.00000.mds fails its xxh64 hash.*, fetched twice; put'):
        dataset.sample(0)
    with pytest.raises(DataError, match='fails its xxh64 hash'):  # of those who come later as well
        dataset.sample(1)
    assert not (cache / 'shard.00000.mds').exists()


def test_a_shard_of_a_cache_is_looked_at_again_by_each_run_and_mended(tmp_path, remote, cache):
    list(open_dataset(remote, tmp_path / 'cache'))
    flip(cache / 'shard.00001.mds')
    os.truncate(cache / 'shard.00002.mds', 100)  # a run was killed while it wrote
    (cache / 'index.json.tmp').write_text('{"version": 2, "shards": []}')
    dataset = open_dataset(remote, tmp_path / 'cache')
    usage = dataset.cache_usage
    assert [dataset.sample(index)['caption'] for index in range(24)] == [f'picture {index:03}' for index in range(24)]
    assert dataset.cache_usage == usage


def test_what_arrives_damaged_is_fetched_once_more(tmp_path, remote, monkeypatch):
    download, times = LocalDownloader._download_file_impl, []

    def damaging(self, remote, local, timeout):
        download(self, remote, local, timeout)
        times.append(remote)
        if len(times) == 1:
            flip(Path(local))
    monkeypatch.setattr(LocalDownloader, '_download_file_impl', damaging)
    assert open_dataset(remote, tmp_path / 'cache').sample(0)['caption'] == 'picture 000'
    assert times == [str(remote / 'shard.00000.mds')] * 2


def test_a_download_that_breaks_off_leaves_nothing(tmp_path, remote, cache, monkeypatch):
    def breaking(self, remote, local, timeout):
        Path(f'{local}.tmp').write_bytes(b'half')
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(LocalDownloader, '_download_file_impl', breaking)
    dataset = open_dataset(remote, tmp_path / 'cache', download_retry=1)
    with pytest.raises(DataError, match='remote/shard.00000.mds, could not be read .*No space left.*--cache_limit$'):
        dataset.sample(0)
    assert set(os.listdir(cache)) == {'cache.lock', 'index.json'}


def test_an_index_that_was_read_is_not_read_again(tmp_path, remote):
    index = read_index(str(remote))
    os.rename(remote / 'index.json', tmp_path / 'index.json')
    assert open_dataset(remote, tmp_path / 'cache', index=index).sample(0)['caption'] == 'picture 000'
    assert StreamingLAIONDataset(str(remote), index=index, batch_size=1).sample(0)['caption'] == 'picture 000'


def test_each_shard_is_verified_once_by_all_processes_of_a_node(tmp_path, remote, monkeypatch):
    looked = []
    monkeypatch.setattr(verified_stream, 'fault_of_shard', lambda path, *_: looked.append(Path(path).name))
    dataset = StreamingLAIONDataset(str(remote), batch_size=1)
    for index in range(24):
        dataset.sample(index)
    list(dataset)

    def read_all() -> int:
        for index in range(24):
            dataset.sample(index)
        return len(looked) - len(dataset.shards)
    assert status_of_child(read_all) == 0  # a worker's
    assert sorted(looked) == sorted(path.name for path in remote.glob('*.mds'))


def test_shards_that_are_read_in_place_are_neither_changed_nor_dropped(tmp_path, remote):
    flip(remote / 'shard.00000.mds')
    before = {path.name: path.read_bytes() for path in remote.iterdir()}
    with pytest.raises(ValueError, match='cache_limit 1mb has no cache to bound'):
        StreamingLAIONDataset(str(remote), batch_size=1, cache_limit='1mb')
    dataset = StreamingLAIONDataset(local=str(remote), batch_size=1)
    with pytest.raises(DataError, match='^shard .*/shard.00000.mds fails its xxh64 hash: .*; put a good copy'):
        dataset.sample(0)
    assert dataset.sample(23)['caption'] == 'picture 023'
    assert {path.name: path.read_bytes() for path in remote.iterdir()} == before


@pytest.mark.parametrize('compression', ['br:1', 'bz2', 'gz', 'snappy', 'zstd:7'])
def test_compressed_shards_are_unpacked_into_a_cache_never_beside_themselves(tmp_path, compression, monkeypatch):
    monkeypatch.setattr('inputs.cache.tempfile.tempdir', str(tmp_path))
    remote = Path(write(tmp_path / 'remote', compression=compression))
    before = set(remote.iterdir())
    dataset = StreamingLAIONDataset(str(remote), batch_size=1)
    assert [dataset.sample(index)['caption'] for index in (0, 23)] == ['picture 000', 'picture 023']
    assert set(remote.iterdir()) == before
    assert {path.suffix for path in Path(dataset.streams[0].local).iterdir()} == {'.mds', '.json', '.lock'}


@pytest.mark.parametrize('unpacked', [1 << 30, 100])
def test_a_compressed_shard_never_takes_more_than_its_index_says(tmp_path, unpacked):
    remote = Path(write(tmp_path / 'remote', compression='zstd'))
    index = json.loads((remote / 'index.json').read_text())
    packed = zstd.compress(bytes(unpacked))
    (remote / 'shard.00000.mds.zstd').write_bytes(packed)
    index['shards'][0]['zip_data'] |= {'bytes': len(packed), 'hashes': {}}
    index['shards'][0]['raw_data']['hashes'] = {}
    (remote / 'index.json').write_text(json.dumps(index))
    written = []
    shards = open_shards(str(remote), str(tmp_path / 'cache'), index)
    with pytest.MonkeyPatch.context() as patch:
        write_bytes = Path.write_bytes
        patch.setattr(Path, 'write_bytes', lambda path, content: written.append(len(content)) or
                      write_bytes(path, content))
        with pytest.raises(DataError, match='shard.00000.mds.zstd (cannot be unpacked by zstd into|is cut short)'):
            shards.fetch(0)
    assert sum(written) <= 2 * index['shards'][0]['raw_data']['bytes']
    assert not list((tmp_path / 'cache').rglob('shard*'))


def test_whole_shards_are_read_without_a_dataset(tmp_path, remote, cache):
    for folder in (None, str(tmp_path / 'cache')):
        shards = open_shards(str(remote), folder, read_index(str(remote)))
        reader = shards.fetch(1)
        assert len(shards) == len(list(remote.glob('*.mds')))
        first = len(shards.readers[0])
        assert [sample['caption'] for sample in reader] == [f'picture {first + i:03}' for i in range(len(reader))]
        shards.drop(1)
        assert shards.fetch(1)[0]['caption'] == f'picture {first:03}'
    assert (remote / 'shard.00001.mds').exists()
    flip(remote / 'shard.00001.mds')
    shards.drop(1)
    assert not (cache / 'shard.00001.mds').exists()
    with pytest.raises(DataError, match='fails its xxh64 hash'):
        shards.fetch(1)


def test_what_killed_runs_were_fetching_is_removed_and_nothing_else(tmp_path, remote, cache):
    open_dataset(remote, tmp_path / 'cache').sample(0)
    leftovers = [f'shard.00003.mds.0123abcd.part{ending}' for ending in ('', '.packed', '.aB3dE5f7', '.tmp')]
    others = ['shard.99999.mds.0123abcd.part', 'mine.part', 'shard.00003.mds.part', 'notes.txt']
    for name in (*leftovers, *others):
        (cache / name).write_text('x')
    open_dataset(remote, tmp_path / 'cache')
    left = set(os.listdir(cache))
    assert left.isdisjoint(leftovers) and left.issuperset(others)


def test_while_another_run_fetches_into_a_cache_nothing_of_its_is_removed(tmp_path, remote, cache):
    first = open_dataset(remote, tmp_path / 'cache')
    (cache / 'shard.00003.mds.0123abcd.part').write_text('x')
    second = open_dataset(remote, tmp_path / 'cache')
    assert (cache / 'shard.00003.mds.0123abcd.part').exists()
    assert [first.sample(3)['caption'], second.sample(3)['caption']] == ['picture 003'] * 2


def test_a_cache_that_was_filled_before_stays_below_its_limit(tmp_path, remote, cache):
    list(open_dataset(remote, tmp_path / 'cache'))
    sizes = [entry['raw_data']['bytes'] for entry in read_index(str(remote))['shards']]
    limit = 4 * max(sizes) + os.path.getsize(remote / 'index.json')
    dataset = open_dataset(remote, tmp_path / 'cache', cache_limit=limit)
    for index in (*range(24), *range(23, -1, -1)):
        assert dataset.sample(index)['caption'] == f'picture {index:03}'
    assert sum(path.stat().st_size for path in cache.glob('*.mds')) <= limit
    assert streaming_patches._ShardState.LOCAL in dataset._shard_states.numpy()


def test_an_offset_beyond_the_file_is_a_fault(tmp_path, remote):
    """Without hashes, what a shard says of itself is all that there is."""
    index = read_index(str(remote))
    index['shards'][0]['raw_data']['hashes'] = {}
    path = remote / 'shard.00000.mds'
    content = bytearray(path.read_bytes())
    content[:4] = struct.pack('<I', index['shards'][0]['samples'] + 1)
    path.write_bytes(content)
    with pytest.raises(DataError, match='shard.00000.mds is not the one of index.json'):
        open_shards(str(remote), None, index).fetch(0)
