"""Files and folders of a run that must not outlive it: marked by their names, locked while their run lives.

What a killed run leaves of them is taken away by a later one, by name, and only where nobody holds its lock.
"""
import contextlib
import fcntl
import os
import re
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from typing import BinaryIO

MARK = 'sd-benchmark'
UNFINISHED = re.compile(rf'.+\.{MARK}-[0-9a-f]{{32}}\.tmp')  # names of files and folders that are being written
LOCK = 'in-use'  # the file in a folder that its run has locked


@contextlib.contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file that takes the name `path` when the context ends and all of it is on the disk; else nothing is left of it.
    """
    unfinished = unfinished_name(path)
    with open(unfinished, 'xb') as file:
        try:
            lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:  # a signal's SystemExit, too
            os.remove(unfinished)
            raise
    sync_folder(os.path.dirname(unfinished) or '.')


@contextlib.contextmanager
def folder_written_whole(path: str | os.PathLike) -> Iterator[str]:
    """A new folder that takes the name `path` when the context ends; else nothing is left of it."""
    around = unfinished_name(path)
    os.makedirs(around)
    with locked_file_in(around):
        try:
            folder = os.path.join(around, os.path.basename(path))
            os.mkdir(folder)
            yield folder
            os.rename(folder, path)
        finally:
            remove_locked_folder(around)


def unfinished_name(path: str | os.PathLike) -> str:
    """A new name for what is to be `path`, by which a later run knows it."""
    return f'{os.fspath(path)}.{MARK}-{uuid.uuid4().hex}.tmp'


def sync_folder(folder: str) -> None:
    """Have the names of the files in a folder on the disk, as well as their contents."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot, and need not
        pass
    finally:
        os.close(descriptor)


def lock(file: BinaryIO) -> bool:
    """Lock a file for as long as it is open; False if another process has, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def locked_file_in(folder: str) -> BinaryIO:
    """The open file of a new folder that tells other processes that it is in use; they never see it without its lock.
    """
    file = open(os.path.join(folder, f'{LOCK}.new'), 'xb')  # noqa: SIM115
    lock(file)
    os.rename(file.name, os.path.join(folder, LOCK))
    return file


def remove_locked_folder(folder: str) -> None:
    """Remove a folder whose lock this process has: that goes last, so that what a kill leaves is removed later."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != LOCK:
            os.remove(entry.path)
    shutil.rmtree(folder)


def remove_unfinished(folder: str) -> list[str]:
    """Take away what killed processes left of files and folders that they wrote in `folder`, and say so.

    What another user left stays. Returns the names.
    """
    removed = []
    for name in sorted(os.listdir(folder) if os.path.isdir(folder) else ()):
        path = os.path.join(folder, name)
        if not UNFINISHED.fullmatch(name) or os.path.islink(path):
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another process was faster; another user's
            if remove_if_abandoned(path):
                print(f'removed {path}, which a killed process left unfinished', file=sys.stderr)
                removed.append(name)
    return removed


def remove_if_abandoned(path: str) -> bool:
    """Remove a file, or a folder that has a file LOCK, unless a process has locked it; whether it was removed."""
    if not os.path.isdir(path):
        with open(path, 'r+b') as file:
            if not lock(file):
                return False
            os.remove(path)
        return True
    with open(os.path.join(path, LOCK), 'r+b') as file:
        if not lock(file):
            return False
        remove_locked_folder(path)
    return True


class PrivateFolder(tempfile.TemporaryDirectory):
    """A new temporary folder that only this user can enter (mode 0700), and that goes with its run.

    It is removed by `cleanup`, at the end of a context, or when the process ends. Where that was killed, the next run
    that makes one removes it.
    """

    def __init__(self):
        remove_abandoned_folders()
        super().__init__(prefix=f'{MARK}-')
        self._lock = locked_file_in(self.name)

    def cleanup(self) -> None:
        super().cleanup()
        self._lock.close()


def remove_abandoned_folders() -> None:
    """Take away the private folders of this user whose runs were killed."""
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(f'{MARK}-'):
            continue
        try:
            if is_private(entry.stat(follow_symlinks=False)):
                remove_if_abandoned(entry.path)
        except FileNotFoundError:  # its own run was faster, or it has no lock yet
            continue
        except OSError as error:
            print(f'warning: {entry.path}, which a killed run has left, could not be removed: {error.strerror}',
                  file=sys.stderr)


def is_private(status: os.stat_result) -> bool:
    """Whether it is a folder that this user alone can enter."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700


@contextlib.contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """A context in which the module tempfile makes all that it makes in `folder`."""
    get_temp_dir()  # multiprocessing makes its own once, for as long as the process lives
    before = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = before
