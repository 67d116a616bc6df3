"""Samples come only from shards that match the index, in Streaming's order. An epoch is complete or ends with an error.

The tests damage the dataset, the cache and the store, and let other datasets and runs interfere.
"""
import contextlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from streaming import StreamingDataset

from data import StreamingLAIONDataset, build_loader
from sdbench.errors import DataError, UserError
from sdbench.inputs.loader import TimedStreamingDataLoader
from sdbench.inputs.shards import read_index
from sdbench.inputs.stream import cache_folder, own_shared_memory
from tests.forked_runs import RUN, run
from tests.runs import assert_same_training, files_of
from tests.samples import good, write_shards
from tests.shortcuts import clip_tokenizer

CAPTIONS = [f'picture {index:03}' for index in range(24)]


def write(folder, text: str = 'picture', **options) -> Path:
    samples = [good(index) | {'caption': f'{text} {index:03}'} for index in range(24)]
    return Path(write_shards(folder, samples, size_limit=1 << 12, **{'hashes': ['xxh64'], **options}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def open_text(remote, cache=None, **kwargs) -> StreamingLAIONDataset:
    dataset = StreamingLAIONDataset(str(remote), cache and str(cache), batch_size=1, **kwargs)
    dataset.gives_text = True
    return dataset


def captions(samples) -> list[str]:
    return [sample['caption'] for sample in samples]


def by_number(dataset) -> list[str]:
    return [dataset.sample(index)['caption'] for index in range(dataset.num_samples)]


@pytest.fixture
def remote(tmp_path) -> Path:
    return write(tmp_path / 'remote')


@pytest.fixture
def many_shards(tmp_path) -> str:
    """120 samples in shards of at most 4 KiB."""
    return write_shards(tmp_path / 'shards', [good(i) for i in range(120)], size_limit=1 << 12)


SMALL_CACHE = 8 << 12  # bytes: eight of these shards


def loaded(dataset, num_workers: int) -> list[str]:
    """Return the captions of an epoch."""
    loader = TimedStreamingDataLoader(dataset, batch_size=1, num_workers=num_workers, collate_fn=captions)
    return [caption for batch in loader for caption in batch]


@pytest.mark.parametrize('num_workers', [0, 2])
def test_the_order_equals_streamings_in_every_epoch_and_after_a_resume(remote, tmp_path, num_workers):
    with own_shared_memory():
        theirs = StreamingDataset(local=str(remote), batch_size=1, shuffle=True, shuffle_seed=5)
    ours = open_text(remote, tmp_path / 'cache', shuffle=True, shuffle_seed=5)
    epochs = [loaded(theirs, num_workers) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == CAPTIONS
    assert [loaded(ours, num_workers) for _ in range(2)] == epochs
    resumed = open_text(remote, shuffle=True, shuffle_seed=5, num_canonical_nodes=1)
    resumed.resume_at(1, 10)
    assert loaded(resumed, num_workers) == epochs[1][10:]


def test_no_sample_comes_from_a_shard_that_does_not_match_the_index(tmp_path, remote):
    """The cache may be damaged, or the remote may have been written again after the index was read."""
    cache = Path(cache_folder(str(tmp_path / 'cache'), read_index(str(remote)), str(remote)))
    assert by_number(open_text(remote, tmp_path / 'cache')) == CAPTIONS
    flip(cache / 'shard.00001.mds')
    os.truncate(cache / 'shard.00002.mds', 100)
    assert by_number(open_text(remote, tmp_path / 'cache')) == CAPTIONS
    flip(cache / 'shard.00001.mds')
    assert captions(open_text(remote, tmp_path / 'cache')) == CAPTIONS
    dataset = open_text(remote, tmp_path / 'cache')
    shutil.copy(write(tmp_path / 'other', 'another') / 'shard.00000.mds', remote / 'shard.00000.mds')
    (cache / 'shard.00000.mds').unlink()
    for read in (by_number, captions):
        with pytest.raises(DataError, match=r'^shard /.*/remote/shard.00000.mds fails its xxh64 hash.*; put a good'):
            read(dataset)
    assert not (cache / 'shard.00000.mds').exists()


@pytest.mark.parametrize('damage, words', [(flip, 'fails its xxh64 hash'), (os.remove, 'is not there')])
def test_a_damaged_shard_that_is_read_in_place_is_reported_and_nothing_is_changed_even_with_a_limit(
        remote, damage, words):
    first = remote / 'shard.00000.mds'
    damage(first)
    before = files_of(remote)
    dataset = open_text(remote, cache_limit='4kb')
    assert dataset.sample(23)['caption'] == CAPTIONS[23]
    with pytest.raises(DataError, match=f'^shard {first} {words}.*; put a good copy in its place'):
        captions(dataset)
    assert files_of(remote) == before


@pytest.mark.parametrize('num_workers', [0, 2])
def test_an_epoch_ends_with_an_error_if_a_shard_is_missing(tmp_path, remote, num_workers):
    dataset = open_text(remote, tmp_path / 'cache')
    (remote / 'shard.00001.mds').unlink()
    for _ in range(2):  # the next epoch ends in the same way
        with pytest.raises(DataError, match=r'^shard /\S+/shard.00001.mds is not there; put a good copy [^\n]+$'):
            loaded(dataset, num_workers)


@pytest.mark.parametrize('status, code, tries', [(503, 'SlowDown', 20), (400, 'InvalidRequest', 2)])
def test_a_request_for_a_shard_is_tried_again_if_the_error_may_be_temporary(tmp_path, remote, s3, status, code, tries):
    for path in remote.iterdir():
        s3.put(f'mds/{path.name}', path.read_bytes())
    dataset = open_text('s3://bucket/mds', tmp_path / 'cache')
    s3.requests = []
    s3.refusals = [(status, code)] * 100
    with pytest.raises(DataError, match=rf's3://bucket/mds/shard.00000.mds cannot be .* \({status} {code} none\)'):
        dataset.sample(0)
    assert tries <= len(s3.requests) <= 2 * tries
    s3.refusals = [(503, 'SlowDown')] * 5
    assert dataset.sample(0)['caption'] == CAPTIONS[0]


def folder_size(folder: Path) -> int:
    size = 0
    for path in folder.glob('*/*.mds'):
        with contextlib.suppress(FileNotFoundError):  # deleted after it was listed
            size += path.stat().st_size
    return size


def test_a_small_cache_serves_the_whole_dataset(tmp_path, many_shards):
    """The limit holds even if an earlier run filled the cache above it."""
    cache = tmp_path / 'cache'
    list(open_text(many_shards, cache))
    assert folder_size(cache) > 2 * SMALL_CACHE
    dataset = StreamingLAIONDataset(many_shards, str(cache), image_size=64, batch_size=4, shuffle=True,
                                    cache_limit=SMALL_CACHE)
    loader = build_loader(dataset, 4, 1, clip_tokenizer()).dataloader
    seen, most = [], 0
    for batch in loader:
        seen += batch['caption'].tolist()
        most = max(most, folder_size(cache))
    assert len(set(map(tuple, seen))) == 120
    assert SMALL_CACHE / 8 < most <= SMALL_CACHE
    for too_small in ('1kb', '1b'):
        with pytest.raises(UserError, match='--cache_limit'):
            open_text(many_shards, tmp_path / 'other', cache_limit=too_small)


def test_a_small_cache_outlives_the_deletion_of_its_copies(tmp_path, many_shards):
    dataset = open_text(many_shards, tmp_path / 'cache', cache_limit=SMALL_CACHE)
    for number in range(120):
        assert dataset.sample(number)
        if number % 20 == 0:  # as another run does, or a system that empties its folder for temporary files
            for path in tmp_path.glob('cache/*/*.mds'):
                path.unlink()


@pytest.mark.parametrize('compression', ['br:1', 'bz2', 'gz', 'snappy', 'zstd:7'])
def test_compressed_shards_are_unpacked_into_a_cache_only_this_user_can_write_to(tmp_path, compression, monkeypatch):
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    remote = write(tmp_path / 'remote', compression=compression)
    before = set(remote.iterdir())
    dataset = open_text(remote)
    assert captions(dataset) == CAPTIONS
    assert set(remote.iterdir()) == before
    assert {path.suffix for path in Path(dataset.streams[0].local).iterdir()} == {'.mds', '.json'}
    caches = tmp_path / f'mds-cache-{os.getuid()}'
    assert caches.stat().st_mode & 0o777 == 0o700
    caches.chmod(0o777)
    with pytest.raises(ValueError, match='is not a folder that only you can write to; give --local a folder'):
        open_text(remote)


def test_a_dataset_that_was_made_again_gets_a_new_cache(tmp_path, remote):
    folder = tmp_path / 'cache'
    folder.mkdir()
    (folder / 'index.json').write_text('mine')  # a file of another program
    old = open_text(remote, folder)
    assert by_number(old) == CAPTIONS
    shutil.rmtree(remote)
    new = open_text(write(remote, 'another'), folder)
    assert by_number(new) == [f'another {index:03}' for index in range(24)]
    assert by_number(old) == CAPTIONS
    assert (folder / 'index.json').read_text() == 'mine'
    complete = new.streams[0].local  # a full cache is itself a dataset
    assert by_number(StreamingLAIONDataset(local=complete, batch_size=1)) == by_number(new)


def test_datasets_of_the_same_sizes_and_without_hashes_have_separate_caches(tmp_path):
    for text in ('red', 'sky'):  # two files index.json with the same content
        remote = write(tmp_path / text, text, hashes=[])
        assert by_number(open_text(remote, tmp_path / 'cache')) == [f'{text} {index:03}' for index in range(24)]


def test_each_split_has_a_separate_cache(tmp_path):
    write(tmp_path / 'remote' / 'train')
    dataset = open_text(tmp_path / 'remote', tmp_path / 'cache', split='train')
    assert by_number(dataset) == CAPTIONS
    assert os.listdir(tmp_path / 'cache') == ['train']


@pytest.mark.long
def test_two_runs_stream_on_one_host_at_the_same_time_after_a_killed_run(server, tmp_path, shards):
    argv, folders = [*RUN, '--save_interval', '3ba', '--remote', shards], [tmp_path / name for name in 'abc']
    killed, *both = folders
    run(server, 1, argv, killed, ('start', 7))  # its shared memory is not removed
    with ThreadPoolExecutor() as pool:
        codes = list(pool.map(lambda folder: run(server, 1, argv, folder), both))
    assert codes == [[0], [0]], [(folder / 'log').read_text() for folder in both]
    assert_same_training(*(folder / 'checkpoints' for folder in both))
