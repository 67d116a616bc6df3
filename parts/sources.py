"""What SOURCE names: the tars and images to convert, and what else lies there, with the reason why it is left out.

One rule splits a name, in tars and in folders: what follows the last dot is the suffix, and what stands before it is
the key. The caption of KEY.jpg is KEY.txt, or else the "caption" of KEY.json, by these exact names. (WebDataset splits
at the first dot: all of IMG_2020.01.02.jpg, IMG_2020.01.03.jpg and so on would be one sample.)

Links in folders are followed wherever they lead (part1 -> /disk1): whoever made SOURCE made them. Each real folder is
searched once, so that loops end, and a file that has two names by links is converted once.
"""
import fnmatch
import glob
import hashlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import obstore
from obstore.exceptions import BaseError

from inputs.errors import DataError, one_line
from inputs.images import formats
from inputs.places import is_address
from inputs.stores import open_store, store_error

IMAGES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.gif', '.bmp', '.avif', '.tif', '.tiff', '.jp2', '.ppm')
HEIF = ('.heic', '.heif')  # read where pillow-heif is installed
CAPTIONS = ('.txt', '.json')  # the first that is there is taken
BESIDE_TARS = ('.parquet', '_stats.json')  # what img2dataset writes for 00000.tar: 00000.parquet, 00000_stats.json


class File(NamedTuple):
    """A tar or an image, as it was found."""
    name: str  # a whole path, or an address in a store
    size: int  # bytes, with those of the captions beside it
    captions: tuple[str, ...] = ()  # of an image: the suffixes of the captions beside it


class Found(NamedTuple):
    """What SOURCE names."""
    files: list[File]  # to convert, each once, in the order of their names
    left_out: list[dict]  # lines for skipped.jsonl: {'source': path, 'key': None, 'reason': 'kind: details'}


def find_files(sources: Iterable[str], excluded: Iterable[str] = ()) -> Found:
    """The tars and images that `sources` name, and what they name that is neither.

    A source is a file, a folder (searched to its leaves) or a glob; or in a store an address of a tar, of a folder of
    tars or a glob. What lies in the folders or addresses `excluded`, as that which is being made does, is passed over.

    Raises ValueError if a source names nothing, and DataError if a folder or a store cannot be read.
    """
    search = Search(list(sources), list(excluded))
    for source in search.sources:
        if is_address(source):
            search.add_store(source)
        else:
            search.add_paths(source)
    return Found(sorted(search.files, key=lambda file: file.name.split('/')), search.left_out)


def join_neighbours(files: list[File], part_bytes: int) -> list[list[File]]:
    """Parts of a dataset: each is a file, or several neighbours that are together no larger than `part_bytes`."""
    parts = []
    size = 0
    for file in files:
        if parts and size + file.size <= part_bytes and not begins_part(file, part_bytes):
            parts[-1].append(file)
            size += file.size
        else:
            parts.append([file])
            size = file.size
    return parts


def begins_part(file: File, part_bytes: int) -> bool:
    """Whether a file begins a part whatever comes before it, as one in about `part_bytes` of files does.

    So where a file is new, or gone, the parts behind the next such file stay as they were.
    """
    draw = hashlib.blake2b(os.path.basename(file.name).encode(errors='surrogateescape'), digest_size=8).digest()
    return int.from_bytes(draw) * part_bytes < file.size * 2 ** 64


def split_name(name: str) -> tuple[str, str]:
    """Key and suffix of a file's name, the suffix with its dot; '' where there is none."""
    key, dot, suffix = name.rpartition('.')
    if not key or key.endswith('/') or '/' in suffix:
        return name, ''
    return key, dot + suffix


def is_image(suffix: str) -> bool:
    """Whether a file of this suffix, in any case, is read as an image."""
    return suffix.lower() in IMAGES or (suffix.lower() in HEIF and 'HEIF' in formats())


def why_not_read(suffix: str) -> str:
    """Why a file of this suffix is neither image, caption nor tar."""
    if suffix.lower() in HEIF:
        return f'{suffix} needs a package (pip install pillow-heif)'
    return f'{suffix or "a file without a suffix"} is not read'


