"""--dry_run: what it says against what was published and measured, and that it needs nothing but the flags."""
import dataclasses
import json
from pathlib import Path

import pytest

import benchmark
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.forecast.dry_run import MEMORY_SIZES, Estimate, estimate, measured_speeds
from sdbench.forecast.memory import lasting_bytes
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.gpus import CARDS, cards_named
from sdbench.measuring.power import GIB
from tests.runs import one_error_line, settings_of

TINY = ['--model_name', 'tiny', '--image_size', '64', '--batch_size', '64']
A100 = 'NVIDIA A100-SXM4-40GB'


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
    assert run.largest_microbatch(MEMORY_SIZES['40 GB']) >= 4


def figures(lines: list[str], start: str, after: str = '') -> list[str]:
    """The words behind `start` in the first line that begins so, below the first line that begins with `after`."""
    first = [line.startswith(after) for line in lines].index(True)
    line = next(line for line in lines[first:] if line.startswith(start))
    return line.removeprefix(start).split()


def number(text: str) -> float:
    return float(text.replace(',', ''))


@pytest.fixture(scope='module')
def printed(shards, tmp_path_factory, smallest_model) -> tuple[list[str], dict, Path]:
    """What a dry run of a small model prints, what it returns, and the folder that it ran in."""
    folder = tmp_path_factory.mktemp('dry_run')
    (folder / 'index.json').write_bytes(Path(shards, 'index.json').read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        text = []
        patch.setattr('builtins.print', lambda *words, sep=' ', **_: text.append(sep.join(words)))
        fitting = benchmark.main(['--dry_run', '8', *TINY, '--model_name', smallest_model, '--image_size', '32',
                                  '--use_ema', '--training_images', '86400000', '--remote', '.', '--gpu', 'A100'])
    return '\n'.join(text).splitlines(), fitting, folder


def test_it_needs_only_an_index_and_leaves_no_record(printed):
    _, _, folder = printed
    assert [path.name for path in folder.iterdir()] == ['index.json']


def test_it_says_parameters_and_arithmetic(printed, smallest_model):
    lines, _, _ = printed
    model = benchmark.StableDiffusion(smallest_model, 32)
    unet = sum(weight.numel() for weight in model.unet.parameters())
    gflops = sum(model.flops_per_image.values()) / 1e9
    assert f'{unet:,} parameters of the UNet are trained, with {gflops:,.1f} GFLOP of arithmetic for an image' in lines
    assert any('8 images a step on each of 8 GPUs' in line for line in lines)


def test_it_says_the_memory_of_each_microbatch_and_the_largest_that_fits(printed):
    lines, fitting, _ = printed
    assert fitting == {card.name.removeprefix('NVIDIA '): 8 for card in cards_named('A100')}
    assert figures(lines, 'GiB at the peak of a step, by microbatch') == ['1', '2', '4', '8']
    for item in ('weights', 'gradients', 'Adam moments', 'average of the weights', 'gradient buckets', 'VAE  ',
                 'cast weights', 'activations', 'working memory', 'counted'):
        assert len(figures(lines, item)) == 4
    for switches in ('as given', '--gradient_checkpointing', '--half_precision_norms', 'latents (encode.py)'):
        assert figures(lines, switches, 'largest microbatch on')[:4] == ['8'] * 4


def test_days_and_dollars_have_the_range_of_the_error(printed):
    lines, _, _ = printed
    speed = number(figures(lines, A100, 'images/s on 8 GPUs, by microbatch')[-1])
    slow, _, fast, shortest, _, longest, least, _, most = map(
        lambda word: word if word == 'to' else number(word), figures(lines, A100, 'at the largest microbatch'))
    assert slow == pytest.approx(speed / (1 + LARGEST_ERROR), rel=0.01)
    assert fast == pytest.approx(speed * (1 + LARGEST_ERROR), rel=0.01)
    assert shortest == pytest.approx(1000 / fast, rel=0.01)
    assert longest == pytest.approx(1000 / slow, rel=0.01)
    assert least == pytest.approx(shortest * 8 * 24 * 2, rel=0.01)
    assert most == pytest.approx(longest * 8 * 24 * 2, rel=0.01)


def test_the_shares_of_the_time_by_kind_of_operator_are_all_of_it(printed):
    lines, _, _ = printed
    start = [line.startswith('where the time goes') for line in lines].index(True)
    shares = []
    for line in lines[start + 1:lines.index('', start)]:
        shares.append(int(line.split()[-1].removesuffix('%')))
    assert sum(shares) == pytest.approx(100, abs=len(shares) / 2)


def test_latents_are_said_to_be_faster(printed):
    lines, _, _ = printed
    given, latents = (number(figures(lines, row, 'images/s with one change')[0])
                      for row in ('as given', 'latents (encode.py)'))
    assert latents > given


def test_what_was_measured_on_the_same_card_stands_beside_the_forecast(tmp_path):
    results = tmp_path / 'results.jsonl'
    record = {'device': 'NVIDIA H100 80GB HBM3', 'num_devices': 2, 'image_size': 512, 'images_per_sec': 99.5}
    others = [record | {'device': 'NVIDIA L4'}, record | {'image_size': 256}, record | {'status': 'failed'},
              record | {'stage': 'encode'}, record | {'measured_batches': 3}]
    results.write_text('\n'.join(json.dumps(each) for each in [record, *others]))
    measured = measured_speeds(settings_of('--dry_run', '--results', results), [CARDS['NVIDIA H100 80GB HBM3']])
    assert list(measured['images/s']) == [189.28, 385.31, 99.5]
    assert set(measured['file']) == {'published.csv', str(results)}


def test_without_a_name_every_card_whose_peak_is_known_is_forecast(smallest_model, capfd):
    benchmark.main(['--dry_run', '1', *TINY, '--model_name', smallest_model, '--image_size', '32'])
    printed = capfd.readouterr().out
    assert 'NVIDIA H100 80GB HBM3' in printed
    assert 'Tesla' not in printed  # which have no bf16
    assert 'AMD' not in printed
    heading = figures(printed.splitlines(), 'largest microbatch on')
    assert heading == ['24', 'GB', '40', 'GB', '80', 'GB', '141', 'GB']


def test_of_a_card_that_is_not_nvidias_the_memory_is_said_and_no_speed(smallest_model, capfd):
    fitting = benchmark.main(['--dry_run', '1', *TINY, '--model_name', smallest_model, '--image_size', '32', '--gpu',
                              'MI300X'])
    printed = capfd.readouterr().out
    assert fitting == {'AMD Instinct MI300X': 64}
    assert figures(printed.splitlines(), 'largest microbatch on') == ['AMD', 'Instinct', 'MI300X']
    assert "The forecast is fitted to NVIDIA's GPUs, so nothing is said of the speed of others." in printed
    assert 'images/s' not in printed


def test_a_microbatch_that_is_asked_for_is_forecast_beside_the_largest(smallest_model, capfd):
    benchmark.main(['--dry_run', '1', *TINY, '--model_name', smallest_model, '--image_size', '32', '--gpu', 'L40S',
                    '--device_train_microbatch_size', '2'])
    lines = capfd.readouterr().out.splitlines()
    by_microbatch = figures(lines, 'NVIDIA L40S', 'images/s on 1 GPU, by microbatch')
    assert figures(lines, 'as given', 'images/s with one change') == by_microbatch[1:2]
    assert figures(lines, 'the largest microbatch', 'images/s with one change') == by_microbatch[-1:]


def test_a_card_that_is_not_known_is_refused_by_the_flags_alone(capsys):
    with pytest.raises(SystemExit) as exit:
        parse(Train, '', ['--dry_run', '--gpu', 'H1000'], 'benchmark.py')
    assert exit.value.code == 2
    assert 'error: --gpu H1000 is no GPU that is known here' in capsys.readouterr().err


@pytest.mark.parametrize('flags, words', [
    (['--dry_run', '7'], '--batch_size 64 does not divide over 7 devices'),
    (['--dry_run', '--remote', '/nowhere'], '--remote /nowhere holds no index.json'),
])
def test_flags_that_cannot_run_are_refused_in_one_line(flags, words, capfd):
    assert words in one_error_line([*TINY, *flags], capfd)
