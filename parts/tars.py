"""Images with captions out of tars and image files: read safely, whatever they hold, and made into samples.

A link in a tar is not followed, since a stranger can have made it. parts/sources.py says
of those in folders.
"""
import io
import json
import os
import tarfile
from collections.abc import Iterator

from inputs.errors import DataError, one_line
from inputs.images import decode_image
from inputs.places import is_address
from inputs.stores import StoredFile
from inputs.words import counted
from parts.names import CAPTIONS, HEIF, IMAGES, File, is_hidden, is_image, split_name, why_not_read

# A tar can declare any size, so nothing larger is read into memory.
MAX_BYTES = dict.fromkeys((*IMAGES, *HEIF), 256 << 20) | dict.fromkeys(CAPTIONS, 4 << 20)
MAX_HEADER = 16 << 10  # bytes, of all that a tar has before a file's own: names of 4096 bytes take 11 KiB
MAX_OPEN = 4  # samples whose files may lie between each other's, such as a.jpg, a.seg.png, a.txt
TOO_LARGE = 'too large'


class Unread(str):
    """Why a file of a sample was not read."""


class Damage(Exception):
    """What is wrong with a tar or image file: it was cut short, changed or removed."""


class NoSample(Exception):
    """Why there is no sample in something that a tar holds."""


Fields = dict[str, bytes | Unread]  # the files of a sample by their suffixes


def read_samples(file: File) -> Iterator[tuple[str | None, Fields | Exception]]:
    """Yield (key, fields) of each sample, for `make_sample`; (key, NoSample) for what else a tar holds.

    Last comes (None, Damage) if the file is cut short, damaged, or gone; the samples before it are whole.

    Raises DataError if the file cannot be read for a reason of the moment, such as a network file system that is away
    or a lack of memory, so that nothing can be said of what it holds.
    """
    damage = None

    def whole_files():
        nonlocal damage
        _, suffix = split_name(os.path.basename(file.name))
        read_files = read_image if is_image(suffix) else read_tar
        try:
            yield from read_files(file)
        except DataError:
            raise
        except (OSError, MemoryError) as error:
            if not is_gone(file.name, error):
                raise DataError(f'{file.name} cannot be read ({type(error).__name__}: {one_line(error)})') from None
            damage = error
        except Exception as error:  # a hostile header makes tarfile raise nearly anything
            damage = error
    yield from group_by_key(whole_files())
    if damage:
        yield None, Damage(one_line(damage))


def is_gone(name: str, error: BaseException) -> bool:
    """Whether a local file was removed; where its folder is gone or empty, it rather is a disk that is away."""
    if not isinstance(error, FileNotFoundError):
        return False
    try:
        return len(os.listdir(os.path.dirname(name) or '.')) > 0
    except OSError:
        return False


def group_by_key(files: Iterator[tuple[str, str, bytes | Unread]]) -> Iterator[tuple[str, Fields | Exception]]:
    """Samples from neighbouring files of one key; the files of a.seg may lie between those of a."""
    samples: dict[str, Fields] = {}
    for key, suffix, content in files:
        if isinstance(content, NoSample):
            yield key, content
            continue
        for other in list(samples):
            goes_on = key == other and suffix not in samples[other]
            lies_between = key.startswith(f'{other}.')
            if not goes_on and not lies_between:
                yield other, samples.pop(other)
        samples.setdefault(key, {})[suffix] = content
        if len(samples) > MAX_OPEN:
            first = next(iter(samples))
            yield first, samples.pop(first)
    yield from samples.items()


def read_image(file: File) -> Iterator[tuple[str, str, bytes | Unread]]:
    """Yield (key, suffix, content) of an image file and of the captions beside it."""
    key, suffix = split_name(os.path.basename(file.name))
    stem = file.name[:-len(suffix)]
    for spelled in (file.name[len(stem):], *file.captions):
        suffix = spelled.lower()
        with open(stem + spelled, 'rb') as opened:
            content = Unread(TOO_LARGE)
            if os.fstat(opened.fileno()).st_size <= MAX_BYTES[suffix]:
                content = opened.read()
        yield key, suffix, content


class TarReader(io.BufferedReader):
    """Gives tarfile `left` bytes at most: it reads headers whole, in time and memory that grow with their square."""

    def __init__(self, raw: io.RawIOBase, size: int):
        super().__init__(raw)
        self.size = size
        self.left = MAX_HEADER

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError('header too large')
        return super().read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if not 0 <= offset <= self.size:  # which a file system refuses with an OSError, as if it had a fault
            raise tarfile.ReadError('unexpected end of data')
        return super().seek(offset, whence)


