"""A folder of cached shards belongs to one dataset; what has other files in it is left as it is."""
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from streaming import MDSWriter, StreamingDataset

from data import StreamingLAIONDataset
from inputs import cache
from inputs.cache import cache_folder, claim_cache, hold_cache, say_unused_caches, share_cache
from inputs.shards import read_index
from inputs.shared_memory import own_shared_memory
from tests.samples import good, write_shards

INDEX = {'version': 2, 'shards': []}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path, shards):
    """Those of a cache that Streaming has filled, or an earlier version of this program, of this dataset or another."""
    filled = tmp_path / 'filled'
    with own_shared_memory():  # Streaming's own is that of any other process that opens a dataset now
        list(StreamingDataset(remote=shards, local=str(filled), batch_size=1))
    (filled / 'remote.txt').write_text(shards)
    (tmp_path / 'thesis').mkdir()
    (tmp_path / 'thesis' / 'chapter.tex').write_text('dear reader')
    for folder, name in ((filled, 'index.json'), (tmp_path / 'thesis', 'chapter.tex')):
        before = contents(folder)
        words = f'^--local {folder} holds {name}, and is no cache that this version .* give it as --remote$'
        with pytest.raises(ValueError, match=words):
            StreamingLAIONDataset(shards, str(folder), batch_size=1)
        assert contents(folder) == before
    assert StreamingLAIONDataset(str(filled), batch_size=1).num_samples == 24


def test_a_whole_cache_is_a_dataset(shards, tmp_path):
    list(StreamingLAIONDataset(shards, str(tmp_path / 'cache'), batch_size=1))
    assert read_index(str(tmp_path / 'cache')) == read_index(shards)
    assert len(list(StreamingLAIONDataset(local=str(tmp_path / 'cache'), batch_size=1))) == 24


def write_hashed(folder, text: str) -> str:
    with MDSWriter(out=str(folder), columns={'jpg': 'bytes', 'caption': 'str'}, hashes=['xxh64']) as writer:
        writer.write(good(1) | {'caption': text})
    return str(folder)


def test_datasets_that_differ_only_in_their_hashes_are_told_apart(tmp_path):
    remote, folder = str(tmp_path / 'remote'), str(tmp_path / 'cache')
    write_hashed(remote, 'a cat')
    claim_cache(folder, remote, read_index(remote))
    claim_cache(folder, remote, read_index(remote))  # unchanged, it goes on
    before = cache_folder(remote, read_index(remote))
    shutil.rmtree(remote)
    write_hashed(remote, 'a dog')
    with pytest.raises(ValueError, match=f'--remote {remote} has changed since --local {folder} .*; remove that fold'):
        StreamingLAIONDataset(remote, folder, batch_size=1)
    assert cache_folder(remote, read_index(remote)) != before


def test_a_cache_of_another_remote_is_refused_and_named_without_its_password(tmp_path):
    for number, (address, shown) in enumerate((('s3://bucket/a', 's3://bucket/a'),
                                               ('sftp://me:secret/7@host/a', 'another remote'))):
        folder = tmp_path / str(number)
        claim_cache(str(folder), address, INDEX)
        with pytest.raises(ValueError, match=f'--local {folder} caches {shown}; give s3://bucket/b another folder'):
            claim_cache(str(folder), 's3://bucket/b', INDEX)
        assert not any(b'secret' in content for content in contents(folder).values())


@pytest.mark.parametrize('content', ['', '{', '[]', '{"index_sha256": 3}'])
def test_a_damaged_marker_is_told(tmp_path, content):
    (tmp_path / 'cache.json').write_text(content)
    with pytest.raises(ValueError, match=f'--local {tmp_path} has a damaged cache.json; give s3://bucket/a another'):
        claim_cache(str(tmp_path), 's3://bucket/a', INDEX)


def test_a_split_is_a_dataset_of_its_own(tmp_path, samples):
    remote, folder = tmp_path / 'remote', tmp_path / 'cache'
    write_shards(remote / 'train', samples)
    dataset = StreamingLAIONDataset(str(remote), str(folder), 'train', batch_size=1)
    assert dataset.num_samples == 24 and dataset.sample(0)['caption'] == 'picture number 0'
    assert 'cache.json' in os.listdir(folder / 'train') and os.listdir(folder) == ['train']


def test_of_many_that_claim_a_folder_at_once_one_remote_wins(tmp_path):
    for attempt in range(30):
        folder = str(tmp_path / f'cache{attempt}')
        remotes = [f's3://bucket/{index % 4}' for index in range(16)]

        def claims(remote, folder=folder) -> bool:
            try:
                claim_cache(folder, remote, INDEX)
            except ValueError:
                return False
            return True
        with ThreadPoolExecutor(16) as pool:
            claimed = list(pool.map(claims, remotes))
        winners = {remote for remote, won in zip(remotes, claimed, strict=True) if won}
        assert winners == {json.loads(Path(folder, 'cache.json').read_bytes())['remote']} and sum(claimed) == 4
        assert os.listdir(folder) == ['cache.json']


def test_a_file_system_without_hard_links_is_claimed_as_well(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, 'Operation not permitted')
    monkeypatch.setattr(os, 'link', refuse)
    claim_cache(str(tmp_path), 's3://bucket/a', INDEX)
    assert os.listdir(tmp_path) == ['cache.json']
    with pytest.raises(ValueError, match='caches s3://bucket/a'):
        claim_cache(str(tmp_path), 's3://bucket/b', INDEX)


def test_the_default_cache_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.tempfile, 'tempdir', str(tmp_path))
    root = tmp_path / f'mds-cache-{os.getuid()}'
    assert cache_folder('s3://bucket/a', INDEX).startswith(f'{root}/')
    assert root.stat().st_mode & 0o777 == 0o700
    assert cache_folder('s3://bucket/a', INDEX) != cache_folder('s3://bucket/b', INDEX)
    root.chmod(0o777)
    with pytest.raises(ValueError, match=f'{root}, where shards are cached, can be changed by others; give --local'):
        cache_folder('s3://bucket/a', INDEX)
    root.rmdir()
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
    ours, older = cache_folder('s3://bucket/a', INDEX), cache_folder('s3://bucket/a', INDEX | {'version': 3})
    os.makedirs(ours)
    say_unused_caches('s3://bucket/a', ours)
    assert capfd.readouterr().err == ''
    earlier = tmp_path / 'mds-cache' / cache.short_hash('s3://bucket/a')
    for folder in (older, earlier):
        os.makedirs(folder)
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
    words = f'^--local {folder} is in use by another dataset of this process, and a --cache_limit would drop .* wait$'
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
