"""Find what SOURCE names: the tars, Parquet files and images to convert, and what is left out, with a reason.

One rule splits a name, in tars and in folders: what follows the last dot is the suffix, and what stands before it is
the key. The caption of KEY.jpg is KEY.txt or KEY.caption, or else the "caption" of KEY.json; the case of a suffix does
not matter.
(WebDataset splits at the first dot: all of IMG_2020.01.02.jpg, IMG_2020.01.03.jpg and so on would be one sample.)
A table of captions goes before both for each image that it names: all tables are read before the first image.

Links in folders are followed wherever they lead (part1 -> /disk1): whoever made SOURCE made them. Each real folder is
searched once, so that loops end, and a file that has two names by links is converted once: by a name that has captions
beside it, or else by one that is no link.
"""
import fnmatch
import glob
import hashlib
import itertools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

from sdbench.datasets.stores import objects_below, open_store, reach
from sdbench.datasets.tables import TABLE_SUFFIXES, TABLES, USUAL_COLUMNS, Captions, Columns, names_by_form
from sdbench.errors import DataError, one_line
from sdbench.inputs.images import formats
from sdbench.paths import is_url

IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.gif', '.bmp', '.avif', '.tif', '.tiff', '.jp2',
                  '.ppm')
HEIF_SUFFIXES = ('.heic', '.heif')  # read where pillow-heif is installed
CAPTION_SUFFIXES = ('.txt', '.caption', '.json')  # the first that is there, and not empty, is taken


class File(NamedTuple):
    """A tar, a Parquet file or an image, as it was found.

    Attributes:
        name: an absolute path, or an address in a store.
        size: in bytes, with that of its captions.
        captions: names of the files beside an image that may hold its caption.
        changed: tells that a file was written again: the time of its last change in nanoseconds, and those of its
            captions; in a store the ETag.
        caption: of an image, from a table of captions.
        piece: for a piece of a Parquet file, the bytes from start to end in which its row groups begin.
    """
    name: str
    size: int
    captions: tuple[str, ...] = ()
    changed: tuple[int | str, ...] = ()
    caption: str | None = None
    piece: tuple[int, int] | None = None

    def identity(self) -> list:
        """Return what tells this file from others, for the name of its part."""
        suffixes = [split_name(name)[1] for name in self.captions]
        return [self.name, self.size, suffixes, self.changed,
                *(value for value in (self.caption, self.piece) if value is not None)]

    def with_captions(self, files: list['File']) -> 'File':
        """Return this image with the files that may hold its caption."""
        names = tuple(os.path.basename(file.name) for file in files)
        changed = tuple(change for file in (self, *files) for change in file.changed)
        return self._replace(size=self.size + sum(file.size for file in files), captions=names, changed=changed)


class Folder(NamedTuple):
    """A folder of this machine, or all that a source in a store names."""
    path: str
    real_path: str  # without links
    present: Set[str]  # names of all that is in it
    named: list[str]  # those of them that SOURCE names
    stored: dict[str, File] | None = None  # in a store, by name, which has the names of the folders below in it

    def file(self, name: str) -> File | None:
        """Return the file of a name, alone; None if it is not a file."""
        if self.stored is not None:
            return self.stored[name]
        path = os.path.join(self.path, name)
        if not os.path.isfile(path):
            return None
        status = os.stat(path)
        return File(path, status.st_size, changed=(status.st_mtime_ns,))

    def real_path_of(self, name: str) -> str:
        """Return the path of a file without links, or its address in a store."""
        if self.stored is not None:
            return self.stored[name].name
        path = os.path.join(self.real_path, name)
        return os.path.realpath(path) if os.path.islink(path) else path


class Found(NamedTuple):
    """What SOURCE names."""
    files: list[File]  # to convert, in the order of their names
    left_out: list[dict]  # lines for skipped.jsonl: {'source': path, 'key': None, 'reason': 'kind: details'}
    captions: dict[tuple[str, str], int]  # how many are of each table and column


