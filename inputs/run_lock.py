"""One run at a time in a folder, as far as its file system has locks."""
from pathlib import Path

from filelock import FileLock, Timeout


def take_lock(path: Path, place: str) -> FileLock:
    """The lock `path`, for `give_lock_back`. It goes with the process, however that ends; the file may stay.

    Args:
        path: in a folder that is there.
        place: what errors call the folder.

    Raises ValueError if another process has it, and OSError if the folder cannot be written.
    """
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f'{place} is in use by another run; wait until that has ended') from None
    return lock


def give_lock_back(path: Path, lock: FileLock) -> None:
    """Remove a lock that `take_lock` took; the lock goes after its file."""
    path.unlink(missing_ok=True)
    lock.release()
