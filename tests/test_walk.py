"""The notebook runs from its first cell to its last, and is stored with what it prints and draws today."""
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.notebook
from tests.forked_runs import run_program, script
from tests.runs import ROOT

NOTEBOOK = ROOT / 'docs' / 'walk.ipynb'


def code_cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())['cells'] if cell['cell_type'] == 'code']


def run_forked(command: list, cwd: Path, env: dict[str, str], **_) -> subprocess.CompletedProcess:
    """Run a program of this repository, as `subprocess.run` does, in a process that has imported it already."""
    python, program, *arguments = map(str, command)
    assert python == sys.executable
    server = multiprocessing.get_context('forkserver')
    code, output, errors = run_program(server, cwd, script, [program, *arguments], **env)
    return subprocess.CompletedProcess(command, code, output + errors)


def run_cells(argv: list[str]) -> None:
    """Run the notebook in a process of its own, and print its code cells with their outputs, and what it leaves."""
    os.chdir(NOTEBOOK.parent)
    subprocess.run = run_forked
    names = {}  # the variables of the notebook
    cells = benchmarks.notebook.run_cells(code_cells(), names)
    work = names['work']
    drawn = sorted(path.name for path in work.glob('checkpoints-samples/*'))
    exported = (work / 'my-model/model_index.json').exists()
    shutil.rmtree(work)
    print(json.dumps({'cells': cells, 'drawn': drawn, 'exported': exported}))


def lines_shown(cell: dict) -> list[str]:
    """Return the sorted lines that a cell prints, without the numbers, names and places that differ from run to run.

    Lines of progress and rows of tables are left out: how many there are, and which columns, follows from the speed.
    """
    printed = ''.join(''.join(output['text']) for output in cell['outputs'] if output['output_type'] == 'stream')
    lines = []
    for line in printed.splitlines():
        if line.startswith('|') or ' left' in line or line.startswith('change '):
            continue
        line = re.sub(r'/\S*/walk-\w+/', '', line)
        line = re.sub(r'(device|on \d+ x) [^,]+', r'\1 CPU', line)
        line = re.sub(r'git_commit \S+', 'git_commit', line)
        lines.append(re.sub(r'\d[\d.,e-]*', '#', line))
    return sorted(lines)  # `run_forked` has the standard error after the standard output


def figures_shown(cell: dict) -> int:
    return sum('image/png' in output.get('data', {}) for output in cell['outputs'])


@pytest.mark.long
def test_the_notebook_shows_what_its_cells_print_and_draw_today(server, tmp_path):
    code, output, errors = run_program(server, tmp_path / 'notebook', run_cells, [], MPLBACKEND='Agg')
    assert code == 0, output + errors
    today = json.loads(output.splitlines()[-1])
    for stored, cell in zip(code_cells(), today['cells'], strict=True):
        assert lines_shown(stored) == lines_shown(cell)
        assert figures_shown(stored) == figures_shown(cell)
    assert today['drawn'] == ['ba150.png', 'ba300.png', 'ba450.png', 'ba600.png']
    assert today['exported']
