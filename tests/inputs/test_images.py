"""Decoded pixels equal the pixels that Pillow alone decodes."""
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageCms, TiffImagePlugin

import convert
from sdbench.inputs.images import FORMATS, decode_image, decode_whole_image, formats
from tests.samples import encoded, picture, pillow_square, pixels, read_back, write_files


def with_orientation(orientation: int, format: str = 'JPEG') -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encoded(picture(orientation, 96, 64), format, exif=exif)


def with_xmp(attribute: bytes, orientation: int | None = None) -> bytes:
    """Return a JPEG with XMP, and with EXIF after it if an orientation is given."""
    jpeg = encoded(picture(9, 96, 64)) if orientation is None else with_orientation(orientation)
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x="adobe:ns:meta/">' + attribute + b'</x:xmpmeta>'
    return jpeg[:2] + b'\xff\xe1' + (len(xmp) + 2).to_bytes(2) + xmp + jpeg[2:]


ENCODED = {
    'jpeg': encoded(picture(1)),
    'progressive jpeg': encoded(picture(2), progressive=True),
    'grey jpeg': encoded(picture(3).convert('L')),
    'cmyk jpeg': encoded(picture(4).convert('CMYK')),
    'png': encoded(picture(5), 'PNG'),
    'palette png': encoded(picture(6).convert('P'), 'PNG'),
    'one bit png': encoded(picture(8).convert('1'), 'PNG'),
    'webp': encoded(picture(10), 'WEBP'),
    'wide jpeg': encoded(picture(11, 100, 64)),
    'tall png': encoded(picture(12, 64, 101), 'PNG'),
    **{f'orientation {n}': with_orientation(n) for n in range(1, 9)},
    **{f'png of orientation {n}': with_orientation(n, 'PNG') for n in range(1, 10)},
    'orientation behind xmp': with_xmp(b'<tiff:Make>x</tiff:Make>', 6),
    'orientation in xmp alone': with_xmp(b'<tiff:Orientation>6</tiff:Orientation>'),
    'png with a large profile': encoded(picture(13), 'PNG', icc_profile=bytes(2 << 20)),
}


@pytest.mark.parametrize('name', ENCODED)
def test_pixels_are_pillows_in_every_format_and_upright_at_every_size(name):
    decoded = decode_image(ENCODED[name])
    assert decoded.dtype == torch.uint8
    np.testing.assert_array_equal(decoded.numpy(), pixels(pillow_square(ENCODED[name])))
    whole, reduced = (decode_whole_image(ENCODED[name], image_size) for image_size in (None, 8))
    assert (whole.shape[1] > whole.shape[2]) == (reduced.shape[1] > reduced.shape[2])


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile('sRGB')).tobytes()
RED_IS_BLUE = SRGB.replace(b'rXYZ', b'last').replace(b'bXYZ', b'rXYZ').replace(b'last', b'bXYZ')  # swaps two tags


def grey_profile() -> bytes:
    """Return a profile for grey whose curve is a straight line from (0.04045, 0.0904) to white instead of sRGB's."""
    exponents = [struct.pack('>i', round(exponent * 65536)) for exponent in (2.4, 1)]
    return SRGB.replace(b'RGB XYZ ', b'GRAYXYZ ').replace(b'rTRC', b'kTRC').replace(*exponents)


def cmyk_profile() -> bytes:
    """Return a CMYK profile that defines cyan as white, and any other ink as black."""
    curve = bytes(range(256))
    colours = [255 if corner in (0, 8) else 0 for corner in range(16)]  # lightness at the 16 corners of C, M, Y, K
    table = b'mft1' + bytes(4) + bytes([4, 3, 2, 0]) + struct.pack('>9i', *(65536, 0, 0, 0) * 2, 65536)
    table += curve * 4 + b''.join(bytes([lightness, 128, 128]) for lightness in colours) + curve * 3
    head = SRGB[:12] + b'prtrCMYKLab ' + SRGB[24:128]
    return struct.pack('>I', 144 + len(table)) + head[4:] + struct.pack('>I4sII', 1, b'A2B0', 144, len(table)) + table


@pytest.mark.parametrize('format', ['JPEG', 'PNG', 'WEBP', 'TIFF', 'AVIF', 'HEIF'])
def test_colours_are_converted_to_srgb_by_the_embedded_profile(format):
    formats()  # registers HEIF
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    options = {'quality': 95} if format != 'PNG' else {}
    data = encoded(picture(1), format, icc_profile=RED_IS_BLUE, exif=exif.tobytes(), **options)
    plain = encoded(picture(1), format, exif=exif.tobytes(), **options)
    for size in (None, 16):  # also if a JPEG is decoded at a reduced size
        meant = decode_image(plain, size).numpy()[::-1].astype(int)
        np.testing.assert_allclose(decode_image(data, size), meant, atol=2)


@pytest.mark.parametrize('image, profile', [
    (picture(1), SRGB), (picture(1), RED_IS_BLUE[:300]), (picture(1), b''), (picture(1), grey_profile()),
    (picture(1).convert('L'), SRGB), (picture(1).convert('CMYK'), RED_IS_BLUE)])
def test_a_profile_that_is_srgb_or_broken_or_for_another_colour_space_changes_nothing(image, profile):
    plain = decode_image(encoded(image))
    np.testing.assert_array_equal(decode_image(encoded(image, icc_profile=profile)), plain)


