"""--dry_run: what it says against what was published and measured, and that it needs nothing but the flags."""
import dataclasses
from pathlib import Path

import pytest
import torch

import benchmark
from fitting.dry_run import CARDS, Estimate, estimate, in_a_row, parts_table, speed_table
from fitting.fake_step import FakeModel, build_fake
from fitting.memory import GIB, build_outline, taken_on_a_gpu
from models.loading import find_model
from models.peaks import PEAKS
from settings.train import Train
from tests.runs import one_error_line, settings_of

TINY = ['--model_name', 'tiny', '--image_size', '64', '--batch_size', '64']


def arguments(*flags: str) -> Train:
    return settings_of(*flags)


def fake_model(settings: Train, latents: bool = False) -> FakeModel:
    return build_fake(build_outline(settings, find_model(settings.model_name), latents, benchmark.build_model))


@pytest.fixture(scope='module')
def sd2() -> FakeModel:
    return fake_model(arguments('--dry_run', '1'))


@pytest.fixture(scope='module')
def milabench(sd2) -> Estimate:
    """One H200, 80 images in a single microbatch, encoders in bf16, no average."""
    settings = arguments('--dry_run', '1', '--batch_size', '80')
    return estimate('', settings, sd2)


@pytest.mark.long
def test_the_estimate_is_a_tenth_below_what_an_h200_took_and_within_what_is_added(milabench):
    images, taken = 80, 115.6  # GiB by NVML
    needed = milabench.needed(images)
    counted = sum(needed.values()) / GIB
    assert counted == pytest.approx(taken / 1.1, rel=0.02)
    assert 1 < taken_on_a_gpu(needed) / GIB / taken < 1.05


@pytest.mark.long
def test_of_32_images_it_is_as_near(milabench):
    settings = arguments('--dry_run', '1', '--batch_size', '32')
    needed = dataclasses.replace(milabench, settings=settings).needed(32)
    assert sum(needed.values()) / GIB == pytest.approx(55 / 1.1, rel=0.02)
    assert 1 < taken_on_a_gpu(needed) / GIB / 55 < 1.05


@pytest.mark.long
def test_each_image_more_takes_what_it_took_there(milabench):
    assert milabench.gib_per_image() == pytest.approx((115.6 - 55) / (80 - 32), rel=0.08)


@pytest.mark.long
def test_the_originals_microbatch_of_4_fits_40_gb_with_fused_attention_and_without_it_2(milabench, sd2):
    settings = arguments('--dry_run', '8', '--use_ema')
    matrices = estimate('', settings, sd2, fused_attention=False)
    assert matrices.largest_microbatch(CARDS['40 GB']) == 2
    fused = dataclasses.replace(matrices, step=milabench.step)
    assert fused.largest_microbatch(CARDS['40 GB']) >= 4


@pytest.mark.long
def test_buckets_are_counted_where_gradients_lie_beside_them(milabench):
    of_eight = dataclasses.replace(milabench, settings=arguments('--dry_run', '8', '--batch_size', '256'))
    assert of_eight.needed(16)['gradient buckets'] == milabench.lasting['gradients']
    assert 'gradient buckets' not in of_eight.needed(32) | milabench.needed(16)


@pytest.mark.long
def test_an_optimizer_that_is_not_fused_has_its_temporaries_when_activations_are_gone(milabench):
    settings = arguments('--dry_run', '--no-fused_optimizer')
    plain = dataclasses.replace(milabench, settings=settings)
    fused = dataclasses.replace(milabench, settings=arguments('--dry_run'))
    assert plain.needed(64) == fused.needed(64)  # within the microbatch
    lasting = sum(milabench.lasting.values())
    assert sum(plain.needed(1).values()) == lasting + milabench.lasting['weights'] > sum(fused.needed(1).values())


def figures(lines: list[str], start: str) -> list[str]:
    [line] = [line for line in lines if line.startswith(start)]
    return line.removeprefix(start).split()


