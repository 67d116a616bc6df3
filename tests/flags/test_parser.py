"""The flags of a command: what they take, what --help says, and how soon a mistake is answered."""
import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from sdbench.flags.commands import Report
from sdbench.flags.parser import build_parser, parse
from sdbench.flags.train import Train
from tests.runs import COMMANDS, ROOT

HEAVY = ('torch', 'numpy', 'pandas', 'composer', 'streaming', 'transformers')


def train(*argv: str) -> Train:
    return parse(Train, '', argv, 'benchmark.py')


def test_each_kind_of_flag_takes_what_its_type_says():
    plain = train('--use_synth_data')
    assert (plain.batch_size, plain.use_ema, plain.compile, plain.learning_rate) == (2048, False, False, 1e-4)
    given = train('--use_synth_data', '--batch_size', '8', '--use_ema', '--compile', '--learning_rate', '3e-5')
    assert (given.batch_size, given.use_ema, given.compile, given.learning_rate) == (8, True, True, 3e-5)
    assert train('--use_synth_data', '--compile', 'max-autotune-no-cudagraphs').compile == 'max-autotune-no-cudagraphs'
    assert train('--use_synth_data', '--use_ema', '--no-use_ema', '--compile', '--no-compile') == plain
    assert train('--dry_run', '--gpu', 'H100').dry_run == (0,)
    report = parse(Report, '', ['a.jsonl', 'b.jsonl', '--extrapolate', '64', '128'])
    assert (report.records, report.extrapolate) == (('a.jsonl', 'b.jsonl'), (64, 128))


@pytest.mark.parametrize('encoding', ['utf-8', 'utf-8-sig'])  # as editors on Windows write it
def test_a_file_of_flags_stands_for_what_it_holds_and_flags_behind_it_decide(tmp_path, encoding):
    path = tmp_path / 'flags.txt'
    text = ("# a comment, with an apostrophe's end\n\n--use_synth_data --batch_size 2  # two\n"
            "--model_name 'B o#' --adam_betas 0.9 0.95\n")
    path.write_bytes(text.replace('\n', '\r\n').encode(encoding))
    settings = train(f'@{path}', '--batch_size', '3', '--adam_betas', '0.8', '0.9')
    assert (settings.use_synth_data, settings.batch_size, settings.model_name) == (True, 3, 'B o#')
    assert settings.adam_betas == (0.8, 0.9)


def test_a_flag_that_is_turned_off_turns_off_what_needs_it():
    plain = train('--use_synth_data')
    assert train('--use_synth_data', '--use_ema', '--ema_half_life', '5ba', '--no-use_ema') == plain
    assert train('--use_synth_data', '--no-use_ema', '--ema_half_life', '5ba') == plain
    assert train('--use_synth_data', '--compile', 'reduce-overhead', '--no-compile_blocks', '--no-compile') == plain
    recipe = [f'@{ROOT / "recipes/phase-1.txt"}', '--use_synth_data', '--save_folder', 'kept']
    without = train(*recipe, '--no-use_ema')
    assert (without.use_ema, without.ema_half_life, without.batch_size) == (False, None, 2048)
    assert train(*recipe, '--no-use_ema', '--use_ema') == train(*recipe)


@pytest.mark.parametrize('program', COMMANDS)
def test_help_has_every_flag_with_its_default(program):
    told = ' '.join(build_parser(COMMANDS[program], '', program).format_help().split())
    for field in fields(COMMANDS[program]):
        if 'nargs' in field.metadata:
            assert f'{field.name.upper()} ' in told
        elif 'help' in field.metadata:
            assert re.search(rf' --{field.name}[ ,].*?\((default: |needed\))', told), field.name


ANSWERED_EARLY = [
    ['benchmark.py', '--help'], ['benchmark.py', '--use_synth_data', '--image_size', '100'], ['convert.py'],
    ['encode.py', '--remote', 'x'], ['evaluate.py', 'm', 'd'], ['export.py', 'checkpoint', 'tests'],
    ['report.py', '--extrapolate', '1,2']]


def test_a_command_line_is_answered_before_anything_heavy_is_imported():
    code = f'''
import json, runpy, sys
for argv in {ANSWERED_EARLY!r}:
    sys.argv = argv
    try:
        runpy.run_path(argv[0], run_name='__main__')
    except SystemExit as exit:
        print(json.dumps([exit.code, [name for name in {HEAVY!r} if name in sys.modules]]))
'''
    run = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('[')]
    assert answers == [[0, []]] + [[2, []]] * (len(ANSWERED_EARLY) - 1)  # status, and what was imported
