"""A dataset is claimed once, written part by part and joined, and files of other people are not touched."""
import dataclasses
import json
import os
import shlex
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdbench.datasets.output import OutputFolder, PartWriter
from sdbench.errors import UserError
from sdbench.files import CLAIM
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.flags.training_command import (
    FEWEST_FROM_RANDOM,
    FINE_TUNED,
    caution_about_steps,
    fine_tuning_recipe,
    forecast_command,
    random_weights_recipe,
    training_command,
)
from tests.local_s3 import local_s3
from tests.runs import ROOT, settings_of

SETTINGS = {'program': 'convert.py', 'size_limit': 1}


@pytest.fixture(params=['folder', 'store'])
def output(request, tmp_path, monkeypatch):
    with local_s3(monkeypatch):
        yield OutputFolder(str(tmp_path / 'out') if request.param == 'folder' else 's3://bucket/some/out', 'OUT')


def begin(output, *sources: str) -> None:
    with output.begun(SETTINGS, sources):
        pass


@pytest.mark.parametrize('captions, samples', [(['x' * 300, 'a', 'y' * 300], [1, 1, 1]), ([], [])])
def test_a_sample_larger_than_a_shard_gets_its_own_and_no_shard_is_empty(output, captions, samples):
    begin(output)
    part = PartWriter(output, 'one', {'caption': 'str'}, shard_bytes=220)
    for caption in captions:
        part.write({'caption': caption})
    part.finish()
    assert [shard['samples'] for shard in json.loads(output.read('one/index.json'))['shards']] == samples


@pytest.mark.parametrize('name, words', [('one/index.json', 'already holds other files'), (CLAIM, 'is not JSON')])
def test_an_out_with_other_files_or_a_truncated_claim_is_refused_and_the_files_stay(output, name, words):
    output.write(name, b'{"layout"')
    with pytest.raises(UserError, match=f'OUT {output.out} .*{words}'):
        begin(output)
    assert list(output.names()) == [name]
    assert output.read(name) == b'{"layout"'


@pytest.mark.parametrize('samples, model_name, pretrained, expected', [
    (120, FINE_TUNED, True, {'batch_size': 4, 'load_weights': FINE_TUNED, 'learning_rate': 1e-5}),
    (7, 'sd', True, {'batch_size': 1, 'max_duration': '400ba', 'load_weights': 'sd', 'learning_rate': 5e-6,
                     'use_ema': False, 'compile': False}),
    (3_000, 'sd', True, {'batch_size': 16, 'max_duration': '9375ba', 'load_weights': 'sd', 'learning_rate': 1e-5,
                         'compile': True, 'clip_grad_norm': 1}),
    (133, 'tiny', True, {'max_duration': '2000ba', 'load_weights': None, 'learning_rate': 1e-3, 'use_ema': True}),
    (133, 'own', True, {'max_duration': '10000ba', 'load_weights': None, 'learning_rate': 1e-4}),
    (133, 'sd', False, {'batch_size': 16, 'max_duration': '10000ba', 'load_weights': None, 'use_ema': True,
                        'sample_prompts': None, 'compile': True}),
    (1_000_000, 'sd', True, {'batch_size': 512, 'load_weights': None, 'learning_rate': 1e-4, 'compile': True})])
def test_the_training_command_fits_the_number_of_samples(samples, model_name, pretrained, expected):
    for model in ('own', FINE_TUNED):  # models without weights of their UNet; one may still be downloading
        os.makedirs(f'{model}/unet')
    _, program, *argv = shlex.split(training_command('photos-mds', samples, model_name, pretrained))
    settings = parse(Train, '', argv, program)
    for flag, value in expected.items():
        assert getattr(settings, flag) == value, flag


@given(samples=st.integers(1, FEWEST_FROM_RANDOM), more=st.integers(0, 1000))
def test_fine_tuning_sees_each_image_often_enough_and_not_too_often(samples, more):
    recipe = fine_tuning_recipe(samples)
    seen = recipe.images_seen
    assert seen >= 400
    assert seen < max(400, 50 * samples) + 16  # the last batch may be filled up
    if samples <= 24:
        assert recipe.batch_size == 1
        assert seen <= 1200
    assert fine_tuning_recipe(samples + more).images_seen >= seen


@pytest.mark.parametrize('recipe_for', [fine_tuning_recipe, random_weights_recipe,
                                        partial(random_weights_recipe, is_tiny=True)])
@given(samples=st.integers(1, 10 ** 10))
def test_every_recipe_has_a_batch_that_the_dataset_fills_and_ten_epochs(recipe_for, samples):
    recipe = recipe_for(samples)
    assert 1 <= recipe.batch_size <= min(samples, 2048)
    assert 2048 % recipe.batch_size == 0  # so it divides among the GPUs of a machine
    assert recipe.images_seen >= 10 * samples
    assert recipe.batches >= 1


@given(samples=st.integers(1, 10 ** 8), out=st.sampled_from(['a/photos-mds', 's3://bucket/composer/mds/']))
def test_what_is_forecast_is_the_training_and_each_model_has_its_own_folder(samples, out):
    commands = [training_command(out, samples, model, True) for model in ('sd15', 'tiny')]
    runs = [parse(Train, '', shlex.split(command)[2:], 'benchmark.py') for command in commands]
    assert len({run.save_folder for run in runs}) == 2
    for run, command in zip(runs, commands, strict=True):
        _, _, *argv = shlex.split(forecast_command(command, samples))
        forecast = parse(Train, '', argv, 'benchmark.py')
        assert dataclasses.replace(forecast, dry_run=None, gpu=(), dollars_per_gpu_hour=()) == run
        assert all(name for name, _ in forecast.dollars_per_gpu_hour)  # a price holds for no other GPU that is tried


@pytest.mark.parametrize('name, samples', [('photographs.md', 3_000), ('training.md', 2_000_000)])
def test_the_pages_show_the_commands_that_convert_prints(name, samples):
    page = (ROOT / 'docs' / name).read_text().replace('\\\n', ' ')
    shown = [shlex.split(line) for line in page.splitlines() if ' benchmark.py ' in line]
    assert shlex.split(training_command('photos-mds', samples, FINE_TUNED, True)) in shown


def test_only_a_short_training_from_random_weights_gets_a_warning(shards):
    def caution(*flags: str, samples: int = 3_000) -> str | None:
        run = settings_of('--remote', shards, '--batch_size', '4', '--max_duration', *flags)
        return caution_about_steps(run, samples)
    assert '9,999 optimizer steps' in caution('9999ba')
    assert training_command(str(shards), 3_000, FINE_TUNED, True) in caution('9999ba')
    assert 'fine-tune' not in caution('10ba', samples=2_000_000)
    for flags in (['10000ba'], ['10ba', '--load_weights', 'sd'], ['10ba', '--model_name', 'tiny'],
                  ['10ba', '--measure_batches', '5']):
        assert caution(*flags) is None


def test_the_claim_contains_no_password(output):
    begin(output, 's3://me:PASSWORD@bucket/tars?token=SECRET')
    claim = output.read(CLAIM).decode()
    assert 's3://***@bucket/tars' in claim
    assert not any(word in claim for word in ('PASSWORD', 'SECRET'))


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(tmp_path):
    first, second = (OutputFolder(str(tmp_path / 'out'), 'OUT') for _ in range(2))
    with first.begun(SETTINGS):
        with pytest.raises(ValueError, match='^OUT .* is in use by another run'):
            begin(second)
    begin(second)
