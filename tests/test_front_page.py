"""README.md: its tables and figures agree with the output of its commands."""
import json
import re
import shlex
from dataclasses import fields, replace

import pytest
import torch

import benchmark
import report
from benchmarks.forecast.fit import Fitted, predict
from benchmarks.forecast.points import read_points
from benchmarks.measured import measured_table
from sdbench.flags.train import Train
from sdbench.flags.training_command import (
    FEWEST_FROM_RANDOM,
    FINE_TUNING_BATCH,
    IMAGES_PER_SEC,
    fine_tuning_time,
    training_command,
)
from sdbench.forecast.forecast import UNCOUNTED_SHARE, DoesNotFit, forecast
from sdbench.forecast.speed import CONSTANTS, IN_A_GRAPH, LARGEST_ERROR
from sdbench.gpus import CARDS as KNOWN
from sdbench.gpus import cards_named
from sdbench.records.summary import run_summary
from sdbench.setup import Setup, setup_of_record
from tests.runs import ROOT
from tests.test_docs import blocks
from tests.test_report import columns, tables

PAGE = (ROOT / 'README.md').read_text()
COSTS = PAGE.partition('## What Stable Diffusion 2 costs')[2]
MEMORY = (ROOT / 'docs/speed.md').read_text().partition('How much memory does it take?')[2]
PUBLISHED = tables(PAGE.partition('## Coming from the original')[2])[0]
CARDS = {'24 GB': 'RTX4090', '40 GB': 'A100-SXM4-40GB', '48 GB': 'L40S', '80 GB': 'H100-80GB', '141 GB': 'NVIDIA-H200'}


def program(command: str) -> list[str]:
    """Return the arguments of a command on the page, which may span several lines."""
    return shlex.split(command.replace('\\\n', ' '))[2:]


