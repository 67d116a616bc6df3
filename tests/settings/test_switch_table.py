"""One entry in the table of switches is enough: all that deals with switches reads it from there."""
import json
import subprocess
import sys

from settings.switch_table import SWITCHES, Situation, switch_of
from tests.runs import ROOT

# In a process of its own: the table is read where these modules are imported.
WITH_AN_ENTRY = '''
import argparse, dataclasses, json
from settings import switch_table
from settings.switch_table import Switch, Value

switch_table.SWITCHES += (Switch('turbo', 'go faster', needs_half_precision=True, bears_on_memory=True,
                                 values=(Value(True, '0 to 1 %'),)),)

from benchmarks.ladder import Machine, rungs
from cli.options import benchmark_parser
from reporting.records import SETTINGS
from reporting.tables import defaults
from settings.train import Train, TRAINING_FLAGS

parser = benchmark_parser('')
help = ' '.join(parser.format_help().split())
print(json.dumps({
    'help': '--turbo, --no-turbo go faster (default: off)' in help,
    'parsed': parser.parse_args(['--turbo']).turbo,
    'a setting': 'turbo' in [field.name for field in dataclasses.fields(Train)],
    'recorded': 'turbo' in TRAINING_FLAGS,
    'keeps records apart': 'turbo' in SETTINGS,
    'its default is known to reports': defaults()['turbo'] == 'no',
    'rungs': [rung.expectation for rung in rungs(Machine(1, 91900, 'GPU')) if '--turbo' in rung.switches],
}))
'''


def test_a_switch_is_one_entry():
    run = subprocess.run([sys.executable, '-c', WITH_AN_ENTRY], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == {
        'help': True, 'parsed': True, 'a setting': True, 'recorded': True, 'keeps records apart': True,
        'its default is known to reports': True, 'rungs': ['0 to 1 %']}


def test_the_default_of_a_switch_follows_from_the_situation():
    assert [switch_of('channels_last').default_in(Situation(on_gpu, 1, False)) for on_gpu in (True, False)] == [True,
                                                                                                                False]
    blocks = switch_of('compile_blocks')
    assert blocks.default_in(Situation(True, 8, True)) is True
    assert not any(blocks.default_in(Situation(True, devices, mode))
                   for devices, mode in ((1, True), (None, True), (8, False), (8, 'reduce-overhead')))


def test_a_value_of_several_parts_needs_what_any_of_them_needs():
    attention = switch_of('attention')
    assert [value.cudnn for value in attention.values_in('flash,cudnn')] == [91501, None]
    assert attention.values_in('xformers')[0].package == 'xformers'


def test_every_default_is_a_value_of_its_switch():
    for switch in SWITCHES:
        if not callable(switch.default) and not switch.is_on_or_off:
            assert switch.default is False or switch.default in switch.names
