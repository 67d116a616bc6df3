"""OUT: the folder or the object store in which a dataset is made, part by part.

OUT/claim.json says what the dataset is made of, and is there before anything else. The shards of part 42 lie in
OUT/000042, and OUT/parts/000042.json is the part's own index, which is written when they are all there, so that a list
of OUT/parts says what is done. OUT/index.json, which makes a dataset of it, comes last.
"""
import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from inputs.errors import DataError
from inputs.places import (
    CLAIM,
    INDEX,
    LEFT_BY_KILLED,
    finished_error,
    hold_others_files,
    is_address,
    number_of_samples,
    occupied_error,
)
from inputs.run_lock import give_lock_back, take_lock
from inputs.stores import open_store, store_error, streaming_address

SKIPPED = 'skipped.jsonl'  # what was left out, and why
DAMAGED = 'damaged.json'  # the files that could not be read to their end, as they were when OUT was begun
EDGE = 'held-out.json'  # the last sample that is held out
ATTEMPTS = 3  # workers that may die of a part before the run ends
RELEASED = 'released'  # in the claim of a run that found nothing to store: another may take its place
LOCK = f'{CLAIM}.lock'  # in a folder, while a run works in it


class Output:
    """Where a dataset is made. A worker has a copy of it, which reaches the same place.

    Args:
        out: as the user gave it.
        flag: what errors call it.
    """

    def __init__(self, out: str, flag: str):
        self.out = out
        if not out.endswith('://'):
            self.out = out.rstrip('/') or out
        self.flag = flag

    @property
    def place(self) -> str:
        """As errors call it."""
        return f'{self.flag} {self.out}'

    @property
    def reading_place(self) -> str:
        """By which Streaming reads what lies here."""
        return streaming_address(self.out)


