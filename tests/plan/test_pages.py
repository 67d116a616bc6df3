"""The pages have the figures that plan.py gives, and Chromium shows its sheet as it should be."""
import contextlib
import datetime
import io
import re
import shlex

import pytest

import plan
from sdbench.flags.plan import SD2_IMAGES
from sdbench.forecast.forecast import forecast
from sdbench.gpus import CARDS
from sdbench.plan.parts import TRAIN
from sdbench.setup import Setup
from tests.browser import CHROMIUM, browser
from tests.runs import ROOT
from tests.test_report import tables

README = (ROOT / 'README.md').read_text().partition('## What a training costs')[2]
PAGE = (ROOT / 'docs/planning.md').read_text()
TODAY = datetime.date(2026, 11, 28)  # when the pages were written
COSTS = re.search(r"^(python plan.py --gpu '8 B200'.*) --html plan.html", README, re.MULTILINE)[1]
EXAMPLE = re.search(r"^python plan.py --gpu '8 H100-80GB' .*?[^\\]$", PAGE, re.MULTILINE | re.DOTALL)[0]
H100 = CARDS['NVIDIA H100 80GB HBM3']


def answer_to(command: str, *flags: str):
    """Return the answer to a command of a page, and its text."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        answer = plan.main([*shlex.split(command.replace('\\\n', ' '))[2:], *flags], TODAY)
    return {one.name: one for one in answer.plans}, text.getvalue()


def sentences(page: str) -> str:
    return ' '.join(page.split())


def test_the_costs_in_the_readme_agree_with_the_command_below_them():
    plans, text = answer_to(COSTS)
    on_spot, _ = answer_to(COSTS, '--spot')
    assert f'8 B200 are the cheapest: ${on_spot["8 x B200"].dollars.likely:,.0f} in all' in sentences(README)
    rows = tables(README)[0]
    assert len(rows) == len(plans)
    for row in rows:
        one = plans[f'8 x {row["8 GPUs"]}']
        days, dollars = one.days, one.dollars
        assert row['days'] == f'{days.likely:.2f} ({days.least:.2f} to {days.most:.2f})'
        assert row['GPU-hours'] == f'{one.gpu_hours.likely:,.0f}'
        assert row['GPU cost'] == f'${one.gpu_dollars.likely:,.0f}'
        assert row['whole cost'] == f'${dollars.likely:,.0f} ({dollars.least:,.0f} to {dollars.most:,.0f})'
    assert '8 x B200, 8 x H100 80GB and 8 x H200 cannot be told apart by cost' in text


def test_the_first_hour_in_the_readme_is_what_the_plan_says_to_do_first():
    command = re.search('^python plan.py results.jsonl .*$', README, re.MULTILINE)[0].replace('results.jsonl ', '')
    _, text = answer_to(command)
    pattern = ('about ([0-9]+) minutes.* slower than ([0-9,]+) images/s at 256 px or ([0-9,]+) images/s at 512 px, '
               '([0-9.]+) of the forecast')
    minutes, first, second, needed = re.search(pattern, sentences(text)).groups()
    stop = (f'stop if the training is slower than {first} images/s at 256 pixels or {second} at 512, which is {needed} '
            'of the forecast.')
    assert stop in sentences(README)
    assert f'The first four commands take about {minutes} minutes' in sentences(README)
    commands = README.partition('In your first hour')[2].partition('python plan.py')[0]
    for measuring in re.findall('^(?:composer|python) .*$', commands, re.MULTILINE):
        assert measuring in text


def test_the_first_sentence_and_the_example_of_the_page_on_planning_are_up_to_date():
    plans, _ = answer_to(COSTS)
    b200, h100 = plans['8 x B200'], plans['8 x H100 80GB']
    first, second = (f'{one.days.likely:.0f} days and ${round(one.dollars.likely, -3):,.0f}' for one in (b200, h100))
    assert f'takes about {first} on 8 B200, or {second} on 8 H100, at' in sentences(PAGE)
    _, text = answer_to(EXAMPLE)
    [shown] = re.findall('^```\n(8 x .*?)^```', PAGE, re.MULTILINE | re.DOTALL)
    assert text.startswith(shown.strip())
    for promised in ('Impossible: 8 x RTX 4090', 'Outside: 16 x L40S', 'With --allreduce_precision bf16',
                     'Stop if the training is slower'):
        assert promised in text
    slower, _ = answer_to(EXAMPLE, '--network_gbits', '50')
    assert f'16 L40S need {slower["16 x L40S"].days.likely:.2f} days' in sentences(PAGE)


def test_a_plan_without_the_compiler_agrees_with_the_page():
    plans, _ = answer_to(COSTS, '--training_flags=--no-compile')
    trained = sum(part.days.likely for part in plans['8 x A100 80GB'].parts if part.kind == TRAIN)
    assert f'a plan has {trained:.2f} days of training.' in sentences(PAGE)


def test_one_gpu_with_little_memory_recomputes_activations_in_blocks_that_are_compiled_alone():
    plans, _ = answer_to("python plan.py --gpu '1 4090'")
    for part in plans['1 x RTX 4090'].training:
        assert part.setup.gradient_checkpointing and part.setup.compile_blocks


def test_a_remedy_is_named_only_where_it_makes_the_training_possible():
    argv = ['--gpu', '8 V100-SXM2-32GB', '8 T4', '8 4090', '8 4080']
    with contextlib.redirect_stdout(io.StringIO()):
        outcomes = plan.main(argv).outcomes
    helping = {one.name: re.findall('--precision amp_fp16|--no-use_ema', one.remedy) for one in outcomes}
    assert helping == {'8 x Tesla V100 SXM2 32GB': ['--precision amp_fp16'], '8 x Tesla T4': [],
                       '8 x RTX 4090': ['--no-use_ema'], '8 x RTX 4080': []}
    with contextlib.redirect_stdout(io.StringIO()):
        [too_large] = plan.main(['--gpu', '8 H200', '--training_flags=--no-compile --device_train_microbatch_size 256 '
                                 '--no-gradient_checkpointing']).outcomes
    assert too_large.remedy.startswith('a GPU with more memory, or no --device_train_microbatch_size')


def test_the_table_of_networks_agrees_with_forecasts():
    [rows] = tables((ROOT / 'docs/machines.md').read_text())
    recipes = {'defaults': Setup(use_ema=True),
               'fastest.txt': Setup(use_ema=True, compile=True, half_precision_norms=True, cudnn_benchmark=True)}
    for heading in list(rows[0])[1:-1]:
        recipe, gbits = re.match('(.*), ([0-9,]+) Gbit/s', heading).groups()
        speeds = {}
        for row in rows:
            setup = Setup(**{**vars(recipes[recipe]), 'num_devices': int(row['GPUs']),
                             'network_gbits': float(gbits.replace(',', ''))})
            speeds[setup.num_devices] = forecast(setup, H100).images_per_sec
            speed, *efficiency = row[heading].removesuffix(' %').split(', ')
            assert float(speed.replace(',', '')) == pytest.approx(speeds[setup.num_devices], abs=1)
            if efficiency:
                each = speeds[setup.num_devices] / speeds[8] * 8 / setup.num_devices
                assert float(efficiency[0]) == pytest.approx(100 * each, abs=0.6)


def test_the_number_of_images_by_default_is_the_one_on_the_page():
    first, second = (f'{images // 10 ** 6} million' for images in SD2_IMAGES)
    assert f'trained Stable Diffusion 2 again on {first} images, {second} of which' in sentences(PAGE)


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
