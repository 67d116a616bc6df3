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
import itertools
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from sdbench.datasets.names import (
    caption_suffixes,
    is_caption,
    is_hidden,
    is_image,
    is_shard,
    is_written_by_img2dataset,
    split_name,
    why_not_read,
)
from sdbench.datasets.splits import ALL_SPLITS, group_by_split, require_one_split
from sdbench.datasets.tables import TABLES, USUAL_COLUMNS, CaptionTables, Columns, SkipReason, Table
from sdbench.errors import DataError, UserError, one_line
from sdbench.inputs.captions import Named
from sdbench.paths import is_url
from sdbench.stores import files_below
from sdbench.stores.addresses import parse_address

WILDCARDS = re.compile(r'[*?[]')


class File(NamedTuple):
    """A tar, a Parquet file or an image that is to be converted.

    Attributes:
        name: absolute path, or address in a store.
        size: in bytes, including the files with its captions.
        captions: for an image, names of the files in its folder that may contain its caption.
        changed: changes if the file is written again: the modification times in nanoseconds of the file and its
            captions, or the ETag in a store.
        table_captions: captions that a table has for the image, by name; None if no table names it.
    """
    name: str
    size: int
    captions: tuple[str, ...] = ()
    changed: tuple[int | str, ...] = ()
    table_captions: Named | None = None

    def identity(self) -> list:
        """Return the values that are hashed for the name of its part, so the name changes if the file changes."""
        suffixes = [split_name(name)[1] for name in self.captions]
        table_captions = [] if self.table_captions is None else [self.table_captions]
        return [self.name, self.size, suffixes, self.changed, *table_captions]

    def with_captions(self, files: Iterable['File']) -> 'File':
        """Return this image with the files beside it that may contain its caption."""
        return self._replace(size=self.size + sum(file.size for file in files),
                             captions=tuple(os.path.basename(file.name) for file in files),
                             changed=self.changed + sum((file.changed for file in files), ()))


class Folder(NamedTuple):
    """A folder of this machine that contains input files."""
    path: str
    real_path: str  # without links
    present: Set[str]  # names of everything in it
    named: list[str]  # names of the files in it that SOURCE names


class Found(NamedTuple):
    """What `find_files` has found."""
    files: list[File]  # to convert, sorted by name
    skipped: list[dict]  # lines for skipped.jsonl: {'source': path, 'key': None, 'reason': 'kind: details'}
    captions: dict[Table, int]  # number of rows in each table that gave a caption


def find_files(sources: Sequence[str], excluded: Iterable[str] = (), captions: str | None = None,
               columns: Columns = USUAL_COLUMNS, split: str | None = None) -> Found:
    """Find the tars, Parquet files and images that `sources` name, and record everything else as skipped.

    A source is a file, a folder (searched with all its subfolders) or a glob. In a store it is a tar, a Parquet file, a
    folder of these, or a glob.

    Args:
        sources: as the user gave them.
        excluded: folders or addresses that are not searched, such as the output of the conversion.
        captions: path of the table that --captions names.
        columns: columns of images and captions in tables.
        split: the split to convert, or ALL_SPLITS. None: SOURCE must have only one.

    Raises UserError if a source names nothing, a table of captions cannot be read, or the split must be chosen,
    DataError if a disk fails, and OSError if a store, or the folder of a named file, cannot be listed.
    """
    # List the stores, then the folders of this machine.
    search = Search(sources, excluded)
    converted = {}  # by name, because SOURCE may name a file twice
    for source in search.sources:
        if is_url(source):
            converted |= {file.name: file for file in search.stored_files(source)}
    folders = search.folders()

    # Read all tables first, because the table for an image may be in any folder. TABLES gives their order in a folder.
    tables = CaptionTables(columns, search.skip)
    if captions is not None:
        tables.add(captions, is_named=True)
    for folder in folders:
        found = [name for name in folder.present if name.lower() in TABLES
                 and os.path.isfile(os.path.join(folder.path, name))]
        for name in sorted(found, key=lambda name: (TABLES.index(name.lower()), name)):
            tables.add(os.path.join(folder.path, name))

    # Give each image the captions of a table, or else of the files beside it. Sort by folder, then by name.
    classified = [(folder, search.classify(folder, tables)) for folder in folders]
    images = {os.path.join(folder.real_path, name) for folder, files in classified for name in files
              if is_image(split_name(name)[1])}
    rows = tables.match(images)
    for folder, files in classified:
        converted |= {file.name: file for file in search.with_captions(folder, files, tables)}

    # Never mix the splits of a dataset, unless the user says so.
    groups = group_by_split(converted, search.sources)
    if split is None:
        require_one_split(groups, f'SOURCE {" ".join(sources)}', 'give one of them, such as --split train')
    elif split != ALL_SPLITS:
        if groups and split not in groups:
            raise UserError(f'--split {split}: SOURCE holds only files of {" and ".join(groups)}; give another split')
        for name in sorted(converted.keys() - groups.get(split, {}).keys()):
            search.skip(name, f'other split: it is not of --split {split}')
            del converted[name]
    return Found(sorted(converted.values(), key=lambda file: file.name.split('/')), search.skipped, rows)


