"""Images with captions as people have them, in tars and folders: found, read safely, made into samples."""
import fnmatch
import glob
import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from inputs.errors import DataError, one_line
from inputs.images import decode_image
from inputs.store import S3Object, S3Store

IMAGES = ('.jpg', '.jpeg', '.png', '.webp', '.gif', '.bmp', '.avif', '.tif', '.tiff', '.jp2', '.ppm')
# A tar can declare any size, so nothing larger is read into memory.
MAX_BYTES = dict.fromkeys(IMAGES, 256 << 20) | {'.txt': 4 << 20, '.json': 4 << 20}
MAX_HEADER = 16 << 10  # bytes, of all that a tar has before a file's own: names of 4096 bytes take 11 KiB


class File(NamedTuple):
    """A tar or an image, as it was found."""
    name: str  # a path, or an address in a store
    size: int  # bytes


def find_files(sources: Iterable[str]) -> list[File]:
    """The tars and images that `sources` name, each once, in the order of their names.

    A source is a file, a folder (searched to its leaves) or a glob; or in a store, s3://bucket/..., a tar, a folder of
    tars or a glob. ValueError: it names nothing, or cannot be reached.
    """
    found = set()
    for source in sources:
        if '://' in source and not os.path.exists(source):
            found.update(find_in_store(source))
        else:
            found.update(File(str(path), path.stat().st_size) for path in find_paths(source))
    return sorted(found, key=lambda file: Path(file.name))


