"""README.md and the pages on forecasts and speed have the figures of the records, the forecasts and the code."""
import json
import math
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
from sdbench.forecast.forecast import UNCOUNTED_SHARE, DoesNotFit, Forecast, forecast
from sdbench.forecast.speed import CONSTANTS, LARGEST_ERROR, TESTED
from sdbench.gpus import CARDS, NETWORK_SHARE, NVLINK_SHARE, PCIE_SHARE, cards_named, short_name
from sdbench.records.summary import run_summary
from sdbench.setup import Setup, setup_of_record
from tests.report_tables import assert_figures, columns, tables
from tests.runs import ROOT
from tests.test_docs import blocks, command_lines, words_of

README, FORECAST, MODEL, SPEED, PHOTOGRAPHS = (
    ROOT / name for name in ('README.md', 'docs/forecast.md', 'docs/forecast-model.md', 'docs/speed.md',
                             'docs/photographs.md'))
PUBLISHED = tables((ROOT / 'docs/migrating.md').read_text())[-1]
RECORDS = ['results/1xH100-torch-2.11.jsonl', 'results/1xH200-torch-2.11.jsonl']


@pytest.fixture(scope='module')
def measured() -> list[tuple[dict, Forecast]]:
    """The record of each measured training, with the forecast for its setup."""
    records = [json.loads(line) for name in RECORDS for line in (ROOT / name).read_text().splitlines()]
    return [(record, forecast(setup_of_record(record), CARDS[record['device']]))
            for record in records if record['stage'] == 'train']


@pytest.fixture
def shown_run(measured) -> dict:
    """The record of the run whose command and summary the README shows."""
    [record] = [record for record, _ in measured if record['compile'] and 'H100' in record['device']]
    return record


# The README

