"""Find what SOURCE names: the tars, Parquet files and images to convert, and what is left out, with a reason.

One rule splits a name, in tars and in folders: what follows the last dot is the suffix, and what stands before it is
the key. The caption of KEY.jpg is KEY.txt or KEY.caption, or else the "caption" of KEY.json; the case of a suffix does
not matter.
(WebDataset splits at the first dot: all of IMG_2020.01.02.jpg, IMG_2020.01.03.jpg and so on would be one sample.)
A table of captions goes before both for each image that it names: all tables are read before the first image.

Links in folders are followed wherever they lead (part1 -> /disk1): whoever made SOURCE made them. A folder is searched
once, by its first name, so that loops end. A link to a file counts as a file of its own, as a copy would.

The search lists the folders, classifies the names in each, gives images the rows of tables, and pairs the others with
the captions beside them.
"""
import errno
import fnmatch
import glob
import hashlib
import itertools
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

from sdbench.datasets.tables import (
    CAPTION_SUFFIXES,
    TABLE_SUFFIXES,
    TABLES,
    USUAL_COLUMNS,
    Captions,
    Columns,
    Unread,
    left_over_pairs,
)
from sdbench.errors import DataError, UserError, one_line
from sdbench.inputs.captions import Named
from sdbench.inputs.images import formats
from sdbench.paths import is_url
from sdbench.stores import files_below, parse_address

IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.gif', '.bmp', '.avif', '.tif', '.tiff', '.jp2',
                  '.ppm')
HEIF_SUFFIXES = ('.heic', '.heif')  # read where pillow-heif is installed


class File(NamedTuple):
    """A tar, a Parquet file or an image, as it was found.

    Attributes:
        name: an absolute path, or an address in a store.
        size: in bytes, with that of its captions.
        captions: of an image, the names in its folder of the files that may hold its caption.
        changed: tells that a file was written again: the time of its last change in nanoseconds, and those of its
            captions; in a store the ETag.
        of_table: captions of an image from a table, by name.
    """
    name: str
    size: int
    captions: tuple[str, ...] = ()
    changed: tuple[int | str, ...] = ()
    of_table: Named | None = None

    def identity(self) -> list:
        """Return what tells this file from others, for the name of its part."""
        suffixes = [split_name(name)[1] for name in self.captions]
        of_table = [] if self.of_table is None else [self.of_table]
        return [self.name, self.size, suffixes, self.changed, *of_table]

    def with_captions(self, files: Iterable['File']) -> 'File':
        """Return this image with the files beside it that may hold its caption."""
        return self._replace(size=self.size + sum(file.size for file in files),
                             captions=tuple(os.path.basename(file.name) for file in files),
                             changed=self.changed + sum((file.changed for file in files), ()))


