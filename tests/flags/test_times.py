"""Times become batches once, as soon as the loader's length is known."""
import pytest

from sdbench.flags.times import is_young, times_in_batches, to_batches
from tests.runs import settings_of


@pytest.mark.parametrize('time, batches', [
    ('7ba', 7), ('3ep', 30), ('0.5dur', 15), ('.1dur', 3), ('0.31dur', 9), ('1dur', 30), ('0.001dur', 1)])
def test_a_time_is_so_many_batches_rounded_down(time, batches):
    assert to_batches(time, batches_per_epoch=10, batches_of_run=30) == batches


def test_every_time_of_a_training_is_in_batches():
    flags = ['--use_synth_data', '--use_ema', '--max_duration', '4ep', '--save_folder', 'kept', '--save_interval',
             '1ep', '--lr_warmup', '0.1dur', '--ema_half_life', '2ep', '--ema_start', '0.9dur', '--eval_remote', 'held',
             '--eval_interval', '2ep']
    settings = times_in_batches(settings_of(*flags), batches_per_epoch=5)
    assert settings.max_duration == '20ba'
    assert settings.save_interval == '5ba'
    assert settings.lr_warmup == '2ba'
    assert settings.ema_half_life == '10ba'
    assert settings.ema_start == '18ba'
    assert settings.eval_interval == '10ba'
    assert settings.sample_interval is None


@pytest.mark.parametrize('length, interval', [
    ('2ep', '3ba'), ('3999ba', '1000ba'), ('90000ba', '1000ba'), ('1ba', '1ba')])
def test_a_short_run_is_saved_and_evaluated_four_times(length, interval):
    flags = ['--use_synth_data', '--max_duration', length, '--save_folder', 'kept', '--eval_remote', 'held']
    settings = times_in_batches(settings_of(*flags), batches_per_epoch=5)
    assert settings.save_interval == interval
    assert settings.eval_interval == interval
    assert settings.sample_interval is None


@pytest.mark.parametrize('half_life, young', [('10ba', True), ('9ba', False), ('1ep', False), (None, False)])
def test_an_average_is_young_until_four_half_lives_have_passed(half_life, young):
    assert is_young(half_life, batches=39) is young
