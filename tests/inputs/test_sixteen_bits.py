"""Grey images of more than 8 bits look as their bits say, whatever file they come in."""
import io
import struct

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from inputs.images import decode_image
from tests.samples import encoded, picture

GREY = np.asarray(picture(9).convert('L')).astype(np.uint16)  # (64, 64), 0 to 255
FULL = GREY * 257  # 0 to 65535
FORMATS = {'PNG': {}, 'TIFF': {}, 'JPEG2000': {'irreversible': False}, 'PPM': {}}


def big_endian_tiff(values: np.ndarray) -> bytes:
    """Mode I;16B."""
    return encoded(Image.frombytes('I;16B', values.shape[::-1], values.astype('>u2').tobytes()), 'TIFF')


def twelve_bit_tiff(values: np.ndarray) -> bytes:
    """Two values in three bytes, the first with its high 8 bits first, as TIFF packs them."""
    flat = values.ravel().astype(int)
    packed = np.stack([flat[::2] >> 4, (flat[::2] & 15) << 4 | flat[1::2] >> 8, flat[1::2] & 255], axis=1)
    data = packed.astype(np.uint8).tobytes()
    height, width = values.shape
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8 + 2 + 9 * 12 + 4, 277: 1, 278: height,
            279: len(data)}
    entries = b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags.items())  # type 4: LONG
    return struct.pack('<2sHIH', b'II', 42, 8, len(tags)) + entries + bytes(4) + data


def grey_of(data: bytes) -> np.ndarray:
    red, green, blue = decode_image(data).numpy()
    np.testing.assert_array_equal(red, green)
    np.testing.assert_array_equal(red, blue)
    return red


@pytest.mark.parametrize('format', FORMATS)
def test_sixteen_bits_keep_their_highest_eight_in_every_format(format):
    np.testing.assert_array_equal(grey_of(encoded(Image.fromarray(FULL), format, **FORMATS[format])), GREY)


def test_a_big_endian_tiff_is_read():
    data = big_endian_tiff(FULL)
    assert Image.open(io.BytesIO(data)).mode == 'I;16B'
    np.testing.assert_array_equal(grey_of(data), GREY)


def test_a_tiff_of_twelve_bits_is_as_bright_as_its_twelve_bits_say():
    data = twelve_bit_tiff(GREY * 16)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), GREY * 16)
    np.testing.assert_array_equal(grey_of(data), GREY)


def test_a_dark_tiff_of_twelve_bits_stays_dark():
    np.testing.assert_array_equal(grey_of(twelve_bit_tiff(GREY)), GREY // 16)


@pytest.mark.parametrize('bits', [8, 10, 12, 14])
@pytest.mark.parametrize('write', [lambda values: encoded(Image.fromarray(values), 'PNG'), big_endian_tiff])
def test_values_that_use_few_of_sixteen_bits_are_not_black(bits, write):
    np.testing.assert_array_equal(grey_of(write(GREY << (bits - 8))), GREY)


@pytest.mark.parametrize('largest', [2 ** 14, 20_000, 40_000, 65_535])
def test_a_picture_that_uses_the_fifteenth_bit_keeps_its_brightness(largest):
    values = (np.arange(4096, dtype=np.uint32).reshape(64, 64) * largest // 4095).astype(np.uint16)
    np.testing.assert_array_equal(grey_of(encoded(Image.fromarray(values), 'PNG')), values >> 8)


@pytest.mark.parametrize('values, expected', [
    ((GREY / 255).astype(np.float32), GREY),             # brightness from 0 to 1
    ((GREY * 257).astype(np.float32), GREY),
    (GREY.astype(np.int32) << 16, GREY),                 # 24 bits
    (np.full((64, 64), -5, np.int32), np.zeros((64, 64))),
    (np.full((64, 64), np.nan, np.float32), np.zeros((64, 64))),
    (np.zeros((64, 64), np.uint16), np.zeros((64, 64))),
])
def test_other_deep_images_decode_without_surprise(values, expected):
    decoded = grey_of(encoded(Image.fromarray(values), 'TIFF')).astype(int)
    assert np.abs(decoded - expected).max() <= 1


def test_a_deep_tiff_is_turned_upright():
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[274] = 3  # upside down
    data = encoded(Image.fromarray(FULL), 'TIFF', tiffinfo=tags)
    np.testing.assert_array_equal(grey_of(data), GREY[::-1, ::-1])
