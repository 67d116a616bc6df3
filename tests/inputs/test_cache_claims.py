"""A folder of cached shards belongs to one dataset, whoever has filled it; nothing is trained on another's."""
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from streaming import MDSWriter, StreamingDataset

import inputs.cache
from benchmark import main
from data import StreamingLAIONDataset
from encode import main as encode
from inputs.cache import claim_cache
from inputs.shards import read_index
from tests.runs import TINY, one_error_line
from tests.samples import good, write_shards


@pytest.fixture
def other(tmp_path) -> str:
    """A dataset of fewer samples, with shards of the same names."""
    return write_shards(tmp_path / 'other', [good(index) for index in range(100, 108)])


@pytest.fixture
def filled_by_streaming(other, tmp_path) -> Path:
    """A cache that Streaming has filled, as the original's was: it has no mark."""
    cache = tmp_path / 'cache'
    dataset = StreamingDataset(remote=other, local=str(cache), batch_size=1)
    assert len([dataset[index] for index in range(8)]) == 8
    assert not (cache / 'remote.txt').exists() and (cache / 'index.json').exists()
    return cache


def test_the_cache_of_another_dataset_is_refused_though_nobody_marked_it(filled_by_streaming, shards, results, capfd):
    argv = ['--remote', shards, '--local', filled_by_streaming, *TINY, '--results', results]
    error = one_error_line(argv, capfd)
    assert f'--local {filled_by_streaming}' in error and f'--remote {shards}' in error
    assert '8 samples, and that of the remote 24' in error and 'another folder' in error
    assert not (filled_by_streaming / 'remote.txt').exists()
    with pytest.raises(ValueError, match='another dataset'):
        StreamingLAIONDataset(shards, str(filled_by_streaming), batch_size=1)


def test_encoding_refuses_it_too(filled_by_streaming, shards, results, tmp_path, capfd):
    with pytest.raises(SystemExit):
        encode(['--remote', shards, '--local', str(filled_by_streaming), '--out', str(tmp_path / 'out'), '--model_name',
                'tiny', '--image_size', '64', '--num_workers', '0', '--results', str(results)])
    assert 'holds another dataset' in capfd.readouterr().err


def test_the_cache_of_the_same_dataset_is_adopted(filled_by_streaming, other):
    shards_before = {path.name: path.stat().st_mtime_ns for path in filled_by_streaming.glob('*.mds')}
    dataset = StreamingLAIONDataset(other, str(filled_by_streaming), batch_size=1)
    assert dataset.sample(3)['caption'] == 'picture 103'
    assert (filled_by_streaming / 'remote.txt').read_text() == other
    assert {path.name: path.stat().st_mtime_ns for path in filled_by_streaming.glob('*.mds')} == shards_before


def write_hashed(folder, text: str) -> str:
    with MDSWriter(out=str(folder), columns={'jpg': 'bytes', 'caption': 'str'}, hashes=['xxh64']) as writer:
        writer.write(good(1) | {'caption': text})
    return str(folder)


@pytest.mark.parametrize('is_marked', [False, True])
def test_datasets_that_differ_only_in_their_hashes_are_told_apart(tmp_path, is_marked):
    one, two = write_hashed(tmp_path / 'one', 'a cat'), write_hashed(tmp_path / 'two', 'a dog')
    cache = tmp_path / 'cache'
    shutil.copytree(one, cache)
    if is_marked:
        (cache / 'remote.txt').write_text(two)
    with pytest.raises(ValueError, match='other hashes'):
        claim_cache(str(cache), two)


def test_a_remote_that_has_changed_since_its_cache_was_filled_is_refused(tmp_path, samples):
    remote, cache = str(tmp_path / 'remote'), str(tmp_path / 'cache')
    write_shards(remote, samples)
    StreamingLAIONDataset(remote, cache, batch_size=1)
    claim_cache(cache, remote)  # unchanged, it goes on
    shutil.rmtree(remote)
    write_shards(remote, samples[:20])
    with pytest.raises(ValueError, match=f'--remote {remote} has changed since --local {cache} .*; remove that folder'):
        StreamingLAIONDataset(remote, cache, batch_size=1)


@pytest.mark.parametrize('content', ['', '{', '[]', '{"shards": [{}]}'])
def test_a_damaged_index_in_a_cache_is_told(tmp_path, shards, content):
    cache = tmp_path / 'cache'
    cache.mkdir()
    (cache / 'index.json').write_text(content)
    with pytest.raises(ValueError, match='index.json is damaged'):
        claim_cache(str(cache), shards)


def test_a_split_has_an_index_of_its_own(tmp_path, samples):
    remote, cache = tmp_path / 'remote', tmp_path / 'cache'
    write_shards(remote / 'train', samples)
    write_shards(cache / 'train', samples[:4])
    with pytest.raises(ValueError, match='4 samples, and that of the remote 24'):
        StreamingLAIONDataset(str(remote), str(cache), 'train', batch_size=1)
    shutil.rmtree(cache)
    assert StreamingLAIONDataset(str(remote), str(cache), 'train', batch_size=1).num_samples == 24


def test_of_many_that_claim_a_folder_at_once_one_remote_wins(tmp_path):
    for attempt in range(30):
        folder = str(tmp_path / f'cache{attempt}')
        remotes = [f's3://bucket/{index % 4}' for index in range(16)]

        def claims(remote, folder=folder) -> bool:
            try:
                claim_cache(folder, remote)
            except ValueError:
                return False
            return True
        with ThreadPoolExecutor(16) as pool:
            claimed = list(pool.map(claims, remotes))
        winners = {remote for remote, won in zip(remotes, claimed, strict=True) if won}
        assert winners == {Path(folder, 'remote.txt').read_text()} and sum(claimed) == 4
        assert os.listdir(folder) == ['remote.txt']


def test_a_file_system_without_hard_links_is_claimed_as_well(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, 'Operation not permitted')
    monkeypatch.setattr(os, 'link', refuse)
    claim_cache(str(tmp_path), 's3://bucket/a')
    assert os.listdir(tmp_path) == ['remote.txt']
    with pytest.raises(ValueError, match='caches s3://bucket/a'):
        claim_cache(str(tmp_path), 's3://bucket/b')


def test_the_index_of_a_remote_is_read_once(shards, tmp_path, results, monkeypatch):
    cache = str(tmp_path / 'cache')
    StreamingLAIONDataset(shards, cache, batch_size=1)
    read = []
    for module in ('benchmark', 'inputs.cache'):
        monkeypatch.setattr(f'{module}.read_index', lambda remote: read.append(remote) or read_index(remote))
    main(['--remote', shards, '--local', cache, *TINY, '--num_workers', '0', '--results', str(results)])
    assert read == [shards]
    assert inputs.cache.read_marker(Path(cache, 'remote.txt')) == shards
    assert json.loads(results.read_text())['status'] == 'complete'
