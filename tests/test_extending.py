"""docs/extending.md: what it names is there, and a figure that is added as it says is in record, summary and report."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, TINY

PAGE = (ROOT / 'docs/extending.md').read_text()
CHANGES = re.findall(r'```diff\n--- (\S+)\n (.*)\n((?:\+.*\n)+)```', PAGE)


@pytest.fixture
def copy(tmp_path) -> Path:
    """The program in a folder of its own, changed as the page says."""
    folder = tmp_path / 'copy'
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns('.*', '__pycache__', 'results*', 'pictures'))
    for name, line, added in CHANGES:
        path = folder / name
        text = path.read_text()
        assert text.count(f'{line}\n') == 1, f'{name} has no longer one line: {line}'
        path.write_text(text.replace(f'{line}\n', f'{line}\n' + added.replace('+', '', 1).replace('\n+', '\n')))
    return folder


def printed(folder: Path, *argv: str) -> str:
    """What a command prints there."""
    return subprocess.run([sys.executable, *argv], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.long
def test_a_figure_that_is_added_as_the_page_says_is_in_record_summary_and_report(copy, smallest_model):
    assert len(CHANGES) == 4
    summary = printed(copy, 'benchmark.py', '--use_synth_data', *TINY, '--model_name', smallest_model, '--image_size',
                      '16', '--measure_batches', '20')
    record = json.loads((copy / 'results.jsonl').read_text())
    assert record['batch_seconds_max'] >= record['batch_seconds_p90']
    assert f'slowest batch   {record["batch_seconds_max"]:.3g} s\n' in summary
    heading, _, row = printed(copy, 'report.py', 'results.jsonl').strip().splitlines()[-3:]
    column = [cell.strip() for cell in heading.split('|')].index('slowest batch')
    assert float(row.split('|')[column].split()[0]) == pytest.approx(record['batch_seconds_max'], rel=0.05)


def test_every_file_that_the_page_names_is_there():
    for name in re.findall(r'`([a-z_/]+\.py)`', PAGE):
        assert (ROOT / name).is_file(), name


def test_every_name_that_the_page_gives_of_a_file_is_in_it():
    table = [line for line in PAGE.splitlines() if line.startswith('| a')]
    for line in table:
        for name, file in re.findall(r'`([A-Za-z_]+)` (?:of|in) `([a-z_/]+\.py)`', line):
            assert name in (ROOT / file).read_text(), (name, file)
