"""Read images with captions from tars, from Parquet files and from image files, and make samples of them.

A link in a tar is not followed, since a stranger can have made it; datasets/sources.py says of those in folders.
"""
import errno
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdbench.datasets.output import DAMAGED
from sdbench.datasets.sources import (
    File,
    captions_among,
    is_caption,
    is_hidden,
    is_image,
    is_parquet,
    split_name,
    why_not_read,
)
from sdbench.datasets.tables import USUAL_COLUMNS, Columns, NoSuchColumn
from sdbench.errors import DataError, one_line
from sdbench.inputs.images import decode_whole_image
from sdbench.inputs.stores import open_file

WHOLE_FILE = 'whole file'  # in the place of a suffix: why a file is not read, or not to its end

# Tars
MAX_BYTES = 256 << 20  # of an image or a caption: a tar can declare any size
MAX_OPEN = 4  # samples whose files may lie between each other's, such as a.jpg, a.seg.png, a.txt
TAR_BUFFER_BYTES = 1 << 20
END_BYTES = 1024  # of zeros, that a tar ends with
RECORD_BYTES = 10240  # writers of tars fill the last record of so many bytes with zeros

# Parquet
PARQUET_IMAGE_COLUMNS = ('image',)  # of the bytes of images
ROWS_AT_ONCE = 32
PARQUET_BUFFER_BYTES = 8 << 20  # of each column, whose row group may be as large as the file

SMALLEST_SIDE = 8  # pixels, of which the VAE makes one latent pixel: a narrower image is less than that


class Unread(str):
    """Why a file of a sample was not read."""


Key = str | int | None  # of a sample: in a tar its name, in Parquet the number of its row; None: a whole file
Fields = dict[str, bytes | Unread]  # the files of a sample by their suffixes


def read_samples(file: File, columns: Columns = USUAL_COLUMNS) -> Iterator[tuple[Key, Fields]]:
    """Yield (key, fields) of each sample of a tar, a Parquet file or an image file, for `make_sample`.

    Last comes (None, {WHOLE_FILE: why}) if a file is cut short or damaged; the samples before it are whole.

    Args:
        file: of which the samples are read; its suffix says what it is.
        columns: of images and captions in Parquet.

    Raises DataError if the file cannot be read, as when a network file system is away: nothing can then be said of what
    it holds.
    """
    samples: dict[Key, Fields] = {}
    for key, suffix, content in read_files(file, columns):  # those of a sample may lie some files apart
        if suffix in samples.get(key, ()):  # another sample of the same name
            yield key, samples.pop(key)
        samples.setdefault(key, {})[suffix] = content
        if len(samples) > MAX_OPEN:
            first = next(iter(samples))
            yield first, samples.pop(first)
    yield from samples.items()


def read_files(file: File, columns: Columns) -> Iterator[tuple[Key, str, bytes | Unread]]:
    """Yield (key, suffix, content) of the files of a tar, of the columns of Parquet's rows, or of an image file.

    An image file comes with its captions. Of what is damaged, all that is before the damage comes.
    """
    try:
        if split_name(file.name)[1].lower() == '.tar':
            yield from read_tar(file)
        elif is_parquet(file.name):
            yield from read_parquet(file, columns)
        else:
            yield from read_image(file)
    except (MemoryError, DataError):
        raise  # which say nothing of what the file holds
    except OSError as error:
        # pyarrow's own have no number, and no place of a file is as far as a garbled header of a tar says
        if error.errno not in (None, errno.EINVAL):
            raise DataError(f'{file.name} cannot be read ({type(error).__name__}: {one_line(error)})') from None
        yield None, WHOLE_FILE, Unread(f'{DAMAGED}: {one_line(error)}')
    except Exception as error:  # damaged bytes make tarfile and pyarrow raise nearly anything
        yield None, WHOLE_FILE, Unread(f'{DAMAGED}: {one_line(error)}')


def read_image(file: File) -> Iterator[tuple[str, str, bytes | Unread]]:
    """Yield (key, suffix, content) of an image file and of its captions."""
    stem, suffix = split_name(file.name)
    key = os.path.basename(stem)
    for part in (suffix, *file.captions):
        yield key, part, Path(stem + part).read_bytes()
    if file.caption is not None:
        yield key, '.txt', file.caption.encode(errors='surrogatepass')


def read_tar(file: File) -> Iterator[tuple[str, str, bytes | Unread]]:
    """Yield (key, suffix, content) of the files of a tar, and of all tars that follow it in the same file.

    `a/b.jpg` is the .jpg of a/b.

    Raises tarfile.ReadError, or nearly anything else, where it is damaged.
    """
    with open_file(file.name) as reader:
        is_empty = True
        is_more = True
        while is_more:
            # read the files of one tar
            start = reader.tell()
            with tarfile.open(fileobj=reader, mode='r:') as tar:
                while member := tar.next():
                    is_empty = False
                    tar.members.clear()  # tarfile would keep every header
                    if tar.offset < member.offset_data:
                        raise tarfile.ReadError('negative size')  # tarfile would go round for ever
                    if not member.isdir():
                        folder, name = os.path.split(member.name)
                        key, suffix = split_name(name)
                        yield os.path.join(folder, key), suffix, read_member(tar, member, suffix)

            # go on to the next, if another follows
            if tar.offset == start > 0:
                raise tarfile.ReadError('what follows its end is no tar')
            is_more = skip_end(reader, tar.offset)
    if is_empty:
        yield '', '', Unread('nothing is in this tar')


