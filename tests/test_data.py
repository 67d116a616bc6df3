"""Tokens, pixels and batches, against Pillow and known token ids."""
import io
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import encoded, picture, write_shards
from PIL import Image, ImageOps

from data import StreamingLAIONDataset, SyntheticImageCaptionDataset, build_loader, collate, normalize
from inputs.cache import cache_folder
from inputs.captions import build_tokenizer
from inputs.errors import DataError
from inputs.images import decode_image
from inputs.shards import read_index


def with_orientation(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture(orientation, 96, 64), exif=exif)


SIXTEEN_BITS = Image.fromarray(np.asarray(picture(9).convert('L')).astype(np.uint16) * 257)
FORMATS = {
    'jpeg': encoded(picture(1)),
    'progressive jpeg': encoded(picture(2), progressive=True),
    'grey jpeg': encoded(picture(3).convert('L')),
    'cmyk jpeg': encoded(picture(4).convert('CMYK')),
    'png': encoded(picture(5), 'PNG'),
    'palette png': encoded(picture(6).convert('P'), 'PNG'),
    'transparent png': encoded(picture(7).convert('RGBA'), 'PNG'),
    'grey and alpha png': encoded(picture(8).convert('LA'), 'PNG'),
    'one bit png': encoded(picture(8).convert('1'), 'PNG'),
    'webp': encoded(picture(10), 'WEBP'),
    'wide jpeg': encoded(picture(11, 100, 64)),
    'tall png': encoded(picture(12, 64, 101), 'PNG'),
    **{f'orientation {n}': with_orientation(n) for n in range(1, 9)},
}


def pillow_square(encoded_image: bytes) -> Image.Image:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded_image))).convert('RGB')
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1).astype(int)  # (3, H, W)


@pytest.mark.parametrize('name', FORMATS)
def test_pixels_are_pillows_in_every_format(name):
    decoded = decode_image(FORMATS[name])
    assert decoded.dtype == torch.uint8
    np.testing.assert_array_equal(decoded.numpy(), pixels(pillow_square(FORMATS[name])))


