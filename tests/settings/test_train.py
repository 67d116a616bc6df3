"""Train: every flag once, filled in beside the command line, and never changed afterwards."""
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from cli.defaults import fill_in_training_defaults
from cli.options import benchmark_parser
from measuring.record import training_settings
from settings.train import Train
from tests.runs import TINY, settings_of


def test_every_flag_is_a_field():
    flags = set(vars(benchmark_parser('').parse_args(['--use_synth_data'])))
    names = [field.name for field in fields(Train)]
    assert set(names) == flags | {'only_measures', 'num_workers_by_default'}


def test_defaults_are_filled_in_beside_the_command_line_and_settings_stay_what_they_are():
    args = benchmark_parser('').parse_args(['--use_synth_data', '--use_ema', *TINY])
    given = dict(vars(args))
    settings = fill_in_training_defaults(args)
    assert vars(args) == given and given['ema_half_life'] is None
    assert settings.ema_half_life == '1000ba' and settings.flags()['max_duration'] == '4ba'
    with pytest.raises(FrozenInstanceError):
        settings.compile = True


def test_the_microbatch_that_was_found_is_in_the_record_and_the_settings_keep_what_was_asked_for():
    told = settings_of('--use_synth_data', *TINY)
    searched = replace(told, device_train_microbatch_size='auto')
    assert searched.searches_microbatch and not told.searches_microbatch
    assert training_settings(searched, latents=False, microbatch=2)['device_train_microbatch_size'] == 2
    assert searched.device_train_microbatch_size == 'auto'


def test_a_dry_run_without_a_number_speaks_of_as_many_gpus_as_there_are_processes(monkeypatch):
    assert settings_of(*TINY).dry_run is None
    assert settings_of('--dry_run', *TINY).dry_run == 1
    monkeypatch.setenv('WORLD_SIZE', '4')
    assert settings_of('--dry_run', *TINY).dry_run == 4
