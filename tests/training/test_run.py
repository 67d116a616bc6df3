"""Why a run failed: one line, and the same in the record."""
import json

import pytest
import torch

import benchmark
from tests.forked_runs import on_small_disk
from tests.runs import TINY, failed
from tests.samples import encoded, picture, write_shards


def test_out_of_memory_says_the_microbatch_what_to_try_and_where_the_record_is_and_no_summary(capfd, monkeypatch):
    monkeypatch.setattr(benchmark.StableDiffusion, 'encode', lambda self, batch: torch.empty(1 << 60))
    with pytest.raises(SystemExit) as exit:
        benchmark.main(['--use_synth_data', *TINY, '--device_train_microbatch_size', '2'])
    output, errors = capfd.readouterr()
    assert exit.value.code == 1
    assert 'out of memory at --device_train_microbatch_size 2; use a smaller one' in errors
    assert output.split() == ['record', 'appended', 'to', 'results.jsonl']


def test_a_crash_leaves_a_record_that_says_why_without_passwords(results, capfd, monkeypatch):
    def crash(self, batch):
        raise RuntimeError('no\nluck at https://me:secret@host/x')
    monkeypatch.setattr(benchmark.StableDiffusion, 'encode', crash)
    line = failed(['--use_synth_data', *TINY], results, capfd)
    record = json.loads(results.read_text())
    assert record['error'] == 'RuntimeError: no luck at https://***@host/x'
    assert record['measured_batches'] == 0
    assert record['images_per_sec'] is None
    assert 'the run failed at batch 1: RuntimeError: no luck' in line


@pytest.mark.long
def test_a_full_disk_at_the_cache_is_one_line(server, tmp_path, results):
    disk = tmp_path / 'disk'
    disk.mkdir()
    shards = write_shards(tmp_path / 'shards', [{'jpg': encoded(picture(index, 512, 512), 'PNG'), 'caption': 'x'}
                                                for index in range(40)], size_limit=1 << 20)
    argv = ['--remote', shards, '--local', disk / 'cache', *TINY, '--max_duration', '1ep', '--results', results]
    line, _ = on_small_disk(server, 2, disk, argv, tmp_path / 'out1')
    assert 'No space left' in line
    assert '--cache_limit' in line
    assert json.loads(results.read_text())['error'] in line
