"""Progress and failures of a run are shown on one line, on a terminal, in a log and in the record."""
import json
import sys

import pytest
import torch
from composer import Callback

import benchmark
from sdbench import process
from tests.forked_runs import on_small_disk
from tests.runs import TINY, failed
from tests.samples import encoded, picture, write_shards


def test_an_error_about_memory_names_the_microbatch_and_what_helps(capfd, results, monkeypatch):
    monkeypatch.setattr(benchmark.StableDiffusion, 'encode', lambda self, batch: torch.empty(1 << 60))
    line = failed(['--use_synth_data', *TINY, '--device_train_microbatch_size', '2'], results, capfd)
    for named in ('out of memory', '--device_train_microbatch_size 2', '--gradient_checkpointing', 'encode.py'):
        assert named in line


class NotesHowItIsClosed(Callback):
    """Notes whether a run has failed, as Composer's W&B logger does."""
    error = None

    def post_close(self):
        self.error = sys.exc_info()[1]


def test_a_crash_leaves_a_record_with_the_reason_and_without_passwords_and_loggers_see_it(results, capfd, monkeypatch):
    error = RuntimeError('no\nluck at https://me:secret@host/x')

    def crash(self, batch):
        raise error
    monkeypatch.setattr(benchmark.StableDiffusion, 'encode', crash)
    callback = NotesHowItIsClosed()
    with pytest.raises(SystemExit):
        benchmark.main(['--use_synth_data', *TINY], [callback])
    assert callback.error is error
    record = json.loads(results.read_text())
    assert record['error'] == 'RuntimeError: no luck at https://***@host/x'
    assert (record['measured_batches'], record['images_per_sec']) == (0, None)
    assert 'the run failed at batch 1: RuntimeError: no luck' in capfd.readouterr().err


def test_a_resumed_run_names_its_checkpoint_and_shows_the_progress_of_the_whole_training(monkeypatch, capfd, recwarn):
    monkeypatch.setattr(process, 'SECONDS_BETWEEN_LINES', 0)
    argv = ['--use_synth_data', *TINY, '--save_folder', 'kept', '--autoresume', '--max_duration']
    benchmark.main([*argv, '2ba'])
    assert 'holds no checkpoint yet' in capfd.readouterr().out
    record = benchmark.main([*argv, '4ba'])
    assert (record['first_batch'], record['trained_batches']) == (2, 4)
    out, err = capfd.readouterr()
    assert 'resuming from kept/ep0-ba2-rank0.pt, batch 2 of 4\n' in out
    _, second, third, *_ = [line for line in err.splitlines() if ' left' in line]
    assert second.startswith('12 of 16 images') and 'batch 3' in second
    assert third.startswith('16 of 16 images') and f'batch 4, loss {record["loss"]:.3f}' in third
    assert not [warning for warning in recwarn if 'state will not be restored' in str(warning.message)]


def test_a_terminal_has_one_bar_for_all_epochs_which_ends_at_100_percent(monkeypatch, shards, capfd):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    record = benchmark.main(['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--max_duration',
                             '2ep'])
    bar = capfd.readouterr().err.split('\r')[-1].splitlines()[0]
    assert bar.startswith('100%') and ' 48/48 ' in bar and f'batch 6, loss {record["loss"]:.3f}' in bar


@pytest.mark.long
def test_a_full_disk_with_cached_shards_is_a_one_line_error(server, tmp_path, results):
    disk = tmp_path / 'disk'
    shards = write_shards(tmp_path / 'shards', [{'jpg': encoded(picture(index, 512, 512), 'PNG'), 'caption': 'x'}
                                                for index in range(40)], size_limit=1 << 20)
    argv = ['--remote', shards, '--local', disk / 'cache', *TINY, '--max_duration', '1ep', '--results', results]
    line = on_small_disk(server, 2, disk, argv, tmp_path / 'out1')
    assert 'No space left' in line and '--cache_limit' in line
    assert json.loads(results.read_text())['error'] in line
