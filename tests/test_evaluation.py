"""The loss on held-out samples is the same however it is computed, and evaluations do not change the training."""
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import convert
import report
from benchmark import StableDiffusion, main
from data import StreamingLAIONDataset, open_held_out
from ema import EMA
from sdbench.inputs.shards import IMAGES_HASH, MOMENTS, index_hash, read_index, was_trained_on
from sdbench.models.loading import find_model
from sdbench.training.checkpoints import checkpoints_in, load_checkpoint
from sdbench.training.end_of_batch import HeldOutLoss
from sdbench.training.resuming import data_of
from sdbench.training.weights import read_trained_model
from tests.runs import SMALLEST, TINY, assert_same_training, one_error_line, settings_of
from tests.samples import good, pillow_square, pixels, write_photos, write_shards
from tests.shortcuts import clip_tokenizer

SIZE_64 = [*TINY, '--image_size', '64']
TRAIN = [*SIZE_64, '--use_ema', '--ema_half_life', '2ba', '--num_workers', '0', '--save_interval', '2ba',
         '--max_duration', '4ba']


@pytest.fixture(scope='module')
def moments(tmp_path_factory) -> tuple[str, list[dict]]:
    """Return a dataset with latents of 5 images, as encode.py would write it for the smallest model at 64 pixels."""
    draw = np.random.default_rng(3)
    samples = [{MOMENTS: draw.normal(size=(8, 64, 64)).astype(np.float16), 'caption': f'latent {i}'} for i in range(5)]
    folder = tmp_path_factory.mktemp('latents') / 'mds'
    write_shards(folder, samples, {MOMENTS: 'ndarray:float16:8,64,64', 'caption': 'str'})
    index = json.loads((folder / 'index.json').read_text())
    index['latents'] = find_model(SMALLEST).origin_of_latents(64) | {IMAGES_HASH: 'of the images'}
    (folder / 'index.json').write_text(json.dumps(index))
    return str(folder), samples


def reference_loss(checkpoint: str, samples: list[dict], image_size: int, seed: int = 17) -> float:
    """Compute the mean loss of the EMA weights over the samples, one by one, with the formulas of the papers."""
    state = load_checkpoint(checkpoint)['state']
    model, ema = StableDiffusion(SMALLEST, image_size, latents=MOMENTS in samples[0]), EMA()
    model.load_state_dict(state['model'])
    ema.load_state_dict(dict(state['algorithms'])['EMA'])
    model = ema.get_ema_model(model).eval()
    betas = torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - betas, 0)
    losses = []
    for index, sample in enumerate(samples):
        number = int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
        generator = torch.Generator().manual_seed(number)
        draw, noise = torch.randn(8, image_size, image_size, generator=generator)[None].split(4, dim=1)
        timestep = torch.randint(1000, (), generator=generator)
        with torch.no_grad():
            if MOMENTS in sample:
                mean, log_variance = torch.from_numpy(sample[MOMENTS])[None].float().split(4, dim=1)
            else:
                image = torch.from_numpy(pixels(pillow_square(sample['jpg'])))[None].to(torch.uint8)
                image = F.interpolate(image, size=(image_size, image_size), mode='bilinear', antialias=True)
                posterior = model.vae.encode(image / 127.5 - 1).latent_dist
                mean, log_variance = posterior.mean, posterior.logvar
            latents = (mean + torch.exp(log_variance / 2) * draw) * 0.18215
            noised = (alphas[timestep].sqrt() * latents + (1 - alphas[timestep]).sqrt() * noise).float()
            text = model.text_encoder(torch.tensor([clip_tokenizer().encode(sample['caption']).ids]))[0]
            losses.append(float(((model.unet(noised, timestep, text).sample - noise) ** 2).mean()))
    return float(np.mean(losses))


@pytest.fixture(scope='module')
def evaluated(tmp_path_factory, shards, held_out) -> tuple[Path, dict]:
    """Return the checkpoints and the record of a run of 4 batches that is evaluated every 2 batches."""
    folder = tmp_path_factory.mktemp('evaluated')
    record = main(['--remote', shards, *TRAIN, '--eval_remote', held_out, '--eval_interval', '2ba', '--save_folder',
                   str(folder / 'kept'), '--results', str(folder / 'results')])
    return folder / 'kept', record


