"""Decode image files safely into tensors: upright, in sRGB, cropped to their centre square."""
import contextlib
import functools
import io
import random
import re
import warnings

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import ExifTags, Image, ImageCms, ImageOps, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from sdbench.errors import BadSample, is_out_of_memory

# Some others are decoded in Python, minutes for a few hundred bytes (DDS), or run a program (EPS: Ghostscript).
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'AVIF', 'TIFF', 'JPEG2000', 'PPM')
DEEP_MODES = ('I', 'F')  # how the names of Pillow's modes for more than 8 bits begin
FLOAT_BITS = (8, 16, 32)  # of whole numbers that are stored as floats
MOST_FRAMES = 10  # of an animation that are looked at for one that is not wholly transparent
SRGB_TOLERANCE = 2  # of 255, within which a colour profile counts as sRGB: the many profiles of sRGB differ by rounding

# Of a profile of colours and of a text in a PNG. With Pillow's limit, 1 MiB, an image with more would not be read.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


@functools.cache
def formats() -> tuple[str, ...]:
    """Return the formats that are decoded, by Pillow's names: FORMATS, and HEIF where pillow-heif is installed."""
    with contextlib.suppress(ImportError):
        from pillow_heif import register_heif_opener
        register_heif_opener()
        return (*FORMATS, 'HEIF')
    return FORMATS


def decode_image(data: bytes, image_size: int | None = None) -> torch.Tensor:
    """Decode the centre square of an image in one of `formats()`: uint8 (3, H, H), upright and in sRGB.

    Args:
        data: the encoded image. Raises BadSample if it does not decode.
        image_size: a larger square is reduced to this many pixels a side (antialiased); None leaves the size.
    """
    image = decode_whole_image(data, image_size)  # (3, H, W)
    height, width = image.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = image[:, top:top + side, left:left + side]  # (3, side, side)
    if image_size and side > image_size:
        image = resize(image, image_size)
    return image


