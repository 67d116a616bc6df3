"""Decode image files safely into tensors: upright, in sRGB, cropped to their centre square."""
import contextlib
import functools
import io
import random
import warnings

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import ExifTags, Image, ImageCms, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from sdbench.errors import BadSample, is_out_of_memory

# Pillow's other formats are not safe for unknown files: DDS is decoded in Python and can take minutes for a few hundred
# bytes, and EPS runs a program (Ghostscript).
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'AVIF', 'TIFF', 'JPEG2000', 'PPM')
# A JPEG that is decoded at a reduced size keeps this many times the pixels per side that are needed, as in Pillow's
# Image.thumbnail. With fewer, the decoder's filter would replace most of the antialiased one, and would sharpen images.
REDUCING_GAP = 2
MOST_FRAMES = 10  # frames of an animation that are searched for one that is not fully transparent
ROTATIONS = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
             5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
             8: Image.Transpose.ROTATE_90}  # by the EXIF orientation
SRGB_TOLERANCE = 2  # of 255: a profile that changes colours by at most this counts as sRGB, whose profiles are rounded

# Accept colour profiles and texts of any length in a PNG. Pillow's default limit of 1 MiB rejects the whole image.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY


@functools.cache
def formats() -> tuple[str, ...]:
    """Return the names that Pillow uses for the decoded formats: FORMATS, and HEIF if pillow-heif is installed."""
    with contextlib.suppress(ImportError):
        from pillow_heif import register_heif_opener
        register_heif_opener()
        return (*FORMATS, 'HEIF')
    return FORMATS


def decode_image(data: bytes, image_size: int | None = None) -> torch.Tensor:
    """Decode an image in one of `formats()`, and crop it to its centre square: uint8 (3, H, H), upright and in sRGB.

    The square is resized to `image_size` H in pixels, bilinear and antialiased; None keeps its size. Only this function
    resizes images, so their pixels do not depend on the other images in a batch.

    Raises BadSample if the image does not decode.
    """
    image = decode_whole_image(data, image_size)  # (3, H, W)
    height, width = image.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = image[:, top:top + side, left:left + side]  # (3, side, side)
    if image_size is None or image_size == side:
        return image
    return F.interpolate(image[None], size=(image_size, image_size), mode='bilinear', antialias=True)[0]


