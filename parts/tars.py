"""Images with captions out of tars and image files, made into samples.

A link in a tar is not followed, since a stranger can have made it; parts/sources.py says of those in folders.
"""
import errno
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from errors.messages import DataError, one_line
from inputs.images import decode_image
from inputs.paths import is_url
from inputs.stores import StoredFile
from parts.output import DAMAGED
from parts.sources import File, captions_among, is_caption, is_hidden, is_image, split_name, why_not_read

MAX_BYTES = 256 << 20  # of an image or a caption: a tar can declare any size
MAX_OPEN = 4  # samples whose files may lie between each other's, such as a.jpg, a.seg.png, a.txt
BUFFER_BYTES = 1 << 20
END_BYTES = 1024  # of zeros, that a tar ends with
RECORD_BYTES = 10240  # writers of tars fill the last record of so many bytes with zeros


class Unread(str):
    """Why a file of a sample was not read."""


Fields = dict[str, bytes | Unread]  # the files of a sample by their suffixes


def read_samples(file: File) -> Iterator[tuple[str | None, Fields]]:
    """Yield (key, fields) of each sample of a tar or an image file, for `make_sample`.

    Last comes (None, {DAMAGED: why}) if a tar is cut short or damaged; the samples before it are whole.

    Raises DataError if the file cannot be read, as when a network file system is away: nothing can then be said of what
    it holds.
    """
    yield from group_by_key(whole_files(file))


def whole_files(file: File) -> Iterator[tuple[str | None, str, bytes | Unread]]:
    """Yield (key, suffix, content) of each file of a tar, or of an image file with its captions, up to any damage."""
    read_files = read_tar if split_name(file.name)[1].lower() == '.tar' else read_image
    try:
        yield from read_files(file)
    except MemoryError:
        raise  # which says nothing of the file
    except OSError as error:
        if error.errno != errno.EINVAL:  # no place of a file is as far as a garbled header says
            raise DataError(f'{file.name} cannot be read ({type(error).__name__}: {one_line(error)})') from None
        yield None, DAMAGED, Unread(one_line(error))
    except Exception as error:  # a garbled header makes tarfile raise nearly anything
        yield None, DAMAGED, Unread(one_line(error))


def group_by_key(files: Iterator[tuple[str, str, bytes | Unread]]) -> Iterator[tuple[str, Fields]]:
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
    """Yield (key, suffix, content) of an image file and of the captions beside it."""
    stem, suffix = split_name(file.name)
    for part in (suffix, *file.captions):
        yield os.path.basename(stem), part, Path(stem + part).read_bytes()


def read_tar(file: File) -> Iterator[tuple[str, str, bytes | Unread]]:
    """Yield (key, suffix, content) of a tar's files, `a/b.jpg` being the .jpg of a/b, and of all tars that follow it in
    the same file.

    Raises tarfile.ReadError, or nearly anything else, where it is damaged.
    """
    raw = StoredFile(file.name) if is_url(file.name) else open(file.name, 'rb', buffering=0)
    with io.BufferedReader(raw, BUFFER_BYTES) as reader:
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


def make_sample(fields: Fields) -> dict[str, bytes | str]:
    """The columns of the shards from what `read_samples` gives. ValueError, with the reason: there is no sample in it.

    A reason has its kind before the first colon, by which reasons are counted.
    """
    if DAMAGED in fields:
        raise ValueError(f'{DAMAGED}: {fields[DAMAGED]}')
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
    decode_image(image)
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
