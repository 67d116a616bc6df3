"""docs/extending.md: what it names is there, and what is added as it says works to its end."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import main
from tests.runs import ROOT, TINY, final_state

PAGE = (ROOT / 'docs/extending.md').read_text()
CHANGES = re.findall(r'```diff\n--- (\S+)\n (.*)\n((?:\+.*\n)+)```', PAGE)


@pytest.fixture(scope='module')
def copy(tmp_path_factory) -> Path:
    """The program in a folder of its own, changed as the page says."""
    folder = tmp_path_factory.mktemp('extended') / 'copy'
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns('.*', '__pycache__', 'results*', 'pictures'))
    for name, line, added in CHANGES:
        path = folder / name
        text = path.read_text()
        assert text.count(f'{line}\n') == 1, f'{name} has no longer one line: {line}'
        path.write_text(text.replace(f'{line}\n', f'{line}\n' + added.replace('+', '', 1).replace('\n+', '\n')))
    return folder


def printed(folder: Path, *argv: str) -> str:
    """Run a command there, and return what it prints."""
    return subprocess.run([sys.executable, *argv], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.long
def test_a_figure_that_is_added_as_the_page_says_is_in_record_summary_and_report(copy):
    summary = printed(copy, 'benchmark.py', '--use_synth_data', *TINY, '--measure_batches', '20')
    record = json.loads((copy / 'results.jsonl').read_text())
    assert record['batch_seconds_max'] >= record['batch_seconds_p90']
    assert f'slowest batch   {record["batch_seconds_max"]:.3g} s\n' in summary
    record['drift'] = 0.0  # or a machine with other work would leave the row without figures
    (copy / 'results.jsonl').write_text(json.dumps(record))
    report = printed(copy, 'report.py', 'results.jsonl')
    heading, _, row = [line for line in report.splitlines() if line.startswith('|')]
    column = [cell.strip() for cell in heading.split('|')].index('slowest batch')
    assert float(row.split('|')[column].split()[0]) == pytest.approx(record['batch_seconds_max'], rel=0.05)


@pytest.mark.long
def test_a_flag_of_the_optimizer_that_is_added_as_the_page_says_must_be_the_same_when_a_run_resumes(
        copy, tmp_path, results):
    """Also from a checkpoint that was written before the flag was there."""
    argv = ['--use_synth_data', *TINY, '--save_folder',
            str(tmp_path / 'kept'), '--results', str(results), '--autoresume', '--max_duration']
    main([*argv, '1ba'])
    resumed = [sys.executable, 'benchmark.py', *argv, '2ba']
    refused = subprocess.run([*resumed, '--adam_epsilon', '0.5'], cwd=copy, capture_output=True, text=True)
    assert refused.returncode == 2
    assert '--adam_epsilon was 1e-08, and is 0.5 now' in refused.stderr
    printed(copy, *resumed[1:])
    assert json.loads(results.read_text().splitlines()[-1])['adam_epsilon'] == 1e-8
    printed(copy, 'benchmark.py', *argv, '1ba', '--adam_epsilon', '0.5', '--save_folder', str(tmp_path / 'other'))
    [group] = final_state(tmp_path / 'other')['optimizers']['AdamW']['param_groups']
    assert group['eps'] == 0.5


def test_every_name_that_the_page_gives_of_a_file_is_in_it():
    table = [line for line in PAGE.splitlines() if line.startswith('| a')]
    for line in table:
        for name, file in re.findall(r'`([A-Za-z_]+)` (?:of|in) `([a-z_/]+\.py)`', line):
            assert name in (ROOT / file).read_text(), (name, file)
