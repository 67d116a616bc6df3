"""A frozen dataclass becomes a command line, and a mistake in it is one line."""
import ast
import json
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Literal

import pytest

from sdbench.flags.commands import Convert, Encode, Evaluate, Export, Report
from sdbench.flags.parser import build_parser, count, flag, parse, positional
from sdbench.flags.train import Train
from tests.runs import ROOT

COMMANDS = {'benchmark.py': Train, 'convert.py': Convert, 'encode.py': Encode, 'evaluate.py': Evaluate,
            'export.py': Export, 'report.py': Report}
HEAVY = ('torch', 'numpy', 'pandas', 'composer', 'streaming', 'transformers')


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """greeting"""
    name: str = positional('who is greeted')
    times: int = flag(1, 'how often', converter=count)
    loud: bool = flag(False, 'in capitals')
    tune: bool | Literal['high', 'low'] = flag(False, 'sing it', bare=True)
    others: tuple[str, ...] = flag((), 'more to greet (default: none)')
    found: int = 7  # no flag

    def check(self) -> None:
        if self.name == 'nobody':
            raise ValueError('NAME nobody is no name')


def greeting(*argv: str) -> Greeting:
    return parse(Greeting, 'Greet.', argv, 'greet.py')


def error_of(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as exit:
        greeting(*argv)
    out, err = capsys.readouterr()
    assert exit.value.code == 2
    assert not out
    assert err.count('\n') == 1
    assert err.startswith('greet.py: error: ')
    return err


@pytest.mark.parametrize('argv, name', [([''], 'NAME'), (['Ada', '--others', 'Bo', ''], '--others')], ids=str)
def test_an_empty_text_is_refused_by_its_name(capsys, argv, name):
    assert f'{name} is empty; a variable of the shell may not be set' in error_of(capsys, *argv)


def test_a_value_for_a_flag_that_takes_none_and_a_file_of_flags_that_is_not_there_say_the_remedy(capsys):
    assert '--loud=true: this flag takes no value; give --loud or --no-loud' in error_of(capsys, 'Ada', '--loud=true')
    assert '@nothing.txt cannot be read' in error_of(capsys, '@nothing.txt')


def test_each_kind_of_field_takes_what_its_type_says():
    assert greeting('Ada') == Greeting(name='Ada')
    given = greeting('Ada', '--times', '3', '--loud', '--tune', 'low', '--others', 'Bo', 'Cy', '--others', 'Di')
    assert given == Greeting(name='Ada', times=3, loud=True, tune='low', others=('Bo', 'Cy', 'Di'))
    assert greeting('Ada', '--tune').tune is True
    assert greeting('Ada', '--loud', '--no-loud', '--tune', '--no-tune') == Greeting(name='Ada')
    with pytest.raises(FrozenInstanceError):
        given.times = 4


@pytest.mark.parametrize('flag, ours', [('--lr', '--learning_rate'), ('--epochs', '--max_duration'),
                                        ('--resolution', '--image_size')])
def test_a_flag_of_another_program_is_answered_by_ours(capsys, flag, ours):
    with pytest.raises(SystemExit):
        parse(Train, '', [flag, '1'], 'benchmark.py')
    assert f'{flag} is no flag; did you mean {ours}?' in capsys.readouterr().err


def test_a_mistake_is_one_line_with_the_flag_its_value_and_the_nearest_flag(capsys):
    assert '--tims is no flag; did you mean --times?' in error_of(capsys, 'Ada', '--tims', '3')
    assert '--found is no flag' in error_of(capsys, 'Ada', '--found', '3')
    assert '--times: 0 is not a whole number above 0' in error_of(capsys, 'Ada', '--times', '0')
    assert "--tune: invalid choice: 'flat'" in error_of(capsys, 'Ada', '--tune', 'flat')
    assert 'required: NAME' in error_of(capsys)
    assert 'Bo is no flag; see --help' in error_of(capsys, 'Ada', 'Bo')
    assert '--ti is no flag' in error_of(capsys, 'Ada', '--ti', '3'), 'an abbreviation is none'
    assert 'NAME nobody is no name' in error_of(capsys, 'nobody')


def test_a_file_of_flags_stands_for_what_it_holds(tmp_path, capsys):
    path = tmp_path / 'flags.txt'
    path.write_text("# a comment, with an apostrophe's end\n\nAda --times 2  # two\n--others 'B o#' Cy\n")
    assert greeting(f'@{path}', '--times', '3') == Greeting(name='Ada', times=3, others=('B o#', 'Cy'))
    path.write_text("--others 'Bo\n")
    assert 'No closing quotation' in error_of(capsys, 'Ada', f'@{path}')
    assert 'nowhere' in error_of(capsys, 'Ada', '@nowhere')


@pytest.mark.parametrize('program', COMMANDS)
def test_help_begins_with_commands_and_has_every_flag_with_its_default(program):
    module = ast.parse((ROOT / program).read_text())
    told = build_parser(COMMANDS[program], ast.get_docstring(module, clean=False), program).format_help()
    beginning, _, rest = told.partition('\n    ')
    assert f' {program} ' in rest.splitlines()[0], 'the usage lists no flags'
    assert beginning.count('[--') == 1, 'the usage lists no flags'
    told = ' '.join(told.split())
    for field in fields(COMMANDS[program]):
        if 'positional' in field.metadata:
            assert f'{field.name.upper()} ' in told
        elif 'help' in field.metadata:
            assert re.search(rf' --{field.name}[ ,].*?\((default: |needed\))', told), field.name


@pytest.mark.parametrize('program, argv', [
    ('benchmark.py', ['--help']), ('benchmark.py', ['--bach_size', '4']), ('benchmark.py', []),
    ('benchmark.py', ['--use_synth_data', '--batch_size', '6', '--device_train_microbatch_size', '4']),
    ('convert.py', []), ('encode.py', ['--remote', 'x']), ('evaluate.py', ['m', 'd', '--out', 'o']),
    ('export.py', ['checkpoint', 'tests']), ('report.py', ['--extrapolate', '1,2']), ('report.py', ['--help'])])
def test_a_command_line_is_answered_before_anything_heavy_is_imported(program, argv):
    code = f'''
import json, runpy, sys
sys.argv = {[program, *argv]!r}
try:
    runpy.run_path({program!r}, run_name='__main__')
except SystemExit as exit:
    print(json.dumps([exit.code, [name for name in {HEAVY!r} if name in sys.modules]]))
'''
    run = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    status, imported = json.loads(run.stdout.splitlines()[-1])
    assert imported == []
    if argv == ['--help']:
        assert status == 0
    else:
        assert status == 2
        assert run.stderr.count('\n') == 1
        assert run.stderr.startswith(f'{program}: error: ')
