"""The figures in README.md, planning.md, machines.md and savings.md are those of plans, and Chromium shows a sheet."""
import contextlib
import datetime
import io
import math
import re

import pytest

import plan
from benchmarks.forecast.points import read_points
from benchmarks.savings import steps_of
from sdbench.flags.plan import SD2_IMAGES
from sdbench.forecast.forecast import forecast
from sdbench.gpus import CARDS
from sdbench.plan.parts import TRAIN
from sdbench.setup import Setup
from tests.browser import CHROMIUM, browser
from tests.report_tables import assert_figures, tables
from tests.runs import ROOT
from tests.test_docs import blocks, command_lines, words_of

README, PLANNING, SAVINGS, MACHINES = (ROOT / name for name in ('README.md', 'docs/planning.md', 'docs/savings.md',
                                                                'docs/machines.md'))
TODAY = datetime.date(2026, 11, 28)  # when the pages were written
[COSTS, FIRST_HOUR] = [command.removesuffix(' --html plan.html') for command in command_lines(README)
                       if command.startswith('python plan.py')]
[EXAMPLE] = [command for command in command_lines(PLANNING) if '--max_days 42' in command]


def answer_to(command: str, *flags: str):
    """Return the answer to a command of a page, and its text."""
    words = [word for word in words_of(command)[2:] if word != 'results.jsonl']
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        answer = plan.main([*words, *flags], TODAY)
    return answer, text.getvalue()


def plans_of(command: str, *flags: str) -> dict:
    answer, _ = answer_to(command, *flags)
    return {one.name.removeprefix('8 x '): one for one in answer.plans}


@pytest.fixture(scope='module')
def costs():
    """The plans of the README's table, by GPU."""
    return plans_of(COSTS)


def test_the_costs_in_the_readme_are_those_of_the_command_above_them(costs):
    rows = tables(README.read_text().partition('## What a training costs')[2])[0]
    assert len(rows) == len(costs)
    for row in rows:
        one = costs[row['8 GPUs']]
        days, dollars = one.days, one.dollars
        assert row['days'] == f'{days.likely:.2f} ({days.least:.2f} to {days.most:.2f})'
        assert row['GPU-hours'] == f'{one.gpu_hours.likely:,.0f}'
        assert row['GPU cost'] == f'${one.gpu_dollars.likely:,.0f}'
        assert row['whole cost'] == f'${dollars.likely:,.0f} ({dollars.least:,.0f} to {dollars.most:,.0f})'
    assert_figures(README, f'${plans_of(COSTS, "--spot")["B200"].dollars.likely:,.0f} in all')


def test_the_first_hour_in_the_readme_has_the_commands_and_limits_of_the_plan():
    answer, _ = answer_to(FIRST_HOUR)
    (sentence, measuring), *_ = answer.first_steps
    assert set(measuring) <= set(command_lines(README))
    minutes = re.search('about ([0-9]+ minutes)', sentence)[1]
    speeds = re.findall('[0-9][0-9,.]*[0-9]', sentence.partition('slower than')[2])
    assert len(speeds) == 5  # a speed at each of two sizes, and their fraction of the forecast
    assert_figures(README, minutes, *speeds)


def test_the_figures_on_the_page_on_planning_are_those_of_plans(costs):
    answer, text = answer_to(EXAMPLE)
    [shown] = [block for block in blocks(PLANNING, '') if block.startswith('8 x ')]
    assert text.startswith(shown.strip())
    assert all(outcome.name in text for outcome in answer.outcomes)
    days = [f'{one.days.likely:.0f} days' for one in (costs['B200'], costs['H100 80GB'])]
    dollars = [f'${round(one.dollars.likely, -3):,.0f}' for one in (costs['B200'], costs['H100 80GB'])]
    slower = plans_of(EXAMPLE, '--network_gbits', '50')['16 x L40S']
    eager = plans_of(COSTS, '--training_flags=--no-compile')['A100 80GB']
    trained = sum(part.days.likely for part in eager.parts if part.kind == TRAIN)
    images = [f'{number // 10 ** 6} million' for number in SD2_IMAGES]
    assert_figures(PLANNING, *days, *dollars, f'{slower.days.likely:.2f} days', f'{trained:.2f} days', *images)