def find_paths(source: str) -> list[Path]:
    """The tars and images of a file, a folder or a glob. ValueError: it names nothing."""
    if os.path.isfile(source):
        return [Path(source)]
    if os.path.exists(source):
        found = [source]
    else:
        found = glob.glob(source, recursive=True)
    if not found:
        raise ValueError(f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
    files = []
    for path in map(Path, found):
        if path.is_dir():
            files += path.rglob('[!.]*')
        else:
            files.append(path)
    return [file for file in files if file.suffix.lower() in ('.tar', *IMAGES) and file.is_file()]


def find_in_store(source: str) -> list[File]:
    """The tars of an address in a store, from one list of it. ValueError: there are none, or they cannot be reached."""
    scheme, _, place = source.partition('://')
    if scheme != 's3':
        raise ValueError(f'SOURCE {source}: of stores, s3:// ones are read; set S3_ENDPOINT_URL if yours speaks S3, or '
                         'copy the tars')
    bucket, _, prefix = place.partition('/')
    beginning = re.split(r'[*?[]', prefix)[0]
    pattern = prefix
    if beginning == prefix:
        pattern = f'{prefix.rstrip("/")}/*'.lstrip('/')  # * matches a / as well
    try:
        found = [File(f's3://{bucket}/{key}', size) for key, size in S3Store(bucket).list(beginning)
                 if key == prefix or fnmatch.fnmatchcase(key, pattern)]
    except Exception as error:  # boto3 has many kinds
        raise ValueError(f'SOURCE {source} cannot be listed; check its name and your credentials '
                         f'({type(error).__name__}: {one_line(error)})') from None
    if not found:
        raise ValueError(f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
    return [file for file in found if file.name.lower().endswith('.tar')]


def opened_by(file: File, stores: dict[str, S3Store]) -> Path | S3Object:
    """What `read_samples` takes for a file; `stores` keeps the clients of this process, by bucket."""
    if not file.name.startswith('s3://') or os.path.exists(file.name):
        return Path(file.name)
    bucket, _, key = file.name.removeprefix('s3://').partition('/')
    if bucket not in stores:
        stores[bucket] = S3Store(bucket)
    return S3Object(stores[bucket], key, file.size)


def join_neighbours(files: list[File], part_bytes: int) -> list[list[File]]:
    """Parts of a dataset: each is a file, or several neighbours that are together no larger than `part_bytes`."""
    parts = []
    size = 0
    for file in files:
        if parts and size + file.size <= part_bytes:
            parts[-1].append(file)
            size += file.size
        else:
            parts.append([file])
            size = file.size
    return parts


def read_samples(path: Path | S3Object) -> Iterator[tuple[str | None, dict[str, bytes | None] | Exception]]:
    """Yield (key, {suffix: bytes}) of each sample, consecutive files of one key; last (None, error) if damaged.

    DataError: its store is out of reach.
    """
    read_files = read_image if path.suffix.lower() in IMAGES else read_tar
    key = None
    fields = {}
    damage = None
    try:
        for next_key, suffix, data in read_files(path):
            if fields and (next_key != key or suffix in fields):
                yield key, fields
                fields = {}
            key = next_key
            fields[suffix] = data
    except DataError:
        raise
    except Exception as error:  # a hostile header makes tarfile raise nearly anything
        damage = error
    if fields:
        yield key, fields  # what came before the damage is whole
    if damage:
        yield None, damage


def read_image(path: Path) -> Iterator[tuple[str, str, bytes | None]]:
    """Yield (key, suffix, bytes) of an image file and of the .txt and .json beside it; None is too large."""
    for file in (path, path.with_suffix('.txt'), path.with_suffix('.json')):
        if file.is_file():
            suffix = file.suffix.lower()
            data = None
            if file.stat().st_size <= MAX_BYTES[suffix]:
                data = file.read_bytes()
            yield path.stem, suffix, data


class TarReader(io.BufferedReader):
    """Gives tarfile `left` bytes at most: it reads headers whole, in time and memory that grow with their square."""
    left = MAX_HEADER

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError('header too large')
        return super().read(size)


def read_tar(path: Path | S3Object) -> Iterator[tuple[str, str, bytes | None]]:
    """Yield (key, suffix, bytes) of a tar's files, `a/b.jpg` being the .jpg of a/b; None is too large."""
    with TarReader(path.open('rb', buffering=0)) as file, tarfile.open(fileobj=file, mode='r:') as tar:
        while member := tar.next():
            tar.members.clear()  # tarfile would keep every header,
            tar.pax_headers.clear()  # and go through the global ones for each file
            if tar.offset < member.offset_data:
                raise tarfile.ReadError('negative size')  # tarfile would go round for ever
            folder, name = os.path.split(member.name)
            key, _, suffix = name.partition('.')
            suffix = f'.{suffix.lower()}'
            # no links, no devices, no hidden files; no sparse ones, where a few bytes give 256 MiB in quadratic time
            if member.isreg() and not member.issparse() and key and suffix in MAX_BYTES:
                data = None
                if member.size <= MAX_BYTES[suffix]:
                    file.left = member.size
                    data = tar.extractfile(member).read()
                yield os.path.join(folder, key), suffix, data
            file.left = MAX_HEADER
        # tarfile also stops, without a word, where a tar is cut between two files and at a garbled header.
        file.seek(tar.offset)
        if file.read(1024) != bytes(1024):
            raise tarfile.ReadError('no end mark')


def make_sample(fields: dict[str, bytes | None] | Exception) -> dict[str, bytes | str]:
    """The columns of the shards from {suffix: bytes}. ValueError, with the reason: there is no sample in it."""
    if isinstance(fields, Exception):
        raise ValueError(f'cut short or damaged: {fields}')
    images = [fields[suffix] for suffix in IMAGES if suffix in fields]
    if not images:
        raise ValueError('no image')
    if len(images) > 1:
        raise ValueError('more than one image')
    if None in fields.values():
        raise ValueError('too large')
    caption = read_caption(fields)
    if not caption.strip():
        raise ValueError('empty caption')
    decode_image(images[0])
    return {'jpg': images[0], 'caption': caption}


def read_caption(fields: dict[str, bytes]) -> str:
    """The text of a sample's .txt, or the `caption` of its .json. ValueError, with the reason: there is none."""
    try:
        if '.txt' in fields:
            return fields['.txt'].decode('utf-8-sig').rstrip('\r\n')
        caption = json.loads(fields['.json'])['caption']
        return caption.encode().decode()  # JSON can hold what UTF-8 cannot
    except UnicodeError:
        raise ValueError('caption is not UTF-8') from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError('no caption') from None
