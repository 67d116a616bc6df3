"""Numbers of things, in words."""
from fitting.dry_run import title
from inputs.words import counted
from tests.runs import settings_of


def test_one_of_a_thing_is_no_plural():
    assert [counted(number, 'batch', 'batches') for number in (0, 1, 2000)] == ['0 batches', '1 batch', '2,000 batches']
    assert [counted(number, 'shard') for number in (1, 2)] == ['1 shard', '2 shards']


def test_a_dry_run_of_one_gpu_and_one_image_speaks_of_one():
    settings = settings_of('--dry_run', '1', '--batch_size', '1', '--model_name', 'tiny')
    assert title(settings, latents=False).endswith('; 1 image a step on each of 1 GPU')
