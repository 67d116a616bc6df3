"""Pixels, against Pillow, and the memory that they take."""
import io
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from inputs.images import BYTES_A_PIXEL, MOST_BYTES, USUAL_BYTES_A_PIXEL, decode_image, decode_whole_image
from tests.runs import ROOT
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


@pytest.mark.parametrize('orientation', range(1, 10))
@pytest.mark.parametrize('format', ['PNG', 'WEBP'])
def test_what_pillow_decodes_is_turned_upright_as_pillow_does(format, orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(picture(5, 60, 40), format, exif=exif, lossless=True)
    reference = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert('RGB')
    np.testing.assert_array_equal(decode_whole_image(data).numpy(), pixels(reference))


# Prints how many bytes more than before the process held at once while it decoded each file, in kiB.
PEAKS = '''
import sys
from pathlib import Path
from inputs.images import decode_image

def high_water():
    return int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])

for path in sys.argv[1:]:
    data = Path(path).read_bytes()
    Path('/proc/self/clear_refs').write_text('5')  # the mark starts anew
    before = high_water()
    decode_image(data, 512)
    print(high_water() - before)
'''
LARGE = [('I;16', 'PNG'), ('RGBA', 'PNG'), ('F', 'TIFF'), ('RGB', 'WEBP'), ('RGB', 'JPEG2000')]


@pytest.mark.long
def test_no_file_takes_more_memory_than_its_header_was_let_pass_for(tmp_path):
    side = 1600
    paths = []
    for number, (mode, format) in enumerate(LARGE):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(encoded(Image.new(mode, (side, side)), format))
    peaks = subprocess.run([sys.executable, '-c', PEAKS, *paths], cwd=ROOT, check=True, capture_output=True, text=True)
    for (mode, format), peak in zip(LARGE, peaks.stdout.split(), strict=True):
        bytes_a_pixel = int(peak) * 1024 / side ** 2
        assert 0.5 < bytes_a_pixel < BYTES_A_PIXEL.get(format, USUAL_BYTES_A_PIXEL) + 2, (mode, format)  # and its heap


def tiff_of_one_tile(side: int) -> bytes:
    """A TIFF of 16 by 16 grey pixels that says that its only tile has `side` by `side`."""
    tags = {256: 16, 257: 16, 258: 8, 259: 1, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: 256}
    entries = b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags.items())  # type 4: LONG
    return struct.pack('<2sHIH', b'II', 42, 8, len(tags)) + entries + bytes(4 + 256)


def test_a_small_file_whose_header_asks_for_much_memory_is_refused_by_its_header():
    side = int((MOST_BYTES / BYTES_A_PIXEL['WEBP']) ** 0.5) + 1  # as a PNG it would be taken
    webp = encoded(Image.new('L', (side, side)), 'WEBP', lossless=True, quality=0, method=0)
    for data, format in ((webp, 'WEBP'), (tiff_of_one_tile(65520), 'TIFF')):
        with pytest.raises(ValueError, match=f'pixels are more than the [0-9,]+ of a {format}'):
            decode_image(data)
