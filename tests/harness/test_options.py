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
