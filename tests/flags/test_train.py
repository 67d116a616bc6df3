"""What cannot be is refused with its flag, its value and the remedy; what was not given follows from the machine."""
import os

import pytest
import torch
from composer.utils import dist
from hypothesis import given
from hypothesis import strategies as st

from sdbench.costs import TRAINING_IMAGES
from sdbench.errors import UserError
from sdbench.flags.train import divisible_batch_size, power_of_two
from sdbench.process import one_line_errors
from tests.runs import TINY, settings_of

SYNTHETIC = ['--use_synth_data', *TINY]


def test_cudnns_attention_is_refused_in_the_versions_that_have_faults(as_on_a_gpu, monkeypatch):
    def settings_with(attention: str, version: int) -> None:
        monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: version)
        settings_of(*SYNTHETIC, '--attention', attention, '--precision', 'amp_bf16')
    settings_with('cudnn', 91501)
    settings_with('flash', 90501)
    with pytest.raises(ValueError, match='--attention cudnn needs cuDNN 9.15.1 .*use --attention sdpa'):
        settings_with('cudnn', 91500)


def test_what_was_not_given_follows_from_the_machine(as_on_a_gpu, monkeypatch):
    as_on_a_gpu(count=0)
    here = settings_of(*SYNTHETIC)
    assert here.max_duration == '4ba'
    assert settings_of('--use_synth_data', '--model_name', 'tiny').training_images is None
    assert (here.precision, here.encoder_precision, here.channels_last) == ('fp32', 'fp32', False)
    assert here.device_train_microbatch_size == 4
    assert here.measures
    as_on_a_gpu(count=8)
    monkeypatch.setenv('WORLD_SIZE', '8')
    monkeypatch.setattr(dist, 'all_gather_object', lambda mine: [mine])
    on_gpus = settings_of('--use_synth_data', '--compile')
    assert on_gpus.device_train_microbatch_size == 'auto'
    assert on_gpus.channels_last  # which torch's group norm would copy, where nothing is compiled
    assert on_gpus.compile_blocks
    assert (on_gpus.precision, on_gpus.encoder_precision) == ('amp_bf16', 'bf16')
    assert not settings_of('--use_synth_data', '--compile', '--no-compile_blocks').compile_blocks
    assert not settings_of('--use_synth_data').channels_last
    assert not settings_of('--use_synth_data', '--compile', '--no-channels_last').channels_last


SIZED = '--dry_run 1 --batch_size 5'


@pytest.mark.parametrize('flags, expected', [
    ('--use_synth_data --max_duration 40ba --save_folder x',  # which trains, and measures all after the warm-up
     {'max_duration': '40ba', 'measure_batches': None, 'measures': False}),
    ('--dry_run 8 --use_ema', {'num_devices': 8, 'use_synth_data': True, 'precision': 'amp_bf16'}),
    ('--dry_run', {'num_devices': 1}),
    ('--use_synth_data --save_folder s3://bucket/cats/run1', {'sample_folder': 'run1-samples'}),
    (SIZED, {'training_images': TRAINING_IMAGES}),
    (f'{SIZED} --max_duration 2000ba', {'training_images': 10_000}),
    (f'{SIZED} --max_duration 3ep --remote SHARDS', {'training_images': 3 * 20}),  # of 24 samples
    ('--batch_size 4 --local SHARDS', {'remote': 'SHARDS', 'local': None})])
def test_what_was_not_given_follows_from_the_other_flags_without_a_gpu(shards, tmp_path, flags, expected):
    (tmp_path / 'SHARDS').symlink_to(shards)
    settings = settings_of(*flags.split())
    assert {flag: getattr(settings, flag) for flag in expected} == expected


@pytest.mark.parametrize('length, flags, expected', [
    ('4ep', '--save_folder kept --save_interval 1ep --lr_warmup 0.1dur --use_ema --ema_half_life 2ep '
     '--ema_start 0.9dur --eval_remote held --eval_interval 2ep',
     {'max_duration': '24ba', 'save_interval': '6ba', 'lr_warmup': '2ba', 'ema_half_life': '12ba', 'ema_start': '21ba',
      'eval_interval': '12ba', 'sample_interval': None}),
    # a short run is saved and evaluated four times, and its average forgets half of it ten times
    *((length, '--save_folder kept --eval_remote held', dict.fromkeys(['save_interval', 'eval_interval'], interval))
      for length, interval in (('2ep', '3ba'), ('3999ba', '1000ba'), ('90000ba', '1000ba'), ('1ba', '1ba'))),
    *((length, '--use_ema', {'ema_half_life': half_life})
      for length, half_life in (('2ep', '2ba'), ('39ba', '4ba'), ('10000ba', '1000ba'), ('90000ba', '1000ba'))),
    ('2ep', '--lr_warmup .001dur', {'ema_half_life': None, 'lr_warmup': '1ba'})])  # never less than a batch
def test_every_time_of_a_training_is_in_batches_given_or_not(shards, length, flags, expected):
    settings = settings_of('--remote', shards, *TINY, '--max_duration', length, *flags.split())  # 24 samples, 4 a batch
    assert {flag: getattr(settings, flag) for flag in expected} == expected


def test_ranks_whose_hosts_differ_train_as_the_first_would(shards, monkeypatch):
    told = []  # by each rank, of its machine

    def gather(mine):
        told.append(mine)
        return told

    monkeypatch.setattr(dist, 'all_gather_object', gather)
    trained = []
    for cores in (6, 8):
        monkeypatch.setattr(os, 'sched_getaffinity', lambda process, cores=cores: range(cores))
        trained.append(settings_of('--remote', shards, *TINY))
    assert trained[0].num_workers == 6
    assert trained[0] == trained[1]


@pytest.mark.parametrize('error, status, line', [
    (UserError('--x 1 is bad'), 2, '--x 1 is bad'), (FileNotFoundError('no such file'), 1, 'no such file; it stays'),
    (KeyboardInterrupt(), 130, 'interrupted; it stays')])
def test_a_users_error_is_one_line_with_its_status_and_a_bug_of_ours_keeps_its_traceback(error, status, line, capsys):
    with pytest.raises(SystemExit) as exit, one_line_errors('x.py', 'it stays'):
        raise error
    assert exit.value.code == status
    assert capsys.readouterr().err == f'x.py: error: {line}\n'
    with pytest.raises(ValueError, match='not enough values'), one_line_errors('x.py'):
        [_] = []


def test_only_the_rank_that_writes_the_record_needs_its_file_and_a_dry_run_writes_none(tmp_path, monkeypatch):
    (tmp_path / 'results.jsonl').mkdir()
    settings_of('--dry_run', '8')
    monkeypatch.setenv('RANK', '1')
    settings_of(*SYNTHETIC)
    monkeypatch.setenv('RANK', '0')
    with pytest.raises(SystemExit):
        settings_of(*SYNTHETIC)


@given(batch_size=st.integers(1, 10_000), devices=st.integers(1, 300), microbatch=st.integers(1, 100))
def test_the_batch_size_that_an_error_names_divides_over_the_devices_and_into_microbatches(
        batch_size, devices, microbatch):
    assert divisible_batch_size(batch_size, devices, microbatch) % (devices * microbatch) == 0
    named = divisible_batch_size(batch_size, devices)
    assert named % devices == 0
    assert named >= devices and named >= 7 / 8 * (batch_size // devices) * devices
    each = named // devices
    assert each % power_of_two(each // 9) == 0