def test_the_measured_speeds_are_rows_of_the_report_and_the_last_is_of_the_command_above(
        shown_run, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    report.main(RECORDS)
    [rows] = tables(capsys.readouterr().out)
    section = README.read_text().partition('### Measured so far')[2]
    shown = tables(section.replace('| defaults, ', '| '))[0]  # the report does not name defaults
    names = ('device', 'GPUs', 'images/s', 'forecast', 'forecast - measured')
    assert {*columns(shown, 'settings', *names)} <= {*columns(rows, 'text', *names)}
    assert shown[-1]['images/s'] == f'{shown_run["images_per_sec"]:.1f}'

    # The flags above the summary are those of the run.
    [command] = [command for command in command_lines(README) if command.startswith('composer benchmark.py')
                 and '--use_synth_data' in command]
    [added] = re.findall('With `(--compile_blocks [^`]*)`', README.read_text())
    flags = build_parser(Train, '', 'benchmark.py').parse_args(words_of(f'{command} {added}')[2:])
    assert all(json.loads(json.dumps(value)) == shown_run[flag] for flag, value in vars(flags).items())


def test_the_summary_in_the_readme_agrees_with_the_record_of_its_run(shown_run):
    flags = {field.name: shown_run[field.name] for field in fields(Run) if field.name in shown_run}
    settings = Run(**{name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()})
    [shown] = [block for block in blocks(README, '') if block.startswith('images/s')]
    assert set(shown.splitlines()) <= set(run_summary(shown_run, settings).splitlines())


def test_the_fine_tuning_command_in_the_readme_is_the_one_that_convert_prints():
    printed = shlex.split(training_command('photos-mds', 3000, FINE_TUNED, True))
    assert printed in [words_of(command) for command in command_lines(README)]
    assert_figures(README, f'{FEWEST_FROM_RANDOM:,} images')


def test_the_dry_run_in_the_readme_is_up_to_date(capsys):
    [command] = [command for command in command_lines(README) if command.startswith('python benchmark.py --dry_run')]
    [shown] = [block for block in blocks(README, '') if block.startswith('GPUs ')]
    benchmark.main(words_of(command)[2:])
    assert shown in capsys.readouterr().out


# The other pages

def test_the_published_rows_agree_with_the_report(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    report.main(['published.csv'])
    rows = {row['GPUs']: row for row in tables(capsys.readouterr().out)[0] if row['device'] == 'A100 40GB'}
    for gpus, *figures in columns(PUBLISHED, 'A100 40GB', 'images/s', 'days', 'cost at $2 per GPU-hour'):
        assert figures == [rows[gpus][key] for key in ('images/s', 'days', 'cost')]


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
def test_the_time_and_cost_of_fine_tuning_are_those_of_a_dry_run(tmp_path, capsys):
    command = training_command('photos-mds', 3000, FINE_TUNED, True)  # before the folder is there, without weights
    write_architecture_of_sd15(tmp_path / FINE_TUNED)
    Path('prompts.txt').write_text('a cat')
    [flags] = re.findall('`(--dry_run 1 [^`]*--dollars_per_gpu_hour[^`]*)`', PHOTOGRAPHS.read_text())
    benchmark.main(shlex.split(command.replace('--remote photos-mds', '--use_synth_data'))[2:] + shlex.split(flags))
    expected = {}
    for line in re.findall('^1 x .*$', capsys.readouterr().out, re.MULTILINE):
        name, microbatch, _, _, time, dollars = re.split('  +', line)
        expected[name.removeprefix('1 x ')] = (microbatch, time, f'${float(dollars):.2f}')
    table = tables(PHOTOGRAPHS.read_text().partition('## Time and cost')[2])[0]
    assert {name: figures for name, *figures in columns(table, 'one GPU', 'microbatch', 'time', 'dollars')} == {
        name: list(figures) for name, figures in expected.items()}
    _, minutes, _ = expected['H100 80GB HBM3']
    assert_figures(README, minutes.removesuffix(' min'), expected['GeForce RTX 4090'][1])


GPUS_OF_MEMORY = {'24 GB: A10': 'NVIDIA-A10', '24 GB: A30, RTX 3090, RTX 4090': 'RTX4090',
                  '40 GB: A100': 'A100-SXM4-40GB', '48 GB: A40, L40, L40S': 'L40S',
                  '48 GB: RTX A6000, RTX 6000 Ada': 'RTX-A6000', '80 GB: A100, H100': 'H100-80GB',
                  '141 GB: H200': 'NVIDIA-H200'}


def test_the_largest_microbatches_agree_with_forecasts():
    [rows] = [table for table in tables(SPEED.read_text()) if 'memory of a GPU' in table[0]]
    assert len(rows) == len(GPUS_OF_MEMORY)
    for row in rows:
        [card] = cards_named((GPUS_OF_MEMORY[row['memory of a GPU']],))
        for column, setup in (('with EMA', Setup(use_ema=True)), ('without', Setup()),
                              ('with EMA, on latents', Setup(use_ema=True, latents=True))):
            try:
                largest = str(forecast(replace(setup, num_devices=8), card).setup.microbatch)
            except DoesNotFit:
                largest = '-'
            assert row[column] == largest


def test_what_flags_made_faster_is_the_ratio_of_two_measured_speeds(measured):
    speeds = [f'{record["images_per_sec"]:.1f}' for record, _ in measured]
    for after, before in (('98.0', '67.5'), ('102.0', '54.5')):
        assert {after, before} <= {*speeds}
        assert_figures(SPEED, f'{float(after) / float(before):.2f} times', f'{after} instead of {before}')


# The pages on forecasts

def test_measured_runs_on_one_gpu_are_forecast_within_the_largest_error(measured):
    reliable = [(record, found) for record, found in measured if abs(record['drift']) < 0.1]
    assert len(reliable) >= 10
    for record, found in reliable:
        assert found.images_per_sec == pytest.approx(record['images_per_sec'], rel=LARGEST_ERROR)
        assert found.gib / (1 + UNCOUNTED_SHARE) == pytest.approx(record['peak_memory_allocated_gib'], rel=0.02)


def test_the_table_of_own_measurements_has_each_run_and_its_forecast_and_marks_the_one_outside_its_range(measured):
    expected = []
    outside = []
    for record, found in measured:
        shown = f'{found.images_per_sec:.1f}'
        least, most = found.images_per_sec_range or (0, math.inf)
        if found.is_tested:
            shown += f' ({least:.1f} to {most:.1f})'
        if not least <= record['images_per_sec'] <= most:
            outside.append(f'**{record["images_per_sec"]:.1f}**')
        gpu = record['device'].removeprefix('NVIDIA ').split()[0]
        error = round(100 * (found.images_per_sec / record['images_per_sec'] - 1))
        expected.append((gpu, str(record['device_train_microbatch_size']), f'{record["images_per_sec"]:.1f}', shown,
                         f'{error:+} %' if error else '0 %'))
    text = FORECAST.read_text()
    table = tables(text.replace('**', '').replace('second H100', 'H100'))[0]
    assert sorted(columns(table, 'GPU', 'microbatch', 'measured', 'forecast', 'error')) == sorted(expected)
    assert [row['measured'] for row in tables(text)[0] if row['measured'].startswith('**')] == outside


def test_the_setups_that_have_a_range_are_those_of_the_program():
    expected = []
    for mode, setups in TESTED.items():
        for (device, size, latents), layouts in setups.items():
            kind = f'{size}, {"latents" if latents else "images"}'
            gpu = short_name(device).replace('H100 80GB', 'H100')
            compiled = f'`{mode}`' if mode else 'none'
            expected += [(gpu, kind, compiled, str(gpus), str(images)) for gpus, images in layouts]
    [table] = [table for table in tables(FORECAST.read_text()) if 'GPUs, at most' in table[0]]
    assert sorted(tuple(row.values())[:5] for row in table) == sorted(expected)
    assert_figures(FORECAST, f'multiplied by {1 + LARGEST_ERROR:.2f}')


def test_the_errors_on_several_machines_are_within_the_largest_error_of_the_program():
    [table] = [table for table in tables(MODEL.read_text()) if 'submitter' in table[0]]
    errors = [float(row['error'].removesuffix(' %')) / 100 for row in table]
    assert LARGEST_ERROR - 0.01 < max(map(abs, errors)) <= LARGEST_ERROR


def test_the_constants_on_the_page_are_those_of_the_program():
    values = {'*p*': f'{CONSTANTS.peak_share}', '*b*': f'{CONSTANTS.bandwidth_share}',
              '*m*': f'{CONSTANTS.bytes_a_cycle}', '*k*': f'{CONSTANTS.seconds_a_kernel * 1e6:.1f} µs',
              '*k* in a CUDA graph': f'{CONSTANTS.seconds_in_a_graph * 1e6:.2f} µs', 'NVLink': f'{NVLINK_SHARE}',
              'PCIe': f'{PCIE_SHARE}', 'network': f'{NETWORK_SHARE}', 'memory': f'{100 * UNCOUNTED_SHARE:.0f} %'}
    [table] = [table for table in tables(MODEL.read_text()) if 'constant' in table[0]]
    assert values.items() <= dict(columns(table, 'constant', 'value')).items()


@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith('2.7.'), reason='other versions trace other operators')
def test_the_forecast_error_in_each_published_row_agrees_with_its_forecast():
    points = read_points()
    points = points[points['device'].eq('A100-SXM4-40GB') & points['by'].eq('mosaicml/diffusion-benchmark')]
    errors = 100 * (predict(points, CONSTANTS) / points['measured'] - 1)
    expected = dict(zip(points['num_devices'], errors, strict=True))
    for gpus, error in columns(PUBLISHED, 'A100 40GB', 'error of the forecast'):
        assert error == f'{expected[int(gpus)]:+.1f} %'
