"""docs/extending.md: what it names is there, and what is added as it says works to its end."""
import json
import re
import shutil
import sys

import pytest

from benchmark import main
from tests.forked_runs import run_program, script
from tests.report_tables import tables
from tests.runs import ROOT, TINY, final_state

PAGE = (ROOT / 'docs/extending.md').read_text()
CHANGES = re.findall(r'```diff\n--- (\S+)\n (.*)\n((?:\+.*\n)+)```', PAGE)


def script_of_another_copy(argv: list[str]) -> None:
    """Do as `script` with the modules of this folder instead of those that the process has imported already."""
    for name in list(sys.modules):
        if name.partition('.')[0] in ('benchmark', 'data', 'ema', 'report', 'sdbench', 'tests'):
            del sys.modules[name]
    script(argv)


@pytest.fixture
def copy(tmp_path):
    """This repository in a folder of its own, changed as the page says."""
    copy = tmp_path / 'copy'
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns('.*', '__pycache__', 'results*', 'pictures'))
    for name, line, added in CHANGES:
        path = copy / name
        text = path.read_text()
        path.write_text(text.replace(f'{line}\n', f'{line}\n' + added.replace('+', '', 1).replace('\n+', '\n')))
    return copy


@pytest.mark.long
def test_a_figure_and_a_flag_that_are_added_as_the_page_says_work_to_their_end(copy, server, tmp_path, results):
    # the figure is in summary, record and report; the flag is in the record and reaches the optimizer
    argv = ['benchmark.py', '--use_synth_data', *TINY, '--measure_batches', '20', '--results', results,
            '--example_epsilon', '0.5', '--save_folder']
    code, summary, errors = run_program(server, copy, script_of_another_copy, [*argv, tmp_path / 'run'])
    assert code == 0, errors
    record = json.loads(results.read_text())
    assert record['batch_seconds_max'] >= record['batch_seconds_p90']
    assert f'slowest batch   {record["batch_seconds_max"]:.3g} s\n' in summary
    assert record['example_epsilon'] == 0.5
    [group] = final_state(tmp_path / 'run')['optimizers']['AdamW']['param_groups']
    assert group['eps'] == 0.5
    record['drift'] = 0.0  # or a machine with other work would leave the row without figures
    results.write_text(json.dumps(record))
    _, report, _ = run_program(server, copy, script_of_another_copy, ['report.py', results])
    [[row]] = tables(report)
    assert float(row['slowest batch'].split()[0]) == pytest.approx(record['batch_seconds_max'], rel=0.05)

    # a checkpoint that was written before the flag was there has its default
    main(['--use_synth_data', *TINY, '--max_duration', '1ba', '--save_folder', str(tmp_path / 'older')])
    argv += [tmp_path / 'older', '--max_duration', '2ba', '--autoresume']
    code, _, errors = run_program(server, copy, script_of_another_copy, argv)
    assert code == 2
    assert '--example_epsilon was 1e-08, and is 0.5 now' in errors


def test_every_line_and_name_that_the_page_gives_of_a_file_is_in_it():
    for name, line, _ in CHANGES:
        assert (ROOT / name).read_text().count(f'{line}\n') == 1, f'{name} has no longer one line: {line}'
    named = re.findall(r'`([A-Za-z_]+)` in `([a-z_/]+\.py)`', ' '.join(PAGE.split()))
    assert len(named) > 30
    for name, file in named:
        assert re.search(rf'\b{name}\b', (ROOT / file).read_text()), (name, file)
