"""What SOURCE names: the tars, Parquet files and images to convert, and what else lies there, with the reason why it is
left out.

One rule splits a name, in tars and in folders: what follows the last dot is the suffix, and what stands before it is
the key. The caption of KEY.jpg is KEY.txt, or else the "caption" of KEY.json; the case of a suffix does not matter.
(WebDataset splits at the first dot: all of IMG_2020.01.02.jpg, IMG_2020.01.03.jpg and so on would be one sample.)
A table of captions goes before both for each image that it names.

Links in folders are followed wherever they lead (part1 -> /disk1): whoever made SOURCE made them. Each real folder is
searched once, so that loops end, and a file that has two names by links is converted once.
"""
import fnmatch
import glob
import hashlib
import itertools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

import obstore
from obstore.exceptions import BaseError

from sdbench.datasets.tables import METADATA, USUAL_COLUMNS, Columns, Row, read_captions
from sdbench.errors import DataError, one_line
from sdbench.inputs.images import formats
from sdbench.inputs.stores import open_store, reach, store_error
from sdbench.paths import is_url

IMAGES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.gif', '.bmp', '.avif', '.tif', '.tiff', '.jp2', '.ppm')
HEIF = ('.heic', '.heif')  # read where pillow-heif is installed
CAPTIONS = ('.txt', '.json')  # the first that is there is taken
BESIDE_TARS = ('.parquet', '_stats.json')  # what img2dataset writes for 00000.tar: 00000.parquet, 00000_stats.json


class File(NamedTuple):
    """A tar, a Parquet file or an image, as it was found.

    Attributes:
        name: a whole path, or an address in a store.
        size: in bytes, with those of the captions beside it.
        captions: of an image, the suffixes of the captions beside it.
        changed: what is another when a file was written again: the nanosecond of its last change, and those of its
            captions; in a store the ETag.
        caption: of an image that a table of captions names, what that says.
        piece: of a Parquet file, the bytes of which this is a piece, from start to end: its row groups begin there.
    """
    name: str
    size: int
    captions: tuple[str, ...] = ()
    changed: tuple[int | str, ...] = ()
    caption: str | None = None
    piece: tuple[int, int] | None = None

    def identity(self) -> list:
        """What the name of its part says of it."""
        return [*self[:4], *(value for value in (self.caption, self.piece) if value is not None)]

    def has_byte(self, offset: int) -> bool:
        """Whether what begins at a byte of the file belongs to this piece of it."""
        return self.piece is None or self.piece[0] <= offset < self.piece[1]


class Entry(NamedTuple):
    """A file as its folder has it."""
    path: str  # or its address
    real_path: str  # without links
    size: int  # in bytes
    change: int | str  # as in File


class Folder(NamedTuple):
    """A folder of this machine, or what a store has below an address."""
    path: str
    names: Set[str]
    find: Callable[[str], Entry | None]  # by its name; None: that is no file


class Found(NamedTuple):
    """What SOURCE names."""
    files: list[File]  # to convert, each once, in the order of their names
    left_out: list[dict]  # lines for skipped.jsonl: {'source': path, 'key': None, 'reason': 'kind: details'}


def find_files(sources: Iterable[str], excluded: Iterable[str] = (), captions: str | None = None,
               columns: Columns = USUAL_COLUMNS) -> Found:
    """The tars, Parquet files and images that `sources` name, and what they name that is none of these.

    A source is a file, a folder (searched to its leaves) or a glob; or in a store an address of a tar or a Parquet
    file, of a folder of them or a glob. What lies in the folders or addresses `excluded`, as that which is being made
    does, is passed over.

    Args:
        sources: as the user gave them.
        excluded: folders or addresses.
        captions: a table of captions, beside those that are found.
        columns: of such tables.

    Raises ValueError if a source names nothing or `captions` is no such table, and DataError if a folder or a store
    cannot be read.
    """
    search = Search(list(sources), list(excluded), columns)
    if captions is not None:
        try:
            search.add_table(captions)
        except OSError as error:
            raise ValueError(f'--captions {captions} cannot be read ({error.strerror})') from None
        except ValueError as error:
            raise ValueError(f'--captions {captions} is no table of captions: {error}') from None
    for source in search.sources:
        if is_url(source):
            search.add_store(source)
        else:
            search.add_paths(source)
    search.list_rows_without_image()
    return Found(sorted(search.files, key=lambda file: file.name.split('/')), search.left_out)