def skip_end(reader: io.BufferedReader, end: int) -> bool:
    """Go on behind the zeros at the `end` of a tar, and return whether something is there.

    Raises tarfile.ReadError if these are not the zeros of a whole tar: tarfile also stops, without a word, where a tar
    is cut between two files, at a garbled header, and where a file was not fetched to its end and is filled with zeros.
    """
    # count the zeros
    reader.seek(end)
    zeros = 0
    rest = b''
    while not rest and (content := reader.read(TAR_BUFFER_BYTES)):
        rest = content.lstrip(bytes(1))
        zeros += len(content) - len(rest)

    # compare them with those that a tar ends with
    if zeros < END_BYTES:
        raise tarfile.ReadError('no end mark')
    if not rest and zeros > END_BYTES + RECORD_BYTES:
        raise tarfile.ReadError(f'it ends in zeros, {zeros:,} of them')
    reader.seek(end + zeros // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE)
    return bool(rest)


def read_member(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> bytes | Unread:
    """Return the content of a file in a tar, or why it is not read."""
    if is_hidden(member.name):
        return Unread('it is hidden')
    if not member.isreg():
        return Unread('a link, a pipe or a device in a tar is not read')
    if not is_image(suffix) and not is_caption(suffix):
        return Unread(why_not_read(suffix))
    if member.size > MAX_BYTES:
        return Unread('too large')
    return tar.extractfile(member).read()


def read_parquet(file: File, columns: Columns) -> Iterator[tuple[int | None, str, bytes | Unread]]:
    """Yield (number, suffix, content) of the image and of the caption of each row of a Parquet file, or of a piece.

    If the file lacks the columns, yield only (None, WHOLE_FILE, why).

    Raises OSError without a number, or an error of pyarrow, if the file is damaged, and DataError if a flag must name
    one of two columns.
    """
    from pyarrow.parquet import ParquetFile  # takes a third of a second
    with (open_file(file.name) as reader,
          ParquetFile(reader, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES,
                      page_checksum_verification=True) as parquet):
        # find the two columns
        try:
            image, caption = columns.find(file.name, parquet.schema_arrow.names, PARQUET_IMAGE_COLUMNS)
        except NoSuchColumn as error:
            yield None, WHOLE_FILE, Unread(error)
            return
        except ValueError as error:
            raise DataError(str(error)) from None

        # read the row groups that begin in this piece
        number = 0  # of the row
        for index in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(index)
            if not file.has_byte(group.column(0).data_page_offset):
                number += group.num_rows
                continue
            for batch in parquet.iter_batches(ROWS_AT_ONCE, [index], [image, caption], use_threads=False):
                for value, text in zip(batch.column(image), batch.column(caption), strict=True):
                    yield number, '.jpg', image_bytes(value.as_py())
                    yield number, '.txt', caption_bytes(text)
                    number += 1


def image_bytes(value: Any) -> bytes | Unread:
    """Return the bytes of an image, which in Parquet of the Hugging Face hub are in a struct of bytes and path."""
    if isinstance(value, dict):
        value = value.get('bytes') or value.get('path')
    if isinstance(value, bytes):
        return value
    if value is None:
        return Unread('the row has none')
    return Unread(f'the row has {value!r:.50} instead of its bytes (--captions reads tables of paths, '
                  'and img2dataset makes tars of addresses)')


def caption_bytes(scalar: Any) -> bytes | Unread:
    """Return a caption in UTF-8, from pyarrow's scalar."""
    try:
        value = scalar.as_py()
    except UnicodeError:
        return Unread('it is not UTF-8')
    if not isinstance(value, str):
        return Unread(f'the row has {value!r:.50}')
    return value.encode()


def make_sample(fields: Fields) -> dict[str, bytes | str]:
    """Return the columns of the shards, `jpg` and `caption`, from what `read_samples` yields.

    Raises ValueError, with the reason, if there is no sample in it. The reason has its kind before the first colon.
    """
    if WHOLE_FILE in fields:
        raise ValueError(fields[WHOLE_FILE])

    # the image
    images = [suffix for suffix in fields if is_image(suffix)]
    if not images:
        unread = [f': {content}' for content in fields.values() if isinstance(content, Unread)]
        raise ValueError('no image' + ''.join(unread[:1]))
    if len(images) > 1:  # one may be a mask of the other
        raise ValueError('more than one image')
    image = require_read(fields[images[0]], 'no image')

    # the caption
    caption = read_caption(fields)
    if not caption.strip():
        raise ValueError('empty caption')

    # whether the image decodes, and is large enough
    height, width = decode_whole_image(image).shape[1:]
    if min(height, width) < SMALLEST_SIDE:
        raise ValueError(f'image is narrower than {SMALLEST_SIDE} pixels: {width} x {height}')
    return {'jpg': image, 'caption': caption}


def require_read(content: bytes | Unread, label: str) -> bytes:
    """Return the content of a file. Raises ValueError if it was not read."""
    if isinstance(content, Unread):
        raise ValueError(f'{label}: {content}')
    return content


def read_caption(fields: Fields) -> str:
    """Return the text of a sample's .txt, or the `caption` of its .json.

    Raises ValueError, with the reason, if there is none.
    """
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
