"""A sample is an image with its caption, made of the files, or of the row, that hold them."""
import json

from sdbench.datasets.output import DAMAGED
from sdbench.datasets.sources import captions_among, is_image
from sdbench.inputs.images import decode_whole_image

SMALLEST_SIDE = 8  # pixels, of which the VAE makes one latent pixel: a narrower image is less than that
OTHER_COLUMNS = 'columns'  # stands for a table that is not read, with the reason


class Unread(str):
    """Why a file of a sample was not read."""


Fields = dict[str, bytes | Unread]  # the files of a sample by their suffixes


def make_sample(fields: Fields) -> dict[str, bytes | str]:
    """The columns of the shards from what `read_samples` gives. ValueError, with the reason: there is no sample in it.

    A reason has its kind before the first colon, by which reasons are counted.
    """
    if DAMAGED in fields:
        raise ValueError(f'{DAMAGED}: {fields[DAMAGED]}')
    if OTHER_COLUMNS in fields:
        raise ValueError(fields[OTHER_COLUMNS])
    images = [suffix for suffix in fields if is_image(suffix)]
    if not images:
        unread = [f': {content}' for content in fields.values() if isinstance(content, Unread)]
        raise ValueError('no image' + ''.join(unread[:1]))
    if len(images) > 1:  # one may be a mask of the other
        raise ValueError('more than one image')
    image = require_read(fields[images[0]], 'no image')
    caption = read_caption(fields)
    if not caption.strip():
        raise ValueError('empty caption')
    height, width = decode_whole_image(image).shape[1:]
    if min(height, width) < SMALLEST_SIDE:
        raise ValueError(f'image is narrower than {SMALLEST_SIDE} pixels: {width} x {height}')
    return {'jpg': image, 'caption': caption}


def require_read(content: bytes | Unread, label: str) -> bytes:
    """The content itself. Raises ValueError if it was not read."""
    if isinstance(content, Unread):
        raise ValueError(f'{label}: {content}')
    return content


def read_caption(fields: Fields) -> str:
    """The text of a sample's .txt, or the `caption` of its .json. ValueError, with the reason: there is none."""
    found = captions_among(fields)
    if not found:
        raise ValueError('no caption')
    content = require_read(fields[found[0]], 'no caption')
    try:
        if found[0].lower() == '.txt':
            return content.decode('utf-8-sig').rstrip('\r\n')
        return json.loads(content)['caption'].encode().decode()  # JSON can hold what UTF-8 cannot
    except UnicodeError:
        raise ValueError('caption is not UTF-8') from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError('no caption') from None