def find_files(sources: Iterable[str], excluded: Iterable[str] = (), captions: str | None = None,
               columns: Columns = USUAL_COLUMNS) -> Found:
    """Find the tars, Parquet files and images that `sources` name, and list what else they name.

    A source is a file, a folder (searched to its leaves) or a glob; in a store it is the address of a tar or a Parquet
    file, of a folder of them, or a glob.

    Args:
        sources: as the user gave them.
        excluded: folders or addresses that are passed over, such as that of the dataset that is made.
        captions: a table of captions, which is read before those in the folders of the sources.
        columns: of tables of captions.

    Raises ValueError if a source names nothing or a table of captions cannot be read, and DataError if a folder or a
    store cannot be read.
    """
    # list the folders, and what of them and of stores SOURCE names
    search = Search(sources, excluded)
    folders = []
    for source in search.sources:
        if is_url(source):
            folders.append(search.stored_files(source))
        else:
            folders += search.folders(source)

    # read all tables of captions
    tables = Captions(columns, search.leave_out)
    if captions is not None:
        tables.add(captions, is_named=True)
    for folder in folders:
        if folder.stored is None:
            found = [name for name in folder.present if name.lower() in TABLES and folder.file(name)]
            for name in sorted(found, key=lambda name: (TABLES.index(name.lower()), name)):
                tables.add(os.path.join(folder.path, name))

    # sort what is converted from what is left out; of the names of a file, the first in this order counts
    files = []
    found = [each for folder in folders for each in search.files(folder, tables)]
    found.sort(key=lambda each: (not any(file.captions for file in each[2]), os.path.islink(each[0])))
    for path, real_path, of_path in found:
        if search.is_new(path, real_path):
            files += of_path
    numbers = tables.finish()
    return Found(sorted(files, key=lambda file: file.name.split('/')), search.left_out, numbers)