def test_it_says_parameters_arithmetic_memory_and_speed_and_reads_only_an_index(shards, capfd, tmp_path, monkeypatch,
                                                                               smallest_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'index.json').write_bytes(Path(shards, 'index.json').read_bytes())
    capfd.readouterr()
    fitting = benchmark.main(['--dry_run', '8', *TINY, '--model_name', smallest_model, '--image_size', '32',
                              '--use_ema', '--training_images', '86400000', '--remote', '.'])
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert err == 'counting the memory of a step, with and without each switch\n'
    assert [path.name for path in tmp_path.iterdir()] == ['index.json']  # no record, no cache
    assert fitting == dict.fromkeys(CARDS, 8)
    assert '8 images a step on each of 8 GPUs' in lines[0]
    model = benchmark.StableDiffusion(smallest_model, 32)
    unet = sum(weight.numel() for weight in model.unet.parameters())
    assert figures(lines, 'UNet, forward and backward') == [f'{unet:,}', f'{model.flops_per_image["unet"] / 1e9:,.1f}']
    assert figures(lines, 'GiB by microbatch') == ['1', '2', '4', '8']
    for item in ('weights', 'gradients', 'Adam moments', 'average of the weights', 'gradient buckets', 'VAE  ',
                 'cast weights', 'activations', 'working memory', 'counted'):
        assert len(figures(lines, item)) == 4
    for switches in ('as given', '--gradient_checkpointing', 'attention without a fused kernel'):
        assert figures(lines, switches)[:4] == ['8'] * 4
    assert_speeds(lines, 8 * 312e12 / sum(model.flops_per_image.values()))


def assert_speeds(lines: list[str], images_per_sec: float) -> None:
    """Of 8 A100s, for 1000 seconds of 86400 images, at $2; and that every card that has bf16 is there."""
    speed, _, half, _, _, days, *_, dollars, _, _, _, _ = figures(lines, 'NVIDIA A100-SXM4-40GB')[1:]
    assert float(speed.replace(',', '')) == pytest.approx(images_per_sec, rel=0.01)
    assert float(half.replace(',', '')) == pytest.approx(images_per_sec / 2, rel=0.01)
    assert float(days) == pytest.approx(1000 / images_per_sec, rel=0.01)
    assert float(dollars.removeprefix('$')) == pytest.approx(8 * 24 * 2 * 1000 / images_per_sec, rel=0.01)
    assert sum(line.startswith(tuple(PEAKS)) for line in lines) == sum(bool(peak.bf16) for peak in PEAKS.values())


def test_latents_need_no_vae(smallest_model):
    settings = arguments('--dry_run', *TINY, '--model_name', smallest_model, '--use_synth_latents')
    needed = estimate('', settings, fake_model(settings, latents=True))
    assert 'VAE' not in needed.lasting
    assert not [line for line in parts_table(needed.model) if line.startswith('VAE')]


def test_what_costs_nothing_is_said_to():
    assert in_a_row([0.0, 12.34], '$') == '$0 / $12.3'


def test_in_float32_nothing_is_said_of_speed():
    lines = speed_table(arguments('--dry_run', *TINY, '--precision', 'fp32'), 10 ** 9)
    assert lines[-1] == 'No peak is known in fp32, so nothing is said of speed.'


@pytest.mark.parametrize('flags, words', [
    (['--dry_run', '7'], '--batch_size 64 does not divide over 7 devices'),
    (['--dry_run', '8', '--device_train_microbatch_size', '3'], 'size 3 does not divide the 8 images'),
    (['--dry_run', '0'], '0 is not a whole number above 0'),
    (['--dry_run', '--loader_only'], 'give one of them'),
    (['--dry_run', '--image_size', '100'], 'not a multiple of 8; use 96'),
    (['--dry_run', '--remote', '/nowhere'], '--remote /nowhere is no folder'),
])
def test_flags_that_cannot_run_are_refused_in_one_line(flags, words, capfd):
    assert words in one_error_line([*TINY, *flags], capfd)


def test_a_run_and_its_dry_run_build_the_same_model(smallest_model):
    settings = arguments('--dry_run', *TINY, '--model_name', smallest_model, '--gradient_checkpointing')
    [fake, real] = [fake_model(settings).model, benchmark.build_model(settings, False)]
    assert fake.unet.is_gradient_checkpointing and real.unet.is_gradient_checkpointing
    sizes = [{name: (weight.shape, weight.dtype) for name, weight in model.state_dict().items()}
             for model in (fake, real)]
    assert sizes[0] == sizes[1]
    assert find_model(smallest_model).configs['unet'].items() <= dict(fake.unet.config).items()
    assert torch.get_default_device() == torch.device('cpu')
