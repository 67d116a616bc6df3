"""Find the tars, Parquet files and images that SOURCE names, and record everything else as skipped, with the reason.

All tables of captions are read before the first image. An image that a table names gets its captions from the table.
All other images get theirs from files beside them; names.py says which files belong together.

Links are followed wherever they lead (part1 -> /disk1), because the owner of SOURCE made them. A folder is searched
once, by its first name, so loops end. A link to a file counts as a separate file, as a copy would.
"""
import errno
import fnmatch
import glob
import hashlib
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from sdbench.datasets.names import (
    ALL_SPLITS,
    caption_suffixes,
    group_by_split,
    is_caption,
    is_hidden,
    is_image,
    is_shard,
    is_written_by_img2dataset,
    require_one_split,
    split_name,
    why_not_read,
)
from sdbench.datasets.tables import TABLES, USUAL_COLUMNS, CaptionTables, Columns
from sdbench.errors import UserError
from sdbench.files import is_url
from sdbench.inputs.batches import Named
from sdbench.stores import files_below
from sdbench.stores.addresses import parse_address

WILDCARDS = re.compile(r'[*?[]')
UNREADABLE = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP)  # no permission, deleted, or a broken link


class File(NamedTuple):
    """A tar, a Parquet file or an image that is to be converted."""
    name: str  # absolute path, or address in a store
    size: int  # in bytes, including the files with its captions
    captions: tuple[str, ...] = ()  # for an image, suffixes of the files beside it that may contain its caption
    # Changes if the file is written again: the modification times in nanoseconds of the file and its captions, or the
    # ETag in a store
    changed: tuple[int | str, ...] = ()
    table_captions: Named | None = None  # captions that a table has for the image; None if no table names it

    def identity(self) -> list:
        """Return the values that are hashed for the name of its part, so the name changes if the file changes."""
        return [value for value in self if value is not None]


class Folder(NamedTuple):
    """A folder of this machine that contains input files."""
    path: str
    present: set[str]  # names of everything in it
    named: set[str]  # names of the files in it that SOURCE names


class Found(NamedTuple):
    """What `find_files` has found."""
    files: list[File]  # to convert, sorted by name
    skipped: list[dict]  # lines for skipped.jsonl: {'source': path, 'key': None, 'reason': 'kind: details'}
    captions: dict[str, int]  # number of rows that gave a caption, by path of the table


def find_files(sources: Sequence[str], excluded: Iterable[str] = (), captions: str | None = None,
               columns: Columns = USUAL_COLUMNS, split: str | None = None) -> Found:
    """Find the tars, Parquet files and images that `sources` name, and record everything else as skipped.

    A source is a file, a folder (searched with all its subfolders) or a glob. In a store it is a tar, a Parquet file, a
    folder of these, or a glob. Paths in `excluded`, such as OUT, are not searched. `captions` is the path of the table
    of --captions. Without a `split`, which may be ALL_SPLITS, SOURCE must have only one.

    Raises UserError if a source names nothing, a table of captions cannot be read, or the split must be chosen, and
    OSError if a store or a disk cannot be read.
    """
    # List the stores, then the folders of this machine.
    search = Search(sources, excluded)
    found = [file for source in search.sources if is_url(source) for file in search.stored_files(source)]
    folders = search.folders()

    # Read all tables first, because the table for an image may be in any folder. TABLES gives their order in a folder.
    tables = CaptionTables(columns, search.skip)
    if captions is not None:
        tables.add(captions)
    for folder in folders:
        names = [name for name in folder.present if name.lower() in TABLES]
        for name in sorted(names, key=lambda name: (TABLES.index(name.lower()), name)):
            if os.path.isfile(os.path.join(folder.path, name)):
                tables.add(os.path.join(folder.path, name))
    rows = tables.match({tables.path_of(os.path.join(folder.path, name)) for folder in folders for name in folder.named
                         if is_image(split_name(name)[1])})
    if captions is not None and not rows[os.path.abspath(captions)]:
        raise UserError(f'--captions {captions}: none of its rows has a caption for an image of SOURCE; its paths are '
                        'relative to its own folder, so move it or correct its paths')

    # Give each image the captions of a table, or else of the files beside it.
    for folder in folders:
        found += search.files_in(folder, tables)
    files = {file.name: file for file in found}  # SOURCE may name a file twice

    # Never mix the splits of a dataset, unless the user says so.
    groups = group_by_split(files, search.sources)
    if split is None:
        require_one_split(groups, f'SOURCE {" ".join(sources)}', 'give one of them, such as --split train')
    elif split != ALL_SPLITS:
        if groups and split not in groups:
            raise UserError(f'--split {split}: SOURCE holds only files of {" and ".join(groups)}; give another split')
        for name in sorted(files.keys() - groups.get(split, [])):
            search.skip(name, f'other split: it is not of --split {split}')
            del files[name]
    return Found(sorted(files.values(), key=lambda file: file.name.split('/')), search.skipped, rows)


