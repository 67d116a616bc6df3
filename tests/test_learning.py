"""It learns: what is trained, saved, resumed and exported draws what its captions say. The long form: `make learn`."""
from benchmark import main
from benchmarks.learn import captions_of, drawn_after, write_latents, write_model


def test_a_model_that_was_trained_stopped_resumed_and_exported_draws_what_the_captions_say(tmp_path):
    captions = captions_of(2, 2)  # of which chance names the right one every fourth time
    write_model(tmp_path / 'model')
    write_latents(tmp_path / 'latents', tmp_path / 'model', captions, 32, samples=256)
    flags = ['--remote', str(tmp_path / 'latents'), '--model_name', str(tmp_path / 'model'), '--image_size', '32',
             '--batch_size', '32', '--learning_rate', '3e-3', '--lr_warmup', '50ba', '--caption_drop', '0.1',
             '--use_ema', '--ema_half_life', '50ba', '--num_workers', '0', '--save_folder', str(tmp_path / 'phase-1'),
             '--save_interval', '200ba', '--autoresume', '--results', str(tmp_path / 'results.jsonl')]
    main([*flags, '--max_duration', '200ba'])
    record = main([*flags, '--max_duration', '500ba'])
    verdicts, _ = drawn_after(tmp_path, 1, captions)
    assert record['first_batch'] == 200 and record['loss'] < 0.1
    for verdict in verdicts.values():
        assert verdict['right'] > 0.85 and verdict['distance'] < 0.12, verdicts
