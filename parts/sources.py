"""What SOURCE names: the tars and images to convert, and what else lies there, with the reason why it is left out.

One rule splits a name, in tars and in folders: what follows the last dot is the suffix, and what stands before it is
the key. The caption of KEY.jpg is KEY.txt, or else the "caption" of KEY.json; the case of a suffix does not matter.
(WebDataset splits at the first dot: all of IMG_2020.01.02.jpg, IMG_2020.01.03.jpg and so on would be one sample.)

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
from collections.abc import Iterable, Set
from typing import NamedTuple

import obstore
from obstore.exceptions import BaseError

from errors.messages import DataError, one_line
from inputs.images import formats
from inputs.paths import is_url
from inputs.stores import open_store, reach, store_error

IMAGES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.gif', '.bmp', '.avif', '.tif', '.tiff', '.jp2', '.ppm')
HEIF = ('.heic', '.heif')  # read where pillow-heif is installed
CAPTIONS = ('.txt', '.json')  # the first that is there is taken
BESIDE_TARS = ('.parquet', '_stats.json')  # what img2dataset writes for 00000.tar: 00000.parquet, 00000_stats.json


class File(NamedTuple):
    """A tar or an image, as it was found.

    Attributes:
        name: a whole path, or an address in a store.
        size: in bytes, with those of the captions beside it.
        captions: of an image, the suffixes of the captions beside it.
        changed: what is another when a file was written again: the nanosecond of its last change, and those of its
            captions; in a store the ETag.
    """
    name: str
    size: int
    captions: tuple[str, ...] = ()
    changed: tuple[int | str, ...] = ()


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
        if is_url(source):
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


def is_caption(suffix: str) -> bool:
    """Whether a file of this suffix, in any case, may hold a caption."""
    return suffix.lower() in CAPTIONS


def captions_among(suffixes: Iterable[str]) -> list[str]:
    """Those of captions, the one that is taken first."""
    return sorted(filter(is_caption, suffixes), key=lambda suffix: (CAPTIONS.index(suffix.lower()), suffix))


def why_not_read(suffix: str) -> str:
    """Why a file of this suffix is neither image, caption nor tar."""
    if suffix.lower() in HEIF:
        return f'{suffix} needs a package (pip install pillow-heif)'
    return f'{suffix or "a file without a suffix"} is not read'


class Folder:
    """A folder of this machine, and the names in it."""
    has_images = True  # that can be read

    def __init__(self, path: str, names: Iterable[str]):
        self.path = path
        self.real_path = os.path.realpath(path)
        self.names = set(names)

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def real_path_of(self, name: str) -> str:
        """The path of a file without links."""
        path = os.path.join(self.real_path, name)
        return os.path.realpath(path) if os.path.islink(path) else path

    def is_file(self, name: str) -> bool:
        return os.path.isfile(self.path_of(name))

    def size_and_change(self, name: str) -> tuple[int, int | str]:
        """Bytes, and what is another when the file was written again."""
        status = os.stat(self.path_of(name))
        return status.st_size, status.st_mtime_ns


class StoredFolder:
    """What a store has below one address: for all that is asked of a Folder, from one list."""
    has_images = False

    def __init__(self, address: str):
        self.address = address
        self.objects = {}  # what obstore says of each, by name

    @property
    def names(self) -> Set[str]:
        return self.objects.keys()

    def path_of(self, name: str) -> str:
        return f'{self.address}/{name}'

    real_path_of = path_of

    def is_file(self, name: str) -> bool:
        return True

    def size_and_change(self, name: str) -> tuple[int, int | str]:
        return self.objects[name]['size'], self.objects[name]['e_tag'] or str(self.objects[name]['last_modified'])


class Search:
    """What was found so far.

    Attributes:
        names: the name of each file and folder by its real path.
    """

    def __init__(self, sources: list[str], excluded: list[str]):
        if '' in sources:
            raise ValueError('SOURCE is empty; a variable of the shell may not be set')
        self.sources = [source if is_url(source) else os.path.abspath(source) for source in sources]
        self.excluded_folders = {os.path.realpath(path) for path in excluded if not is_url(path)}
        self.excluded_addresses = tuple(f'{url.rstrip("/")}/' for url in excluded if is_url(url))
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
            self.add_files(Folder(folder, os.listdir(folder)), names)

    def add_folder(self, top: str) -> None:
        """All that a folder holds, and those below it."""
        for folder, subfolders, names in os.walk(top, onerror=self.list_unreadable, followlinks=True):
            self.add_files(Folder(folder, names), names)
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

    def add_files(self, folder: Folder | StoredFolder, names: Iterable[str]) -> None:
        """Those files of a folder that are called `names`; their captions are among all that it has."""
        images = defaultdict(list)  # by key
        captions = []
        for name in sorted(names):
            key, suffix = split_name(name)
            path = folder.path_of(name)
            if not folder.is_file(name):
                self.leave_out(path, 'no file: a broken link, a pipe, a socket or a device')
            elif name.startswith('.') and path not in self.sources:
                self.leave_out(path, 'hidden')
            elif suffix.lower() == '.tar':
                self.add(folder, name)
            elif is_beside_tar(name, folder.names):
                continue
            elif (is_image(suffix) or is_caption(suffix)) and not folder.has_images:
                self.leave_out(path, 'no tar: of a store, tars are read; copy the folder here, or pack it')
            elif is_image(suffix):
                images[key].append(name)
            elif is_caption(suffix):
                captions.append(name)
            else:
                self.leave_out(path, f'not an image, a caption or a tar: {why_not_read(suffix)}')
        for name in captions:
            key, _ = split_name(name)
            if key not in images:
                self.leave_out(folder.path_of(name), 'no image')
        if images:
            self.add_images(folder, images)

    def add_images(self, folder: Folder, images: dict[str, list[str]]) -> None:
        """The images of a folder by their key, each with the captions that the folder has for it."""
        captions = defaultdict(list)  # suffixes, by key
        for name in folder.names:
            key, suffix = split_name(name)
            if key in images and is_caption(suffix) and folder.is_file(name):
                captions[key].append(suffix)
        for key, names in images.items():
            if len(names) == 1:
                self.add(folder, names[0], captions_among(captions[key]))
                continue
            for name in names:  # one may be a mask of the other
                self.leave_out(folder.path_of(name), f'more than one image: {", ".join(names)}')

    def add(self, folder: Folder | StoredFolder, name: str, captions: Iterable[str] = ()) -> None:
        """A tar, or an image with the suffixes of its captions, unless it was found by another name."""
        path = folder.path_of(name)
        if not self.is_new(path, folder.real_path_of(name)):
            return
        key, _ = split_name(name)
        size, change = folder.size_and_change(name)
        changed = [change]
        for suffix in captions:
            size_of_caption, change = folder.size_and_change(key + suffix)
            size += size_of_caption
            changed.append(change)
        self.files.append(File(path, size, tuple(captions), tuple(changed)))

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
        reach(source, 'SOURCE')
        try:
            found = [entry for page in obstore.list(store, beginning or None) for entry in page]
            if not found and key and beginning == key:
                found = [obstore.head(store, key)]
        except FileNotFoundError:
            found = []
        except (BaseError, OSError) as error:
            raise DataError(store_error(error, f'SOURCE {source}')) from None
        folders: dict[str, StoredFolder] = {}
        named = defaultdict(list)  # objects by their folders
        for entry in found:
            path, _, name = f'{bucket}/{entry["path"]}'.rpartition('/')
            folder = folders.setdefault(path, StoredFolder(path))
            folder.objects[name] = entry
            if beginning == key or fnmatch.fnmatchcase(entry['path'], key):  # in which * matches /
                named[path].append(name)
        if not named:
            raise ValueError(f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
        for path, names in named.items():
            if f'{path}/'.startswith(self.excluded_addresses):
                continue
            if is_hidden(path.removeprefix(f'{bucket}/{beginning}')):
                for name in names:
                    self.leave_out(f'{path}/{name}', 'hidden')
            else:
                self.add_files(folders[path], names)


def is_beside_tar(name: str, present: Set[str]) -> bool:
    """Whether a file is one of those that img2dataset writes for a tar, which is there."""
    return any(name.endswith(end) and f'{name.removesuffix(end)}.tar' in present for end in BESIDE_TARS)


def is_hidden(name: str) -> bool:
    """Whether a file is hidden, or lies in a hidden folder, as .Trash/a.jpg and ._a.jpg do."""
    return any(part.startswith('.') and part not in ('.', '..') for part in name.split('/'))
