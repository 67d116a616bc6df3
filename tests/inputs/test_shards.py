"""Shards and their index: what they hold, what is wrong with them, and no harm from either."""
import json
import os
import shutil
from pathlib import Path

import pytest
from streaming import MDSWriter

import convert
from benchmark import main
from data import StreamingLAIONDataset
from inputs.errors import DataError
from inputs.shards import index_hash, read_index
from tests.runs import TINY, failed, one_error_line
from tests.samples import Hostile, good, write_sample_tar, write_shards


def test_the_index_tells_samples_and_columns(shards, tmp_path):
    entries = read_index(shards)['shards']
    assert sum(entry['samples'] for entry in entries) == 24 and entries[0]['column_names'] == ['caption', 'jpg']
    other = write_shards(tmp_path / 'other', [{'png': b'', 'text': ''}], {'png': 'bytes', 'text': 'str'})
    [entry] = read_index(other)['shards']
    assert (entry['samples'], entry['column_names']) == (1, ['png', 'text'])


@pytest.mark.parametrize('content', ['not json', '{}', '[]', '{"shards": [{}]}', '{"shards": 3}'])
def test_an_index_that_makes_no_sense_is_told(tmp_path, content):
    (tmp_path / 'index.json').write_text(content)
    with pytest.raises(ValueError, match='index.json'):
        read_index(str(tmp_path))


FILE = {'basename': 'shard.00000.mds', 'bytes': 100, 'hashes': {}}
ENTRY = {'column_encodings': ['bytes', 'str'], 'column_names': ['jpg', 'caption'], 'column_sizes': [None, None],
         'compression': None, 'format': 'mds', 'hashes': [], 'raw_data': FILE, 'samples': 2, 'size_limit': 1 << 26,
         'version': 2, 'zip_data': None}


@pytest.mark.parametrize('change, words', [
    ({'column_sizes': [None]}, '2 column_names, 2 column_encodings and 1 column_sizes'),
    ({'column_sizes': [None, -1]}, 'column_sizes of a shard is -1'), ({'column_names': ['jpg', 3]}, 'a column of 3'),
    ({'samples': -2}, 'samples of a shard is -2'), ({'samples': True}, 'samples of a shard is True'),
    ({'format': 'xsv'}, "the format 'xsv'"), ({'version': 1}, 'version 1'), ({'extra': 1}, "'extra' too much"),
    ({'raw_data': FILE | {'bytes': 1 << 40}}, 'bytes of a shard is'), ({'raw_data': {}}, 'a file of {}'),
    ({'raw_data': FILE | {'hashes': {'crc7': ''}}}, "the algorithm 'crc7'"), ({'size_limit': '1e400mb'}, 'is endless'),
    ({'compression': 'rar', 'zip_data': FILE}, "compressed by 'rar'"), ({'zip_data': FILE}, 'compressed by None'),
])
def test_an_entry_that_streaming_could_not_take_is_one_line(tmp_path, change, words):
    def write(entry):
        (tmp_path / 'index.json').write_text(json.dumps({'version': 2, 'shards': [entry]}))
    write(ENTRY)
    assert read_index(str(tmp_path))['shards'] == [ENTRY]
    write(ENTRY | change)
    with pytest.raises(ValueError, match='index.json that is not one of MDS shards') as error:
        read_index(str(tmp_path))
    assert words in str(error.value) and '\n' not in str(error.value)


def test_a_remote_that_is_not_there_is_told_from_one_without_a_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='^--remote phtos-mds is no folder here, and no address'):
        read_index('phtos-mds')
    (tmp_path / 'phtos-mds').mkdir()
    with pytest.raises(ValueError, match='^--remote phtos-mds holds no index.json'):
        read_index('phtos-mds')


