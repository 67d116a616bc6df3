"""The road of docs/training.md from photographs and a table of captions to a picture, with a small model."""
import csv
import shutil
from pathlib import Path

import pytest
from diffusers import DDPMScheduler, StableDiffusionPipeline

import benchmark
import convert
import export
from tests.runs import ROOT
from tests.samples import encoded, picture
from tests.test_docs import command_lines, words_of

SMALLER = ['--image_size', '64', '--batch_size', '4', '--max_duration', '4ba', '--lr_warmup', '2ba', '--save_interval',
           '2ba', '--sample_interval', '4ba', '--num_workers', '0']


def commands_of_the_road() -> list[list[str]]:
    """Read the commands of the page's first section."""
    lines = command_lines(ROOT / 'docs/training.md')
    first, last = 'hf download stable-diffusion-v1-5', 'python export.py my-run my-model'
    start = next(number for number, line in enumerate(lines) if line.startswith(first))
    return [words_of(line) for line in lines[start:lines.index(last) + 1]]


def write_photographs(folder: Path) -> None:
    folder.mkdir()
    with open(folder / 'captions.csv', 'w', newline='') as file:
        table = csv.writer(file)
        table.writerow(['file_name', 'text'])
        for number in range(8):
            (folder / f'{number}.jpg').write_bytes(encoded(picture(number)))
            table.writerow([f'{number}.jpg', f'my cat, {number}'])


def write_pipeline(folder: Path, model_folder: str) -> None:
    """Write a pipeline of Stable Diffusion 1.5's kind: it predicts epsilon."""
    shutil.copytree(model_folder, folder)
    DDPMScheduler(beta_schedule='scaled_linear', beta_start=0.00085, beta_end=0.012).save_config(folder / 'scheduler')


@pytest.mark.long
def test_from_photographs_with_a_table_of_captions_to_a_picture(tmp_path, model_folder):
    write_photographs(tmp_path / 'photos')
    write_pipeline(tmp_path / 'sd15', model_folder)
    (tmp_path / 'prompts.txt').write_text('my cat on a boat')
    download, to_shards, train, to_pipeline = commands_of_the_road()
    assert download[download.index('--local-dir') + 1] == 'sd15'

    assert convert.main(to_shards[2:]) == 0
    record = benchmark.main([*train[2:], *SMALLER])
    assert record['trained_batches'] == 4
    assert record['load_weights'] == 'sd15'
    assert (tmp_path / 'my-run-samples' / 'ba4.png').exists()
    export.main(to_pipeline[2:])
    drawn = StableDiffusionPipeline.from_pretrained('my-model')('my cat on a boat', num_inference_steps=2)
    assert drawn.images[0].size == (64, 64)
