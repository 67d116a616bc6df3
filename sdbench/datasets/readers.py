"""Read the samples in tars, Parquet files and image files: an image and its captions, or the reasons why these lack.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sdbench.datasets.names import (
    ALL_SPLITS,
    CAPTION_SUFFIXES,
    caption_suffixes,
    group_by_split,
    is_caption,
    is_hidden,
    is_image,
    require_one_split,
    split_name,
    why_not_read,
)
from sdbench.datasets.output import DAMAGED
from sdbench.datasets.sources import File
from sdbench.datasets.tables import USUAL_COLUMNS, Columns, captions_in, with_name
from sdbench.errors import BadSample, DataError, UserError, one_line
from sdbench.files import is_url
from sdbench.inputs.batches import Named
from sdbench.inputs.images import decode_whole_image
from sdbench.stores import download
from sdbench.stores.addresses import PATIENT

BUFFER_BYTES = 1 << 20  # read buffer of a file

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


@dataclass
class Sample:
    """What was read for one sample."""
    key: str | int | None  # its name in a tar, its row in Parquet, or None if the reasons are about a whole file
    image: bytes | None = None  # None if there is none that can be used
    captions: Named = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)  # for skipped.jsonl; each begins with its kind and a colon
    sides: tuple[int, ...] = ()  # shorter and longer side of the image in pixels, once it is decoded

    def is_usable(self, clean: Callable[[str], str] = str) -> bool:
        """Clean the captions, and return whether the sample has one, and an image that decodes.

        Whatever cannot be used is removed, and its reason is added.
        """
        # Clean the captions.
        for name, texts in self.captions.items():
            self.captions[name] = []
            for text in texts:
                try:
                    self.captions[name].append(cleaned(text, clean))
                except BadSample as error:
                    self.reasons.append(with_name(str(error), name))
        if self.image is None or not any(self.captions.values()):
            return False

        # The image must decode, and must be large enough for one latent pixel.
        try:
            height, width = decode_whole_image(self.image).shape[1:]
            self.sides = (min(height, width), max(height, width))
            if self.sides[0] < SMALLEST_SIDE:
                raise BadSample(f'image is narrower than {SMALLEST_SIDE} pixels: {width} x {height}')
        except BadSample as error:
            self.reasons.append(str(error))
            return False
        return True


def read_samples(file: File, columns: Columns = USUAL_COLUMNS, split: str | None = None) -> Iterator[Sample]:
    """Yield the samples in a tar, a Parquet file or an image file.

    If the file is cut short or damaged, the last item has only the reason; all samples before it are whole.

    Unless `split`, the value of --split, is ALL_SPLITS, the samples in a tar must belong to one split.

    Raises DataError if the file cannot be read at the moment, for example because a network file system is down, and
    UserError if a tar has several splits.
    """
    try:
        suffix = split_name(file.name)[1].lower()
        if suffix == '.tar':
            yield from read_tar(file.name, columns, split)
        elif suffix == '.parquet':
            yield from read_parquet(file.name, columns)
        else:
            yield read_image_file(file, columns)
    except (MemoryError, DataError, UserError):
        raise  # the file itself may be good
    except Exception as error:  # damaged bytes make tarfile and pyarrow raise nearly anything
        # The disk failed, unless pyarrow raised the error itself (no errno), or a corrupt tar header gave a position
        # that no file has (EINVAL).
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise DataError(f'{file.name} cannot be read ({type(error).__name__}: {one_line(error)})') from None
        yield Sample(None, reasons=[f'{DAMAGED}: {one_line(error)}'])


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
                download(path, copy, path, PATIENT)
            except OSError as error:
                raise DataError(str(error)) from None
        with open(copy, 'rb', BUFFER_BYTES) as file:
            yield file


def read_image_file(file: File, columns: Columns) -> Sample:
    """Read an image, and its captions unless a table has them."""
    path, suffix = split_name(file.name)
    key = os.path.basename(path)
    if file.table_captions is not None:
        return Sample(key, Path(file.name).read_bytes(), dict(file.table_captions))
    files = {suffix: Path(path + suffix).read_bytes() for suffix in (suffix, *file.captions)}
    return sample_of_files(key, files, columns)


def sample_of_files(key: str, files: dict[str, bytes | str], columns: Columns) -> Sample:
    """Return the sample that consists of these files: their contents by suffix, or in a text why one cannot be read."""
    # A sample has exactly one image.
    sample = Sample(key)
    images = [content for suffix, content in files.items() if is_image(suffix)]
    if not images:
        sample.reasons.append('no image')
    elif len(images) > 1:  # one may be a mask of the other
        sample.reasons.append('more than one image')
    elif isinstance(images[0], str):
        sample.reasons.append(f'no image: {images[0]}')
    else:
        sample.image = images[0]

    # Each suffix that --caption_column names gives one caption. Without such suffixes, the first text counts.
    for given in columns.suffixes or [None]:
        name = columns.name_of(given)
        texts = {suffix: content for suffix, content in files.items() if given in (None, suffix.lower())}
        try:
            sample.captions[name] = [first_text(texts)]
        except BadSample as error:
            sample.reasons.append(with_name(str(error), name))
    return sample


def first_text(files: dict[str, bytes | str]) -> str:
    """Return the first caption that is not empty in some files, by suffix: a .txt, a .caption or the key in a .json.

    Raises BadSample if there is none, or if a file before it cannot be read.
    """
    for suffix in caption_suffixes(files):
        content = files[suffix]
        if isinstance(content, str):
            raise BadSample(f'no caption: {content}')
        try:
            if suffix.lower() == '.json':
                text = json.loads(content)
                text = text.get('caption') if isinstance(text, dict) else None
            else:
                is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                text = content.decode('utf-16' if is_utf16 else 'utf-8-sig')
        except UnicodeError:
            raise BadSample('caption is not UTF-8') from None
        except (ValueError, RecursionError) as error:
            raise BadSample(f'no caption: its {suffix} is not valid JSON ({error})') from None
        if isinstance(text, str) and text.strip():
            return text
    raise BadSample('no caption')


def cleaned(text: str, clean: Callable[[str], str]) -> str:
    """Return a caption after cleaning. Raises BadSample if it cannot be used."""
    try:
        text.encode()  # JSON may contain surrogates, which UTF-8 does not allow
    except UnicodeError:
        raise BadSample('caption is not UTF-8') from None
    if '\0' in text:
        raise BadSample('caption has a NUL: UTF-16 needs its byte order mark')
    text = clean(text.rstrip('\r\n'))
    if not text:
        raise BadSample('no caption')
    return text


def read_tar(name: str, columns: Columns, split: str | None) -> Iterator[Sample]:
    """Yield the samples in a tar, and in all tars that follow it in the same file.

    The headers of a tar are read first, and its files are paired by key, because a tar of a folder has its files in any
    order. For example, `a/b.jpg` is the .jpg of the sample a/b. The samples come in the order of their first files. A
    name that occurs twice, as after a second `tar --append`, cannot be read: either file may be right.

    Raises tarfile.ReadError, or nearly any other exception, if the tar is damaged, and UserError if it has several
    splits.
    """
    keys = []  # of all images so far, also those in earlier tars of the file
    with open_file(name) as reader:
        for members in list_members(reader):
            keys += [key for key, files in members.items() if any(map(is_image, files))]
            if split != ALL_SPLITS:
                require_one_split(group_by_split(keys), name, 'unpack the tar to convert one of them')
            for key, files in members.items():
                if isinstance(files, str):
                    yield Sample(key, reasons=[files])
                    continue
                contents = {}
                for suffix, content in files.items():
                    if isinstance(content, tuple):
                        offset, size = content
                        content = os.pread(reader.fileno(), size, offset)
                        if len(content) < size:
                            content = 'the tar is cut within it'
                    contents[suffix] = content
                yield sample_of_files(key, contents, columns)


def list_members(reader: BinaryIO) -> Iterator[dict[str, dict[str, tuple[int, int] | str] | str]]:
    """Yield the images and captions of each tar in a file, by key and suffix, and separately each other member.

    Of each file it yields the position and the size of its content, in bytes, or the reason why it is not read.

    Raises tarfile.ReadError, or nearly any other exception, if a tar is damaged. The files before the damage are
    yielded first.
    """
    members = {}
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
                    yield {name: 'hidden'}
                    continue
                if not is_image(suffix) and not is_caption(suffix):
                    yield {name: f'not an image or a caption: {why_not_read(suffix)}'}
                    continue
                files = members.setdefault(key, {})
                if suffix in files:
                    files[suffix] = f'the tar has several files called {name}'
                elif not member.isreg() or member.issparse():
                    files[suffix] = 'a link, a pipe, a device or a sparse file in a tar is not read'
                elif member.size > MAX_BYTES:
                    files[suffix] = 'too large'
                else:
                    files[suffix] = (member.offset_data, member.size)
        require_end_mark(reader, end, os.fstat(reader.fileno()).st_size)
    except Exception:
        # More files of the last sample may lie after the damage. Without its .txt, which has precedence over all other
        # caption files, its caption is not known.
        if key in members and not any(suffix.lower() == CAPTION_SUFFIXES[0] for suffix in members[key]):
            members[key][CAPTION_SUFFIXES[0]] = 'it may lie behind the damage'
        yield members
        raise
    if key is None:  # no member at all
        members[''] = 'no image: nothing is in this tar'
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


def read_parquet(name: str, columns: Columns) -> Iterator[Sample]:
    """Yield a sample for each row of a Parquet file. If the file lacks the columns, yield only the reason.

    If the file is damaged, raises an error of pyarrow or an OSError whose `errno` is None.
    """
    from pyarrow.parquet import ParquetFile  # importing it takes a third of a second
    with (open_file(name) as reader,
          ParquetFile(reader, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES,
                      page_checksum_verification=True) as parquet):
        # Find the columns. A file without them holds something else.
        try:
            image, captions = columns.find(name, parquet.schema_arrow.names, USUAL_IMAGE_COLUMNS)
        except UserError as error:
            yield Sample(None, reasons=[f'unknown columns: {error}'])
            return
        if parquet.metadata.num_rows == 0:
            yield Sample(None, reasons=['no row: nothing is in this file'])

        # Read one row group at a time: the row groups before a damaged one are good.
        number = 0
        for index in range(parquet.num_row_groups):
            wanted = [image, *captions.values()]
            for batch in parquet.iter_batches(ROWS_PER_BATCH, [index], wanted, use_threads=False):
                for row in range(batch.num_rows):
                    cells = {name: batch.column(column)[row] for name, column in captions.items()}
                    yield sample_of_row(number, batch.column(image)[row], cells)
                    number += 1


def sample_of_row(number: int, image: Any, captions: dict[str, Any]) -> Sample:
    """Return the sample in a row of a Parquet file. Its cells are scalars of pyarrow, for captions by their name."""
    # The image is bytes, or a struct of bytes and path as the Hugging Face hub has it.
    sample = Sample(number)
    content = image.as_py()
    if isinstance(content, dict):
        content = content.get('bytes') or content.get('path')
    if isinstance(content, bytes):
        sample.image = content
    else:
        shown = repr(content) if isinstance(content, str | None) else f'a {type(content).__name__}'
        sample.reasons.append(f'no image: the row has {shown:.50} instead of its bytes (--captions reads tables of '
                              'paths, and img2dataset makes tars of addresses)')

    # A caption column holds a text or a list of texts.
    for name, cell in captions.items():
        try:
            texts, reasons = captions_in(cell.as_py())
        except UnicodeError:
            texts, reasons = [], ['no caption: it is not UTF-8']
        sample.captions[name] = texts
        sample.reasons += [with_name(reason, name) for reason in reasons]
    return sample
