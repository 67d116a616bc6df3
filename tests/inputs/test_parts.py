"""Parts that are written, found and merged, where the tests of convert.py and encode.py do not see it."""
import json
import os
import signal
import time

import psutil
import pytest

from inputs import parts
from inputs.parts import Output, PartWriter, merge_parts, part_index
from tests.runs import wait_until


def merge_slowly(out: str) -> None:
    """Merge four parts in two processes that read, each of which takes long."""
    parts.PARTS_AT_ONCE = 1
    parts.read_some_parts = lambda output, numbers: time.sleep(60)
    merge_parts(Output(out), 4, {}, processes=2)


def test_readers_of_a_merge_end_with_it(server, tmp_path):
    merge = server.Process(target=merge_slowly, args=(str(tmp_path),))
    merge.start()
    wait_until(lambda: len(psutil.Process(merge.pid).children()) == 2)
    readers = psutil.Process(merge.pid).children()
    os.kill(merge.pid, signal.SIGKILL)
    merge.join()
    _, alive = psutil.wait_procs(readers, timeout=20)
    assert not alive


def test_a_merge_by_several_processes_is_that_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, 'PARTS_AT_ONCE', 2)
    for processes in (1, 2):
        output = Output(str(tmp_path / str(processes)))
        for number in range(7):
            shard = {'samples': number, 'raw_data': {'basename': f'{number:06}/shard.00000.mds', 'bytes': 10 * number}}
            shards = [shard] * (number % 3)  # none in some
            skipped = [{'source': 'a', 'key': str(number), 'reason': 'no caption'}]
            output.write(part_index(number), json.dumps({'shards': shards, 'skipped': skipped}))
        merged = merge_parts(output, 7, {'about': 1}, processes)
        assert (merged.parts, merged.shards, merged.samples, merged.bytes) == (7, 6, 19, 190)
    one, two = (tmp_path / '1', tmp_path / '2')
    for name in ('index.json', 'skipped.jsonl'):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    index = json.loads((one / 'index.json').read_text())
    assert index['about'] == 1 and [shard['samples'] for shard in index['shards']] == [1, 2, 2, 4, 5, 5]


def test_a_part_whose_shard_did_not_arrive_is_not_said_to_be_whole(tmp_path, monkeypatch):
    def fail_for_shards(self, name):
        if name.endswith('.mds'):
            raise OSError(28, 'No space left on device')
    monkeypatch.setattr(Output, 'keep', fail_for_shards)
    output = Output(str(tmp_path))
    part = PartWriter(output, 0, {'caption': 'str'})
    part.write({'caption': 'a'})
    with pytest.raises(OSError, match='No space left'):
        part.finish()
    assert not (tmp_path / part_index(0)).exists()


def test_parts_without_a_sample_make_no_dataset(tmp_path):
    output = Output(str(tmp_path))
    output.write(part_index(0), json.dumps({'shards': [], 'skipped': []}))
    assert merge_parts(output, 1, {}).samples == 0
    assert not (tmp_path / 'index.json').exists()
