"""Images with captions as people have them, in tars and folders: found, read safely, made into samples."""
import glob
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from inputs.images import decode_image

IMAGES = ('.jpg', '.jpeg', '.png', '.webp')
# A tar can declare any size, so nothing larger is read into memory.
MAX_BYTES = dict.fromkeys(IMAGES, 256 << 20) | {'.txt': 4 << 20, '.json': 4 << 20}
MAX_HEADER = 16 << 10  # bytes, of all that a tar has before a file's own: names of 4096 bytes take 11 KiB


def find_files(source: str) -> list[Path]:
    """The tars and images that `source` names: a file, a folder (searched to its leaves) or a glob.

    ValueError: it names nothing.
    """
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


def read_samples(path: Path) -> Iterator[tuple[str | None, dict[str, bytes | None] | Exception]]:
    """Yield (key, {suffix: bytes}) of each sample, consecutive files of one key; last (None, error) if damaged."""
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


def read_tar(path: Path) -> Iterator[tuple[str, str, bytes | None]]:
    """Yield (key, suffix, bytes) of a tar's files, `a/b.jpg` being the .jpg of a/b; None is too large."""
    with TarReader(open(path, 'rb', buffering=0)) as file, tarfile.open(fileobj=file, mode='r:') as tar:
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
