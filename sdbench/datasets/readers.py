"""Read images with captions from tars, from Parquet files and from image files, and make samples of them.

A link in a tar is not followed, since a stranger can have made it; datasets/sources.py says of those in folders.
"""
import contextlib
import errno
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sdbench.datasets.names import (
    CAPTION_SUFFIXES,
    caption_suffixes,
    is_caption,
    is_hidden,
    is_image,
    join_similar_keys,
    split_name,
    why_not_read,
)
from sdbench.datasets.output import DAMAGED
from sdbench.datasets.sources import File
from sdbench.datasets.tables import (
    USUAL_COLUMNS,
    Columns,
    NoSuchColumn,
    SkipReason,
    captions_in,
    encoding_of,
    with_name,
)
from sdbench.errors import BadSample, DataError, UserError, one_line
from sdbench.inputs.captions import CAPTIONS, Named
from sdbench.inputs.images import decode_whole_image
from sdbench.paths import is_url
from sdbench.stores import PATIENT, download

BUFFER_BYTES = 1 << 20  # of a file that is read
NO_SAMPLE = 'no sample'  # in the place of a suffix: why there is none, or why a file is not read to its end

# Tars
MAX_BYTES = 256 << 20  # of an image or a caption: a tar can declare any size
TAR_BUFFER_BYTES = 1 << 20
END_BYTES = 1024  # of zeros, that a tar ends with at least: writers of tars fill the last record with more
LARGEST_RECORD = 1 << 20  # bytes

# Parquet
PARQUET_IMAGE_COLUMNS = ('image',)  # of the bytes of images
ROWS_AT_ONCE = 32
PARQUET_BUFFER_BYTES = 8 << 20  # of each column, whose row group may be as large as the file

SMALLEST_SIDE = 8  # pixels, of which the VAE makes one latent pixel: a narrower image is less than that


class Place(NamedTuple):
    """Where the content of a file is in a tar, in bytes."""
    offset: int
    size: int


Key = str | int | None  # of a sample: in a tar its name, in Parquet the number of its row; None: a whole file
# The files of a sample by suffix, each bytes or a SkipReason. The captions from a table or a row are under CAPTIONS:
# Named, where a SkipReason may replace a caption.
Fields = dict[str, Any]
Members = dict[str, dict[str, SkipReason | Place]]  # the files of a tar, by key and suffix


def read_samples(file: File, columns: Columns = USUAL_COLUMNS) -> Iterator[tuple[Key, Fields]]:
    """Yield (key, fields) of each sample of a tar, a Parquet file or an image file, for `make_sample`.

    Last comes (None, {NO_SAMPLE: why}) if a file is cut short or damaged; the samples before it are whole.

    Args:
        file: of which the samples are read; its suffix says what it is.
        columns: of images and captions in Parquet.

    Raises DataError if the file cannot be read, as when a network file system is away: nothing can then be said of what
    it holds.
    """
    try:
        suffix = split_name(file.name)[1].lower()
        if suffix == '.tar':
            yield from read_tar(file.name)
        elif suffix == '.parquet':
            yield from read_parquet(file, columns)
        else:
            yield split_name(os.path.basename(file.name))[0], read_image_file(file)
    except (MemoryError, DataError):
        raise  # neither says that the file itself is damaged
    except OSError as error:
        # pyarrow's own have no number, and no place of a file is as far as a garbled header of a tar says
        if error.errno not in (None, errno.EINVAL):
            raise DataError(f'{file.name} cannot be read ({type(error).__name__}: {one_line(error)})') from None
        yield None, {NO_SAMPLE: SkipReason(f'{DAMAGED}: {one_line(error)}')}
    except Exception as error:  # damaged bytes make tarfile and pyarrow raise nearly anything
        yield None, {NO_SAMPLE: SkipReason(f'{DAMAGED}: {one_line(error)}')}


