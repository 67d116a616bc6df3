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
    ('2ep', '', {'ema_half_life': None})])
def test_every_time_of_a_training_is_in_batches_given_or_not(shards, length, flags, expected):
    settings = settings_of('--remote', shards, *TINY, '--max_duration', length, *flags.split())  # 24 samples, 4 a batch
    assert {flag: getattr(settings, flag) for flag in expected} == expected