def test_the_hash_of_an_index_changes_with_the_dataset_alone(tmp_path):
    one = read_index(str(write_hashed(tmp_path / 'one', 4)))
    again = read_index(str(write_hashed(tmp_path / 'again', 4)))
    other = read_index(str(write_hashed(tmp_path / 'other', 5)))
    assert index_hash(one) == index_hash(again) != index_hash(other)
    assert index_hash(dict(reversed(one.items()))) == index_hash(one)


def write_hashed(folder: Path, number: int) -> Path:
    with MDSWriter(out=str(folder), columns={'jpg': 'bytes', 'caption': 'str'}, hashes=['xxh64'],
                   size_limit=1 << 14) as writer:
        for index in range(number):
            writer.write(good(index))
    return folder


def with_fault(tmp_path: Path, fault: str) -> Path:
    """A dataset whose first shard is not what its index says."""
    shards = write_hashed(tmp_path / 'shards', 24)
    first = shards / 'shard.00000.mds'
    if fault == 'cut':
        os.truncate(first, first.stat().st_size - 10)
    elif fault == 'flipped':
        content = bytearray(first.read_bytes())
        content[-20] ^= 1
        first.write_bytes(content)
    elif fault == 'other':
        shutil.copy(write_hashed(tmp_path / 'other', 3) / 'shard.00000.mds', first)
    else:
        first.unlink()
    return shards


@pytest.mark.parametrize('fault, words', [('cut', 'is cut short'), ('flipped', 'fails its xxh64 hash'),
                                          ('other', 'is not the one of index.json')])
def test_faults_of_shards_are_told_apart(tmp_path, fault, words):
    dataset = StreamingLAIONDataset(str(with_fault(tmp_path, fault)), str(tmp_path / 'cache'), batch_size=1)
    with pytest.raises(DataError, match=words):
        dataset.sample(0)


@pytest.mark.parametrize('fault, words', [('cut', 'is cut short'), ('gone', 'is not there')])
def test_a_fault_of_a_shard_is_the_line_of_the_run(tmp_path, results, capfd, fault, words):
    assert words in failed(['--remote', with_fault(tmp_path, fault), *TINY, '--max_duration', '1ep'], results, capfd)


def test_nothing_in_a_dataset_runs_code_or_writes_outside_its_cache(tmp_path, capfd):
    trace = tmp_path / 'ran'
    columns = {'jpg': 'bytes', 'caption': 'str', 'extra': 'pkl'}
    hostile = write_shards(tmp_path / 'hostile', [good(i) | {'extra': Hostile(trace)} for i in range(8)], columns)
    trace.unlink(missing_ok=True)
    outside = Path(write_shards(tmp_path / 'outside', [good(i) for i in range(8)]))
    index = json.loads((outside / 'index.json').read_text())
    index['shards'][0]['raw_data']['basename'] = '../escaped.mds'
    (outside / 'index.json').write_text(json.dumps(index))
    for remote, words in ((hostile, 'of type pkl, which can run code'), (outside, 'outside its folder')):
        with pytest.raises(SystemExit):
            main(['--remote', str(remote), '--local', str(tmp_path / 'cache'), *TINY])
        line = capfd.readouterr().err
        assert words in line and line.count('\n') == 1
    assert not trace.exists() and not (tmp_path / 'escaped.mds').exists()


def test_a_wrong_bucket_and_wrong_credentials_are_one_line_each(s3, samples, tmp_path, results, capfd, monkeypatch):
    tar = write_sample_tar(tmp_path / '00000.tar', samples)
    assert '--remote s3://nobody/photos' in one_error_line(['--remote', 's3://nobody/photos', *TINY], capfd)
    with pytest.raises(SystemExit):
        convert.main([tar, 's3://nobody/photos'])
    assert 'OUT s3://nobody/photos' in capfd.readouterr().err
    assert convert.main([tar, 's3://bucket/photos', '--num_workers', '1']) == 0
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'wrong')
    assert 'permission' in one_error_line(['--remote', 's3://bucket/photos', *TINY], capfd)
    with pytest.raises(SystemExit):
        convert.main([tar, 's3://bucket/again'])
    assert '403' in capfd.readouterr().err
