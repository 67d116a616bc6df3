"""OUT: the folder or the object store in which a dataset is made, part by part; what is in it says parts/claims.py."""
import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from inputs.errors import DataError
from inputs.places import CLAIM, hold_others_files, is_address, occupied_error
from inputs.run_lock import give_lock_back, take_lock
from inputs.stores import answer_of, open_store, store_error, streaming_address

ATTEMPTS = 3  # workers that may die of a part before the run ends
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
            is_free = answer_of(self._is_new_or_begun, f'asking for {self.place}')
        except DataError as error:
            raise ValueError(str(error)) from None
        if not is_free:
            raise occupied_error(self.place)

    def _is_new_or_begun(self) -> bool:
        holds_files = next(self._listed(''), None) is not None
        return not holds_files or self.read(CLAIM) is not None

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
            raise DataError(store_error(error, self.place)) from error


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
