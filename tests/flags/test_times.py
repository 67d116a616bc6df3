"""Times become batches, once: index.json says how long an epoch is."""
import pytest

from benchmark import build_data
from sdbench.flags.complete import index_of_data
from sdbench.flags.times import to_batches
from sdbench.models.loading import find_model
from tests.runs import TINY, settings_of


@pytest.mark.parametrize('time, batches', [
    ('7ba', 7), ('3ep', 30), ('0.5dur', 15), ('.1dur', 3), ('0.31dur', 9), ('1dur', 30), ('0.001dur', 1)])
def test_a_time_is_so_many_batches_rounded_down(time, batches):
    assert to_batches(time, batches_per_epoch=10, batches_of_run=30) == batches


@pytest.mark.parametrize('data', ['shards', 'synthetic'])
def test_an_epoch_is_as_long_as_the_loader_will_be(shards, data):
    flags = ['--use_synth_data'] if data == 'synthetic' else ['--remote', shards]
    settings = settings_of(*flags, *TINY, '--batch_size', '7')
    loader = build_data(settings, find_model('tiny'), index_of_data(settings)).dataloader
    assert settings.batches_per_epoch == len(loader)


def test_every_time_of_a_training_is_in_batches(shards):
    flags = ['--remote', shards, '--use_ema', '--max_duration', '4ep', '--save_folder', 'kept', '--save_interval',
             '1ep', '--lr_warmup', '0.1dur', '--ema_half_life', '2ep', '--ema_start', '0.9dur', '--eval_remote', 'held',
             '--eval_interval', '2ep']
    settings = settings_of(*flags, *TINY)  # 24 samples, 4 a batch
    assert settings.max_duration == '24ba'
    assert settings.save_interval == '6ba'
    assert settings.lr_warmup == '2ba'
    assert settings.ema_half_life == '12ba'
    assert settings.ema_start == '21ba'
    assert settings.eval_interval == '12ba'
    assert settings.sample_interval is None


@pytest.mark.parametrize('length, interval', [
    ('2ep', '3ba'), ('3999ba', '1000ba'), ('90000ba', '1000ba'), ('1ba', '1ba')])
def test_a_short_run_is_saved_and_evaluated_four_times(shards, length, interval):
    flags = ['--remote', shards, '--max_duration', length, '--save_folder', 'kept', '--eval_remote', 'held']
    settings = settings_of(*flags, *TINY)
    assert settings.save_interval == interval
    assert settings.eval_interval == interval
    assert settings.sample_interval is None


@pytest.mark.parametrize('length, half_life', [
    ('2ep', '2ba'), ('39ba', '4ba'), ('10000ba', '1000ba'), ('90000ba', '1000ba')])
def test_the_average_of_a_short_run_forgets_half_of_it_ten_times(shards, length, half_life):
    flags = ['--remote', shards, '--max_duration', length, *TINY]
    assert settings_of(*flags, '--use_ema').ema_half_life == half_life
    assert settings_of(*flags).ema_half_life is None
