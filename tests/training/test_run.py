"""Progress and failures of a run are shown on one line, on a terminal, in a log and in the record."""
import json
import re
import sys

import pytest
import torch
from composer import Callback

import benchmark
from sdbench import process
from tests.forked_runs import on_small_disk
from tests.runs import TINY
from tests.samples import encoded, picture, write_shards


def test_an_error_about_memory_names_the_microbatch_and_what_helps(capfd, monkeypatch):
    monkeypatch.setattr(benchmark.StableDiffusion, 'encode', lambda self, batch: torch.empty(1 << 60))
    with pytest.raises(SystemExit) as exit:
        benchmark.main(['--use_synth_data', *TINY, '--device_train_microbatch_size', '2'])
    output, errors = capfd.readouterr()
    assert exit.value.code == 1
    assert 'out of memory; --device_train_microbatch_size 2 is too large; use a smaller ' in errors
    assert ', or --gradient_checkpointing, or latents (encode.py); --dry_run with the same flags says which' in errors
    assert output.split() == ['record', 'appended', 'to', 'results.jsonl']


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
    assert record['measured_batches'] == 0
    assert record['images_per_sec'] is None
    assert 'the run failed at batch 1: RuntimeError: no luck' in capfd.readouterr().err


def test_a_resumed_run_names_its_checkpoint_and_shows_the_progress_of_the_whole_training(
        monkeypatch, tmp_path, capfd, recwarn):
    monkeypatch.setattr(process, 'SECONDS_BETWEEN_LINES', 0)
    folder = tmp_path / 'checkpoints'
    argv = ['--use_synth_data', *TINY, '--save_folder', str(folder), '--autoresume', '--max_duration']
    benchmark.main([*argv, '2ba'])
    assert f'--save_folder {folder} holds no checkpoint yet: starting from the first batch' in capfd.readouterr().out
    record = benchmark.main([*argv, '4ba'])
    out, err = capfd.readouterr()
    assert f'resuming from {folder}/ep0-ba2-rank0.pt, batch 2 of 4\n' in out
    _, second, third, *_ = [line for line in err.splitlines() if ' left' in line]
    assert re.fullmatch(r'12 of 16 images, \S+ images/s, \d\d:\d\d left, batch 3, loss \d\.\d{3}', second)
    assert third.startswith('16 of 16 images') and f'batch 4, loss {record["loss"]:.3f}' in third
    assert (record['first_batch'], record['trained_batches']) == (2, 4)
    assert not [warning for warning in recwarn if 'state will not be restored' in str(warning.message)]


def test_a_terminal_has_one_bar_for_all_epochs_which_ends_at_100_percent(monkeypatch, shards, capfd):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
    record = benchmark.main(['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--max_duration',
                             '2ep'])
    bar = capfd.readouterr().err.split('\r')[-1].splitlines()[0]
    assert re.match(r'100%\|█+\| 48/48 \[.* images/s, batch 6, loss \d\.\d{3}\]', bar), bar
    assert record['trained_epochs'] == 2


@pytest.mark.long
def test_a_full_disk_with_cached_shards_is_a_one_line_error(server, tmp_path, results):
    disk = tmp_path / 'disk'
    shards = write_shards(tmp_path / 'shards', [{'jpg': encoded(picture(index, 512, 512), 'PNG'), 'caption': 'x'}
                                                for index in range(40)], size_limit=1 << 20)
    argv = ['--remote', shards, '--local', disk / 'cache', *TINY, '--max_duration', '1ep', '--results', results]
    line, _ = on_small_disk(server, 2, disk, argv, tmp_path / 'out1')
    assert 'No space left' in line and '--cache_limit' in line
    assert json.loads(results.read_text())['error'] in line
