"""Flags, and the help that explains them."""
import subprocess
import sys

import pytest

from harness.options import benchmark_parser
from tests.runs import ROOT


def test_every_flag_has_a_help_line_with_its_default_in_a_group_of_its_subject():
    parser = benchmark_parser('')
    for action in parser._actions[1:]:  # the first is --help
        assert 'default' in action.help, action.dest
    grouped = [action for group in parser.groups.values() for action in group._group_actions]
    assert grouped and {id(action) for action in grouped} == {id(action) for action in parser._actions[1:]}


@pytest.mark.parametrize('argv, value', [
    ([], False), (['--compile'], True), (['--compile', '--use_ema'], True), (['--compile', '--no-compile'], False),
    (['--no-compile', '--compile'], True), (['--compile', 'reduce-overhead'], 'reduce-overhead')])
def test_compiling_takes_a_mode_or_none(argv, value):
    assert benchmark_parser('').parse_args(argv).compile == value


@pytest.mark.parametrize('argument, line', [
    ('--batchsize', '--batchsize is no flag; did you mean --batch_size?'),
    ('--batchsize=4', '--batchsize is no flag; did you mean --batch_size?'),
    ('--qqq', '--qqq is no flag; see --help'),
    ('64', '64 belongs to no flag; see --help'),
])
def test_a_flag_that_is_none_is_one_line_with_the_nearest(argument, line, capsys):
    with pytest.raises(SystemExit) as exit:
        benchmark_parser('').parse_args(['--use_synth_data', argument])
    assert exit.value.code == 2 and capsys.readouterr().err == f'benchmark.py: error: {line}\n'


@pytest.mark.parametrize('command', ['benchmark.py', 'encode.py'])
def test_a_wrong_flag_is_refused_before_anything_heavy_is_imported(command):
    run = subprocess.run([sys.executable, '-X', 'importtime', ROOT / command, '--batchsize', '4'], capture_output=True,
                         text=True)
    imported = {line.rpartition('|')[2].strip() for line in run.stderr.splitlines() if line.startswith('import time:')}
    [error] = [line for line in run.stderr.splitlines() if not line.startswith('import time:')]
    assert run.returncode == 2 and error == f'{command}: error: --batchsize is no flag; did you mean --batch_size?'
    assert 'argparse' in imported and not imported & {'torch', 'composer', 'numpy', 'diffusers'}


@pytest.mark.parametrize('flag, value, words', [
    ('max_duration', 'long', '5000ba'), ('max_duration', '0ep', 'not above 0'), ('max_duration', '1000tok', '5000ba'),
    ('max_duration', 'infba', 'is not a time'), ('max_duration', 'nanba', 'is not a time'),
    ('max_duration', '0.5ep', 'no whole number of epochs'), ('max_duration', '1e400ba', 'is not a time'),
    ('max_duration', '0.5dur', 'is not a time'), ('save_interval', '0.5ep', 'no whole number of epochs'),
    ('save_interval', 'often', '5000ba'), ('lr_warmup', '0.5ep', 'whole number'),
    ('lr_warmup', '0ba', 'not above 0'), ('lr_warmup', '2dur', 'longer than the run'), ('lr_warmup', '9sp', '10000ba'),
    ('ema_half_life', '0.5ep', 'whole number'), ('ema_half_life', '9sp', '1000ba'), ('ema_start', '0.5ep', 'whole'),
    ('ema_start', 'late', '0.5dur'), ('eval_interval', '0.5ep', 'whole number'), ('sample_interval', '0.5ep', 'whole'),
    ('seed', '-1', 'a whole number up to'), ('seed', '1' * 20, 'a whole number up to'),
    ('dist_timeout', '9' * 20, 'a number of seconds'),
])
def test_a_time_or_a_number_that_cannot_be_is_one_line_that_names_its_flag(flag, value, words, capsys):
    with pytest.raises(SystemExit):
        benchmark_parser('').parse_args([f'--{flag}', value])
    error = capsys.readouterr().err
    assert error.startswith(f'benchmark.py: error: argument --{flag}: {value} is') and words in error, error
    assert error.count('\n') == 1


@pytest.mark.parametrize('flag, value', [
    ('max_duration', '3e4ba'), ('max_duration', '90sp'), ('save_interval', '0.25dur'), ('ema_start', '0ba'),
    ('lr_warmup', '0.01dur'), ('seed', '4000000000')])
def test_a_time_stays_as_it_was_given(flag, value):
    assert str(getattr(benchmark_parser('').parse_args([f'--{flag}', value]), flag)) == value


@pytest.mark.parametrize('name, value', [('RANK', 'abc'), ('RANK', '-1'), ('WORLD_SIZE', '0'), ('LOCAL_RANK', '')])
def test_a_rank_that_is_none_is_one_line(name, value, monkeypatch, capsys):
    monkeypatch.setenv('RANK', '0')
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        benchmark_parser('').parse_args([])
    assert capsys.readouterr().err.startswith(f'benchmark.py: error: {name}={value} in the environment is no number')
