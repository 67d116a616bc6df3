"""README.md: its tables and figures agree with the output of its commands."""
import json
import re
import shlex
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import benchmark
import report
from benchmarks.forecast.fit import predict
from benchmarks.forecast.points import read_points
from sdbench.flags.parser import build_parser
from sdbench.flags.train import Run, Train
from sdbench.flags.training_command import FEWEST_FROM_RANDOM, FINE_TUNED, training_command
from sdbench.forecast.forecast import UNCOUNTED_SHARE, DoesNotFit, forecast
from sdbench.forecast.speed import CONSTANTS, LARGEST_ERROR
from sdbench.gpus import CARDS as KNOWN
from sdbench.gpus import cards_named
from sdbench.records.summary import run_summary
from sdbench.setup import Setup, setup_of_record
from tests.runs import ROOT
from tests.test_docs import blocks
from tests.test_report import columns, tables

PAGE = (ROOT / 'README.md').read_text()
MEMORY = (ROOT / 'docs/speed.md').read_text().partition('How much memory does it take?')[2]
PUBLISHED = tables((ROOT / 'docs/migrating.md').read_text())[-1]
CARDS = {'24 GB: A10': 'NVIDIA-A10', '24 GB: A30, RTX 3090, RTX 4090': 'RTX4090', '40 GB: A100': 'A100-SXM4-40GB',
         '48 GB: A40, L40, L40S': 'L40S', '48 GB: RTX A6000, RTX 6000 Ada': 'RTX-A6000',
         '80 GB: A100, H100': 'H100-80GB', '141 GB: H200': 'NVIDIA-H200'}


def program(command: str) -> list[str]:
    """Return the arguments of a command on the page, which may span several lines."""
    return shlex.split(command.replace('\\\n', ' '))[2:]


def test_the_measured_speeds_are_rows_of_the_report_and_the_last_is_of_the_command_above(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    report.main(['results/1xH100-torch-2.11.jsonl', 'results/1xH200-torch-2.11.jsonl'])
    [measured] = tables(capsys.readouterr().out)
    section = PAGE.partition('### Measured so far')[2]
    shown = tables(section.replace('| defaults, ', '| '))[0]  # the report does not name defaults
    names = ('device', 'GPUs', 'images/s', 'forecast', 'forecast - measured')
    assert {*columns(shown, 'settings', *names)} <= {*columns(measured, 'text', *names)}

    # The last row is the run whose command and summary are above
    given = re.search('^composer (benchmark.py @recipes/fastest.txt .*?)  #', PAGE, re.MULTILINE)[1]
    added = re.search('With `(--compile_blocks [^`]*)` on one H100', ' '.join(PAGE.split()))[1]
    records = map(json.loads, (ROOT / 'results/1xH100-torch-2.11.jsonl').read_text().splitlines())
    [record] = [record for record in records if record.get('compile')]
    assert shown[-1]['images/s'] == f'{record["images_per_sec"]:.1f}'
    flags = build_parser(Train, '', 'benchmark.py').parse_args(shlex.split(f'{given} {added}')[1:])
    assert all(json.loads(json.dumps(value)) == record[flag] for flag, value in vars(flags).items())


def test_the_summary_agrees_with_the_record_of_a_run_on_a_gpu():
    lines = (ROOT / 'results/1xH100-torch-2.11.jsonl').read_text().splitlines()
    [record] = [record for record in map(json.loads, lines) if record.get('compile')]
    flags = {field.name: record[field.name] for field in fields(Run) if field.name in record}
    settings = Run(**{name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()})
    [shown] = [block for block in blocks(ROOT / 'README.md', '') if block.startswith('images/s')]
    assert set(shown.splitlines()) <= set(run_summary(record, settings).splitlines())


def test_the_published_rows_agree_with_the_report(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    report.main(['published.csv'])
    rows = {row['GPUs']: row for row in tables(capsys.readouterr().out)[0] if row['device'] == 'A100 40GB'}
    for gpus, *figures in columns(PUBLISHED, 'A100 40GB', 'images/s', 'days', 'cost at $2 per GPU-hour'):
        assert figures == [rows[gpus][key] for key in ('images/s', 'days', 'cost')]


def test_the_fine_tuning_command_is_the_one_that_convert_prints():
    shown = [shlex.split(line) for line in PAGE.replace('\\\n', ' ').splitlines() if FINE_TUNED in line.split()]
    assert shlex.split(training_command('photos-mds', 3000, FINE_TUNED, True)) in shown
    assert f'Below about {FEWEST_FROM_RANDOM:,} images you fine-tune' in PAGE


def write_architecture_of_sd15(folder: Path) -> None:
    """Write the configuration of Stable Diffusion 1.5 as a folder without weights."""
    shutil.copytree(ROOT / 'sdbench/models/stable-diffusion-2-base', folder)
    changes = {'unet': {'attention_head_dim': 8, 'cross_attention_dim': 768, 'use_linear_projection': False},
               'text_encoder': {'hidden_size': 768, 'num_hidden_layers': 12, 'num_attention_heads': 12,
                                'intermediate_size': 3072, 'hidden_act': 'quick_gelu'}}
    for part, changed in changes.items():
        config = folder / part / 'config.json'
        config.write_text(json.dumps(json.loads(config.read_text()) | changed))


@pytest.mark.long
def test_the_time_and_cost_of_fine_tuning_are_those_of_a_dry_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = training_command('photos-mds', 3000, FINE_TUNED, True)  # before the folder is there, without weights
    write_architecture_of_sd15(tmp_path / FINE_TUNED)
    Path('prompts.txt').write_text('a cat')
    page = (ROOT / 'docs/photographs.md').read_text()
    flags = shlex.split(re.search(r'`(--dry_run 1 [^`]*--dollars_per_gpu_hour[^`]*)`', page)[1])
    benchmark.main(shlex.split(command.replace('--remote photos-mds', '--use_synth_data'))[2:] + flags)
    forecast = {}
    for line in capsys.readouterr().out.partition('\nGPUs ')[2].partition('Days and dollars')[0].splitlines()[1:]:
        name, microbatch, _, _, time, dollars = re.split('  +', line.strip())
        forecast[name.removeprefix('1 x ')] = [microbatch, time, f'${float(dollars):.2f}']
    table = tables(page.partition('## Time and cost')[2])[0]
    shown = {name: figures for name, *figures in columns(table, 'one GPU', 'microbatch', 'time', 'dollars')}
    assert shown == forecast
    [time] = [figures[1] for name, figures in shown.items() if name.startswith('H100')]
    assert f'about {time.replace("min", "minutes")} and $2 on one H100' in ' '.join(PAGE.split())


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
    errors = predict(published, CONSTANTS) / published['measured'] - 1
    shown = dict(columns(PUBLISHED, 'A100 40GB', 'error of the forecast'))
    errors = dict(zip(published['num_devices'].astype(int).astype(str), errors, strict=True))
    assert shown == {devices: f'{100 * errors[devices]:+.1f} %' for devices in shown}
