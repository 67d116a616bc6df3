"""docs/savings.md: the figures in its table and its sentences agree with benchmarks/savings.py and the records."""
import math

import pytest

import plan
import report
from benchmarks.forecast.points import read_points
from benchmarks.savings import steps_of
from tests.runs import ROOT
from tests.test_report import columns, tables

PAGE = (ROOT / 'docs/savings.md').read_text()
SENTENCES = ' '.join(PAGE.split())
[TABLE] = tables(PAGE)
MEASURED = 'measured (forecast)'


@pytest.fixture(autouse=True)
def in_this_repository(monkeypatch):
    """The commands name files in recipes/ by relative paths."""
    monkeypatch.chdir(ROOT)


def test_the_first_rows_agree_with_the_published_table_and_the_last_ones_with_the_plan(capsys):
    report.main(['published.csv'])
    published = {row['GPUs']: row for row in tables(capsys.readouterr().out)[0] if row['device'] == 'A100 40GB'}
    answer = plan.main(['--gpu', '8 A100-SXM4-80GB', '8 H100-80GB', '8 B200'])
    plans = {one.name: one for one in answer.plans}
    rows = columns(TABLE, 'GPU-hours', 'dollars')
    expected = [(row['GPU-hours'], row['cost'].strip('$')) for row in (published['256'], published['8'])]
    assert rows[:2] == expected
    of_gpus = [f'{plans[f"8 x {gpu}"].gpu_hours.likely:,.0f}' for gpu in ('A100 80GB', 'H100 80GB', 'B200')]
    assert [hours for hours, _ in rows[-4:]] == [*of_gpus, of_gpus[-1]]
    assert rows[-1][1] == f'{plans["8 x B200"].gpu_dollars.likely:,.0f}'
    assert f'eight H100 would cost ${plans["8 x H100 80GB"].gpu_dollars.likely:,.0f}' in SENTENCES


def test_what_others_measured_agrees_with_their_published_speeds():
    points = read_points().query('num_devices == 8 and device_train_microbatch_size == 32')
    for who, before, after in (('awslabs/awsome-distributed-training', 'A100-SXM4-80GB', 'H100 80GB HBM3'),
                               ('MLPerf, NVIDIA', 'H100 80GB HBM3', 'B200')):
        speed = points[points['by'] == who].set_index('device')['measured']
        assert f' {speed[after] / speed[before]:.2f} times as fast as an' in SENTENCES


def test_every_row_agrees_with_the_output_of_the_command():
    steps = steps_of(['A100-80GB', 'H100-80GB', 'B200'])
    shown = {'GPU-hours': ',.0f', 'dollars': ',.0f', 'vs. row above': '.2f', 'on its own in 2022': '.2f',
             'without it today': '.2f'}
    for row, step in zip(TABLE, steps.to_dict('records'), strict=True):
        figures = {key: format(step[key], form) for key, form in shown.items()}
        assert row == {'step': step['step'], **figures, MEASURED: step[MEASURED], 'text': ''}

    # Sentences that follow from the rows
    first, one_machine, *_ = steps['GPU-hours']
    saved = steps['vs. row above']
    gpus, price, times = math.prod(saved[6:9]), 1 / saved[9], steps['dollars'][0] / steps['dollars'][9]
    assert f'{saved[1]:.2f} × {math.prod(saved[2:6]):.2f} × {gpus:.2f} / {price:.2f} = {times:.0f}' in SENTENCES
    for sentence in (f'256 A100, in {first / 256 / 24:.1f} days', f'in {steps["GPU-hours"][9] / 8 / 24:.1f} days:',
                     f'{one_machine / first:.0%}'.replace('%', ' %'), f'needed {one_machine / 8 / 24:.0f} days'):
        assert sentence in SENTENCES
    pairs = [text.strip(')').split(' (') for text in steps[MEASURED] if text]
    measured, forecast = (math.prod(map(float, factors)) for factors in zip(*pairs, strict=True))
    assert f'Together that is {measured:.2f} ({forecast:.2f})' in SENTENCES
