"""Image files become tensors: decoded safely, upright, cut to their centre square."""
import functools
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

# Some others are decoded in Python, minutes for a few hundred bytes (DDS), or run a program (EPS: Ghostscript).
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'AVIF', 'TIFF', 'JPEG2000', 'PPM')
# What turns an image (3, H, W) of each EXIF orientation upright: whether H and W change places, and then what is
# flipped. ImageOps.exif_transpose also writes the EXIF anew: odd ones make it fail.
UPRIGHT = {2: (False, [2]), 3: (False, [1, 2]), 4: (False, [1]), 5: (True, []), 6: (True, [2]), 7: (True, [1, 2]),
           8: (True, [1])}
FLIP = 'flip'  # bool (B,): which images of a batch are to be mirrored
DEEP_MODES = ('I', 'F')  # how the names of Pillow's modes for more than 8 bits begin
USUAL_BITS = (8, 10, 12, 14, 16)
PIXELS_IN_BAND = 1 << 18  # that are converted at once
# What a decoder holds at most for a pixel, with what is made of it here; measured, see the test. A file of a few
# hundred bytes can say that it is as large as Pillow allows, and every worker would decode it.
BYTES_A_PIXEL = {'AVIF': 10, 'WEBP': 17, 'JPEG2000': 25}
USUAL_BYTES_A_PIXEL = 9
MOST_BYTES = USUAL_BYTES_A_PIXEL * Image.MAX_IMAGE_PIXELS  # 770 MiB
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
        data: the encoded image. Raises ValueError if it does not decode, or would take more than MOST_BYTES of memory.
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
        data: the encoded image. Raises ValueError if it does not decode, or would take more than MOST_BYTES of memory.
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
    most_pixels = MOST_BYTES // BYTES_A_PIXEL.get(header.format, USUAL_BYTES_A_PIXEL)
    for width, height in (header.size, tile_size(header)):
        if width * height > most_pixels:
            raise ValueError(f'{width} x {height} pixels are more than the {most_pixels:,} of a {header.format}')
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
    image = torch.from_numpy(rgb_pixels(header)).permute(2, 0, 1)  # (3, H, W)
    header.close()  # its pixels: turning makes a copy
    return turned_upright(image, orientation)


def turned_upright(image: torch.Tensor, orientation: int | None) -> torch.Tensor:
    """An image (3, H, W) as it was seen, by its EXIF orientation."""
    is_on_its_side, flipped = UPRIGHT.get(orientation, (False, []))
    if is_on_its_side:
        image = image.transpose(1, 2)  # (3, W, H)
    return image.flip(flipped) if flipped else image


def tile_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of what a TIFF says its decoder takes at once, which can be more than the image; else 0."""
    tags = getattr(image, 'tag_v2', {})
    return tags.get(TiffImagePlugin.TILEWIDTH, 0), tags.get(TiffImagePlugin.TILELENGTH, 0)


def rgb_pixels(image: Image.Image) -> np.ndarray:
    """The pixels of a loaded image in RGB, uint8 (H, W, 3). Beside these and the image, no more is held than a band."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    depth = None
    if image.mode[0] in DEEP_MODES:
        depth = depth_of(image)
    for top, band in bands(image):
        if depth:
            band = Image.fromarray(depth.eight_bits(np.asarray(band)))
        pixels[top:top + band.height] = np.asarray(band.convert('RGB'))
    return pixels


def bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Copies of an image's rows, some at a time, each with the number of its first row."""
    rows = max(1, PIXELS_IN_BAND // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


@dataclass(frozen=True)
class Depth:
    """How the values of a grey image of more than 8 bits become 8.

    Attributes:
        scale: what the values are multiplied with, 255 for brightness from 0 to 1.
        bits: of a value, of which the highest 8 are kept.
    """
    scale: int
    bits: int

    def eight_bits(self, values: np.ndarray) -> np.ndarray:
        """uint8, of the same shape."""
        return (whole_numbers(values, self.scale) >> (self.bits - 8)).clip(0, 255).astype(np.uint8)


def depth_of(image: Image.Image) -> Depth:
    """The depth of a grey image of more than 8 bits.

    Its bits are those that the file declares, where it declares fewer than 16; else the fewest of USUAL_BITS that hold
    its largest value, since cameras and scanners store 10, 12 or 14 bits as 16. Pillow's own conversion clips at 255.
    """
    largest = max(finite(np.asarray(band)).max() for _, band in bands(image))
    scale = 1
    if image.mode[0] == 'F' and largest <= 1:
        scale = 255
    bits = declared_bits(image)
    if bits is None:
        number = int(whole_numbers(largest, scale))
        bits = next((usual for usual in USUAL_BITS if number < 2 ** usual), number.bit_length())
    return Depth(scale, bits)


def finite(values: np.ndarray) -> np.ndarray:
    """The values, with 0 for those that are infinite or not a number."""
    return np.nan_to_num(values, posinf=0, neginf=0)


def whole_numbers(values: np.ndarray, scale: int) -> np.ndarray:
    """The scaled values as int64, from 0 to the largest of 32 bits."""
    return (finite(values) * scale).clip(0, 2 ** 32 - 1).astype(np.int64)


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


def normalize_images(images: torch.Tensor, image_size: int | None = None) -> torch.Tensor:
    """Images (B, 3, H, H) to float32 (B, 3, image_size, image_size) in [-1, 1], on their device.

    Args:
        images: uint8, or floats that are in [-1, 1] already.
        image_size: in pixels; None keeps their size.

    Raises ValueError if they are other whole numbers, so that nothing says what is black and what is white.
    """
    is_bytes = images.dtype == torch.uint8
    if is_bytes:
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
    elif not images.is_floating_point():
        raise ValueError(f'images of {images.dtype}; give bytes (uint8), or floats in [-1, 1]')
    if image_size is not None and images.shape[-1] != image_size:
        images = F.interpolate(images, size=(image_size, image_size), mode='bilinear')
    if is_bytes:
        images = images / 127.5 - 1
    return images
