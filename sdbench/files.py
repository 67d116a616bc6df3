"""Files of this machine: text that people write, files that appear whole, folders in which one run works at a time."""
import contextlib
import errno
import json
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sdbench.errors import UserError

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # as Lustre, and NFS without a lock service, can answer


def read_text(path: str, label: str) -> str:
    """Read a text file of the user's: UTF-8, with or without a byte order mark, and any ends of lines.

    Args:
        path: of the file.
        label: its name in error messages: the flag and its value.

    Raises UserError if it cannot be read, or is in another encoding.
    """
    try:
        text = Path(path).read_text(encoding='utf-8-sig')
    except OSError as error:
        raise UserError(f'{label} cannot be read ({error.strerror})') from None
    except UnicodeDecodeError:
        text = '\0'
    if '\0' in text:  # which UTF-16 is full of
        raise UserError(f'{label} is no text in UTF-8; save it as UTF-8, or convert it by iconv')
    return text


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Give a file that takes the name `path` once it is whole and on the disk; after an error nothing is left of it.

    A killed process leaves a file called `.NAME.RANDOM.unfinished`. Several processes may write the same path at once.
    """
    unfinished = Path(path).with_name(f'.{os.path.basename(path)}.{uuid.uuid4().hex}.unfinished')
    try:
        with open(unfinished, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:  # a full disk, and whatever else ends the run
        unfinished.unlink(missing_ok=True)
        raise


def parse_json(content: str | bytes, label: str) -> Any:
    """Return what a file of JSON holds. Raises UserError, which names the file by `label`, if it is not JSON."""
    try:
        return json.loads(content)
    except ValueError as error:  # also of bytes that are not UTF-8
        raise UserError(f'{label} is not JSON ({error}); it may have been cut short: move it away') from None


@contextlib.contextmanager
def locked(path: str | os.PathLike, label: str, seconds: float = 0) -> Iterator[None]:
    """Hold the lock of a folder, which is made where it is not there; the system frees the lock of a killed process.

    Where the file system has no locks, a warning says so, and nothing is locked. filelock would fall back to a lock
    that is held as long as its file exists: a machine that is lost would keep out all others for ever.

    Args:
        path: of the lock, a file in the folder.
        label: its name in error messages, the flag and its value.
        seconds: to wait for another run that is ending.

    Raises UserError if another run holds the lock, or the folder cannot be written to.
    """
    # the folder may be the first thing that a run makes, and a disk that others write to may refuse it
    from filelock import FileLock, Timeout
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        lock.acquire(timeout=seconds)
    except Timeout:
        raise UserError(f'{label} is in use by another run; wait until that has ended') from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UserError(f'{label} cannot be written to ({error.strerror}); give another') from None
        print(f'warning: {label} is on a file system without locks ({error.strerror}), so a second run there would not '
              'be refused; make sure that there is only one', file=sys.stderr)
    try:
        yield
    finally:
        lock.release()
