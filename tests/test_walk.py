"""The notebook runs from its first cell to its last, and is stored with its pictures."""
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_runs import run_in_folder, run_program, script
from tests.runs import ROOT

NOTEBOOK = ROOT / 'docs' / 'walk.ipynb'


def code_cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())['cells'] if cell['cell_type'] == 'code']


def test_the_notebook_is_stored_with_its_pictures_and_with_no_path_of_the_machine_that_drew_them():
    outputs = [output for cell in code_cells() for output in cell['outputs']]
    assert sum('image/png' in output.get('data', {}) for output in outputs) == 5
    assert 'site-packages' not in str(outputs)
    assert not any(cell['execution_count'] for cell in code_cells())


def run_forked(command: list, cwd: Path, env: dict[str, str], **_) -> subprocess.CompletedProcess:
    """`subprocess.run` of a program of this repository, in a process that has imported it already."""
    python, program, *arguments = map(str, command)
    assert python == sys.executable
    server = multiprocessing.get_context('forkserver')
    code, output, errors = run_in_folder(server, cwd, script, [program, *arguments], **env)
    return subprocess.CompletedProcess(command, code, output + errors)


def run_cells(argv: list[str]) -> None:
    """In a process of its own: the notebook, and what it leaves."""
    import matplotlib.pyplot as plt
    os.chdir(NOTEBOOK.parent)
    subprocess.run = run_forked
    multiprocessing.get_context('forkserver').set_forkserver_preload(['tests.preloaded'])
    plt.show = lambda: (print('a figure'), plt.close('all'))
    cells = {}
    exec('\n'.join(''.join(cell['source']) for cell in code_cells()), cells)
    work = cells['work']
    drawn = sorted(path.name for path in work.glob('checkpoints-samples/*'))
    print(drawn, (work / 'my-model/model_index.json').exists())
    shutil.rmtree(work)


@pytest.mark.long
def test_the_notebook_runs_and_shows_the_loss_the_pictures_and_a_report(server, tmp_path):
    code, output, errors = run_program(server, tmp_path / 'notebook', run_cells, [], MPLBACKEND='Agg')
    assert code == 0, output + errors
    assert output.count('a figure') == 5
    for words in ('held out   ', 'on the held-out samples', 'images/s per device',
                  "['ba42.png', 'ba84.png'] True"):
        assert words in output, output
