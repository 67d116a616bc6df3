"""A dataset in parts: claimed once, written part by part, merged; and nothing of anybody else's is touched."""
import json
import os
import threading

import pytest

from inputs.errors import DataError
from inputs.places import CLAIM
from parts.claims import EDGE, claim, finished_parts, part_index, redo, release
from parts.held_out import find_edge
from parts.merge import merge_parts
from parts.output import FolderOutput, open_output
from parts.writer import PartWriter
from tests.local_s3 import local_s3

CONTENTS = {'program': 'convert.py', 'source': 'a'}


@pytest.fixture(params=['folder', 'store'])
def output(request, tmp_path, monkeypatch):
    if request.param == 'folder':
        yield open_output(str(tmp_path / 'out'), 'OUT')
        return
    with local_s3(monkeypatch):
        yield open_output('s3://bucket/some/out', 'OUT')


def write_part(output, number: int, captions: list[str], **about) -> None:
    part = PartWriter(output, number, {'caption': 'str'}, shard_bytes=220)
    for caption in captions:
        part.write({'caption': caption})
    part.finish(**about)


def test_an_index_is_that_of_all_parts_in_their_order(output):
    claim(output, CONTENTS)
    for number in (2, 0, 1, 3):
        skipped = [{'source': 'a', 'key': str(number), 'reason': f'no caption: {number}'}]
        write_part(output, number, [f'{number} {index}' for index in range(3 * number)], skipped=skipped)
    assert finished_parts(output, 4) == {0, 1, 2, 3} and finished_parts(output, 2) == {0, 1}
    merged = merge_parts(output, 4, {'about': [1]}, [{'source': 'b', 'key': None, 'reason': 'hidden'}], {'hidden': 7})
    index = json.loads(output.read('index.json'))
    assert index['version'] == 2 and index['about'] == [1]
    names = [shard['raw_data']['basename'] for shard in index['shards']]
    assert names == sorted(names) and len(names) == merged.shards > 3
    assert sum(shard['samples'] for shard in index['shards']) == merged.samples == 18
    assert sum(len(output.read(name)) for name in names) == merged.bytes
    assert merged.skipped == {'no caption': 4, 'hidden': 7}
    lines = [json.loads(line) for line in output.read('skipped.jsonl').splitlines()]
    assert [line['key'] for line in lines] == [None, '0', '1', '2', '3']


def test_a_part_that_is_gone_or_damaged_makes_no_dataset_and_is_named(output):
    claim(output, CONTENTS)
    write_part(output, 0, ['a'])
    with pytest.raises(DataError, match=r'parts/000001.json of OUT .* is gone'):
        merge_parts(output, 2, {})
    output.write(part_index(1), b'{"shards": [')
    with pytest.raises(DataError, match=r'parts/000001.json of OUT .* is damaged'):
        merge_parts(output, 2, {})
    assert output.read('index.json') is None


def test_parts_without_a_sample_make_no_dataset_and_leave_out_to_another_run(output):
    claim(output, CONTENTS)
    write_part(output, 0, [], skipped=[{'source': 'a', 'key': None, 'reason': 'no image'}])
    assert merge_parts(output, 1, {}).samples == 0
    assert output.read('index.json') is None
    release(output, 1, 'convert.py')
    assert output.read(part_index(0)) is None and output.read('skipped.jsonl') is not None
    assert claim(output, CONTENTS | {'source': 'b'}) is False
    assert output.read('skipped.jsonl') is None


@pytest.mark.parametrize('name', ['000000/shard.00000.mds', 'index.json', 'claim.json.old'])
def test_an_out_that_was_given_back_is_not_taken_where_somebody_has_put_a_file_there_since(output, name):
    claim(output, CONTENTS)
    write_part(output, 0, [], skipped=[{'source': 'a', 'key': None, 'reason': 'no image'}])
    merge_parts(output, 1, {})
    release(output, 1, 'convert.py')
    before = {kept: output.read(kept) for kept in (CLAIM, 'skipped.jsonl')}
    output.write(name, b'mine')
    with pytest.raises(ValueError, match=f'^OUT .* already holds something, {name.partition("/")[0]}'):
        claim(output, CONTENTS)
    assert {kept: output.read(kept) for kept in before} == before and output.read(name) == b'mine'


def test_parts_are_taken_back_with_all_their_shards_and_the_index(output):
    claim(output, CONTENTS)
    for number in (0, 1):
        write_part(output, number, [f'{number} {index}' for index in range(9)])
    merge_parts(output, 2, {})
    names = [shard['raw_data']['basename'] for shard in json.loads(output.read('index.json'))['shards']]
    redo(output, [1])
    assert output.read('index.json') is None and finished_parts(output, 2) == {0}
    assert [output.read(name) is not None for name in names] == [name.startswith('000000') for name in names]


def test_of_several_runs_that_start_at_once_one_has_begun_it(output):
    begun = []
    start = threading.Barrier(8)

    def begin(number: int) -> None:
        start.wait()
        try:
            begun.append(claim(output, CONTENTS | {'source': str(number)}))
        except ValueError as error:
            begun.append(str(error))
    runs = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert begun.count(False) == 1
    assert all('was begun from ' in answer for answer in begun if answer is not False), begun


def test_a_second_run_in_a_folder_is_refused_by_the_pid_of_the_first_and_nothing_is_left_of_the_lock(tmp_path):
    first, second = (open_output(str(tmp_path / 'out'), 'OUT') for _ in range(2))
    with first.in_use():
        with pytest.raises(ValueError, match='^OUT .* is in use by another run'):
            with second.in_use():
                pass
        claim(first, CONTENTS)
    with second.in_use():
        assert claim(second, CONTENTS)
    assert os.listdir(tmp_path / 'out') == [CLAIM]