def join_neighbours(files: list[File], part_bytes: int) -> list[list[File]]:
    """Parts of a dataset: each is a file, or several neighbours that are together no larger than `part_bytes`.

    A larger Parquet file is taken in pieces.
    """
    parts = []
    size = 0
    for file in itertools.chain.from_iterable(pieces_of(file, part_bytes) for file in files):
        if parts and size + file.size <= part_bytes and not begins_part(file, part_bytes):
            parts[-1].append(file)
            size += file.size
        else:
            parts.append([file])
            size = file.size
    return parts


def pieces_of(file: File, part_bytes: int) -> list[File]:
    """Pieces of a Parquet file, each no larger than `part_bytes`; any other file as it is."""
    if split_name(file.name)[1].lower() != '.parquet' or file.size <= part_bytes:
        return [file]
    pieces = []
    for start in range(0, file.size, part_bytes):
        end = min(start + part_bytes, file.size)
        pieces.append(file._replace(size=end - start, piece=(start, end)))
    return pieces


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
    """Why a file of this suffix is neither image, caption, tar nor Parquet."""
    if suffix.lower() in HEIF:
        return f'{suffix} needs a package (pip install pillow-heif)'
    return f'{suffix or "a file without a suffix"} is not read'


def local_folder(path: str, names: Iterable[str]) -> Folder:
    """A folder of this machine."""
    real_folder = os.path.realpath(path)

    def find(name: str) -> Entry | None:
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            return None
        real = os.path.join(real_folder, name)
        if os.path.islink(real):
            real = os.path.realpath(real)
        status = os.stat(file)
        return Entry(file, real, status.st_size, status.st_mtime_ns)
    return Folder(path, set(names), find)


