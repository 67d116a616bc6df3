"""Read images and captions from tars, Parquet files and image files, and make samples from them.

A link in a tar is not followed, because a stranger may have made it. (sources.py follows links in folders.)
"""
import codecs
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
    split_name,
    why_not_read,
)
from sdbench.datasets.output import DAMAGED
from sdbench.datasets.sources import File
from sdbench.datasets.splits import ALL_SPLITS, group_by_split, require_one_split
from sdbench.datasets.tables import (
    USUAL_COLUMNS,
    Columns,
    NoSuchColumn,
    SkipReason,
    captions_in,
    with_name,
)
from sdbench.errors import BadSample, DataError, UserError, one_line
from sdbench.inputs.captions import CAPTIONS, Named
from sdbench.inputs.images import decode_whole_image
from sdbench.paths import is_url
from sdbench.stores import download

BUFFER_BYTES = 1 << 20  # read buffer of a file
NO_SAMPLE = 'no sample'  # key in Fields: why there is no sample, or why the rest of a file cannot be read

# Tars
MAX_BYTES = 256 << 20  # largest image or caption: the header of a tar can declare any size
TAR_BUFFER_BYTES = 1 << 20
END_BYTES = 1024  # zeros at the end of every tar; most programs add more to fill the last record
LARGEST_RECORD = 1 << 20  # bytes; the zeros that fill the last record are fewer

# Parquet
USUAL_IMAGE_COLUMNS = ('image',)
ROWS_PER_BATCH = 32
PARQUET_BUFFER_BYTES = 8 << 20  # per column; without it a whole row group is in memory, which may be the whole file

SMALLEST_SIDE = 8  # pixels: the VAE turns 8 x 8 pixels into one latent pixel


class Place(NamedTuple):
    """Position of a file's content in a tar, in bytes."""
    offset: int
    size: int


Key = str | int | None  # name of a sample in a tar, number of its row in Parquet, or None for the whole file
# The files of a sample by suffix, each bytes or a SkipReason. The captions from a table or a row are under CAPTIONS:
# Named, where a SkipReason may replace a caption.
Fields = dict[str, Any]
Members = dict[str, dict[str, SkipReason | Place]]  # files in a tar, by key and suffix


def read_samples(file: File, columns: Columns = USUAL_COLUMNS, split: str | None = None
                 ) -> Iterator[tuple[Key, Fields]]:
    """Yield (key, fields) for each sample in a tar, a Parquet file or an image file. `make_sample` takes the fields.

    If the file is cut short or damaged, the last item is (None, {NO_SAMPLE: reason}); all samples before it are whole.

    Args:
        file: the file to read; its suffix tells the format.
        columns: columns of images and captions in Parquet.
        split: value of --split. Unless it is ALL_SPLITS, the samples in a tar must belong to one split.

    Raises DataError if the file cannot be read at the moment, for example because a network file system is down, or if
    a tar has several splits.
    """
    try:
        suffix = split_name(file.name)[1].lower()
        if suffix == '.tar':
            yield from read_tar(file.name, split)
        elif suffix == '.parquet':
            yield from read_parquet(file, columns)
        else:
            yield split_name(os.path.basename(file.name))[0], read_image_file(file)
    except (MemoryError, DataError):
        raise  # the file itself may be good
    except OSError as error:
        # The disk failed, unless pyarrow raised the error itself (no errno), or a corrupt tar header gave a position
        # that no file has (EINVAL).
        if error.errno not in (None, errno.EINVAL):
            raise DataError(f'{file.name} cannot be read ({type(error).__name__}: {one_line(error)})') from None
        yield None, {NO_SAMPLE: SkipReason(f'{DAMAGED}: {one_line(error)}')}
    except Exception as error:  # damaged bytes make tarfile and pyarrow raise nearly anything
        yield None, {NO_SAMPLE: SkipReason(f'{DAMAGED}: {one_line(error)}')}


