"""Image files become tensors: decoded safely, upright, cut to their centre square."""
import functools
import io
import warnings

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

# Some others are decoded in Python, minutes for a few hundred bytes (DDS), or run a program (EPS: Ghostscript).
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'AVIF', 'TIFF', 'JPEG2000', 'PPM')
# What turns each EXIF orientation upright. ImageOps.exif_transpose also writes the EXIF anew: odd ones make it fail.
UPRIGHT = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
           5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
           8: Image.Transpose.ROTATE_90}
DEEP_MODES = ('I', 'F')  # how the names of Pillow's modes for more than 8 bits begin
USUAL_BITS = (8, 10, 12, 14, 16)
MAX_SCANS = 200  # of a progressive JPEG: a scan of 31 bytes takes as long as one of the whole picture


@functools.cache
def reads_heif() -> bool:
    """Whether HEIC images, as iPhones take them, can be decoded: it takes a package that Pillow does not bring."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return False
    register_heif_opener()
    return True


def formats() -> tuple[str, ...]:
    """The formats that are decoded, as Pillow calls them."""
    return (*FORMATS, 'HEIF') if reads_heif() else FORMATS


def decode_image(data: bytes, image_size: int | None = None) -> torch.Tensor:
    """The centre square of an image of any of FORMATS, uint8 (3, H, H), upright and in RGB.

    Args:
        data: the encoded image. ValueError: it does not decode, or has more pixels than Pillow's limit.
        image_size: a larger square is reduced to this many pixels a side (antialiased); None leaves the size.
    """
    image = decode_whole_image(data, image_size)
    height, width = image.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = image[:, top:top + side, left:left + side]  # (3, side, side)
    if image_size and side > image_size:
        image = resize(image, image_size)
    return image


def decode_whole_image(data: bytes, image_size: int | None = None) -> torch.Tensor:
    """All of an image of any of FORMATS, uint8 (3, H, W), upright and in RGB.

    Args:
        data: the encoded image. ValueError: it does not decode, or has more pixels than Pillow's limit.
        image_size: a much larger image may be decoded smaller, with no side shorter than this.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # Pillow's on bombs and palettes: the first is an error below
            with Image.open(io.BytesIO(data), formats=formats()) as header:
                return decode_pixels(header, data, image_size)
    except UnidentifiedImageError:
        raise ValueError('image does not decode: not a known format') from None
    except Exception as error:  # damaged bytes make Pillow raise nearly anything
        raise ValueError(f'image does not decode: {error or type(error).__name__}'.splitlines()[0]) from None


def decode_pixels(header: Image.Image, data: bytes, image_size: int | None) -> torch.Tensor:
    """Pixels of an opened image, uint8 (3, H, W): torchvision's decoder for plain JPEGs, Pillow for the rest."""
    if header.width * header.height > Image.MAX_IMAGE_PIXELS:
        raise ValueError(f'{header.width} x {header.height} pixels are more than {Image.MAX_IMAGE_PIXELS:,}')
    if header.info.get('progressive') and data.count(b'\xff\xda') > MAX_SCANS:
        raise ValueError(f'more than {MAX_SCANS} scans')
    much_larger = image_size is not None and min(header.size) >= 2 * image_size
    if header.format == 'JPEG' and header.mode in ('L', 'RGB') and not much_larger:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return torchvision.io.decode_jpeg(encoded, torchvision.io.ImageReadMode.RGB, apply_exif_orientation=True)
    if much_larger:
        header.draft(None, (image_size, image_size))  # JPEG decodes straight to 1/2, 1/4 or 1/8; others ignore it
    header.load()
    orientation = exif_orientation(header)  # Pillow turns a TIFF upright when it loads it
    image = header
    if header.mode[0] in DEEP_MODES:
        image = eight_bits(header)
    image = image.convert('RGB')
    if orientation in UPRIGHT:
        image = image.transpose(UPRIGHT[orientation])
    return torchvision.transforms.functional.pil_to_tensor(image)


def eight_bits(image: Image.Image) -> Image.Image:
    """A grey image of more than 8 bits in 8: of each value the highest 8 of the bits that the image has.

    These are the bits that the file declares, where it declares fewer than 16; else the fewest of USUAL_BITS that hold
    its largest value, since cameras and scanners store 10, 12 or 14 bits as 16. Pillow's own conversion clips at 255.
    """
    values = np.asarray(image)
    if values.dtype.kind == 'f':
        values = np.nan_to_num(values, posinf=0, neginf=0)
        if values.max(initial=0) <= 1:  # brightness from 0 to 1
            values = values * 255
    values = values.clip(0, 2 ** 32 - 1).astype(np.int64)
    bits = declared_bits(image)
    if bits is None:
        largest = int(values.max(initial=0))
        bits = next((usual for usual in USUAL_BITS if largest < 2 ** usual), largest.bit_length())
    return Image.fromarray((values >> (bits - 8)).clip(0, 255).astype(np.uint8))


def declared_bits(image: Image.Image) -> int | None:
    """The bits of a value that a TIFF declares, from 9 to 15; None where it declares others or none."""
    bits = getattr(image, 'tag_v2', {}).get(TiffImagePlugin.BITSPERSAMPLE, (0,))[0]
    if 8 < bits < 16:
        return bits
    return None


def exif_orientation(image: Image.Image) -> int | None:
    """The orientation that a camera wrote, 1 to 8; None where there is none that can be read."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # unreadable in one of many ways: torchvision, too, takes it for upright then
        return None


def resize(image: torch.Tensor, image_size: int) -> torch.Tensor:
    """uint8 (3, H, H) to (3, image_size, image_size), bilinear and antialiased."""
    return F.interpolate(image[None], size=(image_size, image_size), mode='bilinear', antialias=True)[0]


def stack_images(images: list[torch.Tensor], image_size: int) -> torch.Tensor:
    """uint8 (B, 3, H, H): H is the stored size where all agree; mixed sizes are brought to `image_size`."""
    if len({image.shape for image in images}) > 1:
        images = [resize(image, image_size) for image in images]
    # decoders lay pixels out as (H, W, 3): copying them in that order is 6 times as fast as turning them here
    return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
