"""What SOURCE names: the tars, Parquet files and images to convert, and what else lies there, with the reason why it is
left out.

One rule splits a name, in tars and in folders: what follows the last dot is the suffix, and what stands before it is
the key. The caption of KEY.jpg is KEY.txt, or else the "caption" of KEY.json; the case of a suffix does not matter.
(WebDataset splits at the first dot: all of IMG_2020.01.02.jpg, IMG_2020.01.03.jpg and so on would be one sample.)
A table of captions goes before both for each image that it names: all tables are read before the first image.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

import obstore
from obstore.exceptions import BaseError

from sdbench.datasets.tables import (
    METADATA,
    USUAL_COLUMNS,
    Columns,
    NoSuchColumn,
    Row,
    Table,
    read_table,
    read_table_of_paths,
)
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
    present: Set[str]  # the names of all that it holds
    named: list[str]  # those of them that SOURCE names
    find: Callable[[str], Entry | None]  # by its name; None: that is no file

    @property
    def is_stored(self) -> bool:
        """Whether it is in a store."""
        return is_url(self.path)


class Found(NamedTuple):
    """What SOURCE names."""
    files: list[File]  # to convert, each once, in the order of their names
    left_out: list[dict]  # lines for skipped.jsonl: {'source': path, 'key': None, 'reason': 'kind: details'}
    tables: list[tuple[Table, int]]  # of captions, and how many of the files have theirs from each


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

    Raises ValueError if a source names nothing or a table of captions cannot be read, and DataError if a folder or a
    store cannot be read.
    """
    left_out = []
    # list: the folders, and what of them SOURCE names
    listing = Listing(list(sources), list(excluded), left_out)
    folders = [folder for source in listing.sources for folder in listing.folders(source)]

    # read all tables of captions, that of the flag first: an image has the caption of the first that names it
    tables = Captions(columns, left_out)
    if captions is not None:
        tables.add_named(captions)
    for folder in folders:
        tables.add_found(folder)

    # sort: what is converted, and what is left out
    files = Sorting(listing.sources, tables, left_out)
    for folder in folders:
        files.add_folder(folder)
    files.add_images_of_rows()
    return Found(sorted(files.found, key=lambda file: file.name.split('/')), left_out, files.counted_tables())


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
    if not is_parquet(file.name) or file.size <= part_bytes:
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


def local_folder(path: str, present: Iterable[str], named: Iterable[str]) -> Folder:
    """A folder of this machine."""
    real_folder = os.path.realpath(path)

    def find(name: str) -> Entry | None:
        return local_entry(os.path.join(path, name), os.path.join(real_folder, name))
    return Folder(path, set(present), sorted(named), find)


def local_entry(path: str, real: str) -> Entry | None:
    """A file of this machine, of which `real` is the path without links in its folders; None: that is no file."""
    if not os.path.isfile(path):
        return None
    if os.path.islink(real):
        real = os.path.realpath(real)
    status = os.stat(path)
    return Entry(path, real, status.st_size, status.st_mtime_ns)


class LeftOut:
    """What a phase of the search finds and leaves out.

    Args:
        left_out: to which the lines of all phases are added.
    """

    def __init__(self, left_out: list[dict]):
        self.left_out = left_out
        self.names: dict[str, str] = {}  # the name of each folder or file that was found, by its real path

    def leave_out(self, name: str, reason: str, key: int | None = None) -> None:
        """List something with a reason, which begins with its kind, before a colon; of a table the row is the key."""
        self.left_out.append({'source': name, 'key': key, 'reason': reason})

    def is_new(self, path: str, real: str) -> bool:
        """Return whether a folder or file was not found before; list it if that was by another name."""
        if real not in self.names:
            self.names[real] = path
            return True
        if self.names[real] != path:
            self.leave_out(path, f'a second name: of {self.names[real]}')
        return False


