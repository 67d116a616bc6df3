"""A trained, saved, resumed and exported model generates images that match their captions. `make learn` is longer."""
import pytest

from benchmark import main
from benchmarks.learn import UNET, captions_of, fractions_right, generate, write_latents, write_model
from export import main as export

JITTER = 0.3  # standard deviation of each pixel, which generated images must have as well


@pytest.mark.long
def test_a_model_that_was_trained_resumed_and_exported_generates_what_its_captions_say(tmp_path, capfd):
    captions = captions_of(2, 2)  # with 4 captions, chance is right in a quarter of the cases
    write_model(tmp_path / 'model', UNET | {'mid_block_type': None})
    write_latents(tmp_path / 'latents', tmp_path / 'model', captions, 32, samples=256, jitter=JITTER)
    kept = 'kept'
    flags = ['--remote', 'latents', '--model_name', 'model', '--pretrained', '--image_size', '32', '--batch_size', '32',
             '--learning_rate', '3e-3', '--lr_warmup', '50ba', '--use_ema', '--ema_half_life', '50ba', '--num_workers',
             '0', '--save_folder', kept, '--save_interval', '200ba', '--autoresume']
    main([*flags, '--max_duration', '200ba'])
    record = main([*flags, '--max_duration', '500ba'])
    assert record['first_batch'] == 200
    for kind in ('raw', 'EMA'):
        export([kept, str(tmp_path / kind), *(['--raw_weights'] if kind == 'raw' else [])])
        images = generate(tmp_path / kind, captions, each=16, guidance=1)
        verdict = fractions_right(images, captions, near=1.5 * JITTER)
        assert 'cannot decode' not in capfd.readouterr().err
        assert verdict['right'] > 0.7, (kind, verdict)
        assert 0.93 < verdict['distance'] / JITTER < 1.25, (kind, verdict)
