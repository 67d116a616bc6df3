"""The notebook runs from its first cell to its last, and its stored outputs are up to date."""
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
FEWER = {'600ba': '40ba', '150ba': '10ba', '40ba': '2ba', '120ba': '30ba'}  # batches, to save time


def lines_shown(cell: dict) -> list[str]:
    """Return the sorted lines that a cell prints, without the numbers, names and paths that differ between runs.

    It omits progress lines, table rows and notes on tables, because their number and columns depend on the speed.
    """
    printed = ''.join(''.join(output['text']) for output in cell['outputs'] if output['output_type'] == 'stream')
    printed = re.sub(r'All rows: .*?(?=\n\n|\Z)', lambda found: ' '.join(found[0].split()), printed, flags=re.DOTALL)
    lines = []
    for line in printed.splitlines():
        if ' left' in line or re.match(r'\||change |wait for data|[0-9]+: |   ', line):
            continue
        line = re.sub(r'/\S*/walk-\w+/', '', line)
        line = re.sub(r'(device|on \d+ x) [^,]+', r'\1 CPU', line)
        line = re.sub(r'(git_commit|eval_sha256) [^\s,]+', r'\1', line)
        line = re.sub(r'-[0-9a-f]{12}\b', '', line)  # a training id
        lines.append(re.sub(r'\d[\d.,e-]*', '#', line))
    return sorted(lines)  # `run_forked` returns standard error after standard output


@pytest.mark.long
def test_the_stored_outputs_of_the_notebook_are_up_to_date(server, tmp_path, monkeypatch):
    def run_forked(command: list, cwd: Path, env: dict[str, str], **_) -> subprocess.CompletedProcess:
        """Run a program like `subprocess.run`, but in a process that has already imported it."""
        code, output, errors = run_program(server, cwd, script, command[1:], **env)
        return subprocess.CompletedProcess(command, code, output + errors)

    monkeypatch.setattr(subprocess, 'run', run_forked)
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(plt, 'show', plt.show)  # restores it, because running cells replaces it
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
