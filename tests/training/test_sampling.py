"""A run generates the same images as diffusers' own pipeline, and they do not change its training."""
import json
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
from sdbench.training.sampling import Sampling
from tests.forked_runs import RUN
from tests.forked_runs import run as run_ranks
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


def run(folder: Path, model_folder: str, *flags) -> dict:
    places = ['--save_folder', folder / 'kept', '--results', folder / 'results']
    return main(['--use_synth_data', '--use_ema', *TINY, '--model_name', model_folder, '--pretrained',
                 '--save_interval', '3ba', *map(str, [*places, *flags])])


def images_in(path: Path) -> list[np.ndarray]:
    """Cut the grid of three prompts into its images, int (16, 16, 3), and check that each has text below it."""
    cells = cells_in(path)
    middle = (cells[0].shape[1] - 16) // 2
    assert all(cell[16:].min() < 128 for cell in cells)  # there are dark letters
    return [cell[:16, middle:middle + 16] for cell in cells]


def cells_in(path: Path) -> list[np.ndarray]:
    grid = np.asarray(Image.open(path), dtype=int)
    height, width = grid.shape[0] // 2, grid.shape[1] // 2
    return [grid[:height, :width], grid[:height, width:], grid[height:, :width]]


def generated_by_diffusers(out: Path) -> list[np.ndarray]:
    """Generate an image for each prompt with an exported pipeline, with one seed per prompt."""
    noise = torch.cat([torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(17 + n)) for n in range(3)])
    pipeline = StableDiffusionPipeline.from_pretrained(str(out))
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(PROMPTS, latents=noise, num_inference_steps=sampling.STEPS, guidance_scale=GUIDANCE)
    return [np.asarray(image, dtype=int) for image in output.images]


@pytest.mark.long
def test_generating_images_and_resuming_do_not_change_the_training_by_a_bit(tmp_path, model_folder, prompts):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    plain, sampling_run = tmp_path / 'plain', tmp_path / 'sampling'
    plain.mkdir()
    sampling_run.mkdir()
    record = run(plain, model_folder, '--max_duration', '6ba')
    assert record['sampling_seconds'] == 0
    assert not (plain / 'kept-samples').exists()
    flags = ['--sample_prompts', prompts, '--sample_interval', '3ba', '--autoresume']
    run(sampling_run, model_folder, *flags, '--max_duration', '3ba')
    record = run(sampling_run, model_folder, *flags, '--max_duration', '6ba', '--tensorboard', tmp_path / 'board')
    assert record['first_batch'] == 3
    assert_same_training(sampling_run / 'kept', plain / 'kept')
    [folder_of_images] = (sampling_run / 'kept-samples').iterdir()
    assert folder_of_images.name == f'kept-{record["training_id"]}'
    assert sorted(path.name for path in folder_of_images.iterdir()) == ['ba0.png', 'ba3.png', 'ba6.png']
    [folder] = (tmp_path / 'board').iterdir()
    repeated, image = EventAccumulator(str(folder)).Reload().Images('samples')  # of the resumed run
    assert (repeated.step, image.step) == (3, 6)  # the resume generates the images of the checkpoint's batch again
    assert (image.width, image.height) == Image.open(folder_of_images / 'ba6.png').size

    # The images equal what diffusers' pipeline generates with the EMA weights, and not with the raw weights.
    for flags in ([], ['--raw_weights']):
        out = tmp_path / f'out{len(flags)}'
        export([str(sampling_run / 'kept'), str(out), *flags])
        pairs = zip(images_in(folder_of_images / 'ba6.png'), generated_by_diffusers(out), strict=True)
        differences = [np.abs(ours - theirs).max() for ours, theirs in pairs]
        assert (max(differences) <= 1) == (not flags), differences


def test_a_run_on_latents_decodes_images_with_the_vae_of_the_model_folder(tmp_path, model_folder, prompts, few_steps):
    record = main(['--use_synth_latents', *TINY, '--model_name', model_folder, '--pretrained', '--max_duration', '3ba',
                   '--sample_prompts', prompts, '--sample_interval', '1000ba', '--save_folder', 'kept-latents'])
    assert record['encoders'] == 'text_in_loop'
    [latents] = Path('kept-latents-samples').iterdir()
    assert sorted(path.name for path in latents.iterdir()) == ['ba0.png', 'ba3.png']
    export(['kept-latents', 'out'])
    for ours, theirs in zip(images_in(latents / 'ba3.png'), generated_by_diffusers(tmp_path / 'out'), strict=True):
        assert np.abs(ours - theirs).max() <= 1


@pytest.mark.long
def test_rank_0_generates_images_while_the_other_rank_waits(server, tmp_path, model_folder, prompts):
    argv = [*RUN, '--use_synth_data', '--model_name', model_folder, '--pretrained', '--max_duration', '3ba',
            '--sample_prompts', prompts, '--sample_interval', '2ba']
    assert run_ranks(server, 2, argv, tmp_path) == [0, 0], (tmp_path / 'log').read_text()
    names = sorted(path.name for path in (tmp_path / 'checkpoints-samples').glob('*/*'))
    assert names == ['ba0.png', 'ba2.png', 'ba3.png']
    record = json.loads((tmp_path / 'results.jsonl').read_text())
    assert record['num_devices'] == 2
    assert record['sampling_seconds'] > 0


def test_a_new_training_in_the_same_folder_keeps_the_images_of_the_one_before_it(
        tmp_path, smallest_model, prompts, few_steps, capfd):
    kept_in = tmp_path / 'kept'
    argv = ['--use_synth_data', *TINY, '--model_name', smallest_model, '--pretrained', '--max_duration', '1ba',
            '--sample_prompts', prompts, '--save_folder', str(kept_in), '--autoresume']
    record = main(argv)
    output, errors = capfd.readouterr()
    folder = f'{kept_in}-samples/kept-{record["training_id"]}'
    assert f'images          in {folder}\n' in output
    assert '%' not in errors  # diffusers shows no progress bar
    grids = sorted(Path(folder).iterdir())
    assert [grid.name for grid in grids] == ['ba0.png', 'ba1.png']
    os.utime(grids[1], (1, 1))
    for checkpoint in kept_in.glob('*.pt'):  # as if it had been killed before its first checkpoint
        checkpoint.unlink()
    assert main(argv)['training_id'] != record['training_id']
    assert grids[1].stat().st_mtime == 1
    assert len(list(Path(f'{kept_in}-samples').iterdir())) == 2


def test_a_failure_while_generating_images_is_a_warning_and_the_training_continues(
        tmp_path, smallest_model, prompts, capfd, monkeypatch):
    def fail(*_):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(Sampling, 'generate', fail)
    record = run(tmp_path, smallest_model, '--max_duration', '3ba', '--sample_prompts', prompts)
    assert record['status'] == 'complete'
    assert record['trained_batches'] == 3
    assert 'warning: no images were generated at batch 3 (OSError: [Errno 28] No space left' in capfd.readouterr().err
