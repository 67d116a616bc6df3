"""One run at a time in a folder, as far as its file system has locks: a locked file, which names the process."""
import contextlib
import fcntl
import os
import platform
from pathlib import Path

_held: set[int] = set()  # descriptors of locks


def close_in_child() -> None:
    """A forked process, such as a loader's worker, may outlive a run that is killed, and would hold its locks."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=close_in_child)


def take_lock(path: Path, place: str) -> int | None:
    """The descriptor of the lock `path`, for `give_lock_back`; None where the file system has no locks.

    It goes with the process, however that ends; the file that is then left is taken over by the next run.

    Args:
        path: in a folder that is there.
        place: what errors call the folder.

    Raises ValueError if another process has it, and OSError if the folder cannot be written.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors='replace') or 'it has just begun'
            os.close(descriptor)
            raise ValueError(f'{place} is in use by another run ({holder}); wait until that has ended') from None
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f'pid {os.getpid()} on {platform.node()}'.encode())
                _held.add(descriptor)
                return descriptor
        os.close(descriptor)  # of a run that has removed it since, when it ended


def give_lock_back(path: Path, descriptor: int | None) -> None:
    """Remove a lock that `take_lock` took; the lock goes after its file."""
    if descriptor is None:
        return
    try:
        path.unlink(missing_ok=True)
    finally:
        _held.discard(descriptor)
        os.close(descriptor)
