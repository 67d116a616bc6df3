"""--dry_run: its forecasts agree with published and measured runs, and it needs only the flags."""
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import benchmark
from ema import ShadowModel, compute_ema
from sdbench.forecast.forecast import Forecast, bytes_needed, forecast, gib_taken, network_rate
from sdbench.forecast.trace import build_on_meta, ema_update, trace_step, work_of_update
from sdbench.gpus import CARDS, GIB
from sdbench.setup import Setup, setup_of_settings
from tests.runs import SMALLEST, refusal, settings_of

H100 = CARDS['NVIDIA H100 80GB HBM3']


def test_an_h200_took_a_tenth_more_memory_than_the_count_and_less_than_the_count_with_its_margin():
    """milabench ran on one GPU with all images in a single microbatch, the encoders in bf16 and without EMA."""
    for images, taken in ((80, 115.6), (32, 55)):  # GiB by NVML
        setup = Setup(batch_size=images).with_defaults()
        assert sum(bytes_needed(setup, images).values()) / GIB == pytest.approx(taken / 1.1, rel=0.02)
        assert 1 < gib_taken(setup, images) / taken < 1.05


BATCHES = 135_000_000_000


@pytest.fixture
def dry_run(smallest_model, capfd):
    """Return a function that returns the forecasts for a small training, and the printed text."""
    def run(flags: str) -> tuple[list[Forecast], str]:
        small = f'--model_name {smallest_model} --batch_size 64 --image_size 32 --max_duration {BATCHES}ba --dry_run'
        return benchmark.main([*small.split(), *flags.split()]), capfd.readouterr().out
    return run


def rows_in(printed: str, heading: str) -> list[dict[str, str]]:
    """Return the rows of the printed table with this first heading."""
    _, _, table = printed.partition(f'\n{heading} ')
    names, *lines = (re.split('  +', line.strip()) for line in f'{heading} {table}'.splitlines())
    return [dict(zip(names, cells, strict=False)) for cells in itertools.takewhile(lambda cells: len(cells) > 1, lines)]


def number(text: str) -> float:
    return float(text.rstrip('%').replace(',', ''))


def assert_row(row: dict[str, str], found: Forecast, dollars_per_gpu_hour: float) -> None:
    """Check that a row has the figures of a forecast, and the days and dollars that follow from them."""
    devices = found.setup.num_devices
    days = BATCHES * 64 / found.images_per_sec / 86_400
    figures = {'microbatch': found.setup.microbatch, 'images/s': found.images_per_sec, 'days': days,
               'dollars': days * 24 * devices * dollars_per_gpu_hour, 'each': found.images_per_sec / devices,
               'GPU-hours': days * 24 * devices}
    assert row['GPUs'] == f'{devices} x {found.card.name.removeprefix("NVIDIA ")}'
    assert number(row['GiB taken']) == pytest.approx(found.gib, abs=0.05)
    for heading in figures.keys() & row.keys():
        assert number(row[heading]) == pytest.approx(figures[heading], rel=0.01), heading