class Search:
    """A search of `sources`, with the list of everything that it skips. It does not search paths in `excluded`."""

    def __init__(self, sources: Iterable[str], excluded: Iterable[str]):
        self.sources = [source if is_url(source) else os.path.abspath(source) for source in sources]
        self.excluded_folders = {os.path.realpath(path) for path in excluded if not is_url(path)}
        self.excluded_addresses = tuple(f'{url.rstrip("/")}/' for url in excluded if is_url(url))
        self.skipped: list[dict] = []  # lines for skipped.jsonl
        self.searched: set[str] = set()  # real paths of the folders that were searched

    def skip(self, name: str, reason: str, key: int | None = None) -> None:
        """Record that a file, a folder or a row of a table is skipped; `key` is the number of the row.

        The reason begins with its kind and a colon, such as 'no caption: details'.
        """
        self.skipped.append({'source': name, 'key': key, 'reason': reason})

    def stored_files(self, source: str) -> Iterator[File]:
        """Yield the tars and Parquet files that a source in a store names.

        Raises UserError if it names nothing, and OSError if the store cannot be read.
        """
        label = f'SOURCE {source}'
        key = parse_address(source, label).key
        bucket = source.rstrip('/').removesuffix(key).rstrip('/')
        print(f'listing {label}', file=sys.stderr, flush=True)  # a store that does not answer takes minutes

        # List the address or, for a glob, the folder before its first wildcard. The key of an object may contain these
        # characters as well, so an exact match has precedence.
        folder = key
        if WILDCARDS.search(key):
            folder = WILDCARDS.split(key)[0].rpartition('/')[0]
        listed = named = files_below(f'{bucket}/{folder}', label)
        if folder != key:
            exact = [file for file in listed if file.key == key or file.key.startswith(f'{key}/')]
            named = exact or [file for file in listed if fnmatch.fnmatchcase(file.key, key)]  # * matches / as well
        if not named:
            raise nothing_there(source)

        # Choose by name, relative to the listed folder. SOURCE may name hidden files, as in the glob .tmp*/0.tar.
        names_hidden = is_hidden(key.removeprefix(folder).lstrip('/'))
        names = {file.key: file.key.removeprefix(folder).lstrip('/') for file in listed}
        present = set(names.values())
        for file in named:
            path = f'{bucket}/{file.key}'
            if file.key.endswith('/') or path.startswith(self.excluded_addresses):
                continue  # an empty object marks a folder
            if {'', '.', '..'} & {*file.key.split('/')}:  # clients would request a normalized key, so another object
                self.skip(path, 'unusable key: it contains //, /./ or /../; copy the object to another key')
            elif not self.should_read(path, names[file.key], present, names_hidden or file.key == key):
                continue
            elif is_shard(split_name(file.key)[1]):
                yield File(path, file.size, changed=(file.changed,))
            else:
                self.skip(path, 'not a tar or Parquet: nothing else is read from a store; copy the folder here, or '
                          'pack it into a tar')

    def folders(self) -> list[Folder]:
        """Return all folders of this machine that contain input files. Skip subfolders that cannot be opened.

        Raises UserError if a source names nothing, and OSError if a disk fails.
        """
        found = {}
        for source in self.sources:
            if is_url(source):
                continue
            paths = [source] if os.path.lexists(source) else sorted(glob.glob(source, recursive=True))
            if not paths:
                raise nothing_there(source)
            for path in paths:
                if not os.path.isdir(path):
                    parent, name = os.path.split(path)
                    if parent not in found:
                        found[parent] = Folder(parent, set(os.listdir(parent)), set())
                    found[parent].named.add(name)
                elif self.should_search(path):
                    for folder, subfolders, names in os.walk(path, onerror=self.skip_unreadable, followlinks=True):
                        found[folder] = Folder(folder, {*names, *subfolders}, set(names))
                        # Let os.walk enter only these.
                        subfolders[:] = [name for name in sorted(subfolders)
                                         if self.should_search(os.path.join(folder, name))]

        # The captions beside an image belong to SOURCE, even if a glob names only the image.
        for folder in found.values():
            images = {split_name(name)[0] for name in folder.named if is_image(split_name(name)[1])}
            folder.named.update(name for name in folder.present
                                if split_name(name)[0] in images and is_caption(split_name(name)[1]))
        return list(found.values())

    def should_search(self, folder: str) -> bool:
        """Return whether to search a folder: only once, and only if SOURCE names it or it is not excluded or hidden."""
        real = os.path.realpath(folder)
        if folder not in self.sources:
            if real in self.excluded_folders:
                return False
            if os.path.basename(folder).startswith('.'):
                self.skip(folder, 'hidden')
                return False
        is_new = real not in self.searched
        self.searched.add(real)
        return is_new

    def should_read(self, path: str, name: str, present: set[str], is_given: bool) -> bool:
        """Return whether to read a file, which SOURCE names if `is_given`. Skip hidden files.

        The files that img2dataset writes about the shards in `present` are ignored without a line.
        """
        if is_given:
            return True
        if is_hidden(name):
            self.skip(path, 'hidden')
            return False
        return not is_written_by_img2dataset(name, present)

    def skip_unreadable(self, error: OSError) -> None:
        """Record a file or folder as skipped. Raise the error if the disk failed, because a later run may read it."""
        if error.errno not in UNREADABLE:
            raise error
        self.skip(error.filename, f'cannot be opened: {error.strerror}')

    def files_in(self, folder: Folder, tables: CaptionTables) -> Iterator[File]:
        """Yield the tars and Parquet files in a folder, and the images with their captions. Skip other files."""
        groups = defaultdict(dict)  # images and captions, by key and suffix
        for name in sorted(folder.named):
            path = os.path.join(folder.path, name)
            key, suffix = split_name(name)
            file = self.file_at(path)
            if file is None or tables.path_of(path) in tables.read:
                continue
            if not self.should_read(path, name, folder.present, path in self.sources):
                continue
            if is_shard(suffix):
                yield file
            elif is_image(suffix) or is_caption(suffix):
                groups[key][suffix] = file
            else:
                self.skip(path, f'not an image, a caption, a tar or Parquet: {why_not_read(suffix)}')

        for group in groups.values():
            captions = caption_suffixes(group)
            images = [file for suffix, file in group.items() if is_image(suffix)]
            if not images:
                for suffix in captions:
                    self.skip(group[suffix].name, 'no image')
            for image in images:
                table_captions = tables.captions_of(image.name)
                if table_captions is not None:
                    if any(table_captions.values()):  # otherwise `match` has recorded the reason for each row
                        yield image._replace(table_captions=table_captions)
                elif len(images) > 1:  # one may be a mask of the other
                    names = ', '.join(os.path.basename(file.name) for file in images)
                    self.skip(image.name, f'more than one image: {names}')
                else:
                    files = [image, *(group[suffix] for suffix in captions)]
                    yield File(image.name, sum(file.size for file in files), tuple(captions),
                               tuple(file.changed[0] for file in files))

    def file_at(self, path: str) -> File | None:
        """Return the file at a path. Skip a file that cannot be read, and return None for it."""
        try:
            status = os.stat(path)
        except OSError as error:
            self.skip_unreadable(error)
            return None
        if not stat.S_ISREG(status.st_mode):
            self.skip(path, 'not a regular file: a pipe, a socket or a device')
        elif not os.access(path, os.R_OK):
            self.skip(path, 'cannot be opened: Permission denied')
        else:
            return File(path, status.st_size, changed=(status.st_mtime_ns,))
        return None


def nothing_there(source: str) -> UserError:
    return UserError(f'SOURCE {source} does not exist; give a file, a folder, or a glob that matches files')


def group_into_parts(files: list[File], part_bytes: int) -> list[list[File]]:
    """Divide files into parts: each has one file, or several adjacent files of at most `part_bytes` in total."""
    parts = []
    size = 0
    for file in files:
        # A hash of its name makes a file begin a part, with the probability size / part_bytes, so about once in
        # `part_bytes`. If a file is added or removed, only the parts up to the next such file change.
        name = os.path.basename(file.name).encode(errors='surrogateescape')
        name_hash = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
        begins_part = name_hash * part_bytes < file.size * 2 ** 64
        if parts and size + file.size <= part_bytes and not begins_part:
            parts[-1].append(file)
            size += file.size
        else:
            parts.append([file])
            size = file.size
    return parts
