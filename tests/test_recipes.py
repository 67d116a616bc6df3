"""The recipes: two phases of Stable Diffusion 2, and the libraries that the fastest was written for."""
import json
import re

import pytest
import torch

from benchmark import main
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from tests.runs import ROOT, TINY, settings_of

FASTEST = ROOT / 'recipes' / 'fastest.txt'
PHASES = {1: ROOT / 'recipes' / 'phase-1.txt', 2: ROOT / 'recipes' / 'phase-2.txt'}


def parsed(*argv) -> Train:
    return parse(Train, '', [str(argument) for argument in argv])


@pytest.mark.parametrize('phase, size, steps', [(1, 256, 550_000), (2, 512, 850_000)])
def test_a_recipe_has_the_numbers_of_the_model_card_and_of_the_plan_in_the_pages(phase, size, steps):
    args = parsed(f'@{PHASES[phase]}', '--use_synth_data', '--save_folder', 'kept')
    assert (args.image_size, args.batch_size, args.max_duration) == (size, 2048, f'{steps}ba')
    assert (args.learning_rate, args.lr_warmup, args.caption_drop) == (1e-4, '10000ba', 0.1)
    assert args.use_ema and 2 ** (-1 / int(args.ema_half_life.removesuffix('ba'))) == pytest.approx(0.9999, abs=1e-8)
    assert f'--phase {steps * 2048}@{size}' in (ROOT / 'docs/planning.md').read_text()


@pytest.mark.long
def test_the_recipes_train_two_phases_and_each_knows_its_end(shards, model_folder, results, tmp_path, capfd):
    small = ['--model_name', model_folder, '--remote', shards, '--batch_size', '4', '--lr_warmup', '2ba',
             '--max_duration', '4ba', '--warmup_batches', '1', '--num_workers', '0', '--results', str(results)]
    first = [f'@{PHASES[1]}', *small, '--image_size', '64', '--save_folder', str(tmp_path / 'one')]
    second = [f'@{PHASES[2]}', *small, '--image_size', '128', '--save_folder', str(tmp_path / 'two'),
              '--load_weights', str(tmp_path / 'one')]
    for argv, size in ((first, 64), (second, 128)):
        record = main(argv)
        assert (record['status'], record['image_size'], record['first_batch']) == ('complete', size, 0)
        assert record['weight_decay'] == 0.01 and record['caption_drop'] == 0.1 and record['pretrained']
        with pytest.raises(SystemExit) as exit:
            main(argv)
        assert exit.value.code == 0 and 'nothing left to do' in capfd.readouterr().out
    first_record, second_record = map(json.loads, results.read_text().splitlines())
    assert first_record['load_weights'] is None and second_record['load_weights'] == str(tmp_path / 'one')


def test_the_fastest_recipe_says_for_which_libraries_it_was_written():
    text = FASTEST.read_text()
    pinned = dict(re.findall(r'^(\w+)(?:\[.*\])?==(\S+)', (ROOT / 'requirements.txt').read_text(), re.MULTILINE))
    for library, name in (('torch', 'torch'), ('mosaicml', 'Composer'), ('diffusers', 'diffusers')):
        assert f'{name} {pinned[library]}' in text


def test_the_fastest_recipe_is_of_bf16_on_a_gpu(as_on_a_gpu):
    settings = settings_of(f'@{FASTEST}', '--use_synth_data')
    assert (settings.precision, settings.encoder_precision) == ('amp_bf16', 'bf16')
    assert settings.half_precision_norms
    assert settings.compile


@pytest.mark.parametrize('recipe, flags', [
    ('fastest', ['--no-compile']), ('original', ['--precision', 'fp32']),
    pytest.param('fastest', [], marks=[pytest.mark.long, pytest.mark.skipif(
        ' ' in torch.__file__, reason='torch 2.7.0 gives its own path to the compiler of C++ unquoted')])])
def test_a_recipe_of_speed_can_be_tried_on_a_cpu(recipe, flags, smallest_model, results):
    path = ROOT / 'recipes' / f'{recipe}.txt'
    record = main([f'@{path}', *flags, '--use_synth_data', *TINY, '--model_name', smallest_model, '--image_size', '16',
                   '--results', str(results)])
    assert record['status'] == 'complete'
    assert record['precision'] == 'fp32'
