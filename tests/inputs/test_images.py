"""Pixels, against Pillow."""
import numpy as np
import pytest
import torch
from PIL import Image

from inputs.images import decode_image
from tests.samples import encoded, picture, pillow_square, pixels


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