def test_grey_and_cmyk_images_are_converted_by_their_own_profiles():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    values = grey[1:] / 255  # above 0.04045
    meant = 255 * (1.055 * ((values + 0.055) / 1.055) ** (1 / 2.4) - 0.055)
    decoded = decode_image(encoded(Image.fromarray(grey), 'PNG', icc_profile=grey_profile())).numpy()
    for channel in decoded:
        np.testing.assert_allclose(channel[1:], meant, atol=1)
    for inks, colour in ((0, 0, 0, 0), 255), ((255, 0, 0, 0), 255), ((0, 255, 0, 0), 0), ((0, 0, 0, 255), 0):
        data = encoded(Image.new('CMYK', (16, 16), inks), icc_profile=cmyk_profile())
        assert abs(decode_image(data).numpy().astype(int) - colour).max() <= 2


@pytest.mark.parametrize('mode', ['RGBA', 'LA', 'P'])
def test_transparent_pixels_get_a_white_background_also_if_the_image_has_a_profile(mode):
    image = picture(7).convert('RGBA')
    image.putalpha(Image.fromarray(np.tile(np.uint8([0, 128, 255, 255]), (64, 16))))
    image = image.convert(mode)
    white = Image.new('RGBA', image.size, 'white')
    white.alpha_composite(image.convert('RGBA'))
    meant = pixels(white.convert('RGB'))
    assert (meant[:, :, 0] == 255).all()
    np.testing.assert_array_equal(decode_image(encoded(image, 'PNG')), meant)
    decoded = decode_image(encoded(image, 'PNG', icc_profile=RED_IS_BLUE)).numpy().astype(int)
    np.testing.assert_allclose(decoded, meant[::-1], atol=2)


@pytest.mark.parametrize('format', ['GIF', 'WEBP', 'PNG'])
def test_an_animation_becomes_its_first_visible_frame(format):
    clear, seen, later = (Image.new('RGBA', (32, 32), color) for color in ('#0000', '#f00f', '#00ff'))
    for frames, colour in (([clear, clear, seen, later], [255, 0, 0]), ([seen, later], [255, 0, 0]),
                           ([clear, clear], [255, 255, 255])):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
        assert decode_image(data)[:, 9, 9].tolist() == colour


@pytest.mark.parametrize('format', ['JPEG', 'PNG'])
@pytest.mark.parametrize('side', [100, 128, 700])
def test_larger_images_are_reduced_like_pillows_antialiased_filter(format, side):
    image = encoded(picture(3, side + 40, side), format, **({'quality': 95} if format == 'JPEG' else {}))
    decoded = decode_image(image, image_size=64)
    reference = pixels(pillow_square(image).resize((64, 64), Image.BILINEAR))
    assert decoded.shape == (3, 64, 64)
    assert np.abs(decoded.numpy().astype(int) - reference).mean() < 0.25


def test_photos_are_converted_again_once_the_package_for_their_format_is_installed(monkeypatch, capsys):
    assert 'HEIF' in formats()  # which also registers it
    photo = encoded(picture(3), 'HEIF')
    write_files('photos', {'IMG_1.HEIC': photo, 'IMG_1.txt': 'a cat'})
    with monkeypatch.context() as without_package:
        without_package.setattr('convert.formats', lambda: FORMATS)
        assert convert.main(['photos', 'out']) == 0
    assert convert.main(['photos', 'out']) == 0
    assert 'done already' not in capsys.readouterr().out
    assert read_back('out') == [(photo, 'a cat')]


def test_a_format_for_which_pillow_would_run_a_program_is_not_read():
    with pytest.raises(ValueError, match='not a known format'):
        decode_image(encoded(picture(0), 'EPS'))


GREY = np.asarray(picture(9).convert('L')).astype(np.uint16)  # (64, 64), 0 to 255


@pytest.mark.parametrize('format', ['PNG', 'TIFF', 'JPEG2000', 'PPM'])
@pytest.mark.parametrize('darker', [0, 2, 6])
def test_a_grey_image_with_16_bits_keeps_its_brightness(format, darker):
    options = {'irreversible': False} if format == 'JPEG2000' else {}
    decoded = decode_image(encoded(Image.fromarray((GREY << 8) >> darker), format, **options)).numpy()
    for channel in decoded:
        np.testing.assert_array_equal(channel, GREY >> darker)


@pytest.mark.parametrize('values, tags', [
    ((GREY / 255).astype(np.float32), {}), (GREY.astype(np.int32) << 23, {}),
    (GREY << 8, {TiffImagePlugin.PHOTOMETRIC_INTERPRETATION: 0})])
def test_a_grey_image_whose_brightness_would_be_a_guess_is_refused(values, tags):
    with pytest.raises(ValueError, match='neither 8 nor 16 bits from black to white; save it with 8 bits'):
        decode_image(encoded(Image.fromarray(values), 'TIFF', tiffinfo=tags))


@pytest.mark.parametrize('colour', [0, 2])  # PNG's colour types grey and RGB
def test_the_transparent_colour_of_a_16_bit_png_becomes_white(colour):
    values = np.repeat((GREY << 8)[..., None], colour + 1, axis=2)
    rows = b''.join(b'\0' + row.astype('>u2').tobytes() for row in values)
    chunks = {b'IHDR': struct.pack('>IIBBBBB', 64, 64, 16, colour, 0, 0, 0),
              b'tRNS': values[0, 0].astype('>u2').tobytes(), b'IDAT': zlib.compress(rows), b'IEND': b''}
    png = b'\x89PNG\r\n\x1a\n'
    for name, content in chunks.items():
        png += struct.pack('>I', len(content)) + name + content + struct.pack('>I', zlib.crc32(name + content))
    np.testing.assert_array_equal(decode_image(png)[0], np.where(GREY == GREY[0, 0], 255, GREY))