def test_somebodys_folder_gets_no_lock(tmp_path):
    (tmp_path / 'mine').write_text('mine')
    before = tmp_path.stat().st_mtime_ns
    with pytest.raises(ValueError, match='already holds something'):
        with open_output(str(tmp_path), 'OUT').in_use():
            pass
    assert tmp_path.stat().st_mtime_ns == before


def test_in_a_store_a_slower_run_does_not_write_over_a_part_that_a_faster_one_has_split(monkeypatch):
    with local_s3(monkeypatch):
        output = open_output('s3://bucket/out', 'OUT')
        claim(output, CONTENTS)
        slower = PartWriter(output, 0, {'caption': 'str'})
        slower.write({'caption': 'a'})
        PartWriter(output, 0, {'caption': 'str'}).finish(replaces=True, replaced=['x'])
        slower.finish()
        assert json.loads(output.read(part_index(0)))['replaced'] == ['x']


def test_an_out_with_files_of_others_is_refused_and_they_stay(output):
    output.write('000000/shard.00000.mds', b'mine')
    output.write('index.json', b'mine')
    with pytest.raises(ValueError, match='^OUT .* already holds something'):
        claim(output, CONTENTS)
    assert output.read(CLAIM) is None
    assert output.read('000000/shard.00000.mds') == output.read('index.json') == b'mine'


def test_an_out_of_another_program_or_a_damaged_claim_is_refused(output):
    claim(output, {'program': 'encode.py'})
    with pytest.raises(ValueError, match='was begun by encode.py, not by convert.py'):
        claim(output, CONTENTS)
    output.write(CLAIM, b'{"program"')
    with pytest.raises(ValueError, match='claim.json that is damaged'):
        claim(output, CONTENTS)
    assert output.read(CLAIM) == b'{"program"'


def test_a_store_that_forbids_or_fails_is_no_store_without_a_claim(monkeypatch):
    with local_s3(monkeypatch) as store:
        output = open_output('s3://bucket/out', 'OUT')
        claim(output, CONTENTS)
        key = f'out/{CLAIM}'
        before = store.objects[key]
        store.answers = {key: 403}
        with pytest.raises(ValueError, match='OUT s3://bucket/out.* denied'):
            claim(output, CONTENTS | {'source': 'b'})
        assert store.objects[key] == before


def test_a_folder_without_hard_links_is_claimed_once_all_the_same(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(1, 'Operation not permitted')
    monkeypatch.setattr(os, 'link', refuse)
    output = open_output(str(tmp_path / 'out'), 'OUT')
    assert output.create('a', b'1') and not output.create('a', b'2')
    assert output.read('a') == b'1' and os.listdir(tmp_path / 'out') == ['a']


class FullOutput(FolderOutput):
    """A folder on a disk that has no space left for shards."""

    def write(self, name, content, attempt=0):
        if name.endswith('.mds'):
            raise DataError('No space left on device')
        super().write(name, content, attempt)


def test_a_part_whose_shard_did_not_arrive_is_not_said_to_be_whole(tmp_path):
    output = FullOutput(str(tmp_path), 'OUT')
    with pytest.raises(DataError, match='No space left'):
        write_part(output, 0, ['a'])
    assert not (tmp_path / part_index(0)).exists()


def test_what_a_killed_worker_left_unfinished_is_removed_when_its_part_is_whole(tmp_path):
    output = open_output(str(tmp_path), 'OUT')
    (tmp_path / '000000').mkdir()
    for name in ('shard.00000.mds.tmp0', 'shard.00000.mds.tmp2', 'mine.tmp0'):
        (tmp_path / '000000' / name).write_bytes(b'half')
    part = PartWriter(output, 0, {'caption': 'str'}, attempt=1)
    part.write({'caption': 'a'})
    part.finish()
    assert sorted(os.listdir(tmp_path / '000000')) == ['mine.tmp0', 'shard.00000.mds']


@pytest.mark.parametrize('place, words', [('', 'is empty'), ('  ', 'is empty'), ('oci://bucket/x', 'S3-compatible'),
                                          ('dbfs:/x', 'S3-compatible'), ('s3://', 'names no bucket')])
def test_a_place_that_cannot_be_written_to_is_refused_by_its_name(place, words):
    with pytest.raises(ValueError, match=words):
        open_output(place, 'OUT')


def test_a_dataset_that_an_earlier_run_said_more_of_is_another_one(output):
    claim(output, CONTENTS | {'is_held_out': True})
    with pytest.raises(ValueError, match='was begun with what was held out of another dataset'):
        claim(output, CONTENTS)
    assert claim(output, CONTENTS | {'is_held_out': True, 'of_a_later_version': None})


def test_an_out_that_is_given_back_keeps_nothing_of_its_dataset(output):
    claim(output, CONTENTS)
    write_part(output, 0, ['a'])
    output.write(EDGE, b'[1, 0, 0]')
    redo(output, [0])
    release(output, 1, 'convert.py')
    assert list(output.names()) == [CLAIM]


def test_a_damaged_file_of_out_is_named_with_the_remedy(output):
    output.write(EDGE, b'[1, ')
    with pytest.raises(ValueError, match=r'^held-out.json of OUT .* is damaged; give a new folder$'):
        find_edge(output, 1, 1)
    output.write(part_index(0), b'{')
    with pytest.raises(DataError, match=r'^parts/000000.json of OUT .* is damaged; remove it, and run the same'):
        redo(output, [0])


def test_a_claim_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / CLAIM)
    with pytest.raises(DataError, match='claim.json of OUT .* is no file'):
        claim(open_output(str(tmp_path), 'OUT'), CONTENTS)