class Search:
    """A search of SOURCE, with the list of everything that it skips.

    Args:
        sources: as the user gave them.
        excluded: folders or addresses that are not searched.
    """

    def __init__(self, sources: Iterable[str], excluded: Iterable[str]):
        self.sources = [source if is_url(source) else os.path.abspath(source) for source in sources]
        self.excluded_folders = {os.path.realpath(path) for path in excluded if not is_url(path)}
        self.excluded_addresses = tuple(f'{url.rstrip("/")}/' for url in excluded if is_url(url))
        self.skipped: list[dict] = []  # lines for skipped.jsonl
        self.searched: dict[str, str] = {}  # the path under which a folder was first searched, by its real path

    def skip(self, name: str, reason: str, key: int | None = None) -> None:
        """Record that a file, a folder or a row of a table is skipped.

        Args:
            name: path or address.
            reason: begins with its kind and a colon, such as 'no caption: details'.
            key: number of the row in a table.
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
        exact = [file for file in listed if file.key == key or file.key.startswith(f'{key}/')]
        if exact:
            folder = key
            listed = named = exact
        elif folder != key:
            named = [file for file in listed if fnmatch.fnmatchcase(file.key, key)]  # * matches / as well
        if not named:
            raise nothing_there(source)
        names_hidden = is_hidden(key.removeprefix(folder).lstrip('/'))  # for example the glob .tmp*/0.tar

        # Choose by name, as `classify` does for files of this machine. Names are relative to the listed folder.
        names = {file.key: file.key.removeprefix(folder).lstrip('/') or os.path.basename(folder) for file in listed}
        present = set(names.values())
        for file in named:
            name = names[file.key]
            path = f'{bucket}/{file.key}'
            suffix = split_name(name)[1]
            if file.key.endswith('/') or path.startswith(self.excluded_addresses):
                continue  # an empty object marks a folder
            if {'', '.', '..'} & {*file.key.split('/')}:  # clients would request a normalized key, so another object
                self.skip(path, 'unusable key: it contains //, /./ or /../; copy the object to another key')
            elif is_hidden(name) and path not in self.sources and not names_hidden:
                self.skip(path, 'hidden')
            elif is_written_by_img2dataset(name, present):
                continue
            elif is_shard(suffix):
                yield File(path, file.size, changed=(file.changed,))
            elif is_image(suffix) or is_caption(suffix):
                self.skip(path, 'not a tar or Parquet: nothing else is read from a store; copy the folder here, or '
                          'pack it into a tar')
            else:
                self.skip(path, f'not an image, a caption, a tar or Parquet: {why_not_read(suffix)}')

    def folders(self) -> list[Folder]:
        """Return all folders of this machine that contain input files. Skip subfolders that cannot be opened.

        Raises UserError if a source names nothing, DataError if a disk fails, and OSError if the folder of a named file
        cannot be listed.
        """
        # Group by folder the files that SOURCE names, directly or by a glob.
        found = []
        tops = []
        for source in self.sources:
            if is_url(source):
                continue
            paths = [source] if os.path.lexists(source) else sorted(glob.glob(source, recursive=True))
            if not paths:
                raise nothing_there(source)
            tops += filter(os.path.isdir, paths)
            files = [path for path in paths if not os.path.isdir(path)]
            for folder, paths_there in itertools.groupby(sorted(files, key=os.path.split), os.path.dirname):
                names = [os.path.basename(path) for path in paths_there]
                found.append(Folder(path=folder, real_path=os.path.realpath(folder), present=set(os.listdir(folder)),
                                    named=names))

        # Search the folders that SOURCE names, with all their subfolders.
        for top in filter(self.should_search, tops):
            for folder, subfolders, names in os.walk(top, onerror=self.skip_unreadable, followlinks=True):
                found.append(Folder(path=folder, real_path=os.path.realpath(folder), present={*names, *subfolders},
                                    named=sorted(names)))
                paths = [os.path.join(folder, name) for name in sorted(subfolders)]
                subfolders[:] = map(os.path.basename, filter(self.should_search, paths))  # os.walk enters only these
        return found

    def should_search(self, folder: str) -> bool:
        """Return whether to search a folder: only once, and only if SOURCE names it or it is not excluded or hidden."""
        real = os.path.realpath(folder)
        if folder not in self.sources:
            if real in self.excluded_folders:
                return False
            if os.path.basename(folder).startswith('.'):
                self.skip(folder, 'hidden')
                return False
        if real not in self.searched:
            self.searched[real] = folder
            return True
        if self.searched[real] != folder:  # the same path again is a repeated source, which needs no line
            self.skip(folder, f'folder already searched: as {self.searched[real]}')
        return False

    def skip_unreadable(self, error: OSError) -> None:
        """Record a folder as skipped that os.walk cannot open. Raises DataError if the disk fails."""
        self.skip(error.filename, why_unreadable(error, error.filename))

    def classify(self, folder: Folder, tables: CaptionTables) -> dict[str, File]:
        """Return, by name, the input files in a folder: tars, Parquet files, images and caption files. Skip the rest.

        Tables of captions, and the files that img2dataset writes about its shards, are ignored without a line.
        """
        files = {}
        for name in folder.named:
            path = os.path.join(folder.path, name)
            suffix = split_name(name)[1]
            file = file_at(path)
            if isinstance(file, SkipReason):
                self.skip(path, file)
            elif is_hidden(name) and path not in self.sources:
                self.skip(path, 'hidden')
            elif (is_written_by_img2dataset(name, folder.present)
                  or os.path.join(folder.real_path, name) in tables.read):
                continue
            elif is_shard(suffix) or is_image(suffix) or is_caption(suffix):
                files[name] = file
            else:
                self.skip(path, f'not an image, a caption, a tar or Parquet: {why_not_read(suffix)}')
        return files

    def with_captions(self, folder: Folder, files: dict[str, File], tables: CaptionTables) -> Iterator[File]:
        """Yield the tars and Parquet files in `files`, and the images with their captions. Skip other captions."""
        # Group the images and captions in the folder by key. SOURCE may name only some of them.
        names = defaultdict(dict)  # by key and suffix
        for name in folder.present:
            key, suffix = split_name(name)
            if is_image(suffix) or is_caption(suffix):
                names[key][suffix] = name

        # Find the captions whose image SOURCE names. An image that cannot be opened counts, because it was reported.
        with_image = set()
        for name in folder.named:
            key, suffix = split_name(name)
            if is_image(suffix):
                with_image.update(names[key].values())

        for name, file in files.items():
            key, suffix = split_name(name)
            if is_shard(suffix):
                yield file
            elif is_caption(suffix):
                if name not in with_image:
                    self.skip(file.name, 'no image')
            elif (table_captions := tables.captions_of(os.path.join(folder.real_path, name))) is not None:
                if any(table_captions.values()):  # otherwise `match` has recorded the reason for each row
                    yield file._replace(table_captions=table_captions)
            else:
                images = sorted(other for other in names[key].values()
                                if other in files and is_image(split_name(other)[1]))
                if len(images) > 1:  # one may be a mask of the other
                    self.skip(file.name, f'more than one image: {", ".join(images)}')
                    continue
                beside = [file_at(os.path.join(folder.path, names[key][suffix]))
                          for suffix in caption_suffixes(names[key])]
                yield file.with_captions([caption for caption in beside if isinstance(caption, File)])


def file_at(path: str) -> File | SkipReason:
    """Return the file at a path, or why it cannot be read. Raises DataError if the disk fails."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return SkipReason('not a regular file: a pipe, a socket or a device')
        if not os.access(path, os.R_OK):
            return SkipReason('cannot be opened: Permission denied')
    except OSError as error:
        return why_unreadable(error, path)
    return File(path, status.st_size, changed=(status.st_mtime_ns,))


def why_unreadable(error: OSError, path: str) -> SkipReason:
    """Return why a file or folder is skipped. Raises DataError if the disk fails, because a later run may read it."""
    if isinstance(error, PermissionError):
        return SkipReason('cannot be opened: Permission denied')
    if error.errno in (errno.ENOENT, errno.ELOOP):
        return SkipReason('missing file: deleted, or a broken link')
    raise DataError(f'SOURCE {path} cannot be read ({one_line(error)})') from None


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