class FolderOutput(Output):
    """A folder. Every file reaches the disk before it gets its name."""

    def __init__(self, out: str, flag: str):
        super().__init__(out, flag)
        self.folder = Path(os.path.realpath(out))

    @property
    def reading_place(self) -> str:
        return str(self.folder)

    def require_new_or_begun(self) -> None:
        """Raises ValueError if OUT is no folder, or holds files and no claim of ours."""
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise ValueError(f'{self.place} is not a folder; give a new one')
        with self._reaching(), contextlib.suppress(FileNotFoundError):
            if hold_others_files(os.listdir(self.folder)):
                raise occupied_error(self.place)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which no other run works in OUT, as far as its file system has locks.

        Raises ValueError if another run works in it, or it holds files and no claim of ours.
        """
        self.require_new_or_begun()
        with self._reaching():
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = take_lock(self.folder / LOCK, self.place)
        try:
            yield
        finally:
            with self._reaching():
                give_lock_back(self.folder / LOCK, descriptor)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file if there is none of that name; returns whether there was none."""
        unfinished = self._unfinished(name, secrets.randbelow(10 ** 12))  # that no other run has
        with self._reaching():
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            write_through(unfinished, content)
            try:
                link_or_copy(unfinished, self.folder / name)
                return True
            except FileExistsError:
                return False
            finally:
                unfinished.unlink(missing_ok=True)

    def write_first(self, name: str, content: bytes, attempt: int = 0) -> None:
        """A file that no other run writes: this one has OUT to itself."""
        self.write(name, content, attempt)

    def write(self, name: str, content: bytes | BinaryIO, attempt: int = 0) -> None:
        """A file that appears whole, in the place of an earlier one.

        Args:
            name: below OUT.
            content: of the file.
            attempt: of the worker that writes it, from 0. One that was taken for dead may still write.
        """
        unfinished = self._unfinished(name, attempt)
        with self._reaching():
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            try:
                write_through(unfinished, content)
                unfinished.replace(self.folder / name)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        with self._reaching():
            path = self.folder / name
            if path.exists() and not path.is_file():
                raise DataError(f'{name} of {self.place} is no file, but a folder, a pipe or a device; remove it')
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self) -> Iterator[str]:
        """The names of all that lies in OUT itself, files and folders."""
        return self.names_in('.')

    def names_in(self, folder: str) -> Iterator[str]:
        """The names of the files in a folder of OUT."""
        with self._reaching(), contextlib.suppress(FileNotFoundError), os.scandir(self.folder / folder) as entries:
            for entry in entries:
                yield entry.name

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that a run of the same claim has written; those that are not there do not matter."""
        with self._reaching():
            for name in names:
                (self.folder / name).unlink(missing_ok=True)

    def remove_unfinished(self, name: str, attempt: int) -> None:
        """Remove what workers that were killed left of a file, which the worker of `attempt` has written since."""
        others = set(range(ATTEMPTS)) - {attempt}
        self.remove(self._unfinished(name, other).relative_to(self.folder) for other in others)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder of OUT that is empty; one that holds files, whosever they are, stays."""
        with contextlib.suppress(OSError):
            (self.folder / folder).rmdir()

    def _unfinished(self, name: str, attempt: int = 0) -> Path:
        return self.folder / f'{name}.tmp{attempt}'

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raises DataError, in one line, for what a file system raises."""
        try:
            yield
        except OSError as error:
            raise DataError(f'{self.place} cannot be written or read: {error.strerror or error}') from error


class StoreOutput(Output):
    """A folder of an object store, which shows a file only when it is whole, and to which a client is made when it is
    first needed, in each process its own."""

    def __init__(self, out: str, flag: str):
        super().__init__(out, flag)
        self._store = None
        self._process = None  # that made the client
        self._key('')  # a ValueError now, not in a worker

    def __getstate__(self) -> dict:
        return self.__dict__ | {'_store': None, '_process': None}

    def _key(self, name: str) -> str:
        """The key of a file, with the client of this process at hand."""
        if self._process != os.getpid():
            self._store, self._prefix = open_store(self.out, self.flag)
            self._process = os.getpid()
        return '/'.join(filter(None, (self._prefix, name)))

    def require_new_or_begun(self) -> None:
        """Raises ValueError if there are objects and no claim of ours, or the store cannot be reached."""
        try:
            holds_files = next(self._listed(''), None) is not None
            is_begun = self.read(CLAIM) is not None
        except DataError as error:
            raise ValueError(str(error)) from None
        if holds_files and not is_begun:
            raise occupied_error(self.place)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which this run works in OUT. A store has no locks; see `write_first`.

        Raises ValueError if OUT holds objects and no claim of ours, or the store cannot be reached.
        """
        self.require_new_or_begun()
        yield

    def create(self, name: str, content: bytes) -> bool:
        """Write a file if there is none of that name, as the store itself decides; returns whether there was none."""
        with self._reaching():
            try:
                obstore.put(self._store_of(name), self._key(name), content, mode='create')
                return True
            except AlreadyExistsError:
                return False

    def write_first(self, name: str, content: bytes, attempt: int = 0) -> None:
        """A file that stays as it is where it is there already: another run of the same claim has been faster, and may
        have gone on from it."""
        self.create(name, content)

    def write(self, name: str, content: bytes | BinaryIO, attempt: int = 0) -> None:
        """A file that appears whole, in the place of an earlier one."""
        with self._reaching():
            obstore.put(self._store_of(name), self._key(name), content)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        with self._reaching():
            try:
                return obstore.get(self._store_of(name), self._key(name)).bytes().to_bytes()
            except FileNotFoundError:
                return None

    def names(self) -> Iterator[str]:
        """The names of all that lies in OUT, with their folders: 1000 a request."""
        for key in self._listed(''):
            yield key.removeprefix(self._key('')).lstrip('/')

    def names_in(self, folder: str) -> Iterator[str]:
        """The names of the files in a folder of OUT: 1000 a request."""
        for key in self._listed(f'{folder}/'):
            yield key.rpartition('/')[2]

    def _listed(self, folder: str) -> Iterator[str]:
        with self._reaching():
            prefix = self._key(folder)
            for chunk in obstore.list(self._store, prefix=prefix.rstrip('/') + '/' if prefix else None):
                for entry in chunk:
                    yield entry['path']

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that a run of the same claim has written; those that are not there do not matter."""
        with self._reaching():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    # some stores refuse to delete what is not there
                    obstore.head(self._store_of(name), self._key(name))
                    obstore.delete(self._store, self._key(name))

    def remove_unfinished(self, name: str, attempt: int) -> None:
        """Nothing: a store has nothing unfinished."""

    def remove_folder(self, folder: str) -> None:
        """Nothing: a store has no folders."""

    def _store_of(self, name: str):
        self._key(name)
        return self._store

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raises DataError, in one line, for what a store's client raises."""
        try:
            yield
        except (BaseError, OSError) as error:
            raise DataError(f'{self.place}: {store_error(error, self.out)}') from error


def write_through(path: Path, content: bytes | BinaryIO) -> None:
    """A file that is on the disk when this returns."""
    with open(path, 'wb') as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            shutil.copyfileobj(content, file)
        file.flush()
        os.fsync(file.fileno())


def link_or_copy(path: Path, name: Path) -> None:
    """Give a file a second name. Raises FileExistsError if there is a file of that name."""
    try:
        os.link(path, name)  # appears whole
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        with open(name, 'xb') as file:
            file.write(path.read_bytes())


def open_output(out: str, flag: str) -> FolderOutput | StoreOutput:
    """The place that a dataset is made in. Raises ValueError if it has no name, or is of a store that is not known."""
    if not out.strip():
        raise ValueError(f'{flag} is empty; give a new folder, or an address in a store')
    if is_address(out):
        return StoreOutput(out, flag)
    return FolderOutput(out, flag)


def part_name(number: int) -> str:
    """The folder of a part's shards."""
    return f'{number:06}'


def part_index(number: int) -> str:
    """A part's own index, in a folder with all others, so that one list of it says what is done."""
    return f'parts/{part_name(number)}.json'


def read_json(output: Output, name: str) -> object:
    """What a file of OUT holds; None if there is none. Raises ValueError if it is damaged."""
    content = output.read(name)
    if content is None:
        return None
    try:
        return json.loads(content)
    except ValueError:
        raise ValueError(f'{name} of {output.place} is damaged; give a new folder') from None


