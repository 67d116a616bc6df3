"""A dataset in parts: begun once, written part by part, joined; and nothing of anybody else's is touched."""
import json
import os
import shlex
import threading

import pytest
from streaming import StreamingDataset

from sdbench.datasets.job import join_parts, training_command, write_index
from sdbench.datasets.output import Output, PartWriter
from sdbench.errors import DataError
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.inputs.stream import own_shared_memory
from sdbench.paths import CLAIM
from tests.local_s3 import local_s3

SETTINGS = {'program': 'convert.py', 'size_limit': 1}


@pytest.fixture(params=['folder', 'store'])
def output(request, tmp_path, monkeypatch):
    with local_s3(monkeypatch):
        yield Output(str(tmp_path / 'out') if request.param == 'folder' else 's3://bucket/some/out', 'OUT')


def write_part(output, name: str, captions: list[str], skipped=()) -> None:
    part = PartWriter(output, name, {'caption': 'str'}, shard_bytes=220)
    for caption in captions:
        part.write({'caption': caption})
    part.finish(skipped)


def begin(output, **settings) -> None:
    with output.begun(SETTINGS | settings):
        pass


def test_an_index_is_that_of_all_parts_in_their_order(output, tmp_path):
    begin(output)
    for number in (2, 0, 1, 3):
        skipped = [{'source': 'a', 'key': str(number), 'reason': f'no caption: {number}'}]
        write_part(output, f'part{number}', [f'{number} {index}' for index in range(3 * number)], skipped)
    assert output.parts() == {f'part{number}': True for number in range(4)}
    hidden = {'source': 'b', 'key': None, 'reason': 'hidden'}
    joined = join_parts(output, ['part3', 'part0', 'part2', 'part1'], [hidden])
    assert write_index(output, joined, about=[1])
    assert not write_index(output, joined, about=[1])
    index = json.loads(output.read('index.json'))
    assert index['about'] == [1]
    assert joined.skipped == {'no caption': 4, 'hidden': 1}
    names = [shard['raw_data']['basename'] for shard in index['shards']]
    assert names[0] == 'part3/shard.00000.mds'
    assert len(names) > 3
    assert sum(len(output.read(name)) for name in names) == joined.bytes
    assert joined.samples == 18
    lines = [json.loads(line) for line in output.read('skipped.jsonl').splitlines()]
    assert [line['key'] for line in lines] == [None, '3', '0', '2', '1']
    if output.is_folder:
        with own_shared_memory():
            dataset = StreamingDataset(local=output.out, batch_size=1)
        assert [dataset[index]['caption'] for index in (0, 9, 15)] == ['3 0', '2 0', '1 0']


def test_a_sample_larger_than_a_shard_is_one_and_no_shard_is_empty(output):
    begin(output)
    write_part(output, 'one', ['x' * 300, 'a', 'y' * 300])
    shards = json.loads(output.read('one/index.json'))['shards']
    assert [shard['samples'] for shard in shards] == [1, 1, 1]
    write_part(output, 'none', [])
    assert json.loads(output.read('none/index.json'))['shards'] == []


def test_a_part_is_done_once_it_has_its_index_and_a_damaged_one_is_named(output):
    begin(output)
    part = PartWriter(output, 'one', {'caption': 'str'}, shard_bytes=220)
    for index in range(40):
        part.write({'caption': str(index)})
    assert output.parts() == {'one': False}
    assert not output.is_done('one')
    write_part(output, 'one', ['a'])  # by another worker
    assert output.is_done('one')
    output.write('one/index.json', b'{"shards": [')
    for name in ('one', 'two'):
        with pytest.raises(DataError, match=f'^{name}/index.json of OUT .* is gone or damaged; remove .* {name}, '):
            join_parts(output, [name])


def test_an_out_with_files_of_others_is_refused_and_they_stay(output, tmp_path):
    if output.is_folder:
        os.mkdir(output.out)
    output.write('one/index.json', b'mine')
    with pytest.raises(ValueError, match='^OUT .* already holds something'):
        begin(output)
    assert list(output.names()) == ['one/index.json']
    assert output.read('one/index.json') == b'mine'


@pytest.mark.parametrize('samples, model_name, pretrained, expected', [
    (7, 'sd', True, {'batch_size': 4, 'max_duration': '2000ba', 'load_weights': 'sd', 'learning_rate': 1e-5}),
    (133, 'tiny', True, {'max_duration': '2000ba', 'load_weights': None, 'learning_rate': 1e-4}),
    (133, 'sd', False, {'batch_size': 16, 'max_duration': '2000ba', 'load_weights': None, 'use_ema': False}),
    (10_000, 'sd', True, {'batch_size': 64, 'max_duration': '10ep', 'load_weights': None, 'use_ema': True}),
    (2_000_000, 'sd', True, {'batch_size': 2048, 'learning_rate': 1e-4})])
def test_the_command_that_trains_fits_the_number_of_samples(samples, model_name, pretrained, expected):
    _, program, *argv = shlex.split(training_command('photos-mds', samples, model_name, pretrained))
    settings = parse(Train, '', argv, program)
    for flag, value in expected.items():
        assert getattr(settings, flag) == value, flag


def test_of_several_runs_that_start_at_once_in_a_store_one_has_begun_it(monkeypatch):
    refused = []
    start = threading.Barrier(8)
    with local_s3(monkeypatch):
        def run(number: int) -> None:
            start.wait()
            try:
                begin(Output('s3://bucket/out', 'OUT'), size_limit=number)
            except ValueError as error:
                refused.append(str(error))
        runs = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for one in runs:
            one.start()
        for one in runs:
            one.join()
    assert len(refused) == 7
    assert all('was begun with size_limit' in line for line in refused)


def test_of_files_of_another_machine_a_store_is_not_made(output, monkeypatch):
    with output.begun(SETTINGS, ['/data/tars']):
        pass
    monkeypatch.setattr('platform.node', lambda: 'another')
    if output.is_folder:  # which is that machine's as well
        with output.begun(SETTINGS, ['/data/tars']):
            return
    with pytest.raises(ValueError, match='was begun with machine .*, and this command has another; each may have'):
        with output.begun(SETTINGS, ['/data/tars']):
            pass


def test_of_files_in_a_store_any_machine_may_make_a_part_and_the_claim_holds_no_password(output, monkeypatch):
    for machine in ('one', 'another'):
        monkeypatch.setattr('platform.node', lambda machine=machine: machine)
        with output.begun(SETTINGS, ['s3://me:PASSWORD@bucket/tars?token=SECRET']):
            pass
    claim = output.read(CLAIM).decode()
    assert 's3://***@bucket/tars' in claim
    assert not any(word in claim for word in ('PASSWORD', 'SECRET', 'one'))


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(tmp_path):
    first, second = (Output(str(tmp_path / 'out'), 'OUT') for _ in range(2))
    with first.begun(SETTINGS):
        with pytest.raises(ValueError, match='^OUT .* is in use by another run'):
            begin(second)
    begin(second)
