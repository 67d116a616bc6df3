"""--dry_run: its forecasts agree with published and measured runs, and it needs only the flags."""
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import benchmark
from ema import ShadowModel, compute_ema
from sdbench.forecast.forecast import bytes_needed, forecast, gib_taken, network_rate
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


SMALL = ['--batch_size', '64', '--image_size', '32', '--use_ema', '--max_duration', '135000000000ba']


def test_an_index_is_enough_and_one_screen_has_every_card_the_cheapest_first(shards, tmp_path, smallest_model, capsys):
    (tmp_path / 'index.json').write_bytes(Path(shards, 'index.json').read_bytes())
    forecasts = benchmark.main(['--dry_run', '8', *SMALL, '--model_name', smallest_model, '--remote', '.', '--gpu',
                                'A100', '--dollars_per_gpu_hour', '3', 'A100-40GB=1'])
    assert [path.name for path in tmp_path.iterdir()] == ['index.json']  # nothing is stored
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120 and len(lines) <= 40

    start = lines.index('') + 1
    assert lines[start].split() == ['GPUs', 'microbatch', 'GiB', 'taken', 'images/s', 'days', 'dollars']
    assert len(forecasts) == 4
    costs = []
    for line, found in zip(lines[start + 1:start + 5], forecasts, strict=True):
        name, microbatch, taken, _, days, dollars = re.split('  +', line)
        assert (name, microbatch) == (found.card.name.replace('NVIDIA', '8 x'), '8')
        assert float(taken) == pytest.approx(found.gib, abs=0.05)
        price = 1 if '40GB' in name else 3
        assert number(dollars) == pytest.approx(number(days) * 8 * 24 * price, rel=0.01)
        costs.append(number(dollars))
    assert costs == sorted(costs)
    text = ' '.join(lines)
    for price in ('A100 40GB $1', 'A100 PCIE 40GB $1', 'A100 80GB $3', 'A100 80GB PCIe $3'):
        assert price in text
    [epochs] = re.findall(r'8,640,000,000,000 images \(([\d,]+) epochs\)', text)
    samples = sum(shard['samples'] for shard in json.loads(Path('index.json').read_text())['shards'])
    assert number(epochs) * max(1, samples // 64) == 8_640_000_000_000 / 64
    [speed] = re.findall('Encoding all images once, for a training on latents: ([0-9,]+) images/s', text)
    assert number(speed) == pytest.approx(forecasts[0].encode_images_per_sec, rel=0.01)


def number(text: str) -> float:
    return float(text.replace(',', ''))


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


def test_several_gpu_counts_have_a_row_for_each_card_and_count_with_its_efficiency(smallest_model, capfd):
    argv = ['--dry_run', '64', '2', '16', '--batch_size', '64', '--image_size', '32', '--model_name',
            smallest_model, '--gpu', 'H100 80GB', 'B200', '--network_gbits', '10', '--max_duration', '135000000000ba']
    forecasts = benchmark.main(argv)
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    [start] = [number for number, line in enumerate(lines) if line.startswith('GPUs')]
    assert lines[start].split() == ['GPUs', 'microbatch', 'GiB', 'taken', 'images/s', 'each', 'efficiency', 'days',
                                    'GPU-hours', 'dollars']
    for name, device, price in (('H100 80GB HBM3', H100.name, 2.95), ('B200', 'NVIDIA B200', 5.5)):  # list prices
        records = [found for found in forecasts if found.card.name == device]
        assert [record.setup.num_devices for record in records] == [2, 16, 64]
        machines = [(record.setup.machines, record.setup.network_gbits) for record in records]
        assert machines == [(1, 10), (2, 10), (8, 10)]
        shown = [line for line in lines if line.split('  ')[0].endswith(f' x {name}')]
        for record, line in zip(records, shown, strict=True):
            count, microbatch, _, speed, each, efficiency, days, hours, dollars = re.split('  +', line)
            assert count == f'{record.setup.num_devices} x {name}'
            assert number(speed) == pytest.approx(record.images_per_sec, rel=0.01)
            assert number(each) == pytest.approx(record.images_per_sec / record.setup.num_devices, rel=0.01)
            expected = number(each) / (records[0].images_per_sec / 2)
            assert number(efficiency.rstrip('%')) / 100 == pytest.approx(expected, rel=0.02)
            assert number(days) == pytest.approx(1e8 / record.images_per_sec, rel=0.01)
            assert number(hours) == pytest.approx(number(days) * 24 * record.setup.num_devices, rel=0.02)
            assert number(dollars) == pytest.approx(price * number(hours), rel=0.01)
            assert int(microbatch) == 64 // record.setup.num_devices


def test_the_cheapest_gpu_by_its_price_comes_first_and_gpus_without_a_price_come_last(capfd):
    """Eight B200 are faster for each GPU-hour than eight H100, but cost more by the list prices."""
    def order(*flags: str) -> list[str]:
        benchmark.main(['--dry_run', '8', '--gpu', 'B200', 'H100-80GB', 'H100-NVL', *flags])
        return re.findall(r'^8 x (?:NVIDIA )?(\S+(?: NVL)?) .* (\S+)$', capfd.readouterr().out, re.MULTILINE)

    listed = order()
    assert [name for name, _ in listed] == ['H100', 'B200', 'H100 NVL']
    assert listed[-1][1] == '-'
    assert [name for name, _ in order('--dollars_per_gpu_hour', '2')] == ['B200', 'H100', 'H100 NVL']


def test_the_work_of_an_ema_update_agrees_with_a_trace_of_the_real_one(smallest_model):
    settings = settings_of('--dry_run', '1', *SMALL, '--model_name', smallest_model)
    model = build_on_meta(settings, benchmark.build_model)
    trace_step(model, settings.precision)
    shadow = ShadowModel(model.unet)
    traced = work_of_update('EMA update', lambda: compute_ema(model.unet, shadow, 0.999))
    assert ema_update(model)['EMA update'].tolist() == traced['EMA update'].tolist()


@pytest.mark.parametrize('precision, fast', [('amp_bf16', ['NVIDIA L40S']), ('fp32', [])])
def test_a_card_without_a_known_peak_has_a_forecast_of_its_memory_alone(smallest_model, capfd, precision, fast):
    forecasts = benchmark.main(['--dry_run', '1', *SMALL, '--model_name', smallest_model, '--gpu', 'L40S', 'T4',
                                '--precision', precision, '--device_train_microbatch_size', '2'])
    assert [found.card.name for found in forecasts if not math.isnan(found.images_per_sec)] == fast
    printed = capfd.readouterr().out
    assert re.search(r'^1 x Tesla T4  +2  +[0-9.]+  +-  +-  +-$', printed, re.MULTILINE)  # no speed, days and dollars
    assert 'A speed of - means' in printed
    assert re.search('^the largest microbatch +64', printed, re.MULTILINE)


def test_a_run_too_large_for_every_card_is_refused_with_the_changes_that_would_help(capfd):
    argv = ['--dry_run', '1', '--model_name', SMALLEST, '--image_size', '8192', '--gpu', 'T4', '--precision',
            'amp_fp16', '--batch_size', '1']
    line = refusal(capfd, benchmark.main, argv)
    assert 'error: --gpu: a microbatch of 1 takes ' in line
    assert line.endswith('; each of these alone is enough: --image_size 4096')
    assert benchmark.main([*argv, '--image_size', '4096'])
    line = refusal(capfd, benchmark.main, [*argv, '--gradient_checkpointing', '--image_size', '100000'])
    assert line.endswith('; none of these alone is enough: --image_size 50000; latents (encode.py); combine them, or '
                         'use a GPU with more memory')


def test_a_compiled_run_is_forecast_faster_and_smaller_and_has_the_same_table_of_changes(smallest_model, capfd):
    argv = ['--dry_run', '1', *SMALL, '--model_name', smallest_model, '--gpu', 'H100 80GB',
            '--device_train_microbatch_size', '64']
    [eager] = benchmark.main(argv)
    changes = [line for line in capfd.readouterr().out.splitlines() if re.match('(--|without|latents).*  ', line)]
    [compiled] = benchmark.main([*argv, '--compile'])
    printed = capfd.readouterr().out
    assert 'fused kernels' in printed
    assert len(re.findall('^(?:--|without|latents).*  ', printed, re.MULTILINE)) == len(changes) == 4
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
def test_a_change_has_a_row_only_where_it_changes_something(smallest_model, capfd, flags, changes):
    argv = '--dry_run 1 --batch_size 64 --image_size 64 --gpu V100-SXM2-32GB'
    benchmark.main([*argv.split(), '--model_name', smallest_model, *flags.split()])
    lines = capfd.readouterr().out.partition('\nGiB, by')[0].partition('\none change')[2].splitlines()[1:]
    assert [re.split('  +', line)[0] for line in lines if line] == changes


def test_a_given_microbatch_that_fits_only_without_the_margin_is_said_to_be_unsure(capfd):
    [found] = benchmark.main('--dry_run 1 --gpu H100-80GB --batch_size 80 --compile --device_train_microbatch_size 80'
                             .split())
    assert found.gib > H100.gib
    assert 'may still fit, because GiB taken includes a margin of 12%' in ' '.join(capfd.readouterr().out.split())


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
