"""The folders that keep copies of the shards of a remote: one for each dataset, so that no other can meet it.

Each lies below a folder of the user, or the default one, in which nothing else is written, changed or removed.
"""
import contextlib
import fcntl
import gc
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import time
import uuid
from pathlib import Path

from inputs.places import INDEX
from inputs.shards import index_hash

LOCK = 'cache.lock'
SECONDS_TO_LEAVE = 10  # the workers of a killed run notice its end within 5


def is_read_in_place(folder: str, index: dict) -> bool:
    """Whether the shards of a dataset can be read where they are: in a folder, and not compressed."""
    return os.path.isdir(folder) and not any(shard['zip_data'] for shard in index['shards'])


def cache_folder(remote: str, index: dict, parent: str | None = None) -> str:
    """The cache of a dataset, made where it is not there yet; it holds at least a copy of the index.json.

    Its name comes from the remote and its index: a dataset that was made anew has another. Any number of processes may
    call this at once.

    Args:
        remote: folder or object store with the shards.
        index: the index.json of `remote`.
        parent: folder that the cache lies in; default: one of this user alone.

    Raises ValueError if it cannot be written, or the default folder is somebody else's.
    """
    parent = parent or private_parent()
    if os.path.isdir(remote):
        remote = os.path.abspath(remote)  # whose name another folder may have elsewhere
    folder = Path(parent, short_hash(remote), index_hash(index)[:16])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_index(folder, index)
    except OSError as error:
        raise ValueError(f'--local {parent} cannot be written: {error.strerror}') from None
    return str(folder)


def private_parent() -> Path:
    """The folder of this user alone that caches lie in by default. Raises ValueError if it is somebody else's."""
    root = Path(tempfile.gettempdir(), f'mds-cache-{os.getuid()}')
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    found = os.lstat(root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(f'{root}, where shards are cached, can be changed by others; give --local a folder of your '
                         'own, or set TMPDIR')
    return root


def short_hash(remote: str) -> str:
    return hashlib.sha256(remote.encode()).hexdigest()[:16]


def write_index(folder: Path, index: dict) -> None:
    """Put a copy of its index.json into the cache of a dataset."""
    path = folder / INDEX
    if path.exists():
        return
    unfinished = folder / f'{INDEX}.{uuid.uuid4().hex}.tmp'
    unfinished.write_text(json.dumps(index))
    os.replace(unfinished, path)


def say_unused_caches(remote: str, folder: str) -> None:
    """Name, in a line each, what is cached of `remote` and not read any more, and what else the user's folder holds.

    Args:
        remote: folder or object store.
        folder: its cache of today.
    """
    of_remote = Path(folder).parent
    parent = of_remote.parent
    unused = [str(path) for path in of_remote.iterdir() if path != Path(folder)]
    of_earlier_version = Path(tempfile.gettempdir(), 'mds-cache', short_hash(remote))
    if of_earlier_version.is_dir() and of_earlier_version.stat().st_uid == os.getuid():
        unused.append(str(of_earlier_version))
    if unused:
        print(f'warning: {" and ".join(sorted(unused))} cached this dataset as it was made before, or for an earlier '
              'version of this program, and are not read any more; remove them for their space', file=sys.stderr)
    if (parent / INDEX).exists():
        print(f'warning: --local {parent} holds an {INDEX}, of a dataset or of a cache of an earlier version or of '
              f'another program; it is left as it is, and copies go to {folder}; if it holds the whole dataset, give '
              'it as --remote', file=sys.stderr)


def hold_cache(folder: str, alone: bool) -> tuple[int, bool]:
    """A descriptor that holds a cache for as long as it is open, here or in a forked process; and whether nobody else
    was using the cache. Raises ValueError if another run does, and one of the two drops shards from it.

    Runs that only add shards share a cache.

    Args:
        folder: the cache.
        alone: this run drops shards.
    """
    lock = os.open(Path(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o666)
    end = time.monotonic() + SECONDS_TO_LEAVE
    while True:
        try:
            return lock, try_to_hold(lock, alone)
        except BlockingIOError:
            gc.collect()  # a dataset of this process that nobody uses any more
        if time.monotonic() > end:
            pids = holders(lock)
            os.close(lock)
            break
        time.sleep(0.1)
    who = 'another process'
    if os.getpid() in pids:
        who = 'another dataset of this process'
    elif pids:
        who = f'process {", ".join(map(str, pids))}'
    raise ValueError(f'the cache {folder} is in use by {who}, and a --cache_limit would drop shards that are being '
                     'read; give this run another --local, or wait')


def try_to_hold(lock: int, alone: bool) -> bool:
    """Lock a cache; whether nobody else was using it. BlockingIOError: it is in use."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        if alone:
            raise
    except OSError:  # a file system without locks
        return False
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return False


def share_cache(lock: int) -> None:
    """Let others add shards, too, to a cache that this process holds alone."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_SH)


def holders(lock: int) -> list[int]:
    """The processes that have locked a file, where Linux tells."""
    inode = os.fstat(lock).st_ino
    try:
        locks = Path('/proc/locks').read_text()
    except OSError:
        return []
    found = re.findall(rf'FLOCK +ADVISORY +\w+ +(\d+) +\w+:\w+:{inode} ', locks)
    return sorted({int(pid) for pid in found})
