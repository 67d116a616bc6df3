"""The notebook runs from its first cell to its last, and is stored with what it prints and draws today."""
import json
import re
import subprocess
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from benchmarks.notebook import run_cells
from tests.forked_runs import run_program, script
from tests.runs import ROOT

NOTEBOOK = ROOT / 'docs' / 'walk.ipynb'
FEWER = {'600ba': '40ba', '150ba': '10ba', '40ba': '2ba', '120ba': '30ba'}  # batches than in the notebook


def lines_shown(cell: dict) -> list[str]:
    """Return the sorted lines that a cell prints, without the numbers, names and places that differ from run to run.

    Lines of progress, rows of tables and the notes on these are left out: how many there are, and which columns,
    follows from the speed.
    """
    printed = ''.join(''.join(output['text']) for output in cell['outputs'] if output['output_type'] == 'stream')
    printed = re.sub(r'All rows: .*?(?=\n\n|\Z)', lambda found: ' '.join(found[0].split()), printed, flags=re.DOTALL)
    lines = []
    for line in printed.splitlines():
        if ' left' in line or re.match(r'\||change |wait for data|[0-9]+: |   ', line):
            continue
        line = re.sub(r'/\S*/walk-\w+/', '', line)
        line = re.sub(r'(device|on \d+ x) [^,]+', r'\1 CPU', line)
        line = re.sub(r'git_commit \S+', 'git_commit', line)
        line = re.sub(r'-[0-9a-f]{12}\b', '', line)  # the id of a training
        lines.append(re.sub(r'\d[\d.,e-]*', '#', line))
    return sorted(lines)  # `run_forked` has the standard error after the standard output


@pytest.mark.long
def test_the_notebook_shows_what_its_cells_print_and_draw_today(server, tmp_path, monkeypatch):
    def run_forked(command: list, cwd: Path, env: dict[str, str], **_) -> subprocess.CompletedProcess:
        """Run a program as `subprocess.run` does, in a process that has imported it already."""
        code, output, errors = run_program(server, cwd, script, command[1:], **env)
        return subprocess.CompletedProcess(command, code, output + errors)

    monkeypatch.setattr(subprocess, 'run', run_forked)
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(plt, 'show', plt.show)  # which is another one while cells run
    monkeypatch.chdir(NOTEBOOK.parent)
    stored = [cell for cell in json.loads(NOTEBOOK.read_text())['cells'] if cell['cell_type'] == 'code']
    cells = []
    for cell in stored:
        source = re.sub(r'\d+ba', lambda found: FEWER[found[0]], ''.join(cell['source']))
        cells.append(cell | {'source': source})
    for cell, today in zip(stored, run_cells(cells, {}), strict=True):
        assert lines_shown(cell) == lines_shown(today), 'run python -m benchmarks.notebook docs/walk.ipynb'
        figures, figures_today = (['image/png' in output.get('data', {}) for output in each['outputs']].count(True)
                                  for each in (cell, today))
        assert figures == figures_today