class Listing(LeftOut):
    """The first phase: each folder that SOURCE names, once."""

    def __init__(self, sources: list[str], excluded: list[str], left_out: list[dict]):
        super().__init__(left_out)
        self.sources = [source if is_url(source) else os.path.abspath(source) for source in sources]
        self.excluded_folders = {os.path.realpath(path) for path in excluded if not is_url(path)}
        self.excluded_addresses = tuple(f'{url.rstrip("/")}/' for url in excluded if is_url(url))

    def folders(self, source: str) -> Iterator[Folder]:
        """Yield the folders of a source. Raises ValueError if it names nothing, and DataError if it cannot be read."""
        if is_url(source):
            yield from self.stored_folders(source)
            return
        found = [source]
        if not os.path.lexists(source):
            found = sorted(glob.glob(source, recursive=True))
        if not found:
            raise ValueError(f'SOURCE {source} does not exist; give a file, a folder, or a glob that matches some')
        tops = []
        named = defaultdict(set)  # files by their folders
        for path in found:
            if os.path.isdir(path):
                tops.append(path)
            else:
                folder, name = os.path.split(path)
                named[folder].add(name)
        for folder, names in sorted(named.items()):
            yield local_folder(folder, os.listdir(folder), names)
        for path in tops:
            yield from self.folders_below(path)

    def folders_below(self, top: str) -> Iterator[Folder]:
        """Yield a folder and those below it."""
        if not self.is_to_be_searched(top):
            return
        for folder, subfolders, names in os.walk(top, onerror=self.list_unreadable, followlinks=True):
            yield local_folder(folder, names, names)
            paths = [os.path.join(folder, name) for name in sorted(subfolders)]
            subfolders[:] = [os.path.basename(path) for path in paths if self.is_to_be_searched(path)]

    def is_to_be_searched(self, folder: str) -> bool:
        """Return whether a folder is new, and nobody's but the user's; list it if it is another name, or hidden."""
        real = os.path.realpath(folder)
        if folder not in self.sources:
            if real in self.excluded_folders:
                return False
            if os.path.basename(folder).startswith('.'):
                self.leave_out(folder, 'hidden')
                return False
        return self.is_new(folder, real)

    def list_unreadable(self, error: OSError) -> None:
        """List a folder that may not be opened. Raises DataError if it cannot be read for a reason of the moment."""
        if not isinstance(error, PermissionError):
            raise DataError(f'SOURCE {error.filename} cannot be read ({one_line(error)})') from None
        self.leave_out(error.filename, 'cannot be opened: Permission denied')

    def stored_folders(self, source: str) -> Iterator[Folder]:
        """Yield the folders of an address, from one list of it."""
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
                yield Folder(path, entries[path].keys(), sorted(names), entries[path].get)


class Captions(LeftOut):
    """The second phase: the tables of captions, and what they say of images.

    Attributes:
        tables: in the order in which they were read.
        read: the real paths of these, and of those that are tables of something else.
        rows: of each image that a table names, by its real path, with that table.
    """

    def __init__(self, columns: Columns, left_out: list[dict]):
        super().__init__(left_out)
        self.columns = columns
        self.tables: list[Table] = []
        self.read: set[str] = set()
        self.rows: dict[str, tuple[Row, Table]] = {}

    def add_named(self, path: str) -> None:
        """Take the table that --captions names. Raises ValueError if it is none."""
        try:
            self.add(read_table(path, self.columns, is_named=True))
        except OSError as error:
            raise ValueError(f'--captions {path} cannot be read ({error.strerror})') from None
        except NoSuchColumn as error:
            raise ValueError(f'--captions {path} is no table of captions: {error}') from None

    def add_found(self, folder: Folder) -> None:
        """Take the tables that lie in a folder of this machine; list those of something else."""
        if folder.is_stored:
            return
        tables = [name for name in METADATA if name in folder.present]
        tables += [name for name in folder.named if is_parquet(name) and not is_beside_tar(name, folder.present)]
        for name in tables:
            path = os.path.join(folder.path, name)
            real = os.path.realpath(path)
            if real in self.read or not os.path.isfile(path):
                continue
            if is_parquet(name):
                table = read_table_of_paths(path, self.columns)
                if table is not None:
                    self.add(table)
                continue
            try:
                self.add(read_table(path, self.columns))
            except NoSuchColumn as error:
                self.read.add(real)
                self.leave_out(path, f'no table of captions: {error}')

    def add(self, table: Table) -> None:
        """Take the captions of a table, and list its rows that say nothing new of an image."""
        self.tables.append(table)
        self.read.add(os.path.realpath(table.path))
        for number, reason in table.unread.items():
            self.leave_out(table.path, reason, number)
        folder = os.path.realpath(os.path.dirname(table.path))
        for row in table.rows:
            image = os.path.realpath(os.path.join(folder, row.image))
            if image in self.rows:
                self.leave_out(table.path, f'a second caption: of {row.image}', row.number)
            else:
                self.rows[image] = (row, table)