class Folder(NamedTuple):
    """A folder of this machine, or all that a source in a store names."""
    path: str
    real_path: str  # without links
    present: Set[str]  # names of all that is in it
    named: list[str]  # those of them that SOURCE names
    stored: dict[str, File] | None = None  # in a store, by name, which has the names of the folders below in it

    def file(self, name: str) -> File | Unread:
        """Return the file of a name in this folder, without captions, or why it cannot be read.

        Raises DataError if a disk cannot be read at the moment.
        """
        if self.stored is not None:
            return self.stored[name]
        path = os.path.join(self.path, name)
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return Unread('no file: a pipe, a socket or a device')
            if not os.access(path, os.R_OK):
                return Unread('cannot be opened: Permission denied')
        except OSError as error:
            return why_unreadable(error, path)
        return File(path, status.st_size, changed=(status.st_mtime_ns,))


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

    Raises UserError if a source names nothing or a table of captions cannot be read, DataError if a folder cannot be
    read, and OSError if a store cannot.
    """
    # list the folders, and what of them and of stores SOURCE names
    search = Search(sources, excluded)
    folders = search.folders()

    # read all tables of captions
    tables = Captions(columns, search.leave_out)
    if captions is not None:
        tables.add(captions, is_named=True)
    for folder in folders:
        if folder.stored is None:
            found = [name for name in folder.present if name.lower() in TABLES
                     and os.path.isfile(os.path.join(folder.path, name))]
            for name in sorted(found, key=lambda name: (TABLES.index(name.lower()), name)):
                tables.add(os.path.join(folder.path, name))

    # sort what is converted from what is left out
    classified = [(folder, search.classified(folder, tables)) for folder in folders]
    images = {os.path.join(folder.real_path, name) for folder, files in classified for name in files
              if is_image(split_name(name)[1])}
    numbers = tables.match(images)
    converted = {}  # by name: a source may be given twice
    for folder, files in classified:
        converted |= {file.name: file for file in search.paired(folder, files, tables)}
    return Found(sorted(converted.values(), key=lambda file: file.name.split('/')), search.left_out, numbers)


class Search:
    """The search of SOURCE: it lists folders, classifies their names, and pairs images with captions.

    Args:
        sources: as the user gave them.
        excluded: folders or addresses that are passed over.

    Attributes:
        left_out: lines for skipped.jsonl.
        searched: the first name of each folder, by its real path.
    """

    def __init__(self, sources: Iterable[str], excluded: Iterable[str]):
        self.sources = [source if is_url(source) else os.path.abspath(source) for source in sources]
        self.excluded_folders = {os.path.realpath(path) for path in excluded if not is_url(path)}
        self.excluded_addresses = tuple(f'{url.rstrip("/")}/' for url in excluded if is_url(url))
        self.left_out: list[dict] = []
        self.searched: dict[str, str] = {}

    def leave_out(self, name: str, reason: str, key: int | None = None) -> None:
        """List a file or folder with a reason, whose kind stands before a colon; the key is the row of a table."""
        self.left_out.append({'source': name, 'key': key, 'reason': reason})

    def folders(self) -> list[Folder]:
        """Return all folders of the sources: those that are no links, and what these lead to behind them.

        Raises UserError if a source names nothing, DataError if a folder cannot be read, and OSError if a store
        cannot be.
        """
        # stores, files by the folder that they are in, and folders
        found = []
        tops = []
        for source in self.sources:
            if is_url(source):
                found.append(self.stored_files(source))
                continue
            paths = [source] if os.path.lexists(source) else sorted(glob.glob(source, recursive=True))
            if not paths:
                raise nothing_there(source)
            tops += filter(os.path.isdir, paths)
            files = [path for path in paths if not os.path.isdir(path)]
            for folder, of_folder in itertools.groupby(sorted(files, key=os.path.split), os.path.dirname):
                names = [os.path.basename(path) for path in of_folder]
                found.append(Folder(folder, os.path.realpath(folder), set(os.listdir(folder)), names))

        # folders are searched to their leaves
        for top in filter(self.is_to_be_searched, tops):
            for folder, subfolders, names in os.walk(top, onerror=self.list_unreadable, followlinks=True):
                found.append(Folder(folder, os.path.realpath(folder), {*names, *subfolders}, sorted(names)))
                paths = [os.path.join(folder, name) for name in sorted(subfolders)]
                subfolders[:] = map(os.path.basename, filter(self.is_to_be_searched, paths))
        return found

    def is_to_be_searched(self, folder: str) -> bool:
        """Tell whether a folder is searched: not what is made, nothing hidden, and each real folder once."""
        real = os.path.realpath(folder)
        if folder not in self.sources:
            if real in self.excluded_folders:
                return False
            if os.path.basename(folder).startswith('.'):
                self.leave_out(folder, 'hidden')
                return False
        if real not in self.searched:
            self.searched[real] = folder
            return True
        if self.searched[real] != folder:  # a source may be given twice
            self.leave_out(folder, f'a second name: of {self.searched[real]}')
        return False

    def list_unreadable(self, error: OSError) -> None:
        """List a folder that may not be opened. Raises DataError if a disk cannot be read at the moment."""
        self.leave_out(error.filename, why_unreadable(error, error.filename))

    def stored_files(self, source: str) -> Folder:
        """Return what a source in a store names.

        Raises UserError if it names nothing, and OSError if the store cannot be read.
        """
        key = parse_address(source, f'SOURCE {source}').key
        bucket = source.rstrip('/').removesuffix(key).rstrip('/')
        print(f'listing SOURCE {source}', file=sys.stderr, flush=True)  # a store that does not answer takes minutes

        # list what has that name, or else of a glob all below what stands before its first sign
        top = key
        objects = files_below(source, f'SOURCE {source}')
        is_glob = not objects and re.search(r'[*?[]', key)
        if is_glob:
            top = re.split(r'[*?[]', key)[0].rpartition('/')[0]
            objects = files_below(f'{bucket}/{top}', f'SOURCE {source}')

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

    def classified(self, folder: Folder, tables: Captions) -> dict[str, File]:
        """Return by name the tars, Parquet files, images and captions that SOURCE names in a folder; list all else.

        Tables that were read, and what img2dataset writes about its shards, are neither.
        """
        files = {}
        for name in folder.named:
            file = folder.file(name)
            suffix = split_name(name)[1]
            path = folder.stored[name].name if folder.stored else os.path.join(folder.path, name)
            if isinstance(file, Unread):
                self.leave_out(path, file)
            elif is_hidden(name) and path not in self.sources:
                self.leave_out(path, 'hidden')
            elif is_of_img2dataset(name, folder.present) or os.path.join(folder.real_path, name) in tables.read:
                continue
            elif suffix.lower() in ('.tar', '.parquet'):
                files[name] = file
            elif not is_image(suffix) and not is_caption(suffix):
                self.leave_out(path, f'not an image, a caption, a tar or Parquet: {why_not_read(suffix)}')
            elif folder.stored:
                self.leave_out(path, 'no tar: of a store, tars and Parquet are read; copy the folder here, or pack it')
            else:
                files[name] = file
        return files

    def paired(self, folder: Folder, files: dict[str, File], tables: Captions) -> Iterator[File]:
        """Yield what is converted of a folder, images with their captions, and list what has no partner there."""
        # the names that belong together, which SOURCE may name in part
        names = defaultdict(dict)  # of images and captions, by key and suffix
        for name in folder.present:
            key, suffix = split_name(name)
            if is_image(suffix) or is_caption(suffix):
                names[key][suffix] = name
        join_keys_alike(names)

        with_image = set()  # names that an image has beside it, also one that cannot be opened
        for name in folder.named:
            key, suffix = split_name(name)
            if is_image(suffix):
                with_image.update(names[key].values())

        for name, file in files.items():
            key, suffix = split_name(name)
            if is_caption(suffix):
                if name not in with_image:
                    self.leave_out(file.name, 'no image')
            elif not is_image(suffix):
                yield file
            elif (of_table := tables.take(os.path.join(folder.real_path, name))) is not None:
                if any(of_table.values()):  # else each of its rows is listed
                    yield file._replace(of_table=of_table)
            else:
                images = sorted(other for other in names[key].values()
                                if other in files and is_image(split_name(other)[1]))
                if len(images) > 1:  # one may be a mask of the other
                    self.leave_out(file.name, f'more than one image: {", ".join(images)}')
                    continue
                beside = [folder.file(names[key][suffix]) for suffix in captions_among(names[key])]
                yield file.with_captions([caption for caption in beside if isinstance(caption, File)])


def why_unreadable(error: OSError, path: str) -> Unread:
    """Say why a file or folder is left out. Raises DataError if a disk cannot be read at the moment."""
    if isinstance(error, PermissionError):
        return Unread('cannot be opened: Permission denied')
    if error.errno in (errno.ENOENT, errno.ELOOP):
        return Unread('no file: it is gone, or a broken link')
    raise DataError(f'SOURCE {path} cannot be read ({one_line(error)})') from None


def nothing_there(source: str) -> UserError:
    return UserError(f'SOURCE {source} does not exist; give a file, a folder, or a glob that matches some')


def join_neighbours(files: list[File], part_bytes: int) -> list[list[File]]:
    """Return the files of each part: one file, or several neighbours that are together no larger than `part_bytes`."""
    parts = []
    size = 0
    for file in files:
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
    """Join the files of two keys that differ in their form, where one image and one name of captions are left over.

    So IMG_1.txt has the caption of img_1.JPG where no other file of these names is without a partner.

    Args:
        files: of a folder or a tar, by key and suffix.
    """
    with_image = {key for key, of_key in files.items() if any(map(is_image, of_key))}
    with_caption = {key for key, of_key in files.items() if any(map(is_caption, of_key))}
    for image, caption in left_over_pairs(with_image - with_caption, with_caption - with_image):
        files[image].update(files.pop(caption))


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
