"""--dry_run: what it says against what was published and measured, and that it needs nothing but the flags."""
import dataclasses
import functools
import json
from pathlib import Path

import pytest
from composer import ComposerModel

import benchmark
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.forecast.dry_run import MEMORY_SIZES, Estimate, cost_table, estimate, measured_speeds
from sdbench.forecast.memory import build_on_meta, lasting_bytes
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.gpus import CARDS, cards_named
from sdbench.measuring.power import GIB
from sdbench.models.loading import find_model
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


def test_days_and_dollars_of_an_untested_run_are_one_figure_and_say_so(printed):
    lines, _, _ = printed
    speed = number(figures(lines, A100, 'images/s on 8 GPUs, by microbatch')[-1])
    given, days, dollars, *words = figures(lines, A100, 'at the largest microbatch')
    assert number(given) == speed
    assert number(days) == pytest.approx(1000 / speed, rel=0.01)
    assert number(dollars) == pytest.approx(number(days) * 8 * 24 * 2, rel=0.01)
    assert words == ['not', 'tested']
    assert not any(line.startswith('A range is') for line in lines)


@functools.cache
def outline(model_name: str, latents: bool) -> ComposerModel:
    settings = settings_of('--dry_run', '--model_name', model_name)
    return build_on_meta(settings, find_model(model_name), latents, benchmark.build_model)


def untraced(*flags: str) -> Estimate:
    settings = settings_of('--dry_run', *flags)
    return Estimate('', settings, outline(settings.model_name, settings.use_synth_latents), {}, None, None)


def test_days_and_dollars_have_the_range_of_the_error_where_it_is_tested(monkeypatch):
    monkeypatch.setattr(Estimate, 'microbatch_on', lambda self, card: 32)
    monkeypatch.setattr(Estimate, 'images_per_sec', lambda self, card, microbatch: 100.0)
    run = untraced('8', '--training_images', '86400000')
    row = cost_table(run, [CARDS['NVIDIA H100 80GB HBM3']]).iloc[0]
    slow, fast = map(number, row['images/s'].split(' to '))
    shortest, longest = map(number, row['days'].split(' to '))
    least, most = map(number, row['dollars'].split(' to '))
    assert (slow, fast) == pytest.approx((100 / (1 + LARGEST_ERROR), 100 * (1 + LARGEST_ERROR)), rel=0.01)
    assert (shortest, longest) == pytest.approx((1000 / fast, 1000 / slow), rel=0.01)
    assert (least, most) == pytest.approx((shortest * 8 * 24 * 2, longest * 8 * 24 * 2), rel=0.01)


@pytest.mark.parametrize('card, flags, tested', [
    ('NVIDIA H100 80GB HBM3', ['8'], True),
    ('NVIDIA H100 80GB HBM3', ['1', '--batch_size', '4'], True),
    ('NVIDIA A100-SXM4-40GB', ['64'], True),
    ('NVIDIA H100 80GB HBM3', ['8', '--batch_size', '64'], False),      # 8 images a step on each
    ('NVIDIA A100-SXM4-40GB', ['64', '--batch_size', '64'], False),
    ('NVIDIA H100 80GB HBM3', ['16'], False),                           # GPUs
    ('NVIDIA L40S', ['4', '--batch_size', '64'], False),
    ('NVIDIA GeForce RTX 4090', ['8', '--batch_size', '16'], False),    # a card
    ('NVIDIA H100 80GB HBM3', ['8', '--image_size', '256'], False),
    ('NVIDIA H100 80GB HBM3', ['8', '--compile'], False),
    ('NVIDIA H100 80GB HBM3', ['8', '--attention', 'math'], False),
    ('NVIDIA H100 80GB HBM3', ['8', '--model_name', 'tiny'], False),
])
def test_a_range_is_given_only_inside_of_what_was_tested(card, flags, tested):
    assert untraced(*flags).is_tested(CARDS[card]) is tested


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


H100 = CARDS['NVIDIA H100 80GB HBM3']


def test_what_was_measured_of_the_same_model_and_input_stands_beside_the_forecast():
    run = untraced('2')
    record = {'device': H100.name, 'num_devices': 2, 'image_size': 512, 'model_name': run.settings.model_name,
              'encoders': 'in_loop', 'device_train_microbatch_size': 16, 'batch_size': 64, 'channels_last': True,
              'use_ema': True, 'compile': 'default', 'images_per_sec': 99.5}
    others = [record | changes for changes in (
        {'model_name': 'tiny'}, {'encoders': 'text_in_loop'}, {'device': 'NVIDIA L4'}, {'image_size': 256},
        {'status': 'failed'}, {'stage': 'encode'}, {'measured_batches': 3})]
    measured = measured_speeds(run, [H100], [*others, record, {'device': H100.name, 'images_per_sec': 400}])
    assert list(measured['images/s']) == [189.28, 385.31, 99.5]
    assert list(measured['microbatch']) == [4, 32, 16]
    assert list(measured['with']) == ['--use_ema', '--use_ema', '--batch_size 64 --use_ema --compile default']
    assert list(measured['file']) == ['published.csv', 'published.csv', 'results.jsonl']


def test_published_speeds_stand_under_no_other_model_and_no_other_input():
    assert measured_speeds(untraced('8', '--model_name', 'tiny'), [H100], []).empty
    assert measured_speeds(untraced('8', '--use_synth_latents'), [H100], []).empty


def test_lines_that_are_no_record_are_named_and_the_forecast_goes_on(smallest_model, tmp_path, capfd):
    results = tmp_path / 'results.jsonl'
    record = {'device': H100.name, 'image_size': 32, 'model_name': smallest_model, 'encoders': 'in_loop',
              'images_per_sec': 1234.5}
    results.write_text('{"device": "NVIDIA H1\n5\n' + json.dumps(record))
    benchmark.main(['--dry_run', '1', *TINY, '--model_name', smallest_model, '--image_size', '32', '--gpu', 'H100',
                    '--results', str(results)])
    said = capfd.readouterr()
    assert '1234.5' in said.out
    before, _, _ = said.err.partition('counting memory and work of a step')
    for number in (1, 2):
        assert f'{results}:{number} is no record, and is passed over: ' in before


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
