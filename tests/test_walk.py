"""The notebook runs from its first cell to its last."""
import json
import re
import subprocess
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from tests.forked_runs import run_program, script
from tests.runs import ROOT

NOTEBOOK = ROOT / 'docs' / 'walk.ipynb'
FEWER = {'600ba': '40ba', '150ba': '10ba', '40ba': '2ba', '120ba': '30ba'}  # batches, to save time


@pytest.mark.long
def test_every_cell_of_the_notebook_runs(server, tmp_path, monkeypatch):
    def run_forked(command: list, cwd: Path, env: dict[str, str], **_) -> subprocess.CompletedProcess:
        """Run a program like `subprocess.run`, but in a process that has already imported it."""
        code, output, errors = run_program(server, cwd, script, command[1:], **env)
        return subprocess.CompletedProcess(command, code, output + errors)

    monkeypatch.setattr(subprocess, 'run', run_forked)
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(plt, 'show', lambda: plt.close('all'))
    monkeypatch.chdir(NOTEBOOK.parent)
    variables = {}
    for cell in json.loads(NOTEBOOK.read_text())['cells']:
        if cell['cell_type'] == 'code':
            exec(re.sub(r'\d+ba', lambda found: FEWER[found[0]], ''.join(cell['source'])), variables)
