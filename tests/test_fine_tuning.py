"""The road of docs/training.md from photographs and a table of captions to a picture, with a small model."""
import shutil

import pytest
from diffusers import DDPMScheduler, StableDiffusionPipeline

import benchmark
import convert
import export
from tests.runs import ROOT
from tests.samples import write_photos
from tests.test_docs import command_lines, words_of

SMALLER = ['--image_size', '64', '--batch_size', '4', '--max_duration', '4ba', '--lr_warmup', '2ba', '--save_interval',
           '2ba', '--sample_interval', '4ba', '--num_workers', '0']


@pytest.mark.long
def test_from_photographs_with_a_table_of_captions_to_a_picture(tmp_path, model_folder):
    # photographs, a table of captions, and a pipeline of Stable Diffusion 1.5's kind, which predicts epsilon
    photos = write_photos(tmp_path / 'photos', 8)
    (photos / 'captions.csv').write_text('file_name,text\n' + ''.join(f'{n}.jpg,"my cat, {n}"\n' for n in range(8)))
    shutil.copytree(model_folder, tmp_path / 'sd15')
    DDPMScheduler(beta_schedule='scaled_linear', beta_start=0.00085, beta_end=0.012).save_config('sd15/scheduler')
    (tmp_path / 'prompts.txt').write_text('my cat on a boat')

    # the commands of the page's first section
    lines = command_lines(ROOT / 'docs/training.md')
    first = next(number for number, line in enumerate(lines) if line.startswith('hf download stable-diffusion-v1-5'))
    last = lines.index('python export.py my-run my-model')
    download, to_shards, train, to_pipeline = map(words_of, lines[first:last + 1])
    assert download[download.index('--local-dir') + 1] == 'sd15'

    assert convert.main(to_shards[2:]) == 0
    record = benchmark.main([*train[2:], *SMALLER])
    assert record['trained_batches'] == 4
    assert record['load_weights'] == 'sd15'
    assert (tmp_path / 'my-run-samples' / 'ba4.png').exists()
    export.main(to_pipeline[2:])
    drawn = StableDiffusionPipeline.from_pretrained('my-model')('my cat on a boat', num_inference_steps=2)
    assert drawn.images[0].size == (64, 64)
