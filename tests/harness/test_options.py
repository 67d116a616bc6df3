"""Flags, and the help that explains them."""
import os
import subprocess
import sys

import pytest

from harness.early_checks import answer_early, refuse_early_training
from harness.options import benchmark_parser
from harness.versions import git_commit
from tests.runs import ROOT

# Runs a command as its file alone: this Python looks for no installed packages.
AS_SCRIPT = '''
import runpy, sys
del sys.argv[0]
sys.path.insert(0, '')
runpy.run_path(sys.argv[0], run_name='__main__')
'''


def test_every_flag_has_a_help_line_with_its_default_in_a_group_of_its_subject():
    parser = benchmark_parser('')
    for action in parser._actions[2:]:  # the first are --help and --version
        assert 'default' in action.help, action.dest
    grouped = [action for group in parser.groups.values() for action in group._group_actions]
    assert grouped and {id(action) for action in grouped} == {id(action) for action in parser._actions[2:]}


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
    ('--ema', '--ema is short for no single flag; did you mean --use_ema or --ema_start or --ema_half_life?'),
])
def test_a_flag_that_is_none_is_one_line_with_the_nearest(argument, line, capsys):
    with pytest.raises(SystemExit) as exit:
        benchmark_parser('').parse_args(['--use_synth_data', argument])
    assert exit.value.code == 2 and capsys.readouterr().err == f'benchmark.py: error: {line}\n'


def test_a_flag_may_be_cut_short_where_that_is_one_flag_alone():
    assert benchmark_parser('').parse_args(['--batch', '4']).batch_size == 4


SYNTHETIC = ['benchmark.py', '--use_synth_data']
HEAVY = {'torch', 'composer', 'numpy', 'diffusers', 'streaming', 'transformers'}


@pytest.mark.parametrize('argv, line', [
    ([*SYNTHETIC, '--batchsize', '4'], '--batchsize is no flag; did you mean --batch_size?'),
    (['benchmark.py'], 'give one of --remote, --use_synth_data and --use_synth_latents'),
    (['benchmark.py', '--remote', 'nowhere'], '--remote nowhere is no folder'),
    ([*SYNTHETIC, '--image_size', '65'], '--image_size 65 is not a multiple of 8; use 64'),
    ([*SYNTHETIC, '--batch_size', '4', '--device_train_microbatch_size', '3'],
     '--device_train_microbatch_size 3 does not divide the 4 images that each of 1 devices gets of --batch_size 4; use '
     '2'),
    ([*SYNTHETIC, '--ema_start', '9ba'], '--ema_start 9ba needs --use_ema'),
    ([*SYNTHETIC, '--cast_weights_once', '--compile'], '--cast_weights_once does nothing with --compile'),
    ([*SYNTHETIC, '--results', 'tests'], '--results tests cannot be written: Is a directory'),
    ([*SYNTHETIC, '--results', 'FIFO'], 'is a pipe, which would wait for a reader; name a file'),
    (['encode.py'], 'give both --remote and --out'),
    (['encode.py', '--remote', 'tests', '--out', 'x', '--image_size', '65'], '--image_size 65'),
    (['export.py'], 'the following arguments are required: CHECKPOINT, OUT'),
    (['export.py', 'a', 'b', '--lives'], '--lives is no flag; did you mean --live?'),
    (['export.py', 'nowhere', 'out'], 'CHECKPOINT nowhere is not there'),
    (['export.py', 'tests', 'tests'], 'OUT tests already exists'),
])
def test_what_shows_without_torch_is_answered_before_anything_heavy_is_imported(argv, line, tmp_path):
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    argv = [str(pipe) if argument == 'FIFO' else argument for argument in argv]
    run = subprocess.run([sys.executable, '-X', 'importtime', *argv], cwd=ROOT, capture_output=True, text=True)
    imported = {line.rpartition('|')[2].strip() for line in run.stderr.splitlines() if line.startswith('import time:')}
    [error] = [line for line in run.stderr.splitlines() if not line.startswith('import time:')]
    assert run.returncode == 2 and error.startswith(f'{argv[0]}: error: ') and line in error
    assert 'argparse' in imported and not imported & HEAVY


@pytest.mark.parametrize('command', ['benchmark.py', 'encode.py', 'export.py'])
def test_the_version_is_the_commit_and_the_libraries(command):
    run = subprocess.run([sys.executable, command, '--version'], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f'{command} {git_commit()}, with torch ') and run.stdout.count('\n') == 1


@pytest.mark.parametrize('argv', [SYNTHETIC, ['encode.py', '--remote', 'tests', '--out', 'x'],
                                  ['export.py', 'tests', 'x']])
def test_without_the_environment_one_line_says_how_to_activate_it(argv, tmp_path):
    results = [] if argv[0] == 'export.py' else ['--results', tmp_path / 'results']
    run = subprocess.run([sys.executable, '-I', '-S', '-c', AS_SCRIPT, *argv, *results], cwd=ROOT, capture_output=True,
                         text=True)
    assert run.returncode == 2 and run.stderr.count('\n') == 1, run.stderr
    assert 'has no package torch; activate the environment with: source .venv/bin/activate' in run.stderr


@pytest.mark.parametrize('name', ['RANK', 'WORLD_SIZE'])
def test_a_launchers_variable_that_is_no_number_is_one_line(name, monkeypatch, capsys):
    monkeypatch.setenv(name, 'abc')
    monkeypatch.setattr(sys, 'argv', SYNTHETIC)
    with pytest.raises(SystemExit):
        answer_early(benchmark_parser(''), refuse_early_training)
    assert capsys.readouterr().err == (f"benchmark.py: error: the environment variable {name} is 'abc', which a "
                                       'launcher sets to a number; unset it\n')