def decode_whole_image(data: bytes, image_size: int | None = None) -> torch.Tensor:
    """Decode an image in one of `formats()`: uint8 (3, H, W), upright and in sRGB, transparent parts on white.

    Args:
        data: the encoded image. Raises BadSample if it does not decode, or has more pixels than Pillow reads, which
            is 179 million unless a program sets PIL.Image.MAX_IMAGE_PIXELS, and MemoryError if there is no memory for
            it at the moment.
        image_size: a much larger image may be decoded smaller, with no side shorter than this.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # such as Pillow's of palettes, and of half as many pixels as it reads
            with Image.open(io.BytesIO(data), formats=formats()) as image:
                return decode_pixels(image, data, image_size)
    except UnidentifiedImageError:
        raise BadSample('image does not decode: not a known format') from None
    except Image.DecompressionBombError as error:
        pixels, most = (int(number) / 1e6 for number in re.findall('[0-9]+', str(error)))
        raise BadSample(f'image is too large: {pixels:,.0f} megapixels, and at most {most:,.0f} are read; reduce it, '
                        'as a training would in every epoch') from None
    except MemoryError:
        raise  # the image may be good
    except Exception as error:  # damaged bytes make Pillow raise nearly anything
        if isinstance(error, RuntimeError) and is_out_of_memory(error):  # of torch's own decoder
            raise MemoryError(str(error)) from None
        raise BadSample(f'image does not decode: {error or type(error).__name__}'.splitlines()[0]) from None


def decode_pixels(image: Image.Image, data: bytes, image_size: int | None) -> torch.Tensor:
    """Decode an opened image into uint8 (3, H, W), with torchvision where it is a plain JPEG, else with Pillow."""
    # Pillow reads the colour profile with the header, before it decodes any pixel.
    to_srgb = None
    if 'icc_profile' in image.info:
        to_srgb = srgb_transform(image.info['icc_profile'], image.mode)

    # torchvision's decoder is faster. It neither converts colours nor turns by all metadata that Pillow turns by, so it
    # only gets upright images in sRGB.
    much_larger = image_size is not None and min(image.size) >= 2 * image_size
    is_plain = image.format == 'JPEG' and image.mode in ('L', 'RGB') and to_srgb is None
    if is_plain and not much_larger and is_upright(image):
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return torchvision.io.decode_jpeg(encoded, torchvision.io.ImageReadMode.RGB)

    # all that is in the file; a TIFF is turned upright by that
    if much_larger:
        image.draft(None, (image_size, image_size))  # JPEG decodes straight to 1/2, 1/4 or 1/8; others ignore it
    image.load()
    if image.has_transparency_data and getattr(image, 'is_animated', False):
        seek_visible_frame(image)

    # upright, unless its EXIF is odd, which Pillow rewrites after it has rotated the image
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # of many kinds
        pass

    # 8 bits, on white, sRGB; of 48 bits a PNG names the transparent colour by 16 each, and Pillow keeps the upper 8
    if image.mode[0] in DEEP_MODES:
        image = to_eight_bits(image)
    transparent = image.info.get('transparency')
    if isinstance(transparent, tuple) and max(transparent) > 255:
        image.info['transparency'] = tuple(value >> 8 for value in transparent)
    if image.has_transparency_data:
        image = image.convert('RGBA')
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    if to_srgb is not None:
        image = to_srgb.apply(image.convert(to_srgb.input_mode))
    image = image.convert('RGB')
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # (3, H, W)


@functools.lru_cache(16)  # building a transform takes 30 ms, and the images of a dataset share a few profiles
def srgb_transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform from an embedded colour profile (ICC) to sRGB, which takes images of its `input_mode`.

    Return None if the pixels can stay as they are: the profile is sRGB, or it is broken or of another colour space than
    the image, and viewers ignore it too. A profile counts as sRGB if it hardly changes random colours, because names do
    not tell: many profiles of sRGB are called otherwise, such as c2.

    Args:
        profile: as it is embedded in the image.
        mode: Pillow's mode of the image.
    """
    spaces = ['RGB']
    if mode == 'CMYK':
        spaces = ['CMYK']
    elif Image.getmodebase(mode) == 'L':
        spaces = ['GRAY', 'RGB']  # many grey images carry a profile for RGB
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        if space not in spaces:
            return None
        input_mode = 'L' if space == 'GRAY' else space
        transform = ImageCms.buildTransform(source, ImageCms.createProfile('sRGB'), input_mode, 'RGB')
    except MemoryError:
        raise
    except Exception:  # a damaged profile raises nearly anything
        return None

    values = random.Random(0).randbytes(64 * 64 * Image.getmodebands(input_mode))
    colours = Image.frombytes(input_mode, (64, 64), values)
    unconverted = np.asarray(colours.convert('RGB')).astype(int)
    change = np.abs(np.asarray(transform.apply(colours)) - unconverted).max()
    return transform if change > SRGB_TOLERANCE else None


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale a grey image of more than 8 bits to 8 bits. Pillow's own conversion would make 255 and more white.

    Integers are taken as 16 bits, the depth of PNG, PPM, JPEG 2000 and nearly every TIFF, and as 31 or 32 bits if a
    value is larger. The scale is that of the depth, not of the brightest pixel, so that a dark image stays dark. Floats
    up to 1 are taken as brightness, and larger ones as integers of the fewest of FLOAT_BITS that hold the largest
    value.
    """
    # Pillow reads the unsigned 32 bits of a TIFF with a sign
    tags = getattr(image, 'tag_v2', {})
    values = np.asarray(image)  # (H, W)
    if tags.get(TiffImagePlugin.BITSPERSAMPLE) == (32,) and tags.get(TiffImagePlugin.SAMPLEFORMAT, (1,)) == (1,):
        values = values.view(np.uint32)

    # the depth
    values = np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0)
    largest = values.max()
    if image.mode == 'F' and largest <= 1:
        end = 1
    else:
        stored = tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]  # 12 in some scans
        depths = FLOAT_BITS if image.mode == 'F' else (min(stored, 16), 31, 32)
        end = next((2 ** bits for bits in depths if largest < 2 ** bits), largest)
    grey = (values * (256 / end)).clip(0, 255).astype(np.uint8)

    # what Pillow does only to 8 bits: a TIFF may count from white to black, and a PNG may have a transparent grey
    if tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0:
        grey = 255 - grey
    if 'transparency' in image.info:
        grey[values == image.info['transparency']] = 255
    return Image.fromarray(grey)


def is_upright(image: Image.Image) -> bool:
    """Tell whether neither EXIF nor XMP says that an image is to be turned, or what they say cannot be read."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    except MemoryError:
        raise
    except Exception:  # of odd EXIF
        return True


def seek_visible_frame(image: Image.Image) -> None:
    """Go to the first frame of an animation that is not wholly transparent: many begin with an empty one."""
    for number in range(MOST_FRAMES):
        try:
            image.seek(number)
        except EOFError:
            break
        if image.convert('RGBA').getextrema()[3][1] > 0:  # the largest alpha
            return
    image.seek(0)


def resize(image: torch.Tensor, image_size: int) -> torch.Tensor:
    """Resize uint8 (3, H, H) to (3, image_size, image_size), bilinear and antialiased."""
    return F.interpolate(image[None], size=(image_size, image_size), mode='bilinear', antialias=True)[0]