def test_the_loss_counts_each_sample_once_with_the_ema_weights(evaluated, held_out_samples):
    folder, record = evaluated
    expected = [reference_loss(path, held_out_samples, 64) for path in checkpoints_in(str(folder))]
    images, losses = zip(*record['evaluations'], strict=True)
    assert images == (8, 16)  # after 2 and 4 batches
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[0] != expected[1]
    assert (record['eval_batch'], record['eval_loss']) == (4, losses[-1])
    assert record['evaluation_seconds'] > 0


def test_losses_on_other_held_out_data_are_another_curve_in_checkpoint_record_and_report(
        evaluated, shards, held_out, tmp_path, capsys):
    """A training is evaluated up to batch 4, on other data up to batch 6, and on the first data again up to batch 8.

    The first record is missing, as if the run was killed.
    """
    folder, first = evaluated
    shutil.copytree(folder, 'kept')
    other = write_shards(tmp_path / 'other', [good(200 + number) for number in range(3)])
    argv = ['--remote', shards, *TRAIN, '--eval_interval', '2ba', '--save_folder', 'kept', '--autoresume']
    second, third = (main([*argv, '--eval_remote', remote, '--max_duration', duration])
                     for remote, duration in ((other, '6ba'), (held_out, '8ba')))
    assert [images for images, _ in second['evaluations']] == [16, 24]
    assert second['eval_remote'] == other and second['eval_sha256'] == index_hash(read_index(other))
    curve = {key: second[key] for key in second['other_evaluations'][0]}
    assert second['other_evaluations'] == [{key: first[key] for key in curve}]
    assert third['evaluations'][:2] == first['evaluations']
    assert [images for images, _ in third['evaluations']] == [8, 16, 24, 32]
    assert third['other_evaluations'] == [curve]

    # The report has a row for each dataset.
    capsys.readouterr()
    report.main(['results.jsonl'])
    text = capsys.readouterr().out
    assert text.count(f'{second["eval_loss"]:.4f}') == text.count(f'{third["eval_loss"]:.4f}') == 1


def test_a_complete_training_is_evaluated_on_other_data_once(evaluated, shards, held_out, tmp_path, results, capsys):
    folder, first = evaluated
    shutil.copytree(folder, 'kept')
    other = write_shards(tmp_path / 'other', [good(200 + number) for number in range(3)])
    argv = ['--remote', shards, *TRAIN, '--save_folder', 'kept', '--autoresume']
    record = main([*argv, '--eval_remote', other])
    assert (record['first_batch'], record['eval_batch'], record['eval_sha256']) == (4, 4, index_hash(read_index(other)))
    assert record['other_evaluations'][0]['evaluations'] == first['evaluations']
    for flags in (['--eval_remote', other], ['--eval_remote', held_out], []):
        with pytest.raises(SystemExit):
            main([*argv, *flags])
        assert 'and the record: nothing left to do' in capsys.readouterr().out
    [path] = Path('kept').glob('record-*')
    path.write_text(path.read_text().replace(record['training_id'], 'another'))  # its checkpoints were removed
    assert main(argv)['training_id'] == record['training_id']
    assert len(results.read_text().splitlines()) == 2


def test_evaluations_of_checkpoints_from_earlier_versions_are_kept_as_losses_on_unknown_data():
    before = {'evaluations': [[8, 0.5]], 'eval_loss': 0.5, 'eval_batch': 2, 'eval_samples': 3, 'eval_held_out': True}
    for state, expected in (({}, (None, None)), (before | {'evaluations': []}, (None, None)), (before, (2, None))):
        callback = HeldOutLoss('data')
        callback.load_state_dict(state)
        found = callback.metrics_for_record(all_ranks=True)
        assert (found['eval_batch'], found['eval_sha256']) == expected


def test_evaluations_do_not_change_the_training(evaluated, shards):
    main(['--remote', shards, *TRAIN, '--save_folder', 'plain'])
    assert_same_training('plain', evaluated[0])


def test_an_evaluation_depends_on_the_weights_alone(evaluated, held_out, shards, capfd):
    """It does not depend on the microbatch, the batch before it, the number of workers, --snr_gamma, or --seed."""
    folder, record = evaluated
    argv = ['--remote', shards, *SIZE_64, '--num_workers', '2', '--max_duration', '2ba', '--use_ema', '--ema_half_life',
            '1000000000ba', '--load_weights', str(folder), '--eval_remote', held_out, '--seed', '18']
    later = main([*argv, '--device_train_microbatch_size', '1', '--snr_gamma', '0.001'])
    assert (later['eval_batch'], later['eval_held_out']) == (2, False)
    said = capfd.readouterr().err
    assert 'not known to be held out' in said and f'{later["eval_loss"]:.4g}' in said
    assert 'warning: without --pretrained' in said
    assert later['loss'] < 0.1 * record['loss']  # because it starts from the trained weights
    assert later['eval_loss'] == pytest.approx(record['eval_loss'], rel=1e-5)


