"""Names of files, reading text and JSON from users, atomic writes, and locks on folders."""
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

HELD_OUT = '-held-out'  # suffix of the dataset with the held-out samples
INDEX = 'index.json'  # of a dataset; it is written last, so a dataset with one is complete
EXPORTED = 'export.json'  # in a pipeline from export.py: the checkpoint and flags that made it
CLAIM = 'claim.json'  # in an output folder: the program and settings that make it; it is written first
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors from Lustre, or NFS without a lock service


def sibling_path(folder: str, name: str) -> str:
    """Return FOLDER-NAME, a path next to a folder.

    For a folder in a store, return a path in the working directory: s3://BUCKET/KEY/run1 gives run1-NAME.
    """
    folder = folder.rstrip('/')
    if is_url(folder):
        folder = os.path.basename(folder)
    return f'{folder}-{name}'


def is_url(path: str) -> bool:
    """Tell whether a path is the address of a store, supported or not. A path that exists here is not."""
    return ('://' in path or path.startswith('dbfs:')) and not os.path.exists(path)


def read_text(path: str, label: str) -> str:
    """Read a text file from the user: UTF-8, with or without a byte order mark, and with any line ends.

    Raises UserError, which begins with `label`, if the file cannot be read or has another encoding.
    """
    try:
        text = Path(path).read_text(encoding='utf-8-sig')
    except OSError as error:
        raise UserError(f'{label} cannot be read ({error.strerror})') from None
    except UnicodeDecodeError:
        text = '\0'
    if '\0' in text:  # UTF-16 without a byte order mark contains many NULs, and is valid UTF-8
        raise UserError(f'{label} is not UTF-8 text; save it as UTF-8, or convert it with iconv')
    return text


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yield a new file. When the context ends, it is flushed to disk and renamed to `path`; after an error, removed.

    A killed process leaves a file called `.NAME.RANDOM.unfinished`. Several processes may write to the same path
    concurrently.
    """
    unfinished = Path(path).with_name(f'.{os.path.basename(path)}.{uuid.uuid4().hex}.unfinished')
    try:
        with open(unfinished, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:  # a full disk, Ctrl-C or any other end of the run
        unfinished.unlink(missing_ok=True)
        raise


def parse_json(content: str | bytes, label: str) -> Any:
    """Return the value in a JSON file. Raises UserError, which begins with `label`, if it is not JSON."""
    try:
        return json.loads(content)
    except ValueError as error:  # bytes that are not UTF-8 raise it as well
        raise UserError(f'{label} is not JSON ({error}), perhaps because it was cut short; move it away') from None


@contextlib.contextmanager
def locked(path: str | os.PathLike, label: str, seconds: float = 0) -> Iterator[None]:
    """Hold the lock of a folder, and create the folder if needed. The system releases the lock of a killed process.

    If the file system has no locks, this prints a warning and locks nothing. filelock's own fallback is a lock that is
    held as long as its file exists, so if a machine is lost, all other machines would be locked out forever. `seconds`
    is how long to wait for another run to end.

    Raises UserError, which begins with `label`, if another run holds the lock, or the folder cannot be written to.
    """
    from filelock import FileLock, Timeout
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # fails on a full or read-only disk
        lock.acquire(timeout=seconds)
    except Timeout:
        raise UserError(f'{label} is in use by another run; wait until it has ended') from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UserError(f'{label} cannot be written to ({error.strerror}); give another folder') from None
        print(f'warning: {label} is on a file system without locks ({error.strerror}), so a second run in it would not '
              'be refused; start only one run at a time', file=sys.stderr)
    try:
        yield
    finally:
        lock.release()
