"""Flags, and the help that explains them."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.options import benchmark_parser, convert_parser, encode_parser, evaluate_parser, report_parser
from measuring.versions import git_commit
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
    ('--=3', '-- is no flag; see --help'),
    ('--s', '--s is no flag; see --help'),  # short for many
    ('64', '64 belongs to no flag; see --help'),
    ('--ema', '--ema is no flag; did you mean --use_ema or --ema_start or --ema_half_life?'),
    ('--lr=1', '--lr is no flag; did you mean --learning_rate or --lr_warmup or --lr_schedule?'),
    ('--learning', '--learning is no flag; did you mean --learning_rate?'),  # short for it today
    ('--learning_rate', '--learning_rate needs a value: of AdamW (default: 0.0001)'),
    ('--lr_schedule', '--lr_schedule needs a value, one of constant, cosine, linear'),
    ('--use_ema=true', '--use_ema takes no value; write --use_ema alone'),
    ('--pretrained=1', '--pretrained or --no-pretrained takes no value; write --pretrained or --no-pretrained alone'),
    ('--foo\nbar', '--foo bar is no flag; see --help'),
    ('--dist_timeout', '--dist_timeout needs a value: seconds to wait for the other processes (default: 300)'),
])
def test_a_flag_that_is_none_is_one_line_with_the_nearest(argument, line, capsys):
    with pytest.raises(SystemExit) as exit:
        benchmark_parser('').parse_args(['--use_synth_data', argument])
    assert exit.value.code == 2 and capsys.readouterr().err == f'benchmark.py: error: {line}\n'


@pytest.mark.parametrize('parser, argv, words', [
    (benchmark_parser, ['--precision', 'bf16'], "'fp32'); did you mean amp_bf16?"),
    (benchmark_parser, ['--precision', 'FP32'], 'did you mean fp32?'),
    (benchmark_parser, ['--lr_schedule', 'cosin'], 'did you mean cosine?'),
    (benchmark_parser, ['--max_duration', '10'], '10 has no unit; write 10ba for batches, 10ep for epochs'),
    (report_parser, ['x', '--extrapolate', '512,1024'], "'512,1024' is no number; separate several by spaces, as in "
                                                        '512 1024'),
    (benchmark_parser, ['--caption_drop', '10%'], '--caption_drop: 10% is not between 0 and 1; write 0.1\n'),
    (benchmark_parser, ['--caption_drop', '1000%'], '--caption_drop: 1000% is not between 0 and 1\n'),
    (report_parser, ['--extrapolate', '512', 'x.csv'], "'x.csv' is not a positive whole number; files come before "
                                                       'this flag'),
    (evaluate_parser, ['--guidance', '1', '3', 'kept', 'mds'], 'argument --guidance: kept is not a scale from 1 on; '
                                                               'MODEL and DATA come before this flag'),
    (evaluate_parser, ['--guidance', '0.5'], 'argument --guidance: 0.5 is not a scale from 1 on\n'),
    (convert_parser, ['a', 'b', '--dist_timeout'], '--dist_timeout needs a value\n'),
    (benchmark_parser, ['--precision='], "(choose from 'amp_bf16', 'amp_fp16', 'fp32')\n"),
    (convert_parser, ['--heldout', '3'], '--heldout is no flag; did you mean --held_out?'),
    (convert_parser, ['--helt_out=3', 'photos'], '--helt_out is no flag; did you mean --held_out?'),
    (convert_parser, [], 'the following arguments are required: SOURCE, OUT'),
])
def test_what_may_be_meant_is_named(parser, argv, words, capsys):
    with pytest.raises(SystemExit):
        parser('').parse_args(argv)
    error = capsys.readouterr().err
    assert words in error and error.count('\n') == 1
    assert ('did you mean' in error) == ('did you mean' in words)


@pytest.mark.parametrize('parser, names', [(report_parser, 'report.py RECORDS'), (evaluate_parser,
                                                                               'evaluate.py MODEL DATA')])
def test_the_usage_of_a_command_whose_flags_take_several_values_begins_with_its_files(parser, names):
    assert parser('').format_help().startswith(f'usage: {names} ')


def test_each_commands_help_says_what_its_remote_may_hold():
    helps = {parser: ' '.join(parser('').format_help().split()) for parser in (benchmark_parser, encode_parser)}
    assert 'or latents as encode.py does (default: none)' in helps[benchmark_parser]
    assert 'images and captions as convert.py writes them (default: none)' in helps[encode_parser]


SYNTHETIC = ['benchmark.py', '--use_synth_data']
HEAVY = {'torch', 'composer', 'numpy', 'diffusers', 'streaming', 'transformers', 'pandas', 'obstore'}


def dataset_of(samples: int, folder: Path) -> str:
    """A finished dataset, as far as its names and its index.json go."""
    folder.mkdir()
    (folder / 'claim.json').write_text('{"program": "convert.py"}')
    (folder / 'index.json').write_text(json.dumps({'version': 2, 'shards': [{'samples': samples}]}))
    return str(folder)


@pytest.mark.parametrize('argv, line', [
    ([*SYNTHETIC, '--batchsize', '4'], '--batchsize is no flag; did you mean --batch_size?'),
    (['benchmark.py'], 'give one of --remote, --use_synth_data and --use_synth_latents'),
    (['benchmark.py', '--remote', 'nowhere'], '--remote nowhere is no folder'),
    ([*SYNTHETIC, '--model_name', 'tinny'], '--model_name tinny is no folder here, and a name of the hub has its owner '
     'before a slash; did you mean tiny?'),
    ([*SYNTHETIC, '--model_name', 'tiny', '--pretrained'], '--model_name tiny has no weights; leave out --pretrained'),
    ([*SYNTHETIC, '--image_size', '65'], '--image_size 65 is not a multiple of 8; use 64'),
    ([*SYNTHETIC, '--batch_size', '4', '--device_train_microbatch_size', '3'],
     '--device_train_microbatch_size 3 does not divide --batch_size 4; use 2'),
    ([*SYNTHETIC, '--ema_start', '9ba'], '--ema_start 9ba needs --use_ema'),
    ([*SYNTHETIC, '--cast_weights_once', '--compile'], '--cast_weights_once does nothing with --compile'),
    ([*SYNTHETIC, '--cast_weights_once', '--gradient_checkpointing'],
     '--cast_weights_once does nothing with --gradient_checkpointing'),
    ([*SYNTHETIC, '--results', 'tests'], '--results tests is a folder; name a file, such as tests/results.jsonl'),
    ([*SYNTHETIC, '--results', 'FIFO'], 'is a pipe, which would wait for a reader; name a file'),
    (['encode.py'], 'give both --remote and --out'),
    (['encode.py', '--remote', 'tests', '--out', 'x', '--image_size', '65'], '--image_size 65'),
    (['benchmark.py', '--remote', 'tests'], '--remote tests holds no index.json'),
    (['benchmark.py', '--remote', 'DATA'], 'holds 24 samples, fewer than --batch_size 2048; use --batch_size 24'),
    ([*SYNTHETIC, '--eval_remote', 'tests'], '--eval_remote tests holds no index.json'),
    ([*SYNTHETIC, '--save_folder', 'tests'], '--save_folder tests already holds files; give a new one'),
    ([*SYNTHETIC, '--model_name', 'tiny', '--sample_prompts', 'nowhere'],
     '--sample_prompts nowhere cannot be read (No such file or directory)'),
    ([*SYNTHETIC, '--load_weights', 'nowhere'], '--load_weights nowhere does not exist; give a checkpoint, '),
    ([*SYNTHETIC, '--load_weights', 'tests'], '--load_weights tests is no checkpoint, and holds neither'),
    ([*SYNTHETIC, '--max_duration', '3ba'], '--max_duration 3ba ends within --warmup_batches 3'),
    (['encode.py', '--remote', 'DATA', '--out', 'tests'], '--out tests already holds something'),
    (['encode.py', '--remote', 'DATA', '--out', 'DATA'], 'already holds a dataset, with its index.json'),
    (['export.py', 'tests', 'nowhere'], 'CHECKPOINT tests holds no whole checkpoint; give one, or the --save_folder'),
    (['export.py'], 'the following arguments are required: CHECKPOINT, OUT'),
    (['export.py', 'a', 'b', '--lives'], '--lives is no flag; did you mean --live?'),
    (['export.py', 'nowhere', 'out'], 'CHECKPOINT nowhere is not there'),
    (['export.py', 'tests', 'tests'], 'OUT tests already exists'),
    (['convert.py'], 'the following arguments are required: SOURCE, OUT'),
    (['convert.py', 'tests', 'x', '--heldout', '3'], '--heldout is no flag; did you mean --held_out?'),
    (['convert.py', 'tests', 'nowhere*', 'x'], 'SOURCE nowhere* does not exist'),
    (['convert.py', 'tests', 'docs'], 'OUT docs already holds something; give a new folder'),
    (['convert.py', 'tests', 'README.md'], 'OUT README.md is not a folder; give a new one'),
    (['evaluate.py', 'LICENSE', 'tests', '--inception', 'README.md'], 'give --out, a new folder'),
    (['evaluate.py', 'nowhere', 'tests', '--out', 'x'], 'MODEL nowhere is not there'),
    (['evaluate.py', 'tests', 'tests', '--out', 'x'], 'MODEL tests holds no whole checkpoint'),
    (['evaluate.py', 'LICENSE', 'tests', '--out', 'x', '--clip', 'models/tiny/unet'], 'DATA tests holds no index.json'),
    (['evaluate.py', 'LICENSE', 'tests', '--out', 'docs'], '--out docs already holds something'),
    (['evaluate.py', 'LICENSE', 'tests', '--out', 'x'], 'give --inception for FID, --clip for the CLIP score, or both'),
    (['evaluate.py', 'LICENSE', 'tests', '--out', 'x', '--inception', 'no'], '--inception no is no file; fetch https://'),
    (['evaluate.py', 'LICENSE', 'tests', '--out', 'x', '--clip', 'docs'], '--clip docs is no folder with a model'),
    (['evaluate.py', 'LICENSE', 'README.md', '--out', 'x', '--inception', 'README.md'], 'FID compares with images'),
    (['evaluate.py', 'LICENSE', 'README.md', '--out', 'x', '--inception', 'README.md', '--reference', 'no'],
     '--reference no is not there, and DATA README.md has no images'),
    (['evaluate.py', 'LICENSE', 'README.md', '--out', 'x', '--inception', 'README.md', '--reference', 'LICENSE'],
     'fewer than --samples 30,000; use --samples'),
    (['evaluate.py', 'LICENSE', 'README.md', '--out', 'x', '--inception', 'README.md', '--reference', 'LICENSE',
      '--samples', '9'], 'DATA README.md:2: a caption without words'),
    (['evaluate.py', 'LICENSE', 'tests', '--guidance', '0.5'], '--guidance: 0.5 is not a scale from 1 on'),
    (['evaluate.py', 'LICENSE', 'tests', '--ray', 'auto', '--out', 'x'], 'needs a pipeline folder that all'),
    (['report.py', 'published.csv', '--figrue', 'x'], '--figrue is no flag; did you mean --figure?'),
    (['report.py', 'nowhere'], 'nowhere: No such file or directory'),
    (['report.py', 'tests'], 'tests: Is a directory; give files of JSON lines or CSV'),
    (['report.py', 'published.csv', '--figure', 'tests'], '--figure tests is a folder'),
])
def test_what_shows_without_torch_is_answered_before_anything_heavy_is_imported(argv, line, tmp_path):
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    places = {'FIFO': str(pipe), 'DATA': dataset_of(24, tmp_path / 'data')}
    argv = [places.get(argument, argument) for argument in argv]
    run = subprocess.run([sys.executable, '-X', 'importtime', *argv], cwd=ROOT, capture_output=True, text=True)
    imported = {line.rpartition('|')[2].strip() for line in run.stderr.splitlines() if line.startswith('import time:')}
    [error] = [line for line in run.stderr.splitlines() if not line.startswith('import time:')]
    assert run.returncode == 2 and error.startswith(f'{argv[0]}: error: ') and line in error
    assert 'argparse' in imported and not imported & HEAVY


@pytest.mark.parametrize('command', ['benchmark.py', 'convert.py', 'encode.py', 'evaluate.py', 'export.py',
                                     'report.py'])
def test_the_version_is_the_commit_and_the_libraries(command):
    run = subprocess.run([sys.executable, command, '--version'], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f'{command} {git_commit()}, with torch ') and run.stdout.count('\n') == 1


@pytest.mark.parametrize('argv', [SYNTHETIC, ['encode.py', '--remote', 'DATA', '--out', 'x'],
                                  ['export.py', 'README.md', 'x'], ['convert.py', 'tests', 'x'],
                                  ['report.py', 'published.csv']])
def test_without_the_environment_one_line_says_how_to_activate_it(argv, tmp_path):
    data = dataset_of(24, tmp_path / 'data')
    argv = [data if argument == 'DATA' else argument for argument in argv]
    results = ['--results', tmp_path / 'results'] if argv[0] in ('benchmark.py', 'encode.py') else []
    run = subprocess.run([sys.executable, '-I', '-S', '-c', AS_SCRIPT, *argv, *results], cwd=ROOT, capture_output=True,
                         text=True)
    assert run.returncode == 2 and run.stderr.count('\n') == 1, run.stderr
    package = 'pandas' if argv[0] == 'report.py' else 'torch'
    assert f'has no package {package}; activate the environment with: source .venv/bin/activate' in run.stderr


@pytest.mark.parametrize('argv, package', [
    (SYNTHETIC, 'torch'), (['convert.py', 'tests', 'x'], 'obstore'), (['report.py', 'published.csv'], 'pandas')])
@pytest.mark.parametrize('rank, lines', [('0', ['error: interrupted']), ('1', [])])
def test_ctrl_c_while_the_libraries_are_imported_is_one_line_of_one_rank(argv, package, rank, lines):
    program = f"""
import os, runpy, signal, sys

class Watch:
    def find_spec(self, name, *_):
        if name == {package!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Watch())
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name='__main__')
"""
    run = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | {'RANK': rank, 'PYTHONPATH': str(ROOT)})
    assert run.returncode == 130 and run.stderr.splitlines() == [f'{argv[0]}: {line}' for line in lines]


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


def test_a_file_of_flags_that_is_not_there_or_names_itself_is_one_line(tmp_path, capsys):
    file = tmp_path / 'self.txt'
    for argument in (f'@{file}', f'@{tmp_path}', '@'):
        with pytest.raises(SystemExit):
            benchmark_parser('').parse_args([argument])
        assert capsys.readouterr().err == (f'benchmark.py: error: {argument} names no file of flags; check the name '
                                           'behind the @\n')
    file.write_text(f'@{file}')
    with pytest.raises(SystemExit):
        benchmark_parser('').parse_args([f'@{file}'])
    assert capsys.readouterr().err == ('benchmark.py: error: a file of flags, named by @FILE, names itself; take that '
                                       'line out\n')
