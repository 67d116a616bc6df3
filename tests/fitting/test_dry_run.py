"""--dry_run: what it says against what was published and measured, and that it needs nothing but the flags."""
import csv
import dataclasses
from pathlib import Path

import pytest

import benchmark
from fitting.dry_run import CARDS, SHARES_OF_PEAK, Estimate, estimate, gpus_named
from fitting.memory import GIB, lasting_bytes
from models.flops import utilization
from models.peaks import PEAKS
from tests.runs import ROOT, one_error_line, settings_of

TINY = ['--model_name', 'tiny', '--image_size', '64', '--batch_size', '64']


@pytest.fixture(scope='module')
def milabench() -> Estimate:
    """One H200, 80 images in a single microbatch, encoders in bf16, no average."""
    return estimate('', settings_of('--dry_run', '1', '--batch_size', '80'), False, benchmark.build_model)


@pytest.mark.long
@pytest.mark.parametrize('images, taken', [(80, 115.6), (32, 55)])  # GiB by NVML
def test_the_estimate_is_a_tenth_below_what_an_h200_took_and_within_what_is_added(milabench, images, taken):
    run = dataclasses.replace(milabench, settings=settings_of('--dry_run', '1', '--batch_size', images))
    assert sum(run.needed(images).values()) / GIB == pytest.approx(taken / 1.1, rel=0.02)
    assert 1 < run.taken(images) / taken < 1.05


@pytest.mark.long
def test_the_originals_microbatch_of_4_fits_40_gb(milabench):
    settings = settings_of('--dry_run', '8', '--use_ema')
    run = dataclasses.replace(milabench, settings=settings, lasting=lasting_bytes(settings, milabench.model, 8))
    assert run.largest_microbatch(CARDS['40 GB']) >= 4


def figures(lines: list[str], start: str) -> list[str]:
    [line] = [line for line in lines if line.startswith(start)]
    return line.removeprefix(start).split()


def test_it_says_parameters_arithmetic_memory_and_speed_and_reads_only_an_index(shards, capfd, tmp_path, monkeypatch,
                                                                               smallest_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'index.json').write_bytes(Path(shards, 'index.json').read_bytes())
    fitting = benchmark.main(['--dry_run', '8', *TINY, '--model_name', smallest_model, '--image_size', '32',
                              '--use_ema', '--training_images', '86400000', '--remote', '.', '--gpu', 'A100'])
    lines = capfd.readouterr().out.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ['index.json']  # no record, no cache
    assert fitting == dict.fromkeys(CARDS, 8)
    assert '8 images a step on each of 8 GPUs' in lines[0]
    model = benchmark.StableDiffusion(smallest_model, 32)
    unet = sum(weight.numel() for weight in model.unet.parameters())
    gflops = sum(model.flops_per_image.values()) / 1e9
    assert f'{unet:,} parameters of the UNet are trained, with {gflops:,.1f} GFLOP of arithmetic for an image' in lines
    assert figures(lines, 'GiB by microbatch') == ['1', '2', '4', '8']
    for item in ('weights', 'gradients', 'Adam moments', 'average of the weights', 'gradient buckets', 'VAE  ',
                 'cast weights', 'activations', 'working memory', 'counted'):
        assert len(figures(lines, item)) == 4
    for switches in ('as given', '--gradient_checkpointing', '--half_precision_norms', 'latents (encode.py)'):
        assert figures(lines, switches)[:4] == ['8'] * 4
    _, _, _, _, half, days, _, _, _, _, dollars, *_ = figures(lines, 'NVIDIA A100-SXM4-40GB')[1:]
    images_per_sec = 8 * 312e12 / sum(model.flops_per_image.values())
    assert float(half.replace(',', '')) == pytest.approx(images_per_sec / 2, rel=0.01)
    assert float(days) == pytest.approx(1000 / images_per_sec / SHARES_OF_PEAK[0], rel=0.01)
    assert float(dollars) == pytest.approx(float(days) * 8 * 24 * 2, rel=0.01)
    assert [line.split('  ')[0] for line in lines if line.startswith(tuple(PEAKS))] == gpus_named('A100')


def test_the_first_share_of_the_peak_is_what_the_published_a100s_reached():
    with open(ROOT / 'published.csv') as file:
        row = next(csv.DictReader(file))
    flops = 3570.5e9  # of an image at 512 pixels, encoders included
    reached = utilization(float(row['images_per_sec']) / int(row['num_devices']), flops, 'amp_bf16',
                          'NVIDIA A100-SXM4-40GB')
    assert (row['num_devices'], row['image_size']) == ('8', '512')
    assert SHARES_OF_PEAK[0] == pytest.approx(reached['mfu'], abs=0.005)


def test_a_gpu_is_named_by_its_name_in_records_or_by_a_part_of_it():
    assert gpus_named('A100-40GB') == ['NVIDIA A100-SXM4-40GB', 'NVIDIA A100-PCIE-40GB']
    assert gpus_named('NVIDIA H100 80GB HBM3') == ['NVIDIA H100 80GB HBM3'] and gpus_named(None) == list(PEAKS)


@pytest.mark.parametrize('flags, words', [
    (['--dry_run', '--gpu', 'H1000'], '--gpu H1000 is no GPU that is known here; give one of NVIDIA A100-SXM4-40GB, '),
    (['--dry_run', '7'], '--batch_size 64 does not divide over 7 devices'),
    (['--dry_run', '--remote', '/nowhere'], '--remote /nowhere holds no index.json'),
])
def test_flags_that_cannot_run_are_refused_in_one_line(flags, words, capfd):
    assert words in one_error_line([*TINY, *flags], capfd)
