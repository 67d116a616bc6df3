"""Shards are cached in a folder for each dataset, and what else lies in a user's folder is left as it is."""
import os
import shutil
from pathlib import Path

import pytest
from streaming import MDSWriter, StreamingDataset

from data import StreamingLAIONDataset
from inputs import cache
from inputs.cache import cache_folder, hold_cache, say_unused_caches, share_cache
from inputs.shards import read_index
from inputs.verified_stream import open_shards
from tests.samples import good, write_shards

INDEX = {'version': 2, 'shards': []}


def contents(folder: Path) -> dict[str, bytes]:
    """Of each file in it, without those in caches."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def captions(dataset) -> list[str]:
    return [dataset.sample(index)['caption'] for index in range(dataset.num_samples)]


def test_a_local_remote_is_read_in_place_and_a_given_cache_is_filled(shards, tmp_path):
    in_place = StreamingLAIONDataset(shards, batch_size=1)
    assert in_place.streams[0].local == shards and in_place.streams[0].remote is None
    cached = StreamingLAIONDataset(shards, str(tmp_path / 'cache'), batch_size=1)
    assert captions(cached) == captions(in_place)
    assert {path.name for path in Path(shards).iterdir()} <= set(os.listdir(cached.streams[0].local))


def test_what_lies_in_the_users_folder_is_neither_read_nor_changed_and_an_index_there_is_one_line(tmp_path, shards,
                                                                                                 capfd):
    """A cache that Streaming has filled, or an earlier version of this program, of this dataset or another."""
    folder = tmp_path / 'filled'
    other = write_shards(tmp_path / 'other', [good(index) for index in range(24)])
    list(StreamingDataset(remote=other, local=str(folder), batch_size=1))
    for name in ('cache.json', 'chapter.tex'):
        (folder / name).write_text('dear reader')
    before = contents(folder)
    capfd.readouterr()
    dataset = StreamingLAIONDataset(shards, str(folder), batch_size=1, cache_limit='1mb')
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f'warning: --local {folder} holds an index.json') and dataset.streams[0].local in line
    assert captions(dataset) == [f'picture number {index}' for index in range(24)]
    dataset.evict_shard(0)
    open_shards(shards, str(folder), read_index(shards)).drop(1)
    assert contents(folder) == before


def test_datasets_share_a_folder_and_read_their_own(tmp_path, shards):
    other = write_shards(tmp_path / 'other', [good(index) for index in range(24)])
    folder = str(tmp_path / 'cache')
    for remote, words in ((shards, 'picture number'), (other, 'picture')):
        dataset = StreamingLAIONDataset(remote, folder, batch_size=1)
        assert captions(dataset) == [f'{words} {index}' for index in range(24)]
    assert len(list(Path(folder).rglob('shard.00000.mds'))) == 2


def test_a_whole_cache_is_a_dataset(shards, tmp_path):
    dataset = StreamingLAIONDataset(shards, str(tmp_path / 'cache'), batch_size=1)
    list(dataset)
    folder = dataset.streams[0].local
    assert read_index(folder) == read_index(shards)
    assert len(list(StreamingLAIONDataset(local=folder, batch_size=1))) == 24


def write_hashed(folder, text: str) -> str:
    with MDSWriter(out=str(folder), columns={'jpg': 'bytes', 'caption': 'str'}, hashes=['xxh64']) as writer:
        writer.write(good(1) | {'caption': text})
    return str(folder)


def test_a_dataset_that_was_made_anew_has_another_cache_and_the_old_one_is_named_and_left(tmp_path, capfd):
    """They differ only in their hashes."""
    remote, folder = str(tmp_path / 'remote'), str(tmp_path / 'cache')
    old = StreamingLAIONDataset(write_hashed(remote, 'a cat'), folder, batch_size=1)
    assert captions(old) == ['a cat']
    shutil.rmtree(remote)
    write_hashed(remote, 'a dog')
    capfd.readouterr()
    new = StreamingLAIONDataset(remote, folder, batch_size=1)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f'warning: {old.streams[0].local} cached this dataset as it was made before')
    assert captions(new) == ['a dog'] and captions(old) == ['a cat']


def test_folders_of_one_name_and_index_are_not_one_dataset(tmp_path, monkeypatch):
    folders = []
    for name in ('one', 'other'):
        (tmp_path / name / 'shards').mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        folders.append(cache_folder('shards', INDEX, str(tmp_path / 'cache')))
    assert folders[0] != folders[1]


def test_no_password_of_a_remote_stands_in_its_cache(tmp_path):
    folder = Path(cache_folder('sftp://me:secret/7@host/a', INDEX, str(tmp_path)))
    assert 'secret' not in str(folder.relative_to(tmp_path))
    assert not any(b'secret' in content for content in contents(folder).values())


def test_a_split_is_a_dataset_of_its_own(tmp_path, samples):
    remote, folder = tmp_path / 'remote', tmp_path / 'cache'
    write_shards(remote / 'train', samples)
    dataset = StreamingLAIONDataset(str(remote), str(folder), 'train', batch_size=1)
    assert dataset.num_samples == 24 and dataset.sample(0)['caption'] == 'picture number 0'
    assert Path(dataset.streams[0].local).is_relative_to(folder / 'train') and os.listdir(folder) == ['train']


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(ValueError, match=f'^--local {tmp_path}/file cannot be written: Not a directory$'):
        cache_folder('s3://bucket/a', INDEX, str(tmp_path / 'file'))


def test_the_default_cache_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.tempfile, 'tempdir', str(tmp_path))
    root = tmp_path / f'mds-cache-{os.getuid()}'
    assert cache_folder('s3://bucket/a', INDEX).startswith(f'{root}/')
    assert root.stat().st_mode & 0o777 == 0o700
    assert cache_folder('s3://bucket/a', INDEX) != cache_folder('s3://bucket/b', INDEX)
    root.chmod(0o777)
    with pytest.raises(ValueError, match=f'{root}, where shards are cached, can be changed by others; give --local'):
        cache_folder('s3://bucket/a', INDEX)
    root.rename(tmp_path / 'ours')
    (tmp_path / 'elsewhere').mkdir()
    root.symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(ValueError, match='can be changed by others'):
        cache_folder('s3://bucket/a', INDEX)
    root.unlink()
    root.mkdir(mode=0o700)
    monkeypatch.setattr(cache.os, 'getuid', lambda: 12345)
    root.rename(tmp_path / 'mds-cache-12345')  # another user was first
    with pytest.raises(ValueError, match='can be changed by others'):
        cache_folder('s3://bucket/a', INDEX)


def test_caches_of_before_are_named_in_one_line_and_left(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(cache.tempfile, 'tempdir', str(tmp_path))
    ours = cache_folder('s3://bucket/a', INDEX)
    say_unused_caches('s3://bucket/a', ours)
    assert capfd.readouterr().err == ''
    older = cache_folder('s3://bucket/a', INDEX | {'version': 3})
    earlier = tmp_path / 'mds-cache' / cache.short_hash('s3://bucket/a')
    earlier.mkdir(parents=True)
    say_unused_caches('s3://bucket/a', ours)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith('warning: ') and older in line and str(earlier) in line and ours not in line
    assert os.path.isdir(older) and earlier.is_dir()


def test_runs_that_only_add_share_a_cache_and_one_that_drops_has_it_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, 'SECONDS_TO_LEAVE', 0)
    folder = str(tmp_path)
    first, was_alone = hold_cache(folder, alone=False)
    assert was_alone
    share_cache(first)
    second, was_alone = hold_cache(folder, alone=False)
    assert not was_alone
    os.close(second)
    words = f'^the cache {folder} is in use by another dataset of this process, and a --cache_limit would drop .* wait$'
    with pytest.raises(ValueError, match=words):
        hold_cache(folder, alone=True)
    monkeypatch.setattr(cache.os, 'getpid', lambda: 1)
    with pytest.raises(ValueError, match=r'is in use by process \d+, and'):
        hold_cache(folder, alone=True)
    os.close(first)
    alone, was_alone = hold_cache(folder, alone=True)
    with pytest.raises(ValueError, match='is in use by process'):
        hold_cache(folder, alone=False)
    os.close(alone)