@contextlib.contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """Open a file of this machine, or for an address in a store a copy, which is gone at the end.

    Raises DataError if a store cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = path
        if is_url(path):  # tars and Parquet files are read back and forth, which would be a request each time
            copy = os.path.join(folder, 'copy')
            try:
                download(path, copy, path, **PATIENT)
            except OSError as error:
                raise DataError(str(error)) from None
        with open(copy, 'rb', BUFFER_BYTES) as file:
            yield file


def read_image_file(file: File) -> Fields:
    """Read an image and its captions."""
    fields = {split_name(file.name)[1]: Path(file.name).read_bytes()}
    if file.table_captions is not None:
        fields[CAPTIONS] = file.table_captions
    for name in file.captions:
        fields[split_name(name)[1]] = Path(file.name).with_name(name).read_bytes()
    return fields


def read_tar(name: str) -> Iterator[tuple[str, Fields]]:
    """Yield (key, fields) of the samples of a tar, and of all tars that follow it in the same file.

    The headers of a tar are read first, and its files paired by their keys: in a tar of a folder they lie in any order.
    The samples then come in the order of their first files. `a/b.jpg` is the .jpg of a/b. A name that comes several
    times, as where a file was appended to the tar again, is of no sample: which one counts is not known.

    Raises tarfile.ReadError, or nearly anything else, where it is damaged.
    """
    with open_file(name) as reader:
        for members in list_members(reader):
            join_similar_keys(members)
            for key, files in members.items():
                fields = {}
                for suffix, content in files.items():
                    if isinstance(content, Place):
                        offset, size = content
                        content = os.pread(reader.fileno(), size, offset)
                        if len(content) < size:
                            content = SkipReason('the tar is cut within it')
                    fields[suffix] = content
                yield key, fields


def list_members(reader: BinaryIO) -> Iterator[Members]:
    """Yield the files of each tar in a file, and alone each one that is neither image nor caption.

    Raises tarfile.ReadError, or nearly anything else, where a tar is damaged, behind its files before that.
    """
    members: Members = {}
    key = None  # of the last file
    end = 0  # of what was read
    try:
        # tarfile passes over all that is no header: the zeros between two tars, and what is damaged
        with tarfile.open(fileobj=reader, mode='r:', ignore_zeros=True) as tar:
            while member := tar.next():
                tar.members.clear()  # tarfile would keep every header
                if tar.offset < member.offset_data:
                    raise tarfile.ReadError('negative size')  # tarfile would go round for ever
                if member.offset > end:
                    require_end_mark(reader, end, member.offset)
                    yield members
                    members = {}
                end = tar.offset
                if member.isdir():
                    continue
                name = os.path.normpath(member.name)
                key, suffix = split_name(name)
                if is_hidden(member.name):
                    yield {name: {NO_SAMPLE: SkipReason('hidden')}}
                    continue
                if not is_image(suffix) and not is_caption(suffix):
                    yield {name: {NO_SAMPLE: SkipReason(f'not an image or a caption: {why_not_read(suffix)}')}}
                    continue
                files = members.setdefault(key, {})
                if suffix in files:
                    files[suffix] = SkipReason(f'the tar has several files called {name}')
                elif not member.isreg() or member.issparse():
                    files[suffix] = SkipReason('a link, a pipe, a device or a sparse file in a tar is not read')
                elif member.size > MAX_BYTES:
                    files[suffix] = SkipReason('too large')
                else:
                    files[suffix] = Place(member.offset_data, member.size)
        require_end_mark(reader, end, os.fstat(reader.fileno()).st_size)
    except Exception:
        # more files of the last sample may lie behind the damage, and its text file goes before all others
        if key in members and not any(suffix.lower() == CAPTION_SUFFIXES[0] for suffix in members[key]):
            members[key][CAPTION_SUFFIXES[0]] = SkipReason('it may lie behind the damage')
        yield members
        raise
    if key is None:
        members[''] = {'': SkipReason('nothing is in this tar')}
    yield members


def require_end_mark(reader: BinaryIO, start: int, end: int) -> None:
    """Raise tarfile.ReadError if the bytes from `start` to `end` are not the zeros that a tar ends with."""
    reader.seek(start)
    for position in range(start, end, TAR_BUFFER_BYTES):
        if reader.read(min(TAR_BUFFER_BYTES, end - position)).strip(bytes(1)):
            raise tarfile.ReadError('a garbled header, or what follows its end is no tar')
    if end - start < END_BYTES:  # as where a tar is cut between two files
        raise tarfile.ReadError('no end mark')
    if end - start >= END_BYTES + LARGEST_RECORD:  # as where a download has made a file of full size, and was cut
        raise tarfile.ReadError(f'{end - start:,} bytes of zeros, more than a tar ends with')


def read_parquet(file: File, columns: Columns) -> Iterator[tuple[int | None, Fields]]:
    """Yield (number, fields) of each row of a Parquet file.

    If the file lacks the columns, yield only (None, {NO_SAMPLE: why}).

    Raises OSError without a number, or an error of pyarrow, if the file is damaged, and DataError if a flag must name
    one of two columns.
    """
    from pyarrow.parquet import ParquetFile  # takes a third of a second
    with (open_file(file.name) as reader,
          ParquetFile(reader, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES,
                      page_checksum_verification=True) as parquet):
        # find the columns
        try:
            image, captions = columns.find(file.name, parquet.schema_arrow.names, PARQUET_IMAGE_COLUMNS)
        except NoSuchColumn as error:
            yield None, {NO_SAMPLE: SkipReason(error)}
            return
        except UserError as error:
            raise DataError(str(error)) from None

        if parquet.metadata.num_rows == 0:
            yield None, {NO_SAMPLE: SkipReason('no row: nothing is in this file')}

        # the row groups, one after the other, so that those before a damaged one are read
        number = 0  # of the row
        for index in range(parquet.num_row_groups):
            wanted = [image, *captions.values()]
            for batch in parquet.iter_batches(ROWS_AT_ONCE, [index], wanted, use_threads=False):
                for row in range(batch.num_rows):
                    # the bytes of the image, which the Hugging Face hub has in a struct of bytes and path
                    content = batch.column(image)[row].as_py()
                    if isinstance(content, dict):
                        content = content.get('bytes') or content.get('path')
                    if content is None:
                        content = SkipReason('the row has none')
                    elif not isinstance(content, bytes):
                        content = SkipReason(f'the row has {content!r:.50} instead of its bytes (--captions reads '
                                             'tables of paths, and img2dataset makes tars of addresses)')

                    # its captions
                    texts = {}
                    for name, column in captions.items():
                        try:
                            texts[name] = captions_in(batch.column(column)[row].as_py())
                        except UnicodeError:
                            texts[name] = [SkipReason('no caption: it is not UTF-8')]
                    yield number, {'.jpg': content, CAPTIONS: texts}
                    number += 1


class NoText(SkipReason):
    """Why a file holds no caption, so that the next one counts."""


def make_sample(fields: Fields, columns: Columns = USUAL_COLUMNS, clean: Callable[[str], str] = str
                ) -> tuple[bytes, Named, list[str]]:
    """Return an image and its captions, of what `read_samples` yields, and why others of its captions are left out.

    Args:
        fields: of a sample.
        columns: which of its files have captions.
        clean: mends the letters of a caption.

    Raises BadSample, with the reason, if there is no sample in it. The reason has its kind before the first colon.
    """
    if NO_SAMPLE in fields:
        raise BadSample(fields[NO_SAMPLE])

    # the image
    images = [suffix for suffix in fields if is_image(suffix)]
    if not images:
        unread = [f': {content}' for content in fields.values() if isinstance(content, SkipReason)]
        raise BadSample('no image' + ''.join(unread[:1]))
    if len(images) > 1:  # one may be a mask of the other
        raise BadSample('more than one image')
    image = fields[images[0]]
    if isinstance(image, SkipReason):
        raise BadSample(f'no image: {image}')
    captions, missing = read_captions(fields, columns, clean)

    # whether the image decodes, and is large enough
    height, width = decode_whole_image(image).shape[1:]
    if min(height, width) < SMALLEST_SIDE:
        raise BadSample(f'image is narrower than {SMALLEST_SIDE} pixels: {width} x {height}')
    return image, captions, missing


def read_captions(fields: Fields, columns: Columns, clean: Callable[[str], str]) -> tuple[Named, list[str]]:
    """Return the captions of a sample, and why others are left out. Raises BadSample, with the reason, without any."""
    # those of a table or of a row, or those in files
    if CAPTIONS in fields:
        texts = fields[CAPTIONS]
    else:
        of_files = [(suffix, read_text(suffix, fields[suffix])) for suffix in caption_suffixes(fields)]
        texts = {}
        for given in columns.suffixes or [None]:
            of_name = [text for suffix, text in of_files if given in (None, suffix.lower())]
            with_text = [text for text in of_name if not isinstance(text, NoText)]
            texts[columns.name_of(given)] = (with_text or of_name or [SkipReason('no caption')])[:1]

    # their letters, and what is none
    captions = {}
    missing = []
    for name, of_name in texts.items():
        captions[name] = []
        for text in of_name:
            text = checked(text, clean)
            if isinstance(text, SkipReason):
                missing.append(with_name(text, name))
            else:
                captions[name].append(text)
    if not any(captions.values()):
        raise BadSample(missing[0])
    return captions, missing


def read_text(suffix: str, content: bytes | SkipReason) -> str | SkipReason:
    """Return the text of a .txt or .caption, or the `caption` of a .json; or why there is none."""
    if isinstance(content, SkipReason):
        return SkipReason(f'no caption: {content}')
    try:
        if suffix.lower() == '.json':
            text = json.loads(content)['caption']
            if not isinstance(text, str):
                return NoText('no caption')
        else:
            text = content.decode(encoding_of(content))
    except UnicodeError:
        return SkipReason('caption is not UTF-8')
    except (json.JSONDecodeError, RecursionError) as error:
        return NoText(f'no caption: its {suffix} is no JSON that can be read ({error})')
    except (ValueError, KeyError, TypeError):
        return NoText('no caption')  # a .json of something else
    return text if text.strip() else NoText('empty caption')


def checked(text: str | SkipReason, clean: Callable[[str], str]) -> str | SkipReason:
    """Return a caption with its letters mended; or why it is none."""
    if isinstance(text, SkipReason):
        return text
    try:
        text.encode()  # JSON can hold what UTF-8 cannot
    except UnicodeError:
        return SkipReason('caption is not UTF-8')
    if '\0' in text:
        return SkipReason('caption has a NUL: UTF-16 needs its byte order mark')
    return clean(text.rstrip('\r\n')) or SkipReason('empty caption')