def test_the_table_of_savings_is_that_of_the_command_and_ends_with_the_costs_in_the_readme(costs, monkeypatch):
    monkeypatch.chdir(ROOT)  # where the price list is
    [table] = tables(SAVINGS.read_text())
    steps = steps_of(['A100-80GB', 'H100-80GB', 'B200'])
    formats = {'GPU-hours': ',.0f', 'dollars': ',.0f', 'vs. row above': '.2f', 'on its own in 2022': '.2f',
               'without it today': '.2f'}
    for row, step in zip(table, steps.to_dict('records'), strict=True):
        figures = {key: format(step[key], template) for key, template in formats.items()}
        measured = 'measured (forecast)'
        assert row == {'step': step['step'], **figures, measured: step[measured], 'text': ''}
    hours = [f'{costs[gpu].gpu_hours.likely:,.0f}' for gpu in ('A100 80GB', 'H100 80GB', 'B200', 'B200')]
    assert [row['GPU-hours'] for row in table[-4:]] == hours
    assert table[-1]['dollars'] == f'{costs["B200"].gpu_dollars.likely:,.0f}'

    # Figures in the text that follow from the rows
    first, one_machine, *_ = steps['GPU-hours']
    saved = steps['vs. row above']
    training, gpus, price = math.prod(saved[2:6]), math.prod(saved[6:9]), 1 / saved[9]
    times = steps['dollars'][0] / steps['dollars'][9]
    pairs = [text.strip(')').split(' (') for text in steps['measured (forecast)'] if text]
    measured, forecast_ratio = (math.prod(map(float, factors)) for factors in zip(*pairs, strict=True))
    assert_figures(SAVINGS, f'{saved[1]:.2f} × {training:.2f} × {gpus:.2f} / {price:.2f} = {times:.0f}',
                   f'{first / 256 / 24:.1f} days', f'{steps["GPU-hours"][9] / 8 / 24:.1f} days',
                   f'{100 * one_machine / first:.0f} %', f'{one_machine / 8 / 24:.0f} days',
                   f'${costs["H100 80GB"].gpu_dollars.likely:,.0f}', f'{measured:.2f} ({forecast_ratio:.2f})')


def test_the_ratios_of_gpus_on_the_page_of_savings_are_those_of_published_speeds():
    points = read_points().query('num_devices == 8 and device_train_microbatch_size == 32')
    for who, before, after in (('awslabs/awsome-distributed-training', 'A100-SXM4-80GB', 'H100 80GB HBM3'),
                               ('MLPerf, NVIDIA', 'H100 80GB HBM3', 'B200')):
        speed = points[points['by'] == who].set_index('device')['measured']
        assert_figures(SAVINGS, f'{speed[after] / speed[before]:.2f} times')


def test_one_gpu_with_little_memory_recomputes_activations_in_blocks_that_are_compiled_alone():
    for part in plans_of("python plan.py --gpu '1 4090'")['1 x RTX 4090'].training:
        assert part.setup.gradient_checkpointing and part.setup.compile_blocks


@pytest.mark.parametrize('gpu, flags, remedies', [
    ('8 V100-SXM2-32GB', '', ['--precision amp_fp16']), ('8 T4', '', []), ('8 4090', '', ['--no-use_ema']),
    ('8 4080', '', []), ('8 H200', '--no-compile --device_train_microbatch_size 256 --no-gradient_checkpointing',
                         ['no --device_train_microbatch_size'])])
def test_a_remedy_is_named_only_where_it_makes_the_training_possible(gpu, flags, remedies):
    answer, _ = answer_to(f"python plan.py --gpu '{gpu}' '--training_flags={flags or '--use_ema'}'")
    [impossible] = answer.outcomes
    known = '--precision amp_fp16|--no-use_ema|no --device_train_microbatch_size'
    assert re.findall(known, impossible.remedy) == remedies


def test_the_table_of_networks_has_the_forecasts_and_efficiencies_of_its_setups():
    [rows] = tables(MACHINES.read_text())
    flags = {'defaults': {}, 'fastest.txt': {'compile': True, 'half_precision_norms': True, 'cudnn_benchmark': True}}
    for heading in list(rows[0])[1:-1]:
        recipe, gbits = re.match('(.*), ([0-9,]+) Gbit/s', heading).groups()
        on_one_machine = None
        for row in rows:
            gpus = int(row['GPUs'])
            setup = Setup(**flags[recipe], use_ema=True, num_devices=gpus, network_gbits=float(gbits.replace(',', '')))
            speed = forecast(setup, CARDS['NVIDIA H100 80GB HBM3']).images_per_sec
            on_one_machine = on_one_machine or speed / gpus
            shown, *efficiency = row[heading].removesuffix(' %').split(', ')
            assert float(shown.replace(',', '')) == pytest.approx(speed, abs=1)
            if efficiency:
                assert float(efficiency[0]) == pytest.approx(100 * speed / gpus / on_one_machine, abs=0.6)


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason='needs Chromium: apt-get install chromium')
def test_in_chromium_nothing_of_the_sheet_is_cut_on_a_telephone_and_it_requests_nothing(tmp_path):
    pytest.importorskip('websockets', reason='needs websockets: pip install websockets')
    path = tmp_path / 'plan.html'
    answer_to('python plan.py --max_days 20', '--html', str(path))
    with browser(tmp_path / 'profile') as tab:
        for width in (390, 1280):
            tab.call('Emulation.setDeviceMetricsOverride', width=width, height=800, deviceScaleFactor=1, mobile=False)
            tab.call('Page.navigate', url=path.as_uri())
            tab.run('new Promise(done => document.readyState == "complete" ? done() : onload = done)')
            assert tab.run('document.documentElement.scrollWidth') <= width
        assert set(tab.requests()) == {path.as_uri()}
        assert tab.console() == []