class Sorting(LeftOut):
    """The third phase: which files are converted, and with which captions.

    Attributes:
        found: what is converted.
        captioned: the images among them whose captions are in a table, by their real paths.
    """

    def __init__(self, sources: list[str], captions: Captions, left_out: list[dict]):
        super().__init__(left_out)
        self.sources = sources
        self.captions = captions
        self.found: list[File] = []
        self.captioned: set[str] = set()

    def add_folder(self, folder: Folder) -> None:
        """Sort the files of a folder that SOURCE names; their captions are among all that it holds."""
        images = defaultdict(list)  # by key
        captions = []
        for name in folder.named:
            key, suffix = split_name(name)
            path = os.path.join(folder.path, name)
            entry = folder.find(name)
            if entry is None:
                self.leave_out(path, 'no file: a broken link, a pipe, a socket or a device')
            elif name.startswith('.') and path not in self.sources:
                self.leave_out(path, 'hidden')
            elif is_beside_tar(name, folder.present) or entry.real_path in self.captions.read:
                continue
            elif suffix.lower() == '.tar' or is_parquet(name):
                self.add(entry)
            elif (is_image(suffix) or is_caption(suffix)) and folder.is_stored:
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
        """Take the images of a folder by their key, each with its row of a table, or the captions beside it."""
        captions = defaultdict(dict)  # by key and suffix
        for name in folder.present:
            key, suffix = split_name(name)
            if key in images and is_caption(suffix) and (entry := folder.find(name)):
                captions[key][suffix] = entry
        for key, entries in images.items():
            for entry in entries:
                if entry.real_path in self.captions.rows:
                    self.add_captioned(entry)
                elif len(entries) == 1:
                    self.add(entry, captions[key])
                else:  # one may be a mask of the other
                    names = [os.path.basename(one.path) for one in entries]
                    self.leave_out(entry.path, f'more than one image: {", ".join(names)}')

    def add_captioned(self, entry: Entry) -> None:
        """Take an image with its caption of a table."""
        row, _ = self.captions.rows[entry.real_path]
        self.captioned.add(entry.real_path)
        self.add(entry, caption=row.caption)

    def add(self, entry: Entry, captions: Mapping[str, Entry] = MappingProxyType({}), caption: str | None = None
            ) -> None:
        """Take a file, unless it was found before.

        Args:
            entry: a tar, a Parquet file or an image.
            captions: of an image, the files beside it by their suffix.
            caption: of an image, what a table says.
        """
        if not self.is_new(entry.path, entry.real_path):
            return
        suffixes = captions_among(captions)
        files = [entry, *(captions[suffix] for suffix in suffixes)]
        size = sum(file.size for file in files)
        self.found.append(File(entry.path, size, tuple(suffixes), tuple(file.change for file in files), caption))

    def add_images_of_rows(self) -> None:
        """Take the images that only a Parquet file names; list the rows of tables whose images are not there."""
        for image, (row, table) in self.captions.rows.items():
            if image in self.captioned:
                continue
            path = os.path.join(os.path.dirname(table.path), row.image)
            entry = local_entry(path, image)
            if entry is None:
                self.leave_out(table.path, why_not_there(row.image), row.number)
            elif is_parquet(table.path):
                reason = why_not_of_row(row.image)
                if reason is None:
                    self.add_captioned(entry)
                else:
                    self.leave_out(table.path, reason, row.number)
            # else SOURCE does not name it, or it is listed by its own name

    def counted_tables(self) -> list[tuple[Table, int]]:
        """Return the tables of captions, each with the number of images that have theirs from it."""
        numbers = Counter(self.captions.rows[image][1].path for image in self.captioned)
        return [(table, numbers[table.path]) for table in self.captions.tables]


def why_not_there(image: str) -> str:
    """Why there is no image of the path that a row has."""
    if '://' in image:
        return f'no image but an address (img2dataset makes tars of these): {image}'
    return f'no image at the path of a row: there is no {image}'


def why_not_of_row(image: str) -> str | None:
    """Why an image that only a row of Parquet names is not read; None: it is."""
    if os.path.isabs(image) or '..' in image.split('/'):  # a stranger can have written it
        return f'no image in the folder of its row: {image} leads out of it'
    _, suffix = split_name(image)
    if not is_image(suffix):
        return f'no image at the path of a row: of {image}, {why_not_read(suffix)}'
    return None


def is_parquet(name: str) -> bool:
    """Whether a file is Parquet, by its name."""
    return split_name(name)[1].lower() == '.parquet'


def is_beside_tar(name: str, present: Set[str]) -> bool:
    """Whether a file is one of those that img2dataset writes for a tar, which is there."""
    return any(name.endswith(end) and f'{name.removesuffix(end)}.tar' in present for end in BESIDE_TARS)


def is_hidden(name: str) -> bool:
    """Whether a file is hidden, or lies in a hidden folder, as .Trash/a.jpg and ._a.jpg do."""
    return any(part.startswith('.') and part not in ('.', '..') for part in name.split('/'))