def open_tar(file: File) -> TarReader:
    if is_address(file.name):
        return TarReader(StoredFile(file.name, file.size), file.size)
    raw = open(file.name, 'rb', buffering=0)
    return TarReader(raw, os.fstat(raw.fileno()).st_size)


def read_tar(file: File) -> Iterator[tuple[str, str, bytes | Unread | NoSample]]:
    """Yield (key, suffix, content) of a tar's files, `a/b.jpg` being the .jpg of a/b.

    Last, NoSample says how many hidden files there are, or that there are no files at all.
    """
    num_files = 0
    num_hidden = 0
    first_hidden = None
    with open_tar(file) as reader, tarfile.open(fileobj=reader, mode='r:') as tar:
        while member := tar.next():
            tar.members.clear()  # tarfile would keep every header,
            tar.pax_headers.clear()  # and go through the global ones for each file
            if tar.offset < member.offset_data:
                raise tarfile.ReadError('negative size')  # tarfile would go round for ever
            if is_hidden(member.name):
                num_hidden += 1
                first_hidden = first_hidden or member.name
            elif not member.isdir():
                num_files += 1
                folder, name = os.path.split(member.name)
                key, suffix = split_name(name)
                yield os.path.join(folder, key), suffix, read_member(tar, member, suffix, reader)
            reader.left = MAX_HEADER
        # tarfile also stops, without a word, where a tar is cut between two files and at a garbled header.
        reader.seek(tar.offset)
        if reader.read(1024) != bytes(1024):
            raise tarfile.ReadError('no end mark')
    if num_hidden:
        hidden = counted(num_hidden, 'file')
        yield first_hidden, '', NoSample(f'hidden: {hidden} of this tar, the first is {first_hidden}')
    if not num_files and not num_hidden:
        yield '', '', NoSample('no files in this tar')


def read_member(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str, reader: TarReader) -> bytes | Unread:
    """The content of a file, or why it is not read."""
    if member.issym() or member.islnk():
        return Unread('a link in a tar is not followed')
    if member.issparse():  # a few bytes of it give 256 MiB in quadratic time
        return Unread('a sparse file in a tar is not read')
    if not member.isreg():
        return Unread('a pipe or device is not read')
    if not is_image(suffix) and suffix not in CAPTIONS:
        return Unread(why_not_read(suffix))
    if member.size > MAX_BYTES[suffix]:
        return Unread(TOO_LARGE)
    reader.left = member.size
    return tar.extractfile(member).read()


def make_sample(fields: Fields | Exception) -> dict[str, bytes | str]:
    """The columns of the shards from what `read_samples` gives. ValueError, with the reason: there is no sample in it.

    A reason has its kind before the first colon, by which reasons are counted.
    """
    if isinstance(fields, Damage):
        raise ValueError(f'cut short or damaged: {fields}')
    if isinstance(fields, Exception):
        raise ValueError(str(fields))
    images = [suffix for suffix in fields if is_image(suffix)]
    if not images:
        unread = [content for content in fields.values() if isinstance(content, Unread)]
        raise ValueError(f'no image: {unread[0]}' if unread else 'no image')
    if len(images) > 1:
        raise ValueError('more than one image')
    image = fields[images[0]]
    refuse_unread(image, 'no image')
    caption = read_caption(fields)
    if not caption.strip():
        raise ValueError('empty caption')
    decode_image(image)
    return {'jpg': image, 'caption': caption}


def refuse_unread(content: bytes | Unread, kind: str) -> None:
    """Raises ValueError if it was not read."""
    if isinstance(content, Unread):
        raise ValueError(content if content == TOO_LARGE else f'{kind}: {content}')


def read_caption(fields: Fields) -> str:
    """The text of a sample's .txt, or the `caption` of its .json. ValueError, with the reason: there is none."""
    for suffix in CAPTIONS:
        if suffix in fields:
            refuse_unread(fields[suffix], 'no caption')
            break
    try:
        if '.txt' in fields:
            return fields['.txt'].decode('utf-8-sig').rstrip('\r\n')
        caption = json.loads(fields['.json'])['caption']
        return caption.encode().decode()  # JSON can hold what UTF-8 cannot
    except UnicodeError:
        raise ValueError('caption is not UTF-8') from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError('no caption') from None
