"""What SOURCE names: the tars and images to convert, and what else lies there, with the reason why it is left out.

A link in a folder is followed wherever it leads, for tars, images, captions and subfolders alike (part1 -> /disk1):
whoever made SOURCE made it. Each real folder is searched once, so that loops end, and a link to a folder that SOURCE
itself lies in is not followed. A file that has two names, by links of either kind, is converted once; an image with
another caption beside its second name is another sample.
"""
import errno
import fnmatch
import glob
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from inputs.errors import DataError, one_line
from inputs.places import CLAIM, OUR_PROGRAMS, is_address, program_of, program_that_made
from inputs.stores import answer_of, open_store, store_error
from parts.names import ARCHIVES, CAPTIONS, File, is_hidden, is_image, split_name, why_not_read

COMPANIONS = ('_stats.json', '.parquet', 'Thumbs.db', 'desktop.ini')  # of tars by img2dataset, of images by Windows
COUNTED = ('hidden', 'a companion of other files')  # kinds that are not listed one by one
OF_OURS = 'made by a command of this program'  # a folder inside SOURCE, with shards or pictures
LISTED_OF_A_KIND = 10_000  # files that are left out for one kind of reason; the others are counted


class Found(NamedTuple):
    """What SOURCE names."""
    files: list[File]  # to convert, each once, in the order of their names
    left_out: list[dict]  # lines for skipped.jsonl: {'source': path, 'key': None, 'reason': 'kind: details'}
    counts: Counter  # of all that is left out, by kind of reason


class LeftOut:
    """The list of what is left out, which stays short however much there is."""

    def __init__(self):
        self.lines: list[dict] = []
        self.counts: Counter = Counter()

    def add(self, source: str, kind: str, details: str = '') -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= LISTED_OF_A_KIND:
            reason = f'{kind}: {details}' if details else kind
            self.lines.append({'source': source, 'key': None, 'reason': reason})

    def count(self, kind: str) -> None:
        """One of those that only their number is listed of."""
        self.counts[kind] += 1

    def all_lines(self, sources: list[str]) -> list[dict]:
        """The list, and a line for each kind of which not all are in it."""
        listed = Counter(line['reason'].partition(':')[0] for line in self.lines)
        rest = []
        for kind, count in self.counts.items():
            if count > listed[kind]:
                reason = f'{kind}: {count - listed[kind]:,} {"more" if listed[kind] else "files or folders"}'
                rest.append({'source': ' '.join(sources), 'key': None, 'reason': reason})
        return self.lines + rest


def find_files(sources: Iterable[str], excluded: Iterable[str] = ()) -> Found:
    """The tars and images that `sources` name, and what they name that is neither.

    A source is a file, a folder (searched to its leaves) or a glob; or in a store an address of a tar, of a folder of
    tars or a glob. What lies in the folders or addresses `excluded`, as that which is being made does, is passed over.
    A folder inside a source that convert.py, encode.py or evaluate.py has made is a line in the list.

    Raises ValueError if a source names nothing or cannot be reached, and DataError if a folder cannot be read for a
    reason of the moment.
    """
    sources = list(sources)
    search = Search(sources, list(excluded))
    for source in sources:
        if is_address(source):
            search.add_store(source)
        else:
            search.add_paths(source)
    search.follow_links()
    files = sorted(search.files, key=lambda file: Path(file.name))
    return Found(files, search.left_out.all_lines(sources), search.left_out.counts)


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