def read_part(output: Output, number: int) -> dict | None:
    """The index of a part; None if there is none. Raises DataError if it is damaged."""
    try:
        return read_json(output, part_index(number))
    except ValueError:
        raise DataError(f'{part_index(number)} of {output.place} is damaged; remove it, and run the same command again'
                        ) from None


def require_same_place(output: Output) -> None:
    """Raises DataError if a worker does not see the OUT that the command has begun."""
    if output.read(CLAIM) is None:
        raise DataError(f'{output.place} is not the same folder on every machine; use a shared one or a store')


def claim(output: Output, contents: dict) -> bool:
    """Say in OUT what it is made of.

    Args:
        output: must be new, or begun with the same contents.
        contents: what JSON can hold; `program` is the name of the one that makes it.

    Returns whether an earlier run has begun it. Raises ValueError if OUT holds anything else.
    """
    output.require_new_or_begun()
    text = json.dumps(contents).encode()
    held = output.read(CLAIM)
    if held is None:
        if output.create(CLAIM, text):
            return False
        held = output.read(CLAIM)  # another run was faster
    try:
        begun = dict(json.loads(held or b''))
    except (ValueError, TypeError):
        raise ValueError(f'{output.place} holds a {CLAIM} that is damaged; give a new folder') from None
    if begun == {'program': contents['program'], RELEASED: True}:
        refuse_others_files(output)
        output.write(CLAIM, text)
        output.remove([SKIPPED])
        return False
    key = other_key(begun, contents)
    if key is not None:
        raise ValueError(f'{output.place} was begun with {key} {begun.get(key)}, and this run has {contents.get(key)}; '
                         'give what it was begun with, or a new folder')
    return True


def other_key(begun: dict, contents: dict) -> str | None:
    """The first key in which two claims differ; None where they are of one dataset."""
    for key in {**contents, **begun}:  # what only the earlier run knows of makes it another dataset as well
        if begun.get(key) != contents.get(key):
            return key
    return None


def names_beside_claim(output: Output) -> Iterator[str]:
    """The names of what lies in OUT beside its claim."""
    return (name for name in output.names() if name != CLAIM and not LEFT_BY_KILLED.fullmatch(name))


def refuse_others_files(output: Output) -> None:
    """Raises ValueError if an OUT that was given back holds more than a run leaves in it."""
    for name in names_beside_claim(output):
        if name != SKIPPED:
            raise ValueError(f'{output.place} already holds something, {name}; give a new folder')


def is_claimed_for(output: Output, contents: dict) -> bool:
    """Whether an earlier run has claimed OUT for the same contents, as `claim` takes them."""
    with contextlib.suppress(ValueError, TypeError):
        return other_key(dict(json.loads(output.read(CLAIM) or b'')), contents) is None
    return False


def is_begun(output: Output) -> bool:
    """Whether a run has claimed OUT, and not given it back."""
    held = output.read(CLAIM)
    if held is None:
        return False
    with contextlib.suppress(ValueError, TypeError):
        return RELEASED not in json.loads(held)
    return True  # `claim` says that it is damaged


def samples_of_finished(output: Output) -> int | None:
    """How many samples the dataset in OUT has; None where it has no index.json yet. Raises ValueError if that is
    damaged."""
    index = read_json(output, INDEX)
    if index is None:
        return None
    try:
        return number_of_samples(index)
    except (KeyError, TypeError):
        raise ValueError(f'{INDEX} of {output.place} is damaged; give a new folder') from None


def refuse_finished(output: Output) -> None:
    """Raises ValueError if OUT has its index.json already."""
    if output.read(INDEX) is not None:
        raise finished_error(output.place)


def finished_parts(output: Output, num_parts: int) -> set[int]:
    """The numbers of the parts that are done; a store is listed once, 1000 parts a request."""
    found = (re.fullmatch(r'(\d{6,})\.json', name) for name in output.names_in('parts'))
    numbers = {int(match[1]) for match in found if match}
    return {number for number in numbers if number < num_parts}


def redo(output: Output, numbers: Iterable[int]) -> None:
    """Take parts of a dataset back, so that they are made again, and with them what makes a dataset of it."""
    output.remove([INDEX])
    for number in numbers:
        part = read_part(output, number)
        if part is None:
            continue
        shards = [shard['raw_data']['basename'] for shard in part['shards']]
        output.remove([part_index(number), *shards, *part.get('replaced', ())])


def remove_part_folders(output: Output, numbers: Iterable[int]) -> None:
    """Remove the folders of parts whose shards are all gone."""
    for number in numbers:
        output.remove_folder(part_name(number))


def release(output: Output, num_parts: int, program: str) -> None:
    """Give an OUT back that no sample came to, so that the next run may use it; the list of reasons stays."""
    output.remove(map(part_index, range(num_parts)))
    output.remove([DAMAGED, EDGE])
    remove_part_folders(output, range(num_parts))
    output.remove_folder('parts')
    output.write(CLAIM, json.dumps({'program': program, RELEASED: True}).encode())