def test_held_out_samples_are_cached_in_local_within_the_limit_or_read_in_place(tmp_path, shards):
    samples = [good(number) for number in range(100, 220)]
    remote = write_shards(tmp_path / 'held', samples, size_limit=4096)
    limit = 8 * max(path.stat().st_size for path in Path(remote).glob('*.mds'))
    for flags in (['--local', str(tmp_path / 'cache')], []):
        settings = settings_of('--remote', shards, *SIZE_64, '--eval_remote', remote, '--cache_limit', limit, *flags)
        held_out = open_held_out(settings, find_model(SMALLEST), StreamingLAIONDataset(shards))
        assert [held_out[number]['caption'] for number in range(120)] == [sample['caption'] for sample in samples]
    copies = list((tmp_path / 'cache').glob('*/*.mds'))
    assert limit / 8 < sum(copy.stat().st_size for copy in copies) <= limit


def test_samples_are_known_to_be_held_out_only_if_every_phase_trained_on_the_other_side_of_their_conversion(tmp_path):
    write_photos(tmp_path / 'photos', 40)
    shutil.copytree('photos', 'larger')
    for path in Path('larger').glob('*.jpg'):  # the same pictures at another size
        Image.open(path).resize((80, 80)).save(path)
    for source, out, *flags in (('photos', 'all'), ('photos', 'small', '--held_out', '0.3'),
                                ('larger', 'large', '--held_out', '0.3')):
        assert convert.main([source, out, *flags, '--num_workers', '1']) == 0

    def is_held_out(remote: str, folder: str, *flags: str) -> bool:
        argv = ['--remote', remote, '--eval_remote', 'small-held-out', *TINY, '--num_workers', '0', '--save_folder',
                folder, '--autoresume', '--max_duration', '1ba', *flags]
        return main(argv)['eval_held_out']

    assert is_held_out('small', 'one')
    assert is_held_out('small', 'two', '--load_weights', 'one')
    assert is_held_out('small', 'two', '--max_duration', '2ba')  # a resume
    assert not is_held_out('large', 'other-size', '--load_weights', 'one')
    assert not is_held_out('all', 'of-all')
    assert not is_held_out('small', 'side-of-all', '--load_weights', 'of-all')
    assert not is_held_out('small', 'side-of-all', '--max_duration', '2ba')
    index = read_index('small-held-out')
    for folder, expected in (('two', False), ('side-of-all', None)):  # evaluate.py asks this function
        assert was_trained_on(data_of(read_trained_model(folder, 'MODEL').flags), index) is expected


def test_a_training_on_latents_is_evaluated_on_latents(moments):
    remote, samples = moments
    record = main(['--use_synth_latents', *TRAIN, '--eval_remote', remote, '--save_folder', 'kept'])
    assert record['eval_loss'] == pytest.approx(reference_loss(checkpoints_in('kept')[-1], samples, 64), rel=1e-5)
    assert (record['eval_held_out'], record['eval_samples']) == (True, len(samples))


def test_latents_of_another_size_than_the_images_of_the_training_are_refused(moments, capfd):
    line = one_error_line([*TINY, '--use_synth_data', '--image_size', '128', '--eval_remote', moments[0]], capfd)
    assert '--eval_remote' in line and 'latents with image_size 64' in line


@pytest.mark.parametrize('kind', ['images', 'latents'])
def test_copies_of_the_training_data_are_refused(kind, shards, moments, capfd):
    shutil.copytree(shards if kind == 'images' else moments[0], 'copy')
    if kind == 'latents':  # as encode.py would write them for these shards
        index = read_index('copy')
        index['latents'][IMAGES_HASH] = index_hash(read_index(shards))
        Path('copy/index.json').write_text(json.dumps(index))
    line = one_error_line(['--remote', shards, *SIZE_64, '--eval_remote', 'copy'], capfd)
    assert '--eval_remote' in line and 'same images as the training data' in line
