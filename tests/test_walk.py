"""The notebook runs from its first cell to its last, and nothing of a machine is stored in it."""
import ast
import json
import os
import shlex
import subprocess
import sys

import pytest

from cli.options import benchmark_parser
from tests.runs import ROOT

NOTEBOOK = ROOT / 'docs' / 'walk.ipynb'


def code_cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())['cells'] if cell['cell_type'] == 'code']


def test_the_notebook_is_stored_without_what_a_run_of_it_has_shown():
    assert len(code_cells()) > 5
    for cell in code_cells():
        assert cell['outputs'] == [] and cell['execution_count'] is None and cell['metadata'] == {}


def test_the_two_runs_that_the_report_compares_differ_in_the_average_alone():
    """Beside what a run does between its batches, which is in no speed."""
    calls = [node.args[0].value for cell in code_cells() for node in ast.walk(ast.parse(''.join(cell['source'])))
             if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'run']
    runs = [call.removeprefix('benchmark.py ') for call in calls if call.startswith('benchmark.py ')]
    first, second = (vars(benchmark_parser('').parse_args(shlex.split(run))) for run in runs)
    differ = {flag for flag in first if first[flag] != second[flag]}
    between_batches = {'eval_remote', 'eval_interval', 'save_folder', 'sample_prompts', 'sample_interval',
                       'tensorboard'}
    assert differ == {'use_ema', 'ema_half_life', *between_batches}


BEFORE = """
import matplotlib.pyplot
matplotlib.pyplot.show = lambda: (print('a figure'), matplotlib.pyplot.close('all'))
"""
AFTER = """
import shutil
print(sorted(path.name for path in work.glob('samples/*')), (work / 'my-model/model_index.json').exists())
shutil.rmtree(work)
"""


@pytest.mark.long
def test_the_notebook_runs_and_shows_the_loss_the_pictures_and_a_report():
    cells = '\n'.join(''.join(cell['source']) for cell in code_cells())
    run = subprocess.run([sys.executable, '-c', BEFORE + cells + AFTER], cwd=NOTEBOOK.parent, capture_output=True,
                         text=True, env=os.environ | {'MPLBACKEND': 'Agg'})
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count('a figure') == 5
    for words in ('held out   16 samples', 'on the held-out samples', 'images/s per CPU rank',
                  "['ba42.png', 'ba84.png'] True"):
        assert words in run.stdout, run.stdout
