"""What a sample of a dataset takes in a batch, as far as can be told before it is read."""
import os
import tempfile

from streaming.base.format.mds.encodings import get_mds_encoded_size

from inputs.captions import CAPTION_LENGTH
from inputs.errors import DataError
from inputs.images import decode_image
from inputs.shards import LATENTS, read_index, require_columns
from inputs.verified_stream import open_shards

CAPTION_BYTES = 8 * CAPTION_LENGTH  # int64


def most_bytes_of_sample(image_size: int) -> int:
    """Of an image of `image_size` pixels, and its caption."""
    return 3 * image_size ** 2 + CAPTION_BYTES


def bytes_of_sample(remote: str, image_size: int) -> int:
    """Bytes of a sample in a batch: of latents exactly, of images as many as the first of three shards suggest.

    Batches of images that differ in size are brought to `image_size`. Raises ValueError if the dataset cannot be read.
    """
    index = read_index(remote)
    require_columns(remote, index)
    if 'latents' in index:
        [shard, *_] = index['shards']
        columns = dict(zip(shard['column_names'], shard['column_encodings'], strict=True))
        return get_mds_encoded_size(columns[LATENTS]) + CAPTION_BYTES
    try:
        sides = sides_of_images(remote, index, image_size)
    except DataError as error:
        raise ValueError(str(error)) from None
    if len(sides) != 1:
        return most_bytes_of_sample(image_size)
    return most_bytes_of_sample(sides.pop())


def sides_of_images(remote: str, index: dict, image_size: int) -> set[int]:
    """Pixels a side, as they come in a batch, of the first images of the first, the middle and the last shard.

    Raises DataError if a shard cannot be had.
    """
    sides = set()
    with tempfile.TemporaryDirectory() as folder:
        shards = open_shards(remote, None if os.path.isdir(remote) else folder, index)
        for number in {0, len(shards) // 2, len(shards) - 1} & set(range(len(shards))):
            reader = shards.fetch(number)
            try:
                sides.add(decode_image(reader[0]['jpg'], image_size).shape[-1])  # of (3, H, H)
            except (ValueError, IndexError):
                continue  # a bad sample, or a shard without any
    return sides