def test_an_index_is_enough_and_one_screen_has_every_card_the_cheapest_first(shards, tmp_path, dry_run):
    (tmp_path / 'index.json').write_bytes(Path(shards, 'index.json').read_bytes())
    forecasts, printed = dry_run('8 --remote . --gpu A100 --dollars_per_gpu_hour 3 A100-40GB=1')
    assert [path.name for path in tmp_path.iterdir()] == ['index.json']  # nothing is stored
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 120 and len(lines) <= 40
    rows = rows_in(printed, 'GPUs')
    assert len(rows) == 4
    for row, found in zip(rows, forecasts, strict=True):
        assert row.keys() == {'GPUs', 'microbatch', 'GiB taken', 'images/s', 'days', 'dollars'}
        assert_row(row, found, 1 if '40GB' in found.card.name else 3)
    costs = [number(row['dollars']) for row in rows]
    assert costs == sorted(costs)
    [epochs] = re.findall(r'8,640,000,000,000 images \(([\d,]+) epochs\)', ' '.join(lines))
    samples = sum(shard['samples'] for shard in json.loads(Path('index.json').read_text())['shards'])
    assert number(epochs) * max(1, samples // 64) == BATCHES
    [speed] = re.findall('Encoding all images once, .*?: ([0-9,]+) images/s', ' '.join(lines))
    assert number(speed) == pytest.approx(forecasts[0].encode_images_per_sec, rel=0.01)


def setup_of(*flags: str) -> Setup:
    return setup_of_settings(settings_of('--dry_run', *flags))


IN_A_GRAPH = '--compile reduce-overhead --batch_size 512 --device_train_microbatch_size 64'


@pytest.mark.parametrize('card, tested, untested', [
    ('H100 80GB HBM3', ['8', '1 --batch_size 4', f'8 {IN_A_GRAPH} --use_synth_latents'],
     ['8 --batch_size 64', '16', '8 --image_size 256', '8 --use_synth_latents', '8 --compile --use_synth_latents',
      f'8 {IN_A_GRAPH}', f'8 {IN_A_GRAPH} --use_synth_latents --compile_blocks', '8 --attention math',
      '8 --model_name tiny']),
    ('A100-SXM4-40GB', ['64'], ['256']),
    ('A100-SXM4-80GB', ['8 --image_size 256 --use_synth_latents'], ['8 --image_size 256']),
    ('GeForce RTX 4090', [], ['8 --batch_size 16'])])
def test_a_range_is_printed_only_for_setups_that_published_runs_tested(card, tested, untested):
    for flags in (*tested, *untested):
        found = forecast(setup_of(*flags.split()), CARDS[f'NVIDIA {card}'])
        assert found.is_tested == (flags in tested), flags


@pytest.mark.parametrize('card, flags, machines, rate', [
    ('NVIDIA H100 80GB HBM3', ['8', '--network_gbits', '100'], 1, math.inf),
    ('NVIDIA H100 80GB HBM3', ['16', '--network_gbits', '100'], 2, 12.5 * 0.92),
    ('NVIDIA H100 80GB HBM3', ['16'], 2, math.inf),                             # as fast as the interconnect
    ('NVIDIA H100 80GB HBM3', ['8', '--network_gbits', '100', '--gpus_per_node', '4'], 2, 12.5 * 0.92),
    ('NVIDIA L40S', ['64', '--network_gbits', '200'], 16, 25 * 0.92),
    ('NVIDIA GB200', ['64', '--network_gbits', '100'], 16, math.inf),           # one rack
    ('NVIDIA GB200', ['128', '--network_gbits', '100'], 32, 18 * 12.5 * 0.92)])  # the networks of 18 machines per rack
def test_gradients_cross_the_network_only_between_gpus_that_no_interconnect_joins(card, flags, machines, rate):
    setup = replace(setup_of(*flags), device=card)
    assert setup.machines == machines
    assert network_rate(setup, CARDS[card]) == pytest.approx(rate)


def test_several_gpu_counts_have_a_row_for_each_card_and_count_with_its_efficiency(dry_run):
    forecasts, printed = dry_run('64 2 16 --gpu H100-80GB B200 --network_gbits 10')
    assert max(map(len, printed.splitlines())) <= 120
    prices = {'NVIDIA H100 80GB HBM3': 2.95, 'NVIDIA B200': 5.5}  # list prices
    setups = [(found.setup.num_devices, found.setup.machines, found.setup.network_gbits) for found in forecasts]
    assert setups == 2 * [(2, 1, 10), (16, 2, 10), (64, 8, 10)]
    fewest = {found.card: found.images_per_sec / 2 for found in forecasts if found.setup.num_devices == 2}
    for row, found in zip(rows_in(printed, 'GPUs'), forecasts, strict=True):
        assert {'each', 'GPU-hours'} <= row.keys()
        assert_row(row, found, prices[found.card.name])
        efficiency = found.images_per_sec / found.setup.num_devices / fewest[found.card]
        assert number(row['efficiency']) / 100 == pytest.approx(efficiency, rel=0.02)


def test_the_cheapest_gpu_by_its_price_comes_first_and_gpus_without_a_price_come_last(capfd):
    """Eight B200 are faster for each GPU-hour than eight H100, but cost more by the list prices."""
    def order(*flags: str) -> list[str]:
        benchmark.main(['--dry_run', '8', '--gpu', 'B200', 'H100-80GB', 'H100-NVL', *flags])
        rows = rows_in(capfd.readouterr().out, 'GPUs')
        return [row['GPUs'].split(' x ')[1] + ' without a price' * (row['dollars'] == '-') for row in rows]

    assert order() == ['H100 80GB HBM3', 'B200', 'H100 NVL without a price']
    assert order('--dollars_per_gpu_hour', '2') == ['B200', 'H100 80GB HBM3', 'H100 NVL']


def test_the_work_of_an_ema_update_agrees_with_a_trace_of_the_real_one(smallest_model):
    flags = '--dry_run 1 --batch_size 64 --image_size 32 --use_ema --model_name'
    settings = settings_of(*flags.split(), smallest_model)
    model = build_on_meta(settings, benchmark.build_model)
    trace_step(model, settings.precision)
    shadow = ShadowModel(model.unet)
    traced = work_of_update('EMA update', lambda: compute_ema(model.unet, shadow, 0.999))
    assert ema_update(model)['EMA update'].tolist() == traced['EMA update'].tolist()


@pytest.mark.parametrize('precision, fast', [('amp_bf16', ['NVIDIA L40S']), ('fp32', [])])
def test_a_card_without_a_known_peak_has_a_forecast_of_its_memory_alone(dry_run, precision, fast):
    forecasts, printed = dry_run(f'1 --gpu L40S T4 --precision {precision} --device_train_microbatch_size 2')
    assert [found.card.name for found in forecasts if not math.isnan(found.images_per_sec)] == fast
    [t4] = [row for row in rows_in(printed, 'GPUs') if row['GPUs'] == '1 x Tesla T4']
    assert [t4[heading] for heading in ('microbatch', 'images/s', 'days', 'dollars')] == ['2', '-', '-', '-']
    assert 'the largest microbatch' in [row['one change'] for row in rows_in(printed, 'one change')]


def test_a_run_too_large_for_every_card_is_refused_with_the_changes_that_would_help(capfd):
    flags = f'--dry_run 1 --image_size 8192 --gpu T4 --precision amp_fp16 --batch_size 1 --model_name {SMALLEST}'
    argv = flags.split()
    line = refusal(capfd, benchmark.main, argv)
    assert 'error: --gpu: a microbatch of 1 takes ' in line
    assert line.endswith(': --image_size 4096')
    assert benchmark.main([*argv, '--image_size', '4096'])
    line = refusal(capfd, benchmark.main, [*argv, '--gradient_checkpointing', '--image_size', '100000'])
    assert 'these changes together are not enough: --image_size 50000; latents' in line
    line = refusal(capfd, benchmark.main, [*argv, '--image_size', '10800'])
    assert 'make all of these changes: --gradient_checkpointing; --image_size 5400; latents' in line
    together = ['--gradient_checkpointing', '--image_size', '5400', '--use_synth_latents']
    assert benchmark.main([*argv, *together])


def test_a_compiled_run_is_forecast_faster_and_smaller(dry_run):
    [eager], _ = dry_run('1 --gpu H100-80GB --device_train_microbatch_size 64')
    [compiled], _ = dry_run('1 --gpu H100-80GB --device_train_microbatch_size 64 --compile')
    assert compiled.setup.compile is True
    assert not compiled.is_tested  # no published run tests this mode
    assert compiled.images_per_sec > eager.images_per_sec
    assert compiled.gib < eager.gib


@pytest.mark.parametrize('flags, changes', [
    ('--use_synth_latents --gradient_checkpointing --half_precision_norms', []),
    ('--precision amp_fp16 --device_train_microbatch_size 64 --gradient_checkpointing --half_precision_norms',
     ['latents (encode.py)']),
    ('--precision amp_fp16 --encoder_precision fp32 --use_synth_latents --gradient_checkpointing',
     ['--encoder_precision fp16', '--half_precision_norms'])])
def test_a_change_has_a_row_only_where_it_changes_something(dry_run, flags, changes):
    _, printed = dry_run(f'1 --image_size 64 --gpu V100-SXM2-32GB {flags}')
    assert [row['one change'] for row in rows_in(printed, 'one change')] == changes


def test_a_given_microbatch_that_fits_only_without_the_margin_is_not_refused():
    [found] = benchmark.main('--dry_run 1 --gpu H100-80GB --batch_size 80 --compile --device_train_microbatch_size 80'
                             .split())
    assert found.gib > H100.gib


def test_the_largest_published_encoding_took_at_most_15_percent_longer_than_forecast():
    """mosaicml/diffusion encoded 790 million images at 256 and at 512 px, and their captions, in 3,784 A100-hours.

    The text encoder takes 45.1 GFLOP per caption.
    """
    a100 = CARDS['NVIDIA A100-SXM4-40GB']
    seconds = 45.1e9 / (0.5 * a100.tflops * 1e12)
    for size in (256, 512):
        setup = Setup(encoder_precision='fp16', image_size=size, batch_size=1)
        seconds += 1 / forecast(setup, a100).encode_images_per_sec
    assert 1 < 3784 / (790e6 * seconds / 3600) < 1.15
