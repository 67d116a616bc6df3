"""A dataset is claimed once, written part by part and joined, and files of other people are not touched."""
import json
import os
import shlex

import pytest

from sdbench.datasets.output import Output, PartWriter
from sdbench.errors import UserError
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.flags.training_command import (
    FEWEST_FROM_RANDOM,
    FINE_TUNED,
    caution_about_steps,
    fine_tuning_time,
    training_command,
)
from sdbench.paths import CLAIM
from tests.local_s3 import local_s3
from tests.runs import ROOT

SETTINGS = {'program': 'convert.py', 'size_limit': 1}


@pytest.fixture(params=['folder', 'store'])
def output(request, tmp_path, monkeypatch):
    with local_s3(monkeypatch):
        yield Output(str(tmp_path / 'out') if request.param == 'folder' else 's3://bucket/some/out', 'OUT')


def begin(output, sources=(), **settings) -> None:
    with output.begun(SETTINGS | settings, list(sources)):
        pass


@pytest.mark.parametrize('captions, samples', [(['x' * 300, 'a', 'y' * 300], [1, 1, 1]), ([], [])])
def test_a_sample_larger_than_a_shard_gets_its_own_and_no_shard_is_empty(output, captions, samples):
    begin(output)
    part = PartWriter(output, 'one', {'caption': 'str'}, shard_bytes=220)
    for caption in captions:
        part.write({'caption': caption})
    part.finish()
    assert [shard['samples'] for shard in json.loads(output.read('one/index.json'))['shards']] == samples


def test_an_out_with_other_files_is_refused_and_the_files_stay(output, tmp_path):
    if output.is_folder:
        os.mkdir(output.out)
    output.write('one/index.json', b'mine')
    with pytest.raises(ValueError, match='^OUT .* already holds other files'):
        begin(output)
    assert list(output.names()) == ['one/index.json']
    assert output.read('one/index.json') == b'mine'


def test_an_out_without_samples_accepts_other_settings_and_one_with_a_sample_does_not(output):
    begin(output)
    PartWriter(output, 'one', {'caption': 'str'}).finish()
    begin(output, program='encode.py')
    begin(output, seed=2)
    part = PartWriter(output, 'two', {'caption': 'str'})
    part.write({'caption': 'a'})
    part.finish()
    with pytest.raises(ValueError, match='was begun with seed 2, and this command has 3'):
        begin(output, seed=3)


@pytest.mark.parametrize('samples, model_name, pretrained, expected', [
    (7, 'sd', True, {'batch_size': 4, 'max_duration': '1000ep', 'load_weights': 'sd', 'learning_rate': 1e-5,
                     'use_ema': False}),
    (3_000, 'sd', True, {'batch_size': 16, 'max_duration': '50ep', 'load_weights': 'sd'}),
    (999_999, 'sd', True, {'batch_size': 16, 'max_duration': '10ep', 'load_weights': 'sd'}),
    (133, 'tiny', True, {'max_duration': '250ep', 'load_weights': None, 'learning_rate': 1e-3, 'use_ema': True}),
    (133, 'own', True, {'max_duration': '1250ep', 'load_weights': None, 'learning_rate': 1e-4}),
    (133, 'sd', False, {'batch_size': 16, 'max_duration': '1250ep', 'load_weights': None, 'use_ema': True,
                        'sample_prompts': None}),
    (1_000_000, 'sd', True, {'batch_size': 512, 'max_duration': '10ep', 'load_weights': None, 'use_ema': True}),
    (3_000_000, 'sd', True, {'batch_size': 2048, 'learning_rate': 1e-4})])
def test_the_training_command_fits_the_number_of_samples(samples, model_name, pretrained, expected):
    os.makedirs('own/unet')  # a model without weights of its UNet
    _, program, *argv = shlex.split(training_command('photos-mds', samples, model_name, pretrained))
    settings = parse(Train, '', argv, program)
    for flag, value in expected.items():
        assert getattr(settings, flag) == value, flag


def test_the_page_shows_the_commands_that_convert_prints():
    page = (ROOT / 'docs/training.md').read_text().replace('\\\n', ' ')
    shown = [shlex.split(line) for line in page.splitlines() if line.startswith('composer ')]
    for samples in (3_000, 2_000_000):
        assert shlex.split(training_command('photos-mds', samples, FINE_TUNED, True)) in shown
    text = ' '.join(page.split())
    assert f'Below about {FEWEST_FROM_RANDOM:,} images you fine-tune' in text
    assert f'roughly {fine_tuning_time(3_000).replace("min", "minutes")}' in text


def settings(*flags: str) -> Train:
    return parse(Train, '', ['--remote', 'photos-mds', *flags], 'benchmark.py')


def test_only_a_short_training_from_random_weights_gets_a_warning():
    caution = caution_about_steps(settings('--max_duration', '9999ba'), 3_000)
    assert caution.startswith('9,999 optimizer steps will not teach')
    assert training_command('photos-mds', 3_000, FINE_TUNED, True) in caution
    assert 'fine-tune' not in caution_about_steps(settings('--max_duration', '10ba'), 2_000_000)
    for flags in (['10000ba'], ['10ba', '--load_weights', 'sd'], ['10ba', '--model_name', 'tiny'],
                  ['10ba', '--measure_batches', '5']):
        assert caution_about_steps(settings('--max_duration', *flags), 3_000) is None


def test_the_claim_contains_no_password(output):
    begin(output, ['s3://me:PASSWORD@bucket/tars?token=SECRET'])
    claim = output.read(CLAIM).decode()
    assert 's3://***@bucket/tars' in claim
    assert not any(word in claim for word in ('PASSWORD', 'SECRET'))


def test_a_truncated_claim_is_reported_and_stays(output):
    begin(output)
    output.write(CLAIM, b'{"layout"')
    with pytest.raises(UserError, match=f'^{CLAIM} of OUT .* is not JSON'):
        begin(output)
    assert output.read(CLAIM) == b'{"layout"'


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(tmp_path):
    first, second = (Output(str(tmp_path / 'out'), 'OUT') for _ in range(2))
    with first.begun(SETTINGS):
        with pytest.raises(ValueError, match='^OUT .* is in use by another run'):
            begin(second)
    begin(second)
