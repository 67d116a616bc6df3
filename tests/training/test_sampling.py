"""A run generates the same images as diffusers' own pipeline, and they do not change its training."""
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from benchmark import main
from export import main as export
from sdbench.models.generation import GUIDANCE
from sdbench.training import sampling
from tests.runs import TINY, assert_same_training

PROMPTS = ['a red square', 'Wow! a blue one', 'Über den Dächern, with letters beyond ASCII']


@pytest.fixture(scope='module')
def prompts(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp('prompts') / 'prompts.txt'
    path.write_text('\n'.join([PROMPTS[0], '', *PROMPTS[1:], '']), encoding='utf-8')
    return str(path)


@pytest.fixture
def few_steps(monkeypatch):
    """Use 2 sampling steps instead of 50; only the first test takes all of them."""
    monkeypatch.setattr(sampling, 'STEPS', 2)


def images_in(path: Path) -> list[np.ndarray]:
    """Cut the grid of three prompts into its images, int (16, 16, 3), and check that each has text below it."""
    grid = np.asarray(Image.open(path), dtype=int)
    height, width = grid.shape[0] // 2, grid.shape[1] // 2
    cells = [grid[:height, :width], grid[:height, width:], grid[height:, :width]]
    assert all(cell[16:].min() < 128 for cell in cells)  # there are dark letters
    middle = (width - 16) // 2
    return [cell[:16, middle:middle + 16] for cell in cells]


def largest_difference(path: Path, out: str) -> int:
    """Compare a grid's images with those of an exported pipeline, which generates each prompt with its own seed."""
    noise = torch.cat([torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(17 + n)) for n in range(3)])
    pipeline = StableDiffusionPipeline.from_pretrained(out)
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(PROMPTS, latents=noise, num_inference_steps=sampling.STEPS, guidance_scale=GUIDANCE)
    pairs = zip(images_in(path), output.images, strict=True)
    return max(np.abs(ours - np.asarray(theirs, dtype=int)).max() for ours, theirs in pairs)


@pytest.mark.long
def test_generating_images_and_resuming_do_not_change_the_training_by_a_bit(model_folder, prompts):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    argv = ['--use_synth_data', '--use_ema', *TINY, '--model_name', model_folder, '--pretrained', '--save_interval',
            '3ba', '--max_duration', '6ba', '--save_folder']
    assert main([*argv, 'plain'])['sampling_seconds'] == 0
    assert not Path('plain-samples').exists()
    argv += ['kept', '--autoresume', '--sample_prompts', prompts, '--sample_interval', '3ba']
    main([*argv, '--max_duration', '3ba'])
    record = main([*argv, '--tensorboard', 'board'])
    assert record['first_batch'] == 3
    assert_same_training('kept', 'plain')
    folder_of_images = Path('kept-samples', f'kept-{record["training_id"]}')
    assert sorted(path.name for path in folder_of_images.iterdir()) == ['ba0.png', 'ba3.png', 'ba6.png']
    [folder] = Path('board').iterdir()
    repeated, image = EventAccumulator(str(folder)).Reload().Images('samples')  # of the resumed run
    assert (repeated.step, image.step) == (3, 6)  # the resume generates the images of the checkpoint's batch again
    assert (image.width, image.height) == Image.open(folder_of_images / 'ba6.png').size

    # The images equal what diffusers' pipeline generates with the EMA weights, and not with the raw weights.
    export(['kept', 'ema'])
    export(['kept', 'raw', '--raw_weights'])
    assert largest_difference(folder_of_images / 'ba6.png', 'ema') <= 1
    assert largest_difference(folder_of_images / 'ba6.png', 'raw') > 1


def test_a_run_on_latents_decodes_images_with_the_vae_of_the_model_folder(model_folder, prompts, few_steps):
    record = main(['--use_synth_latents', *TINY, '--model_name', model_folder, '--pretrained', '--max_duration', '3ba',
                   '--sample_prompts', prompts, '--sample_interval', '1000ba', '--save_folder', 'kept'])
    assert record['encoders'] == 'text_in_loop'
    _, path = sorted(Path('kept-samples').glob('*/*'))
    assert path.name == 'ba3.png'
    export(['kept', 'out'])
    assert largest_difference(path, 'out') <= 1


def test_a_new_training_in_the_same_folder_keeps_the_images_of_the_one_before_it(
        smallest_model, prompts, few_steps, capfd):
    argv = ['--use_synth_data', *TINY, '--model_name', smallest_model, '--pretrained', '--max_duration', '1ba',
            '--sample_prompts', prompts, '--save_folder', 'kept', '--autoresume']
    record = main(argv)
    output, errors = capfd.readouterr()
    folder = f'kept-samples/kept-{record["training_id"]}'
    assert folder in output
    assert '%' not in errors  # diffusers shows no progress bar
    grids = sorted(Path(folder).iterdir())
    assert [grid.name for grid in grids] == ['ba0.png', 'ba1.png']
    os.utime(grids[1], (1, 1))
    for checkpoint in Path('kept').glob('*.pt'):  # as if it had been killed before its first checkpoint
        checkpoint.unlink()
    assert main(argv)['training_id'] != record['training_id']
    assert grids[1].stat().st_mtime == 1
    assert len(list(Path('kept-samples').iterdir())) == 2


def test_a_failure_while_generating_images_is_a_warning_and_the_training_continues(
        smallest_model, prompts, few_steps, capfd):
    Path('kept-samples').write_text('')  # so that no folder can be made there
    record = main(['--use_synth_data', *TINY, '--model_name', smallest_model, '--pretrained', '--max_duration', '3ba',
                   '--sample_prompts', prompts, '--save_folder', 'kept'])
    assert (record['status'], record['trained_batches']) == ('complete', 3)
    assert 'warning: no images were generated at batch 3 (NotADirectoryError' in capfd.readouterr().err
