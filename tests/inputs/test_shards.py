"""The index of a dataset is checked before anything in the dataset is used."""
import json
from pathlib import Path

import pytest

from sdbench.inputs.shards import read_index
from tests.runs import TINY, one_error_line
from tests.samples import Hostile, good, write_shards

SHARD = {'samples': 1, 'format': 'mds', 'raw_data': {'basename': 'a', 'bytes': 1}}


@pytest.mark.parametrize('content, words', [
    ('not json', 'index.json'), ('{}', 'index.json'), ('[]', 'index.json'), ('{"shards": [{}]}', 'index.json'),
    ('{"shards": 3}', 'index.json'), ('{"shards": [], "latents": {}}', 'lacks what convert.py and encode.py write'),
    (json.dumps({'shards': [SHARD | {'format': 'jsonl'}]}), 'has a shard of format jsonl, which is not read')])
def test_the_error_for_an_unreadable_index_gives_the_reason(tmp_path, content, words):
    (tmp_path / 'index.json').write_text(content)
    with pytest.raises(ValueError, match=words):
        read_index(str(tmp_path))


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
        assert words in one_error_line(['--remote', remote, '--local', tmp_path / 'cache', *TINY], capfd)
    assert not trace.exists()
    assert not (tmp_path / 'escaped.mds').exists()


def test_a_wrong_bucket_and_a_missing_permission_are_each_reported_in_one_line(s3, capfd):
    reading, saving = [*TINY, '--remote'], [*TINY, '--use_synth_data', '--save_folder']
    s3.put('runs/1/ep0-ba2-rank0.pt', b'')
    assert 'already holds files' in one_error_line([*saving, 's3://bucket/runs/1'], capfd)
    assert '--remote s3://nobody/photos' in one_error_line([*reading, 's3://nobody/photos'], capfd)
    assert '--save_folder s3://nobody/runs cannot be read or' in one_error_line([*saving, 's3://nobody/runs'], capfd)
    s3.is_read_only = True
    assert '--save_folder s3://bucket/2 cannot be read or' in one_error_line([*saving, 's3://bucket/2'], capfd)