class Search:
    """What was found so far.

    Attributes:
        names: the name of each file and folder by its real path.
    """

    def __init__(self, sources: list[str], excluded: list[str]):
        self.sources = [source if is_address(source) else os.path.abspath(source) for source in sources]
        self.excluded_folders = {os.path.realpath(place) for place in excluded if not is_address(place)}
        self.excluded_addresses = tuple(f'{place.rstrip("/")}/' for place in excluded if is_address(place))
        self.files: list[File] = []
        self.left_out: list[dict] = []
        self.names: dict[str, str] = {}

    def leave_out(self, name: str, reason: str) -> None:
        """List something with a reason, which begins with its kind, before a colon."""
        self.left_out.append({'source': name, 'key': None, 'reason': reason})

    def add_paths(self, source: str) -> None:
        """A file, a folder or a glob. Raises ValueError if it names nothing."""
        found = [source]
        if not os.path.lexists(source):
            found = sorted(glob.glob(source, recursive=True))
        if not found:
            raise ValueError(f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
        named = defaultdict(set)  # files by their folders
        for path in found:
            if not os.path.isdir(path):
                folder, name = os.path.split(path)
                named[folder].add(name)
            elif self.is_to_be_searched(path):
                self.add_folder(path)
        for folder, names in sorted(named.items()):
            self.add_files(folder, names, set(os.listdir(folder)))

    def add_folder(self, top: str) -> None:
        """All that a folder holds, and those below it."""
        for folder, subfolders, names in os.walk(top, onerror=self.list_unreadable, followlinks=True):
            self.add_files(folder, names, set(names))
            paths = [os.path.join(folder, name) for name in sorted(subfolders)]
            subfolders[:] = [os.path.basename(path) for path in paths if self.is_to_be_searched(path)]

    def is_to_be_searched(self, folder: str) -> bool:
        """Whether a folder is new, and nobody's but the user's; else it is in the list."""
        real = os.path.realpath(folder)
        if folder not in self.sources:
            if real in self.excluded_folders:
                return False
            if os.path.basename(folder).startswith('.'):
                self.leave_out(folder, 'hidden')
                return False
        return self.is_new(folder, real)

    def is_new(self, path: str, real: str) -> bool:
        """Whether a file or folder was not found before; else it is in the list, if that was by another name."""
        if real not in self.names:
            self.names[real] = path
            return True
        if self.names[real] != path:
            self.leave_out(path, f'a second name of {self.names[real]}')
        return False

    def list_unreadable(self, error: OSError) -> None:
        """List a folder that may not be opened. Raises DataError if it cannot be read for a reason of the moment."""
        if not isinstance(error, PermissionError):
            raise DataError(f'SOURCE {error.filename} cannot be read ({one_line(error)})') from None
        self.leave_out(error.filename, 'cannot be opened: Permission denied')

    def add_files(self, folder: str, names: Iterable[str], present: set[str]) -> None:
        """Those files of a folder that are called `names`; their captions are among all that are `present`."""
        real_folder = os.path.realpath(folder)
        images = defaultdict(list)  # by key
        captions = []
        for name in sorted(names):
            key, suffix = split_name(name)
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                self.leave_out(path, 'no file: a broken link, a pipe, a socket or a device')
            elif name.startswith('.') and path not in self.sources:
                self.leave_out(path, 'hidden')
            elif is_image(suffix):
                images[key].append(name)
            elif suffix.lower() == '.tar':
                self.add(folder, real_folder, name)
            elif suffix in CAPTIONS:
                captions.append(name)
            elif not is_beside_tar(name, present):
                self.leave_out(path, f'not an image, a caption or a tar: {why_not_read(suffix)}')
        for key, of_key in images.items():
            if len(of_key) > 1:  # one may be a mask of the other
                for name in of_key:
                    self.leave_out(os.path.join(folder, name), f'more than one image: {", ".join(of_key)}')
            else:
                beside = [suffix for suffix in CAPTIONS if key + suffix in present]
                beside = [suffix for suffix in beside if os.path.isfile(os.path.join(folder, key + suffix))]
                self.add(folder, real_folder, of_key[0], beside)
        for name in captions:
            key, _ = split_name(name)
            if key not in images and not is_beside_tar(name, present):
                self.leave_out(os.path.join(folder, name), 'no image')

    def add(self, folder: str, real_folder: str, name: str, captions: Iterable[str] = ()) -> None:
        """A tar, or an image with the suffixes of its captions, unless it was found by another name."""
        key, _ = split_name(name)
        path = os.path.join(folder, name)
        real = os.path.join(real_folder, name)
        if os.path.islink(real):
            real = os.path.realpath(real)
        if self.is_new(path, real):
            parts = (name, *(key + suffix for suffix in captions))
            size = sum(os.path.getsize(os.path.join(folder, part)) for part in parts)
            self.files.append(File(path, size, tuple(captions)))

    def add_store(self, source: str) -> None:
        """The tars of an address, from one list of it.

        Raises ValueError if it names nothing, and DataError if it cannot be listed.
        """
        store, key = open_store(source, 'SOURCE')
        bucket = source.rstrip('/').removesuffix(key).rstrip('/')
        beginning = re.split(r'[*?[]', key)[0]
        if beginning != key:
            beginning = beginning.rpartition('/')[0]
        print(f'listing SOURCE {source}', file=sys.stderr, flush=True)  # a store that does not answer takes minutes
        try:
            sizes = {entry['path']: entry['size'] for page in obstore.list(store, beginning or None) for entry in page}
            if beginning != key:
                sizes = {path: size for path, size in sizes.items() if fnmatch.fnmatchcase(path, key)}  # * matches /
            elif not sizes and key:
                sizes = {key: obstore.head(store, key)['size']}
        except FileNotFoundError:
            sizes = {}
        except (BaseError, OSError) as error:
            raise DataError(store_error(error, f'SOURCE {source}')) from None
        if not sizes:
            raise ValueError(f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
        for path, size in sizes.items():
            if not f'{bucket}/{path}'.startswith(self.excluded_addresses):
                self.add_object(f'{bucket}/{path}', path.removeprefix(beginning) or path, size)

    def add_object(self, address: str, path: str, size: int) -> None:
        """A tar of a store, or why it is none; `path` is what follows the address that was listed."""
        _, suffix = split_name(path.rpartition('/')[2])
        if is_hidden(path):
            self.leave_out(address, 'hidden')
        elif suffix.lower() == '.tar':
            if self.is_new(address, address):
                self.files.append(File(address, size))
        elif is_image(suffix) or suffix in CAPTIONS:
            self.leave_out(address, 'no tar: of a store, tars are read; copy the folder here, or pack it')
        else:
            self.leave_out(address, f'not an image, a caption or a tar: {why_not_read(suffix)}')


def is_beside_tar(name: str, present: set[str]) -> bool:
    """Whether a file is one of those that img2dataset writes for a tar, which is there."""
    return any(name.endswith(end) and f'{name.removesuffix(end)}.tar' in present for end in BESIDE_TARS)


def is_hidden(name: str) -> bool:
    """Whether a file is hidden, or lies in a hidden folder, as .Trash/a.jpg and ._a.jpg do."""
    return any(part.startswith('.') and part not in ('.', '..') for part in name.split('/'))