def test_sixteen_bits_keep_their_highest_eight():
    decoded = decode_image(encoded(SIXTEEN_BITS, 'PNG'))
    np.testing.assert_array_equal(decoded[0].numpy(), np.asarray(SIXTEEN_BITS) // 257)


@pytest.mark.parametrize('format', ['JPEG', 'PNG'])
@pytest.mark.parametrize('side', [100, 700])
def test_larger_images_are_reduced_like_pillows_antialiased_filter(format, side):
    image = encoded(picture(3, side + 40, side), format, **({'quality': 95} if format == 'JPEG' else {}))
    decoded = decode_image(image, image_size=64)
    reference = pixels(pillow_square(image).resize((64, 64), Image.BILINEAR))
    assert decoded.shape == (3, 64, 64)
    assert np.abs(decoded.numpy().astype(int) - reference).mean() < 1.5


def test_smaller_images_stay_as_they_are():
    assert decode_image(FORMATS['jpeg'], image_size=512).shape == (3, 64, 64)


@pytest.mark.parametrize('broken', [b'', b'no image', FORMATS['jpeg'][:-40], FORMATS['jpeg'][:20], FORMATS['png'][:99]])
def test_what_does_not_decode_is_a_value_error_of_one_line(broken):
    with pytest.raises(ValueError, match='^image does not decode: [^\n]+$'):
        decode_image(broken)


def test_a_decompression_bomb_is_refused_before_it_is_decoded():
    bomb = encoded(Image.new('1', (20_000, 20_000)), 'PNG')
    with pytest.raises(ValueError, match='pixels'):
        decode_image(bomb)


@pytest.mark.parametrize('caption, words', [
    ('a photo of a cat', [320, 1125, 539, 320, 2368]),
    ("Wow! it's 2024", [2781, 256, 585, 568, 273, 271, 273, 275]),  # "!" is a word, though its id 0 pads
    ('', []),
])
def test_token_ids_are_clips(caption, words):
    expected = [49406, *words, 49407]
    assert build_tokenizer().encode(caption).ids == expected + [0] * (77 - len(expected))


def test_token_ids_agree_with_open_clips_tokenizer_on_odd_captions():
    import open_clip
    reference, tokenizer = open_clip.get_tokenizer('ViT-H-14'), build_tokenizer()
    captions = ["don't UPPER lower", 'naïve café 中文 🎉', '!!! ???', 'word ' * 100, 'x' * 500, ' two  blanks', '½ ≠ 1']
    for caption, encoding in zip(captions, tokenizer.encode_batch(captions), strict=True):
        assert encoding.ids == reference(caption)[0].tolist(), caption


def test_a_tokenizer_folder_pads_with_its_own_token(model_folder):
    ids = build_tokenizer(model_folder).encode('a cat').ids
    assert ids == [49406, 320, 2368] + [49407] * 74


def test_a_batch_of_one_size_travels_as_it_is_stored():
    images = [torch.full((3, 32, 32), value, dtype=torch.uint8) for value in (1, 2)]
    batch = collate([{'image': image, 'caption': 'x'} for image in images], build_tokenizer(), image_size=64)
    assert batch['image'].dtype == torch.uint8 and batch['image'].shape == (2, 3, 32, 32)
    assert batch['caption'].dtype == torch.int64 and batch['caption'].shape == (2, 77)
    assert torch.equal(batch['image'], torch.stack(images))


def test_a_batch_of_mixed_sizes_is_brought_to_the_training_size():
    small, large = decode_image(encoded(picture(1, 32, 32), 'PNG')), decode_image(encoded(picture(2, 64, 64), 'PNG'))
    batch = collate([{'image': image, 'caption': ''} for image in (small, large)], build_tokenizer(), image_size=64)
    assert batch['image'].shape == (2, 3, 64, 64)
    assert torch.equal(batch['image'][1], large)
    alone = normalize({'image': small[None]}, 64)['image'][0]  # what the device would have made of it
    mixed = normalize({'image': batch['image'][:1]}, 64)['image'][0]
    assert (alone - mixed).abs().max() < 1.01 / 127.5


def test_normalize_scales_bytes_to_minus_one_to_one_and_upsamples():
    image = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    out = normalize({'image': image, 'caption': 'kept'}, 16)
    assert out['image'].shape == (1, 3, 16, 16) and out['caption'] == 'kept'
    torch.testing.assert_close(out['image'][0, :, 5, 5], torch.tensor([-1.0, 1.0, -0.6]))


def test_normalize_agrees_with_torch_interpolation_in_float64():
    image = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    reference = F.interpolate(image.double(), size=(64, 64), mode='bilinear', align_corners=False) / 127.5 - 1
    torch.testing.assert_close(normalize({'image': image}, 64)['image'].double(), reference, atol=1e-5, rtol=0)


def test_synthetic_batches_keep_the_contract_and_cost_no_draw():
    dataset = SyntheticImageCaptionDataset(image_size=16, num_samples=10)
    spec = build_loader(dataset, batch_size=4, num_workers=0)
    first, second = list(spec.dataloader)  # the last two samples make no whole batch
    assert first['image'].dtype == torch.uint8 and first['image'].shape == (4, 3, 16, 16)
    assert first['caption'].dtype == torch.int64 and first['caption'].shape == (4, 77)
    assert 0 <= first['caption'].min() and first['caption'].max() < 49408
    assert first['image'].data_ptr() == second['image'].data_ptr()
    assert len(first['image'].unique()) == 256 and not torch.equal(first['image'][0], first['image'][1])
    assert not torch.equal(first['image'], SyntheticImageCaptionDataset(16, 10, seed=18).__getitems__([0] * 4)['image'])
    assert dataset[3]['image'].shape == (3, 16, 16)


@pytest.mark.parametrize('num_workers', [0, 2])
def test_streamed_batches_hold_every_pair_once(shards, samples, num_workers):
    dataset = StreamingLAIONDataset(shards, image_size=64, batch_size=4, shuffle=True)
    tokenizer = build_tokenizer()
    loader = build_loader(dataset, 4, num_workers, tokenizer).dataloader
    batches = list(loader)
    if num_workers:
        loader._iterator._shutdown_workers()  # at once; left to the garbage collector it takes 5 s a worker
    assert [batch['image'].shape for batch in batches] == [(4, 3, 64, 64)] * 6
    seen = {tuple(ids.tolist()): image for batch in batches
            for ids, image in zip(batch['caption'], batch['image'], strict=True)}
    assert len(seen) == len(samples)
    for sample in samples:
        np.testing.assert_array_equal(seen[tuple(tokenizer.encode(sample['caption']).ids)].numpy(),
                                      pixels(pillow_square(sample['jpg'])))


def test_a_local_remote_is_read_in_place_and_a_given_cache_is_filled(shards, tmp_path):
    in_place = StreamingLAIONDataset(shards, batch_size=1)
    assert in_place.streams[0].local == shards and in_place.streams[0].remote is None
    cached = StreamingLAIONDataset(shards, str(tmp_path / 'cache'), batch_size=1)
    assert cached[0]['caption'] == in_place[0]['caption']
    assert (tmp_path / 'cache' / 'index.json').exists()


def test_an_epoch_ends_with_the_reason_when_both_background_threads_fail(shards, tmp_path, monkeypatch):
    def unreachable(self, shard_id, blocking=True):
        barrier.wait(10)  # both threads are here before one of them fails
        raise OSError('no route')
    barrier, failures = threading.Barrier(2), []
    monkeypatch.setattr(StreamingLAIONDataset, 'prepare_shard', unreachable)

    def read():
        try:
            list(StreamingLAIONDataset(shards, str(tmp_path / 'cache'), batch_size=4))
        except DataError as error:
            failures.append(str(error))
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    assert not reader.is_alive() and failures == ['a shard could not be read (OSError: no route)']


def test_each_remote_has_a_cache_of_its_own():
    assert cache_folder('s3://a/b') != cache_folder('s3://a/c')


def test_the_index_tells_samples_and_columns(shards, tmp_path):
    entries = read_index(shards)['shards']
    assert sum(entry['samples'] for entry in entries) == 24 and entries[0]['column_names'] == ['caption', 'jpg']
    other = write_shards(tmp_path / 'other', [{'png': b'', 'text': ''}], {'png': 'bytes', 'text': 'str'})
    [entry] = read_index(other)['shards']
    assert (entry['samples'], entry['column_names']) == (1, ['png', 'text'])


@pytest.mark.parametrize('content', ['not json', '{}', '[]', '{"shards": [{}]}', '{"shards": 3}'])
def test_an_index_that_makes_no_sense_is_told(tmp_path, content):
    (tmp_path / 'index.json').write_text(content)
    with pytest.raises(ValueError, match='index.json'):
        read_index(str(tmp_path))
