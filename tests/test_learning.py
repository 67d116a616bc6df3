"""It learns: what is trained, saved, resumed and exported draws what its captions say. The long form: `make learn`."""

import numpy as np
import pytest

from benchmark import main
from benchmarks.learn import EDGE, UNET, captions_of, draw, figure, judged, picture_of, write_latents, write_model
from export import main as export

JITTER = 0.3  # standard deviation of each pixel, which what is drawn must have as well


@pytest.mark.long
def test_a_model_that_was_trained_stopped_resumed_and_exported_draws_what_the_captions_say(tmp_path, capfd):
    captions = captions_of(2, 2)  # of which chance names the right one every fourth time
    write_model(tmp_path / 'model', UNET | {'mid_block_type': None})
    write_latents(tmp_path / 'latents', tmp_path / 'model', captions, 32, samples=256, jitter=JITTER)
    kept = str(tmp_path / 'kept')
    flags = ['--remote', str(tmp_path / 'latents'), '--model_name', str(tmp_path / 'model'), '--pretrained',
             '--image_size', '32', '--batch_size', '32', '--learning_rate', '3e-3', '--lr_warmup', '50ba', '--use_ema',
             '--ema_half_life', '50ba', '--num_workers', '0', '--save_folder', kept, '--save_interval', '200ba',
             '--autoresume', '--results', str(tmp_path / 'results.jsonl')]
    main([*flags, '--max_duration', '200ba'])
    record = main([*flags, '--max_duration', '500ba'])
    assert record['first_batch'] == 200
    for kind in ('live', 'averaged'):
        export([kept, str(tmp_path / kind), '--pretrained', *(['--live'] if kind == 'live' else [])])
        verdict = judged(draw(tmp_path / kind, captions, each=16, guidance=1), captions, near=1.5 * JITTER)
        assert 'cannot decode' not in capfd.readouterr().err
        assert verdict['right'] > 0.7 and 0.93 < verdict['distance'] / JITTER < 1.25, (kind, verdict)


def test_the_figure_has_each_picture_whole_with_a_white_edge_in_the_row_of_its_colour():
    drawn = np.stack([picture_of(caption, 8) for caption in captions_of()])[:, None]  # (16, 1, 3, 8, 8)
    side = 128 + 2 * EDGE
    grid = np.asarray(figure(drawn), dtype=int)
    assert grid.shape == (4 * side, 4 * side, 3)
    red_top_left = grid[:side, :side]
    assert (red_top_left[:EDGE] == 255).all() and (red_top_left[:, -EDGE:] == 255).all()
    assert (red_top_left[EDGE:EDGE + 64, EDGE:EDGE + 64] == (255, 0, 0)).all()
    assert (red_top_left[EDGE + 64:-EDGE, EDGE + 64:-EDGE] == 128).all()
