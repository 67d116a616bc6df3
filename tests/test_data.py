"""Samples and batches of both datasets, and the replacement of bad samples."""
import numpy as np
import pytest
import torch

from benchmark import main
from data import HeldOutSamples, StreamingLAIONDataset, build_data, build_loader, normalize
from sdbench.inputs.images import decode_image
from sdbench.inputs.shards import read_index
from sdbench.inputs.tokenizer import token_ids
from sdbench.models.loading import find_model
from tests.runs import SMALLEST, TINY, failed, settings_of
from tests.samples import encoded, good, large_png, picture, pillow_square, pixels, write_shards
from tests.shortcuts import clip_tokenizer


def test_the_pixels_of_an_image_do_not_depend_on_the_other_images_in_its_batch(tmp_path):
    sizes = (32, 32, 64, 64, 96, 48)
    samples = [{'jpg': encoded(picture(size, size, size), 'PNG'), 'caption': 'x'} for size in sizes]
    shards = write_shards(tmp_path / 'shards', samples)
    model = find_model(SMALLEST)
    expected = torch.stack([decode_image(sample['jpg'], 64) for sample in samples])
    images = StreamingLAIONDataset(shards, image_size=64, batch_size=1)
    held_out = HeldOutSamples(images, model.latent_size(64), 1000, 17)
    for batch_size in (1, 2, 3, 6):
        data = build_loader(held_out, batch_size, 0, clip_tokenizer())
        made = torch.cat([normalize(batch)['image'] for batch in data.dataloader])
        torch.testing.assert_close(made, expected / 127.5 - 1, atol=0, rtol=0)


def test_bytes_are_scaled_only_once():
    image = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    scaled = normalize({'image': image})
    torch.testing.assert_close(scaled['image'].double(), image.double() / 127.5 - 1, atol=1e-6, rtol=0)
    assert normalize(scaled)['image'] is scaled['image']
    with pytest.raises(ValueError, match='images have the type torch.int64; give bytes'):
        normalize({'image': image.long()})


@pytest.mark.parametrize('num_workers', [0, 2])
def test_bad_samples_are_replaced_printed_once_and_counted(tmp_path, capfd, num_workers):
    samples = [good(index) for index in range(20)]
    samples[3]['jpg'], samples[17]['jpg'], samples[18]['caption'] = b'no image', large_png(), ' \n'
    shards = write_shards(tmp_path / 'shards', samples)
    record = main(['--remote', shards, *TINY, '--max_duration', '2ep', '--measure_batches', '9', '--num_workers',
                   str(num_workers), '--max_bad_samples', '0.2'])
    assert (record['status'], record['bad_samples'], record['measured_batches']) == ('complete', 3, 9)
    errors = capfd.readouterr().err
    for index, reason in ((3, 'not a known format'), (17, 'exceeds limit'), (18, 'no caption')):
        assert errors.count(f'bad sample {index} is skipped: ') == 1
        assert reason in errors


def test_too_many_bad_samples_end_the_run(tmp_path, results, capfd):
    samples = [good(index) | ({'jpg': b''} if index % 2 else {}) for index in range(40)]
    shards = write_shards(tmp_path / 'shards', samples)
    line = failed(['--remote', shards, *TINY, '--measure_batches', '9'], results, capfd)
    assert 'samples are bad, more than the fraction --max_bad_samples 0.01' in line
    assert main(['--remote', shards, *TINY, '--max_bad_samples', '1'])['bad_samples'] > 2


def test_captions_are_dropped_and_images_mirrored_in_the_shares_asked_for_by_seed_epoch_and_sample(shards, samples):
    # Recognize each image, mirrored or not, by its pixels.
    known = {}
    for number, sample in enumerate(samples):
        image = torch.from_numpy(pixels(pillow_square(sample['jpg']))).to(torch.uint8)
        known |= {image.numpy().tobytes(): (number, False), image.flip(2).numpy().tobytes(): (number, True)}
    empty, *captions = token_ids(clip_tokenizer(), ['', *(sample['caption'] for sample in samples)])

    def choices_in(epochs: int, *flags: str, first: int = 0) -> list[dict]:
        """Return whether each image is mirrored and its caption dropped, by number, in each epoch."""
        settings = settings_of('--remote', shards, *TINY, '--image_size', '64', '--random_flip', '--caption_drop',
                               '0.2', *flags)
        loader = build_data(settings, find_model(SMALLEST), read_index(shards)).dataloader
        loader.dataset.resume_at(first, 0)
        choices = []
        for _ in range(epochs):
            choices.append({})
            for batch in loader:
                for image, caption in zip(batch['image'], batch['caption'].tolist(), strict=True):
                    number, is_mirrored = known[image.contiguous().numpy().tobytes()]
                    assert number not in choices[-1]  # each image comes once in an epoch, with its own caption
                    assert caption in (captions[number], empty)
                    choices[-1][number] = (is_mirrored, caption == empty)
        return choices

    epochs = choices_in(20, '--num_workers', '0')
    mirrored, dropped = np.array([[epoch[number] for number in range(24)] for epoch in epochs]).mean(axis=(0, 1))
    assert mirrored == pytest.approx(0.5, abs=0.1)  # 4 standard deviations of 480 choices
    assert dropped == pytest.approx(0.2, abs=0.08)
    assert len({tuple(sorted(epoch.items())) for epoch in epochs}) == 20
    assert choices_in(2, '--num_workers', '2', '--batch_size', '8', first=18) == epochs[18:]
    assert choices_in(1, '--num_workers', '0', '--seed', '18') != epochs[:1]