def test_the_costs_agree_with_the_command_below_them(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    command = re.search(r'^python report.py docs/plan.jsonl .*?[^\\]$', COSTS, re.MULTILINE | re.DOTALL)[0]
    argv = program(command.replace('plan.png', str(tmp_path / 'plan.png')))
    expected = {}
    for prices in ('on-demand', 'spot'):
        report.main([word.replace('on-demand', prices) for word in argv])
        [plans] = tables(capsys.readouterr().out)
        expected[prices] = {row['GPUs'].removeprefix('8 x '): row for row in plans if row['input'] == 'latents'}
    rows = tables(COSTS)[0]
    for device, *figures in columns(rows, '8 GPUs', 'days', 'GPU-hours', 'on demand', 'days, spot', 'spot'):
        planned, on_spot = expected['on-demand'].pop(device), expected['spot'][device]
        assert figures[:3] == [planned['days'], planned['GPU-hours'], planned['cost']]
        assert figures[3:] == [on_spot['days'], on_spot['cost'] or '-']
    assert not expected['on-demand']  # every card of the plan is in the table


def test_days_and_dollars_without_the_compiler_agree_with_the_eager_plan(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    report.main(['docs/plan-eager.jsonl', '@recipes/plan.txt', '@recipes/prices-on-demand.txt'])
    [plans] = tables(capsys.readouterr().out)
    plan = {row['GPUs']: row for row in plans}
    h100, a100 = plan['8 x H100 80GB'], plan['8 x A100 80GB']
    trained = sum(float(a100[part].removesuffix(' days')) for part in ('train 256', 'train 512'))
    of_h100 = f'{h100["days"]} days and {h100["cost"]}'
    assert f'Without the compiler, 8 H100 take {of_h100}.' in ' '.join(PAGE.split())
    assert (f'8 H100 take {of_h100}, and 8 A100 80GB take {a100["days"]} days, of which training takes '
            f'{trained:.2f}.') in ' '.join((ROOT / 'docs/planning.md').read_text().split())


def test_the_measured_speeds_agree_with_the_records():
    shown, = (tables(PAGE.partition('## Measured so far')[2])[:1])
    assert shown == tables(measured_table(ROOT / 'results'))[0]


def test_the_summary_agrees_with_the_record_of_a_run_on_a_gpu():
    lines = (ROOT / 'results/1xH100-torch-2.11.jsonl').read_text().splitlines()
    [record] = [record for record in map(json.loads, lines) if record.get('compile')]
    flags = {field.name: record[field.name] for field in fields(Train) if field.name in record}
    settings = Train(**{name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()})
    [shown] = [block for block in blocks(ROOT / 'README.md', '') if block.startswith('images/s')]
    assert set(shown.splitlines()) <= set(run_summary(record, settings).splitlines())


def test_the_published_rows_agree_with_the_report(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    report.main(['published.csv'])
    rows = {row['GPUs']: row for row in tables(capsys.readouterr().out)[0] if row['device'] == 'A100 40GB'}
    for gpus, *figures in columns(PUBLISHED, 'A100 40GB', 'images/s', 'days', 'cost at $2 per GPU-hour'):
        assert figures == [rows[gpus][key] for key in ('images/s', 'days', 'cost')]


def test_the_speed_that_a_budget_needs_agrees_with_the_plan(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    report.main(['docs/plan.jsonl', '@recipes/plan.txt', '@recipes/prices-on-demand.txt', '--max_dollars', '16000'])
    text = ' '.join(capsys.readouterr().out.split())
    needed = re.search(r'8 x H100 80GB on latents, [^;]*needs at least ([0-9.]+) of the forecast', text)[1]
    assert f'For 8 H100 you need at least {needed} of the forecast speed' in ' '.join(PAGE.split())


def test_the_fine_tuning_command_is_the_one_that_convert_prints():
    command = training_command('photos-mds', 3000, 'sd15', True)
    [shown] = [program(line) for line in re.findall(r'^composer (?:[^\n]*\\\n)*[^\n]*$', PAGE, re.MULTILINE)
               if 'sd15' in line]
    assert shown == shlex.split(command)[2:]
    assert f'roughly {fine_tuning_time(3000).replace("min", "minutes")}, by the forecast' in ' '.join(PAGE.split())
    assert f'Below about {FEWEST_FROM_RANDOM:,} images you fine-tune' in PAGE


def test_the_time_for_fine_tuning_agrees_with_a_forecast():
    found = forecast(Setup(batch_size=FINE_TUNING_BATCH), cards_named(('H100-80GB',))[0])
    assert found.images_per_sec == pytest.approx(IMAGES_PER_SEC, rel=0.01)


def test_the_largest_microbatches_agree_with_forecasts():
    [rows] = tables(MEMORY.partition('*On latents*')[0])
    assert len(rows) == len(CARDS)
    for row in rows:
        [card] = cards_named((CARDS[row['memory of a GPU']],))
        for column, setup in (('with EMA', Setup(use_ema=True)), ('without', Setup()),
                              ('with EMA, on latents', Setup(use_ema=True, latents=True))):
            try:
                shown = str(forecast(replace(setup, num_devices=8), card).setup.microbatch)
            except DoesNotFit:
                shown = '-'
            assert row[column] == shown


def test_the_dry_run_on_the_page_is_up_to_date(capsys):
    command, shown = re.search(r'^(python benchmark.py --dry_run [^\n]*)\n```\n```\n(.*?)```', PAGE,
                               re.MULTILINE | re.DOTALL).groups()
    benchmark.main(program(command))
    assert shown in capsys.readouterr().out


def test_the_forecasts_behind_the_costs_are_up_to_date():
    for record in map(json.loads, (ROOT / 'docs/plan.jsonl').read_text().splitlines()):
        found = forecast(setup_of_record(record | {'num_nodes': None}), KNOWN[record['device']])
        assert found.images_per_sec == pytest.approx(record['images_per_sec'], rel=1e-3)
        assert found.gib == pytest.approx(record['peak_memory_gib'], rel=1e-3)


@pytest.mark.parametrize('gpu', ['H100', 'H200'])
def test_measured_runs_on_one_gpu_are_forecast_within_the_largest_error(gpu):
    records = map(json.loads, (ROOT / f'results/1x{gpu}-torch-2.11.jsonl').read_text().splitlines())
    measured = [record for record in records if record['stage'] == 'train' and abs(record['drift']) < 0.1]
    assert len(measured) >= 5
    for record in measured:
        found = forecast(setup_of_record(record), KNOWN[record['device']])
        assert found.images_per_sec == pytest.approx(record['images_per_sec'], rel=LARGEST_ERROR)
        assert found.gib / (1 + UNCOUNTED_SHARE) == pytest.approx(record['peak_memory_allocated_gib'], rel=0.02)


@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith('2.7.'), reason='other versions trace other operators')
def test_the_forecast_error_in_each_published_row_agrees_with_its_forecast():
    rows = read_points()
    published = rows[rows['device'].eq('A100-SXM4-40GB') & rows['by'].eq('mosaicml/diffusion-benchmark')]
    errors = predict(published, Fitted(CONSTANTS, IN_A_GRAPH)) / published['measured'] - 1
    shown = dict(columns(PUBLISHED, 'A100 40GB', 'forecast error'))
    errors = dict(zip(published['num_devices'].astype(int).astype(str), errors, strict=True))
    assert shown == {devices: f'{100 * errors[devices]:+.1f} %' for devices in shown}