class Search:
    """The search of SOURCE: each folder and each file once, by the first of its names.

    Args:
        sources: as the user gave them.
        excluded: folders or addresses that are passed over.

    Attributes:
        left_out: lines for skipped.jsonl.
        names: the first name of each folder and file, by its real path.
    """

    def __init__(self, sources: Iterable[str], excluded: Iterable[str]):
        self.sources = [source if is_url(source) else os.path.abspath(source) for source in sources]
        self.excluded_folders = {os.path.realpath(path) for path in excluded if not is_url(path)}
        self.excluded_addresses = tuple(f'{url.rstrip("/")}/' for url in excluded if is_url(url))
        self.left_out: list[dict] = []
        self.names: dict[str, str] = {}

    def leave_out(self, name: str, reason: str, key: int | None = None) -> None:
        """List a file or folder with a reason, whose kind stands before a colon; the key is the row of a table."""
        self.left_out.append({'source': name, 'key': key, 'reason': reason})

    def is_new(self, path: str, real: str) -> bool:
        """Tell whether a folder or file was not found before. List it if it was found by another name."""
        if real not in self.names:
            self.names[real] = path
            return True
        if self.names[real] != path:
            self.leave_out(path, f'a second name: of {self.names[real]}')
        return False

    def folders(self, source: str) -> Iterator[Folder]:
        """Yield the folders of a source. Raises ValueError if it names nothing, and DataError if it cannot be read."""
        found = [source]
        if not os.path.lexists(source):
            found = sorted(glob.glob(source, recursive=True))
        if not found:
            raise nothing_there(source)
        files = [path for path in found if not os.path.isdir(path)]
        for folder, paths in itertools.groupby(sorted(files, key=os.path.split), os.path.dirname):
            names = [os.path.basename(path) for path in paths]
            yield Folder(folder, os.path.realpath(folder), set(os.listdir(folder)), names)
        for path in found:
            if os.path.isdir(path):
                yield from self.folders_below(path)

    def folders_below(self, top: str) -> Iterator[Folder]:
        """Yield a folder and those below it."""
        if not self.is_to_be_searched(top):
            return
        for folder, subfolders, names in os.walk(top, onerror=self.list_unreadable, followlinks=True):
            yield Folder(folder, os.path.realpath(folder), {*names, *subfolders}, sorted(names))
            subfolders.sort()
            subfolders[:] = [name for name in subfolders if self.is_to_be_searched(os.path.join(folder, name))]

    def is_to_be_searched(self, folder: str) -> bool:
        """Tell whether a folder is searched: not what is made, nothing hidden, and each real folder once."""
        real = os.path.realpath(folder)
        if folder not in self.sources:
            if real in self.excluded_folders:
                return False
            if os.path.basename(folder).startswith('.'):
                self.leave_out(folder, 'hidden')
                return False
        return self.is_new(folder, real)

    def list_unreadable(self, error: OSError) -> None:
        """List a folder that may not be opened. Raises DataError if a disk cannot be read at the moment."""
        if not isinstance(error, PermissionError):
            raise DataError(f'SOURCE {error.filename} cannot be read ({one_line(error)})') from None
        self.leave_out(error.filename, 'cannot be opened: Permission denied')

    def stored_files(self, source: str) -> Folder:
        """Return what a source in a store names.

        Raises ValueError if it names nothing, and DataError if the store cannot be read.
        """
        _, key = open_store(source, 'SOURCE')  # which says what is no address
        bucket = source.rstrip('/').removesuffix(key).rstrip('/')
        print(f'listing SOURCE {source}', file=sys.stderr, flush=True)  # a store that does not answer takes minutes
        reach(source, 'SOURCE')

        # list what has that name, or else of a glob all below what stands before its first sign
        top = key
        objects = objects_below(source, 'SOURCE')
        is_glob = not objects and re.search(r'[*?[]', key)
        if is_glob:
            top = re.split(r'[*?[]', key)[0].rpartition('/')[0]
            objects = objects_below(f'{bucket}/{top}', 'SOURCE')

        # what is named, and what no client opens by its key
        stored = {}
        named = []
        odd = []
        for found in objects:
            name = found.key.removeprefix(top).lstrip('/') or os.path.basename(top)
            is_named = not is_glob or fnmatch.fnmatchcase(found.key, key)  # in which * matches /
            if found.key.endswith('/'):
                continue  # stands for a folder
            if {'', '.', '..'} & {*found.key.split('/')}:
                odd += [found.key] if is_named else []
                continue
            stored[name] = File(f'{bucket}/{found.key}', found.size, changed=(found.changed,))
            if is_named:
                named.append(name)
        if not named and not odd:
            raise nothing_there(source)
        for key in odd:
            self.leave_out(f'{bucket}/{key}', 'no path: a key with //, /./ or /../; copy it to another')
        named = [name for name in sorted(named) if not stored[name].name.startswith(self.excluded_addresses)]
        return Folder(bucket, bucket, stored.keys(), named, stored)

    def files(self, folder: Folder, tables: Captions) -> Iterator[tuple[str, str, list[File]]]:
        """Yield each tar, Parquet file and image of a folder that SOURCE names, and list what else it names there.

        Each is its path, without links as well, and a File; for an image one for each of its captions of a table.
        """
        # sort the files by what they are
        images = defaultdict(list)  # by key
        captions = []
        for name in folder.named:
            key, suffix = split_name(name)
            file = folder.file(name)
            path = file.name if file else os.path.join(folder.path, name)
            real_path = folder.real_path_of(name)
            if file is None:
                self.leave_out(path, 'no file: a broken link, a pipe, a socket or a device')
            elif is_hidden(name) and path not in self.sources:
                self.leave_out(path, 'hidden')
            elif is_of_img2dataset(name, folder.present) or real_path in tables.read:
                continue
            elif suffix.lower() == '.tar' or is_parquet(name):
                yield path, real_path, [file]
            elif folder.stored and (is_image(suffix) or is_caption(suffix)):
                self.leave_out(path, 'no tar: of a store, tars and Parquet are read; copy the folder here, or pack it')
            elif is_image(suffix):
                images[key].append((file, real_path))
            elif is_caption(suffix):
                captions.append(name)
            else:
                self.leave_out(path, f'not an image, a caption, a tar or Parquet: {why_not_read(suffix)}')

        # pair images and captions, which may be any files of the folder, also where SOURCE names the image alone
        named = defaultdict(dict)  # by key and suffix
        for name in folder.present:
            key, suffix = split_name(name)
            if is_image(suffix) or is_caption(suffix):
                named[key][suffix] = name
        join_keys_alike(named)
        paired = {name for key in images for name in named[key].values()}
        for name in captions:
            if name not in paired:
                self.leave_out(os.path.join(folder.path, name), 'no image')

        # each image with its captions of a table, or else in files
        for key, of_key in images.items():
            names = [named[key][suffix] for suffix in captions_among(named[key])]
            beside = [file for file in map(folder.file, names) if file is not None]
            for image, real_path in of_key:
                of_table = tables.take(real_path)
                if of_table is not None:
                    yield image.name, real_path, [image._replace(caption=caption) for caption in of_table]
                elif len(of_key) > 1:  # one may be a mask of the other
                    names = [os.path.basename(file.name) for file, _ in of_key]
                    self.leave_out(image.name, f'more than one image: {", ".join(names)}')
                else:
                    yield image.name, real_path, [image.with_captions(beside)]