class Search:
    """What was found so far.

    Attributes:
        names: the name of each file and folder by its real path.
        tables: the real paths of the tables of captions.
        captions: the row of each image that a table names, by its real path, and the name of the table.
    """

    def __init__(self, sources: list[str], excluded: list[str], columns: Columns):
        self.sources = [source if is_url(source) else os.path.abspath(source) for source in sources]
        self.excluded_folders = {os.path.realpath(path) for path in excluded if not is_url(path)}
        self.excluded_addresses = tuple(f'{url.rstrip("/")}/' for url in excluded if is_url(url))
        self.files: list[File] = []
        self.left_out: list[dict] = []
        self.names: dict[str, str] = {}
        self.columns = columns
        self.tables: set[str] = set()
        self.captions: dict[str, tuple[Row, str]] = {}

    def leave_out(self, name: str, reason: str, key: int | None = None) -> None:
        """List something with a reason, which begins with its kind, before a colon; of a table the row is the key."""
        self.left_out.append({'source': name, 'key': key, 'reason': reason})

    def add_table(self, path: str) -> None:
        """Take the captions of a table. Raises ValueError if it is none, and OSError."""
        real = os.path.realpath(path)
        if real in self.tables:
            return
        self.tables.add(real)
        folder = os.path.realpath(os.path.dirname(path))
        for row in read_captions(path, self.columns):
            image = os.path.realpath(os.path.join(folder, row.image))
            if image in self.captions:
                self.leave_out(path, f'a second caption: of {row.image}', row.number)
            else:
                self.captions[image] = (row, path)

    def add_metadata(self, folder: Folder) -> None:
        """Take the captions of the tables that lie in a folder; one that is none is listed."""
        for name in METADATA:
            if name in folder.names:
                try:
                    self.add_table(os.path.join(folder.path, name))
                except ValueError as error:
                    self.leave_out(os.path.join(folder.path, name), f'no table of captions: {error}')

    def list_rows_without_image(self) -> None:
        """List the rows of tables whose images are not there."""
        for image, (row, table) in self.captions.items():
            if image not in self.names and not os.path.isfile(image):
                self.leave_out(table, f'no image: there is no {row.image}', row.number)

    def add_paths(self, source: str) -> None:
        """A file, a folder or a glob. Raises ValueError if it names nothing."""
        found = [source]
        if not os.path.lexists(source):
            found = sorted(glob.glob(source, recursive=True))
        if not found:
            raise ValueError(f'SOURCE {source} does not exist; give a file, a folder, or a glob that matches some')
        folders = []
        named = defaultdict(set)  # files by their folders
        for path in found:
            if os.path.isdir(path):
                folders.append(path)
            else:
                folder, name = os.path.split(path)
                named[folder].add(name)
        for folder, names in sorted(named.items()):  # before the folders, whose captions may be in a table of these
            self.add_files(local_folder(folder, os.listdir(folder)), names)
        for path in folders:
            if self.is_to_be_searched(path):
                self.add_folder(path)

    def add_folder(self, top: str) -> None:
        """All that a folder holds, and those below it."""
        for folder, subfolders, names in os.walk(top, onerror=self.list_unreadable, followlinks=True):
            self.add_files(local_folder(folder, names), names)
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

    def add_files(self, folder: Folder, names: Iterable[str]) -> None:
        """Those files of a folder that are called `names`; their captions are among all that it has."""
        is_stored = is_url(folder.path)
        if not is_stored:
            self.add_metadata(folder)
        images = defaultdict(list)  # by key
        captions = []
        for name in sorted(names):
            key, suffix = split_name(name)
            path = os.path.join(folder.path, name)
            entry = folder.find(name)
            if entry is None:
                self.leave_out(path, 'no file: a broken link, a pipe, a socket or a device')
            elif name.startswith('.') and path not in self.sources:
                self.leave_out(path, 'hidden')
            elif is_beside_tar(name, folder.names) or entry.real_path in self.tables:
                continue
            elif suffix.lower() in ('.tar', '.parquet'):
                self.add(entry)
            elif (is_image(suffix) or is_caption(suffix)) and is_stored:
                self.leave_out(path, 'no tar: of a store, tars and Parquet are read; copy the folder here, or pack it')
            elif is_image(suffix):
                images[key].append(entry)
            elif is_caption(suffix):
                captions.append(name)
            else:
                self.leave_out(path, f'not an image, a caption, a tar or Parquet: {why_not_read(suffix)}')
        for name in captions:
            key, _ = split_name(name)
            if key not in images:
                self.leave_out(os.path.join(folder.path, name), 'no image')
        if images:
            self.add_images(folder, images)

    def add_images(self, folder: Folder, images: dict[str, list[Entry]]) -> None:
        """The images of a folder by their key, each with its row of a table, or the captions that the folder has."""
        captions = defaultdict(dict)  # by key and suffix
        for name in folder.names:
            key, suffix = split_name(name)
            if key in images and is_caption(suffix) and (entry := folder.find(name)):
                captions[key][suffix] = entry
        for key, entries in images.items():
            for entry in entries:
                if entry.real_path in self.captions:
                    row, _ = self.captions[entry.real_path]
                    self.add(entry, caption=row.caption)
                elif len(entries) == 1:
                    self.add(entry, captions[key])
                else:  # one may be a mask of the other
                    names = [os.path.basename(one.path) for one in entries]
                    self.leave_out(entry.path, f'more than one image: {", ".join(names)}')

    def add(self, entry: Entry, captions: Mapping[str, Entry] = MappingProxyType({}), caption: str | None = None
            ) -> None:
        """A tar, a Parquet file, or an image with its captions by suffix or the one of a table, unless it was found by
        another name."""
        if not self.is_new(entry.path, entry.real_path):
            return
        suffixes = captions_among(captions)
        files = [entry, *(captions[suffix] for suffix in suffixes)]
        size = sum(file.size for file in files)
        self.files.append(File(entry.path, size, tuple(suffixes), tuple(file.change for file in files), caption))

    def add_store(self, source: str) -> None:
        """The tars and Parquet files of an address, from one list of it.

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
        entries = defaultdict(dict)  # by their folders and names
        named = defaultdict(list)  # objects by their folders
        for entry in found:
            address = f'{bucket}/{entry["path"]}'
            path, _, name = address.rpartition('/')
            change = entry['e_tag'] or str(entry['last_modified'])
            entries[path][name] = Entry(address, address, entry['size'], change)
            if beginning == key or fnmatch.fnmatchcase(entry['path'], key):  # in which * matches /
                named[path].append(name)
        if not named:
            raise ValueError(f'SOURCE {source} does not exist; give a file, a folder, or a glob that matches some')
        for path, names in named.items():
            if f'{path}/'.startswith(self.excluded_addresses):
                continue
            if is_hidden(path.removeprefix(f'{bucket}/{beginning}')):
                for name in names:
                    self.leave_out(f'{path}/{name}', 'hidden')
            else:
                self.add_files(Folder(path, entries[path].keys(), entries[path].get), names)


def is_beside_tar(name: str, present: Set[str]) -> bool:
    """Whether a file is one of those that img2dataset writes for a tar, which is there."""
    return any(name.endswith(end) and f'{name.removesuffix(end)}.tar' in present for end in BESIDE_TARS)


def is_hidden(name: str) -> bool:
    """Whether a file is hidden, or lies in a hidden folder, as .Trash/a.jpg and ._a.jpg do."""
    return any(part.startswith('.') and part not in ('.', '..') for part in name.split('/'))