def decode_whole_image(data: bytes, image_size: int | None = None) -> torch.Tensor:
    """Decode an image in one of `formats()`: uint8 (3, H, W), upright and in sRGB, with transparent parts in white.

    An image much larger than `image_size` may be decoded at a reduced size, with no side shorter than twice that many
    pixels.

    Raises BadSample if the image does not decode or has more pixels than Pillow accepts, which is 179 million unless a
    program sets PIL.Image.MAX_IMAGE_PIXELS. Raises MemoryError if there is not enough memory at the moment.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # Pillow warns about palettes, and from half of its pixel limit on
            with Image.open(io.BytesIO(data), formats=formats()) as image:
                return decode_pixels(image, data, image_size)
    except UnidentifiedImageError:
        raise BadSample('image does not decode: not a known format') from None
    except Exception as error:  # Pillow raises many types of errors for damaged bytes
        if is_out_of_memory(error):  # the image may be good
            raise MemoryError(str(error)) from None
        raise BadSample(f'image does not decode: {error or type(error).__name__}'.splitlines()[0]) from None


def decode_pixels(image: Image.Image, data: bytes, image_size: int | None) -> torch.Tensor:
    """Decode an opened image into uint8 (3, H, W): with torchvision if it is a plain JPEG, else with Pillow."""
    # Read the colour profile, which is in the header, so no pixels are decoded yet.
    to_srgb = None
    if 'icc_profile' in image.info:
        to_srgb = srgb_transform(image.info['icc_profile'], image.mode)

    # Use torchvision for most images, because its decoder is faster. It ignores colour profiles and some of the
    # orientation metadata, so it only gets upright images in sRGB. For much larger images Pillow is faster.
    much_larger = image_size is not None and min(image.size) >= 2 * REDUCING_GAP * image_size
    is_plain = image.format == 'JPEG' and image.mode in ('L', 'RGB') and to_srgb is None
    if is_plain and not much_larger and orientation(image) == 1:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return torchvision.io.decode_jpeg(encoded, torchvision.io.ImageReadMode.RGB)

    # Decode with Pillow, which rotates a TIFF upright when it is loaded. Rotate other images here, because Pillow's
    # function for it also rewrites the EXIF, which fails if the EXIF is unusual.
    if much_larger:
        kept = REDUCING_GAP * image_size
        image.draft(None, (kept, kept))  # JPEG decodes directly to 1/2, 1/4 or 1/8; other formats ignore it
    image.load()
    if image.has_transparency_data and getattr(image, 'is_animated', False):
        seek_visible_frame(image)
    if orientation(image) in ROTATIONS:
        image = image.transpose(ROTATIONS[orientation(image)])

    # Reduce to 8 bits per channel. In a PNG with 16 bits per channel the transparent colour also has 16 bits, but
    # Pillow reduces only the pixels to 8 bits.
    if image.mode[0] in 'IF':
        image = to_eight_bits(image)
    transparent = image.info.get('transparency')
    if isinstance(transparent, tuple) and max(transparent) > 255:
        image.info['transparency'] = tuple(value >> 8 for value in transparent)

    # Put transparent parts on white, then convert to sRGB, because a profile does not know about transparency.
    if image.has_transparency_data:
        image = image.convert('RGBA')
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    if to_srgb is not None:
        image = to_srgb.apply(image.convert(to_srgb.input_mode))
    image = image.convert('RGB')
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # (3, H, W)


@functools.lru_cache(16)  # building a transform takes 30 ms, and the images in a dataset share a few profiles
def srgb_transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform from an embedded colour profile (ICC) to sRGB. It takes images in its `input_mode`.

    Return None if the profile is sRGB, or if it is broken or for another colour space than the image: image viewers
    ignore such a profile, too. A profile counts as sRGB if it hardly changes random colours. The name of a profile is
    no help, because many sRGB profiles have other names, such as c2.
    """
    # Read the profile, and ignore it unless its colour space fits the image.
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
    except Exception:  # damaged profiles raise many types of errors
        return None

    # Convert random colours to see whether the profile differs from sRGB.
    values = random.Random(0).randbytes(64 * 64 * Image.getmodebands(input_mode))
    colours = Image.frombytes(input_mode, (64, 64), values)
    unconverted = np.asarray(colours.convert('RGB')).astype(int)
    change = np.abs(np.asarray(transform.apply(colours)) - unconverted).max()
    return transform if change > SRGB_TOLERANCE else None


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale a grey image of 16 bits to 8 bits. Pillow's own conversion would clip all values above 255.

    Raises BadSample for floats, other depths and a TIFF that stores white as 0: their brightness would be a guess.
    """
    tags = getattr(image, 'tag_v2', {})
    has_16_bits = image.mode.startswith('I;16') and tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,)) == (16,)
    is_ppm = image.format == 'PPM' and image.mode == 'I'  # Pillow scales it to 16 bits
    if not (has_16_bits or is_ppm) or tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0:
        raise BadSample('its grey values are neither 8 nor 16 bits from black to white; save it with 8 bits')
    values = np.asarray(image)  # (H, W)
    grey = (values >> 8).astype(np.uint8)
    if 'transparency' in image.info:  # a grey value of 16 bits in a PNG
        grey[values == image.info['transparency']] = 255
    return Image.fromarray(grey)


def orientation(image: Image.Image) -> int:
    """Return the orientation of an image in its EXIF or XMP; 1, which is upright, if there is none to read."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception:  # unusual EXIF raises many types of errors
        return 1


def seek_visible_frame(image: Image.Image) -> None:
    """Go to the first frame that is not fully transparent, because many animations begin with an empty frame."""
    for number in range(MOST_FRAMES):
        try:
            image.seek(number)
        except EOFError:
            break
        if image.convert('RGBA').getextrema()[3][1] > 0:  # the largest alpha
            return
    image.seek(0)
