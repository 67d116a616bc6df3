"""Images with captions out of tars and image files; of Parquet files sdbench/datasets/parquet.py reads the rows.

A link in a tar is not followed, since a stranger can have made it; sdbench/datasets/sources.py says of those in folders.
"""
import errno
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from sdbench.datasets.output import DAMAGED
from sdbench.datasets.parquet import read_parquet
from sdbench.datasets.samples import Fields, Unread
from sdbench.datasets.sources import File, is_caption, is_hidden, is_image, split_name, why_not_read
from sdbench.datasets.tables import USUAL_COLUMNS, Columns
from sdbench.errors import DataError, one_line
from sdbench.inputs.stores import open_file

MAX_BYTES = 256 << 20  # of an image or a caption: a tar can declare any size
MAX_OPEN = 4  # samples whose files may lie between each other's, such as a.jpg, a.seg.png, a.txt
BUFFER_BYTES = 1 << 20
END_BYTES = 1024  # of zeros, that a tar ends with
RECORD_BYTES = 10240  # writers of tars fill the last record of so many bytes with zeros


def read_samples(file: File, columns: Columns = USUAL_COLUMNS) -> Iterator[tuple[str | int | None, Fields]]:
    """Yield (key, fields) of each sample of a tar, a Parquet file or an image file, for `make_sample`.

    Last comes (None, {DAMAGED: why}) if a file is cut short or damaged; the samples before it are whole.

    Args:
        file: of which the samples are read; its suffix says what it is.
        columns: of images and captions in Parquet.

    Raises DataError if the file cannot be read, as when a network file system is away: nothing can then be said of what
    it holds.
    """
    yield from group_by_key(whole_files(file, columns))


def whole_files(file: File, columns: Columns) -> Iterator[tuple[str | int | None, str, bytes | Unread]]:
    """Yield (key, suffix, content) of each file of a tar, of each column of a Parquet file's rows, or of an image file
    with its captions, up to any damage."""
    suffix = split_name(file.name)[1].lower()
    try:
        if suffix == '.tar':
            yield from read_tar(file)
        elif suffix == '.parquet':
            yield from read_parquet(file, columns)
        else:
            yield from read_image(file)
    except (MemoryError, DataError):
        raise  # which say nothing of what the file holds
    except OSError as error:
        # pyarrow's own have no number, and no place of a file is as far as a garbled header of a tar says
        if error.errno not in (None, errno.EINVAL):
            raise DataError(f'{file.name} cannot be read ({type(error).__name__}: {one_line(error)})') from None
        yield None, DAMAGED, Unread(one_line(error))
    except Exception as error:  # damaged bytes make tarfile and pyarrow raise nearly anything
        yield None, DAMAGED, Unread(one_line(error))


def group_by_key(files: Iterator[tuple[str | int | None, str, bytes | Unread]]
                 ) -> Iterator[tuple[str | int | None, Fields]]:
    """Samples from files of one key, which may lie some files apart."""
    samples: dict[str, Fields] = {}
    for key, suffix, content in files:
        if suffix in samples.get(key, ()):  # another sample of the same name
            yield key, samples.pop(key)
        samples.setdefault(key, {})[suffix] = content
        if len(samples) > MAX_OPEN:
            first = next(iter(samples))
            yield first, samples.pop(first)
    yield from samples.items()


def read_image(file: File) -> Iterator[tuple[str, str, bytes | Unread]]:
    """Yield (key, suffix, content) of an image file and of its captions."""
    stem, suffix = split_name(file.name)
    key = os.path.basename(stem)
    for part in (suffix, *file.captions):
        yield key, part, Path(stem + part).read_bytes()
    if file.caption is not None:
        yield key, '.txt', file.caption.encode(errors='surrogatepass')


def read_tar(file: File) -> Iterator[tuple[str, str, bytes | Unread]]:
    """Yield (key, suffix, content) of a tar's files, `a/b.jpg` being the .jpg of a/b, and of all tars that follow it in
    the same file.

    Raises tarfile.ReadError, or nearly anything else, where it is damaged.
    """
    with open_file(file.name) as reader:
        is_empty = True
        is_more = True
        while is_more:
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
            if tar.offset == start > 0:
                raise tarfile.ReadError('what follows its end is no tar')
            is_more = skip_end(reader, tar.offset)
    if is_empty:
        yield '', '', Unread('nothing is in this tar')


def skip_end(reader: io.BufferedReader, end: int) -> bool:
    """Go on behind the zeros at the `end` of a tar; returns whether something is there.

    Raises tarfile.ReadError if these are not the zeros of a whole tar: tarfile also stops, without a word, where a tar
    is cut between two files, at a garbled header, and where a file was not fetched to its end and is filled with zeros.
    """
    reader.seek(end)
    zeros = 0
    rest = b''
    while not rest and (content := reader.read(BUFFER_BYTES)):
        rest = content.lstrip(bytes(1))
        zeros += len(content) - len(rest)
    if zeros < END_BYTES:
        raise tarfile.ReadError('no end mark')
    if not rest and zeros > END_BYTES + RECORD_BYTES:
        raise tarfile.ReadError(f'it ends in zeros, {zeros:,} of them')
    reader.seek(end + zeros // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE)
    return bool(rest)


def read_member(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> bytes | Unread:
    """The content of a file, or why it is not read."""
    if is_hidden(member.name):
        return Unread('it is hidden')
    if not member.isreg():
        return Unread('a link, a pipe or a device in a tar is not read')
    if not is_image(suffix) and not is_caption(suffix):
        return Unread(why_not_read(suffix))
    if member.size > MAX_BYTES:
        return Unread('too large')
    return tar.extractfile(member).read()