class Search:
    """What was found so far.

    Attributes:
        names: the name of each file by what it really is: a real path, or an inode.
        walked: the name of each folder by its real path.
        linked_folders, linked_files: links, which are followed last, so that a file keeps its plain name.
    """

    def __init__(self, sources: list[str], excluded: list[str]):
        self.files: list[File] = []
        self.left_out = LeftOut()
        self.names: dict[str | tuple, str] = {}
        self.walked: dict[str, str] = {}
        self.linked_folders: list[str] = []
        self.linked_files: list[tuple[File, list[str | tuple]]] = []  # with their identities
        self.excluded_folders = {os.path.realpath(place) for place in excluded if not is_address(place)}
        self.excluded_addresses = tuple(f'{place.rstrip("/")}/' for place in excluded if is_address(place))
        self.roots = [os.path.realpath(source) for source in sources if os.path.isdir(source)]

    def add_paths(self, source: str) -> None:
        """A file, a folder or a glob. Raises ValueError if it names nothing, or cannot be opened."""
        found = [source]
        if not os.path.lexists(source):
            found = sorted(glob.glob(source, recursive=True))
        if not found:
            raise ValueError(f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
        if os.path.isdir(source):
            try:
                os.scandir(source).close()
            except PermissionError:
                raise ValueError(f'SOURCE {source} cannot be opened (Permission denied); change its rights') from None
        names_by_folder = defaultdict(set)
        for path in map(Path, found):
            if path.is_dir():
                self.walk(str(path))
            else:
                names_by_folder[str(path.parent)].add(path.name)
        for folder, names in sorted(names_by_folder.items()):
            self.look_into(folder, names)

    def follow_links(self) -> None:
        """Search the folders that links lead to, and add the files."""
        while self.linked_folders:
            folder = self.linked_folders.pop()
            real = os.path.realpath(folder)
            if any(f'{root}/'.startswith(f'{real.rstrip("/")}/') for root in self.roots):
                self.left_out.add(folder, 'a link to a folder that SOURCE lies in', real)
            else:
                self.walk(folder)
        for file, identities in sorted(self.linked_files, key=lambda linked: linked[0]):
            self.add(file, identities)

    def walk(self, top: str) -> None:
        """Search a folder and those below it, each real folder once."""
        folders = [top]
        while folders:
            folder = folders.pop()
            real = os.path.realpath(folder)
            if real in self.excluded_folders:
                continue
            if real not in self.walked:
                self.walked[real] = folder
                folders += self.look_into(folder)
            elif self.walked[real] != folder:
                self.left_out.add(folder, 'a second name of a folder', self.walked[real])

    def look_into(self, folder: str, names: set[str] | None = None) -> list[str]:
        """Add what a folder holds, or of that only the files called `names`; returns its subfolders."""
        entries = self.entries_of(folder)
        real_folder = os.path.realpath(folder)
        if names is None and real_folder not in self.roots and any(entry.name == CLAIM for entry in entries):
            program = program_that_made(folder)
            if program:
                self.left_out.add(folder, OF_OURS, program)
                return []
        subfolders = []
        images = defaultdict(list)  # by key
        captions = defaultdict(list)
        for entry in entries:
            kind, details = kind_of(entry, is_named=names is not None)
            key, _ = split_name(entry.name)
            path = str(Path(folder, entry.name))
            if kind == 'caption':
                captions[key].append(entry)
            elif names is not None and entry.name not in names:
                continue
            elif kind == 'image':
                images[key].append(entry)
            elif kind == 'tar':
                self.add_entry(entry, [], path, real_folder)
            elif kind == 'folder':
                (self.linked_folders if entry.is_symlink() else subfolders).append(path)
            elif kind in COUNTED:
                self.left_out.count(kind)
            else:
                self.left_out.add(path, kind, details)
        self.pair(images, captions, folder, real_folder)
        self.list_lonely(images, captions, folder, names)
        return subfolders

    def entries_of(self, folder: str) -> list[os.DirEntry]:
        """What lies in a folder, by name; nothing, and a line in the list, if it may not be opened."""
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except PermissionError:
            self.left_out.add(folder, 'cannot be opened', 'Permission denied')
        except OSError as error:
            raise DataError(f'SOURCE {folder} cannot be read ({one_line(error)})') from None
        return []

    def pair(self, images: dict, captions: dict, folder: str, real_folder: str) -> None:
        """Add each image with the captions of its key; two of a kind for one key are no sample."""
        for key, entries in images.items():
            beside = captions.get(key, [])
            suffixes = [split_name(entry.name)[1] for entry in beside]
            for several, kind in ((len(entries) > 1, 'more than one image'),
                                  (len(suffixes) > len(set(suffixes)), 'more than one caption')):
                if several:
                    names = ', '.join(entry.name for entry in (entries if kind.endswith('image') else beside))
                    for entry in (*entries, *beside):
                        self.left_out.add(str(Path(folder, entry.name)), kind, names)
                    break
            else:
                self.add_entry(entries[0], beside, str(Path(folder, entries[0].name)), real_folder)

    def list_lonely(self, images: dict, captions: dict, folder: str, names: set[str] | None) -> None:
        """List the captions that have no image, and say where one differs in case alone."""
        images_in_any_case = {key.lower(): entries[0].name for key, entries in images.items()}
        for key in sorted(captions.keys() - images.keys()):
            other = images_in_any_case.get(key.lower())
            details = f'{other} is spelled in another case' if other else ''
            for entry in captions[key]:
                if names is None or entry.name in names:
                    self.left_out.add(str(Path(folder, entry.name)), 'no image', details)

    def add_entry(self, entry: os.DirEntry, captions: list[os.DirEntry], path: str, real_folder: str) -> None:
        """Add a tar, or an image with its captions; now if it is plain, and last if it is a link."""
        key, _ = split_name(entry.name)
        file = File(path, entry.stat().st_size, tuple(caption.name[len(key):] for caption in captions))
        real = os.path.join(real_folder, entry.name)
        identities = [path if path == real else real]  # one string in memory, where it is the same
        is_link = entry.is_symlink() or any(caption.is_symlink() for caption in captions)
        if is_link:
            identities = [identity_of_links(path, [str(Path(path).parent / caption.name) for caption in captions])]
        if entry.stat().st_nlink > 1:
            identities.append(tuple((found.stat().st_dev, found.stat().st_ino) for found in (entry, *captions)))
        if is_link:
            self.linked_files.append((file, identities))
        else:
            self.add(file, identities)

    def add(self, file: File, identities: list[str | tuple]) -> None:
        """Add a file, unless it was found by another name."""
        for identity in identities:
            if identity in self.names:
                if self.names[identity] != file.name:
                    self.left_out.add(file.name, 'a second name of a file', self.names[identity])
                return
        self.files.append(file)
        self.names.update(dict.fromkeys(identities, file.name))

    def add_store(self, source: str) -> None:
        """The tars of an address, from one list of it.

        Raises ValueError if there are none, or they cannot be listed.
        """
        store, key = open_store(source, 'SOURCE')
        root = source.rstrip('/').removesuffix(key)  # of the bucket or container
        beginning = re.split(r'[*?[]', key)[0]
        is_glob = beginning != key
        if is_glob:
            beginning = beginning.rpartition('/')[0]
        try:
            listing = f'listing SOURCE {source}'
            found = answer_of(partial(sizes_of_objects, store, beginning), listing)
            if not found and not is_glob and key:
                found = [(key, answer_of(partial(obstore.head, store, key), listing)['size'])]
        except FileNotFoundError:
            found = []
        except (BaseError, OSError, ValueError) as error:
            raise ValueError(f'SOURCE {store_error(error, source)}') from None
        if is_glob:
            found = [(path, size) for path, size in found if fnmatch.fnmatchcase(path, key)]  # * matches a / as well
        if not found:
            raise ValueError(f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
        found = [(path, size) for path, size in found if not (root + path).startswith(self.excluded_addresses)]
        ours = self.folders_of_ours(store, root, [path for path, _ in found if path.rpartition('/')[2] == CLAIM])
        for path, size in found:
            if path.startswith(ours):
                continue
            self.add_object(root + path, path.removeprefix(beginning) or path, size)

    def folders_of_ours(self, store, root: str, claims: list[str]) -> tuple[str, ...]:
        """The beginnings of the keys of what our commands have made in a store, each a line in the list.

        Args:
            store: client of the bucket or container.
            root: its address.
            claims: keys of files that are called as claims are.

        Raises ValueError if one cannot be read.
        """
        ours = []
        for key in claims:
            try:
                content = answer_of(lambda key=key: obstore.get(store, key).bytes(), f'reading SOURCE {root}{key}')
                program = program_of(content.to_bytes())
            except (BaseError, OSError) as error:
                raise ValueError(f'SOURCE {store_error(error, root + key)}') from None
            if program in OUR_PROGRAMS:
                folder = key.removesuffix(CLAIM)
                self.left_out.add(root + folder, OF_OURS, program)
                ours.append(folder)
        return tuple(ours)

    def add_object(self, name: str, path: str, size: int) -> None:
        """A tar of a store, or why it is none; `path` is what follows the address that was listed."""
        _, suffix = split_name(path.rpartition('/')[2])
        if is_hidden(path):
            self.left_out.count('hidden')
        elif path.endswith(COMPANIONS):
            self.left_out.count('a companion of other files')
        elif suffix == '.tar':
            self.add(File(name, size), [name])
        elif size == 0 and not suffix:
            self.left_out.count('a mark of a folder')
        elif is_image(suffix) or suffix in CAPTIONS:
            self.left_out.add(name, 'no tar', 'of a store, tars are read; copy the folder here, or pack it')
        else:
            self.left_out.add(name, *why_left_out(suffix))


def sizes_of_objects(store: ObjectStore, beginning: str) -> list[tuple[str, int]]:
    """The keys that begin so in a bucket, each with the size of its object in bytes."""
    return [(entry['path'], entry['size']) for page in obstore.list(store, beginning) for entry in page]


def kind_of(entry: os.DirEntry, is_named: bool) -> tuple[str, str]:
    """What an entry of a folder is: tar, image, caption, folder; else the kind of reason to leave it out, and details.

    Args:
        is_named: the source names it, so that a hidden one is wanted.
    """
    _, suffix = split_name(entry.name)
    if entry.name.startswith('.') and not is_named:
        return 'hidden', ''
    try:
        if entry.is_dir():
            return 'folder', ''
        if entry.name.endswith(COMPANIONS):
            return 'a companion of other files', ''
        if not entry.is_file():
            is_broken = entry.is_symlink() and not os.path.exists(entry.path)
            return 'no file', 'a broken link' if is_broken else 'a pipe, a socket or a device'
        entry.stat()  # of which the size is taken later
    except PermissionError:
        return 'cannot be opened', 'Permission denied'
    except FileNotFoundError:
        return 'no file', 'it was removed'
    except OSError as error:
        if error.errno == errno.ELOOP:
            return 'no file', 'a link to itself'
        raise DataError(f'SOURCE {entry.path} cannot be read ({one_line(error)})') from None
    if suffix == '.tar':
        return 'tar', ''
    if is_image(suffix):
        return 'image', ''
    if suffix in CAPTIONS:
        return 'caption', ''
    return why_left_out(suffix)


def why_left_out(suffix: str) -> tuple[str, str]:
    """Kind and details of the reason for which files of a suffix are not converted."""
    if suffix in ARCHIVES:
        return 'an archive', why_not_read(suffix)
    return 'not an image, a caption or a tar', why_not_read(suffix)


def identity_of_links(path: str, captions: list[str]) -> str | tuple[str, ...]:
    """What a tar or image really is: its real path, and those of its captions where they lie elsewhere."""
    real = os.path.realpath(path)
    real_captions = [os.path.realpath(caption) for caption in captions]
    stem = os.path.splitext(real)[0]
    if all(os.path.splitext(caption)[0] == stem for caption in real_captions):
        return real
    return real, *real_captions