@contextlib.contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """Open a file of this machine, or a temporary copy of a file in a store.

    Raises DataError if the store cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = path
        if is_url(path):  # each seek in a tar or a Parquet file would be a request
            copy = os.path.join(folder, 'copy')
            try:
                download(path, copy, path)
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


def read_tar(name: str, split: str | None) -> Iterator[tuple[str, Fields]]:
    """Yield (key, fields) for the samples in a tar, and in all tars that follow it in the same file.

    The headers of a tar are read first, and its files are paired by key, because a tar of a folder has its files in any
    order. For example, `a/b.jpg` is the .jpg of the sample a/b. The samples come in the order of their first files. If
    a name occurs twice, as after a second `tar --append`, a SkipReason replaces the file: either file may be right.

    Raises tarfile.ReadError, or nearly any other exception, if the tar is damaged, and DataError if it has several
    splits.
    """
    with open_file(name) as reader:
        for members in list_members(reader):
            if split != ALL_SPLITS:
                keys = [key for key, files in members.items() if any(map(is_image, files))]
                try:
                    require_one_split(group_by_split(keys), name, 'unpack the tar to convert one of them')
                except UserError as error:
                    raise DataError(str(error)) from None
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
    """Yield the images and captions of each tar in a file, and separately each other member with a reason to skip it.

    Raises tarfile.ReadError, or nearly any other exception, if a tar is damaged. The files before the damage are
    yielded first.
    """
    members: Members = {}
    key = None  # of the last member
    end = 0  # position after the last member
    try:
        # With `ignore_zeros`, tarfile continues after the zeros at the end of a tar. It also skips any garbage there,
        # so `require_end_mark` checks that only zeros lie between two tars.
        with tarfile.open(fileobj=reader, mode='r:', ignore_zeros=True) as tar:
            while member := tar.next():
                tar.members.clear()  # otherwise tarfile keeps every header in memory
                if tar.offset < member.offset_data:
                    raise tarfile.ReadError('negative size')  # tarfile would loop forever
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
        # More files of the last sample may lie after the damage. Without its .txt, which has precedence over all other
        # caption files, its caption is not known.
        if key in members and not any(suffix.lower() == CAPTION_SUFFIXES[0] for suffix in members[key]):
            members[key][CAPTION_SUFFIXES[0]] = SkipReason('it may lie behind the damage')
        yield members
        raise
    if key is None:  # no member at all
        members[''] = {'': SkipReason('nothing is in this tar')}
    yield members


def require_end_mark(reader: BinaryIO, start: int, end: int) -> None:
    """Raise tarfile.ReadError unless the bytes from `start` to `end` are the zeros at the end of a tar."""
    reader.seek(start)
    for position in range(start, end, TAR_BUFFER_BYTES):
        if reader.read(min(TAR_BUFFER_BYTES, end - position)).strip(bytes(1)):
            raise tarfile.ReadError('corrupt header, or something other than a tar follows its end')
    if end - start < END_BYTES:  # for example, a tar that is cut between two files
        raise tarfile.ReadError('no end mark')
    if end - start >= END_BYTES + LARGEST_RECORD:  # an interrupted download may leave a hole at the end
        raise tarfile.ReadError(f'{end - start:,} bytes of zeros, more than a tar ends with')


def read_parquet(file: File, columns: Columns) -> Iterator[tuple[int | None, Fields]]:
    """Yield (number, fields) for each row of a Parquet file.

    If the file lacks the columns, yield only (None, {NO_SAMPLE: reason}).

    If the file is damaged, raises an error of pyarrow or an OSError whose `errno` is None. Raises DataError if a flag
    must choose between two columns.
    """
    from pyarrow.parquet import ParquetFile  # importing it takes a third of a second
    with (open_file(file.name) as reader,
          ParquetFile(reader, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES,
                      page_checksum_verification=True) as parquet):
        # Find the columns. A file without them holds something else.
        try:
            image, captions = columns.find(file.name, parquet.schema_arrow.names, USUAL_IMAGE_COLUMNS)
        except NoSuchColumn as error:
            yield None, {NO_SAMPLE: SkipReason(f'missing column: {error}')}
            return
        except UserError as error:
            raise DataError(str(error)) from None

        if parquet.metadata.num_rows == 0:
            yield None, {NO_SAMPLE: SkipReason('no row: nothing is in this file')}

        # Read one row group at a time: the row groups before a damaged one are good.
        number = 0
        for index in range(parquet.num_row_groups):
            wanted = [image, *captions.values()]
            for batch in parquet.iter_batches(ROWS_PER_BATCH, [index], wanted, use_threads=False):
                for row in range(batch.num_rows):
                    # The image is bytes, or a struct of bytes and path as the Hugging Face hub has it.
                    content = batch.column(image)[row].as_py()
                    if isinstance(content, dict):
                        content = content.get('bytes') or content.get('path')
                    if content is None:
                        content = SkipReason('the row has none')
                    elif not isinstance(content, bytes):
                        shown = repr(content) if isinstance(content, str) else f'a {type(content).__name__}'
                        content = SkipReason(f'the row has {shown:.50} instead of its bytes (--captions reads '
                                             'tables of paths, and img2dataset makes tars of addresses)')

                    # A caption column holds a text or a list of texts.
                    texts = {}
                    for name, column in captions.items():
                        try:
                            texts[name] = captions_in(batch.column(column)[row].as_py())
                        except UnicodeError:
                            texts[name] = [SkipReason('no caption: it is not UTF-8')]
                    yield number, {'.jpg': content, CAPTIONS: texts}
                    number += 1


class NoText(SkipReason):
    """The reason why a caption file has no text, so the next caption file of the image is tried."""


def make_sample(fields: Fields, columns: Columns = USUAL_COLUMNS, clean: Callable[[str], str] = str
                ) -> tuple[bytes, Named, list[str]]:
    """Return the bytes of the image, its captions by name, and the reasons why other captions are missing.

    Args:
        fields: the fields of a sample from `read_samples`.
        columns: the suffixes of caption files, if flags name them.
        clean: function that cleans the text of a caption.

    Raises BadSample if there is no usable image or no caption. The reason begins with its kind and a colon.
    """
    if NO_SAMPLE in fields:
        raise BadSample(fields[NO_SAMPLE])

    # A sample has exactly one image.
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

    # The image must decode, and must be large enough for one latent pixel.
    height, width = decode_whole_image(image).shape[1:]
    if min(height, width) < SMALLEST_SIDE:
        raise BadSample(f'image is narrower than {SMALLEST_SIDE} pixels: {width} x {height}')
    return image, captions, missing


def read_captions(fields: Fields, columns: Columns, clean: Callable[[str], str]) -> tuple[Named, list[str]]:
    """Return the captions of a sample, and the reasons why others are missing. Raises BadSample if there is none."""
    # Take all captions from a table or a Parquet row. Otherwise each suffix that --caption_column names gives one
    # caption. Without such suffixes, try all caption files and take the first text. If no file has a text, report the
    # reason for the first file.
    if CAPTIONS in fields:
        texts_by_name = fields[CAPTIONS]
    else:
        texts_by_name = {}
        for given in columns.suffixes or [None]:
            texts = [caption_text(suffix, fields[suffix]) for suffix in caption_suffixes(fields)
                     if given in (None, suffix.lower())]
            usable = [text for text in texts if not isinstance(text, NoText)]
            texts_by_name[columns.name_of(given)] = (usable or texts or [SkipReason('no caption')])[:1]

    # Clean the texts, and separate them from the reasons.
    captions = {}
    missing = []
    for name, texts in texts_by_name.items():
        captions[name] = []
        for text in texts:
            text = cleaned(text, clean)
            if isinstance(text, SkipReason):
                missing.append(with_name(text, name))
            else:
                captions[name].append(text)
    if not any(captions.values()):
        raise BadSample(missing[0])
    return captions, missing


def encoding_of(beginning: bytes) -> str:
    """Return the name of the encoding of a text, from its first bytes: UTF-16 with a byte order mark, or else UTF-8."""
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return 'utf-16'
    return 'utf-8-sig'


def caption_text(suffix: str, content: bytes | SkipReason) -> str | SkipReason:
    """Return the text of a .txt or .caption, or the `caption` in a .json, or a SkipReason if there is none."""
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
        return NoText(f'no caption: its {suffix} is not valid JSON ({error})')
    except (ValueError, KeyError, TypeError):
        return NoText('no caption')  # the .json is about something else
    if not text.strip():
        return NoText('empty caption')
    return text


def cleaned(text: str | SkipReason, clean: Callable[[str], str]) -> str | SkipReason:
    """Return a caption after cleaning, or a SkipReason if it cannot be used. A SkipReason is returned as it is."""
    if isinstance(text, SkipReason):
        return text
    try:
        text.encode()  # JSON may contain surrogates, which UTF-8 does not allow
    except UnicodeError:
        return SkipReason('caption is not UTF-8')
    if '\0' in text:
        return SkipReason('caption has a NUL: UTF-16 needs its byte order mark')
    return clean(text.rstrip('\r\n')) or SkipReason('empty caption')