def nothing_there(source: str) -> ValueError:
    return ValueError(f'SOURCE {source} does not exist; give a file, a folder, or a glob that matches some')


def join_neighbours(files: list[File], part_bytes: int) -> list[list[File]]:
    """Return the files of each part: one file, or several neighbours that are together no larger than `part_bytes`."""
    # a larger Parquet file is taken in pieces, but for those of a store, which would be copied for each
    pieces = []
    for file in files:
        if not is_parquet(file.name) or is_url(file.name) or file.size <= part_bytes:
            pieces.append(file)
            continue
        for start in range(0, file.size, part_bytes):
            end = min(start + part_bytes, file.size)
            pieces.append(file._replace(size=end - start, piece=(start, end)))

    # neighbours are joined
    parts = []
    size = 0
    for file in pieces:
        # One in about `part_bytes` of files begins a part whatever comes before it, by its name. So where a file is
        # new, or gone, the parts behind the next such file stay as they were.
        draw = hashlib.blake2b(os.path.basename(file.name).encode(errors='surrogateescape'), digest_size=8).digest()
        begins_part = int.from_bytes(draw) * part_bytes < file.size * 2 ** 64
        if parts and size + file.size <= part_bytes and not begins_part:
            parts[-1].append(file)
            size += file.size
        else:
            parts.append([file])
            size = file.size
    return parts


def split_name(name: str) -> tuple[str, str]:
    """Return the key and the suffix of a file's name, the suffix with its dot; '' if there is none."""
    key, dot, suffix = name.rpartition('.')
    if not key or key.endswith('/') or '/' in suffix:
        return name, ''
    return key, dot + suffix


def is_image(suffix: str) -> bool:
    """Tell whether a file of this suffix, in any case, is read as an image."""
    return suffix.lower() in IMAGE_SUFFIXES or (suffix.lower() in HEIF_SUFFIXES and 'HEIF' in formats())


def is_caption(suffix: str) -> bool:
    """Tell whether a file of this suffix, in any case, may hold a caption."""
    return suffix.lower() in CAPTION_SUFFIXES


def join_keys_alike(files: dict[str, dict[str, Any]]) -> None:
    """Join the files of two keys of one form where one has an image alone, and the other captions alone.

    So IMG_1.txt has the caption of img_1.JPG where no other file of these names is there.

    Args:
        files: of a folder or a tar, by key and suffix.
    """
    for keys in names_by_form(files).values():
        with_image = [key for key in keys if any(map(is_image, files[key]))]
        if len(keys) == 2 and len(with_image) == 1:
            [image] = with_image
            [other] = {*keys} - {image}
            if not any(map(is_caption, files[image])):
                files[image].update(files.pop(other))


def captions_among(suffixes: Iterable[str]) -> list[str]:
    """Return the suffixes of captions, the one that is taken first."""
    return sorted(filter(is_caption, suffixes), key=lambda suffix: (CAPTION_SUFFIXES.index(suffix.lower()), suffix))


def why_not_read(suffix: str) -> str:
    """Say why a file of this suffix is neither image, caption, tar nor Parquet."""
    if suffix.lower() in HEIF_SUFFIXES:
        return f'{suffix} needs a package (pip install pillow-heif)'
    if suffix.lower() in TABLE_SUFFIXES:
        return f'{suffix} of this name is read where --captions names it'
    return f'{suffix or "a file without a suffix"} is not read'


def is_parquet(name: str) -> bool:
    """Tell whether a file is Parquet, by its name."""
    return split_name(name)[1].lower() == '.parquet'


def is_of_img2dataset(name: str, present: Set[str]) -> bool:
    """Tell whether img2dataset writes a file of this name about a shard that is present.

    Beside 00000.tar, or the folder 00000 of its layout `files`, it writes 00000.parquet and 00000_stats.json.
    """
    shard = name.removesuffix('.parquet').removesuffix('_stats.json')
    if shard == name:
        return False
    return f'{shard}.tar' in present or {shard, f'{shard}_stats.json'} <= present


def is_hidden(name: str) -> bool:
    """Tell whether a file is hidden, or lies in a hidden folder, as .Trash/a.jpg and ._a.jpg do."""
    return any(part.startswith('.') and part not in ('.', '..') for part in name.split('/'))
