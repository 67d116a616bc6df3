"""The folders that keep copies of the shards of a remote: one for each dataset, and marked as its own.

A folder is marked while it is empty, so that all which is in it later has come from this program. What holds other
files is refused, and left as it is.
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

from inputs.shards import index_hash

MARKER = 'cache.json'
LOCK = 'cache.lock'
INDEX = 'index.json'  # a copy, with which a whole cache is a dataset; it is not read from a cache
SECONDS_TO_LEAVE = 10  # the workers of a killed run notice its end within 5


def is_read_in_place(folder: str, index: dict) -> bool:
    """Whether the shards of a dataset can be read where they are: in a folder, and not compressed."""
    return os.path.isdir(folder) and not any(shard['zip_data'] for shard in index['shards'])


def cache_folder(remote: str, index: dict) -> str:
    """The default cache of a dataset, below a folder of this user alone. ValueError: that is somebody else's.

    Its name comes from the remote and its index: a dataset that was made anew has another.
    """
    root = Path(tempfile.gettempdir(), f'mds-cache-{os.getuid()}')
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    found = os.lstat(root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(f'{root}, where shards are cached, can be changed by others; give --local a folder of your '
                         'own, or set TMPDIR')
    return str(root / short_hash(remote) / index_hash(index)[:16])


def short_hash(remote: str) -> str:
    return hashlib.sha256(remote.encode()).hexdigest()[:16]


def say_unused_caches(remote: str, folder: str) -> None:
    """Name, in one line, what is cached of `remote` and not read any more: it may take much of the disk.

    Args:
        remote: folder or object store.
        folder: its default cache of today.
    """
    of_earlier_version = Path(tempfile.gettempdir(), 'mds-cache', short_hash(remote))
    unused = [str(path) for path in Path(folder).parent.glob('*') if path != Path(folder)]
    if of_earlier_version.is_dir() and of_earlier_version.stat().st_uid == os.getuid():
        unused.append(str(of_earlier_version))
    if unused:
        print(f'warning: {" and ".join(sorted(unused))} cached this dataset as it was made before, or for an earlier '
              'version of this program, and are not read any more; remove them for their space', file=sys.stderr)


def claim_cache(folder: str, remote: str, index: dict) -> None:
    """Mark `folder` as the cache of a dataset. ValueError: it is another's, holds other files, or is not writable.

    Every rank may call this at once, and other runs, too: each looks for itself, and the first marker stays.

    Args:
        folder: empty or new, or marked for this dataset.
        remote: folder or object store with the shards.
        index: the index.json of `remote`.
    """
    marker = Path(folder, MARKER)
    ours = {'remote_sha256': hashlib.sha256(remote.encode()).hexdigest(), 'index_sha256': index_hash(index)}
    if not re.search('[@?;=]', remote):  # else it may hold a password
        ours['remote'] = remote
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            refuse_other_files(marker)
            write_marker(marker, ours)
        content = marker.read_bytes()
    except OSError as error:
        raise ValueError(f'--local {folder} cannot be written: {error.strerror}') from None
    try:
        found = json.loads(content)
        theirs = (found['remote_sha256'], found['index_sha256'])
    except (ValueError, KeyError, TypeError):  # of JSON, of Unicode, of what is in it
        raise ValueError(f'--local {folder} has a damaged {MARKER}; give {remote} another folder') from None
    if theirs[0] != ours['remote_sha256']:
        raise ValueError(f'--local {folder} caches {found.get("remote", "another remote")}; give {remote} another '
                         'folder')
    if theirs[1] != ours['index_sha256']:
        raise ValueError(f'--remote {remote} has changed since --local {folder} was filled from it; remove that '
                         'folder, or give the remote another one')


def refuse_other_files(marker: Path) -> None:
    """ValueError: a folder without the marker holds files, which are then not of this program."""
    strangers = [name for name in os.listdir(marker.parent) if not name.startswith(MARKER)]
    if strangers and not marker.exists():  # else another process was faster
        raise ValueError(f'--local {marker.parent} holds {sorted(strangers)[0]}, and is no cache that this version of '
                         'the program has made; give a new folder, or, if it holds the whole dataset, give it as '
                         '--remote')


def write_marker(marker: Path, content: dict) -> None:
    """Mark a folder, unless another process is faster."""
    unfinished = marker.with_name(f'{MARKER}.{uuid.uuid4().hex}.tmp')
    unfinished.write_text(json.dumps(content))
    try:
        os.link(unfinished, marker)  # appears whole, and only if there is none
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.rename(unfinished, marker)
    unfinished.unlink(missing_ok=True)


def write_index(folder: str, index: dict) -> None:
    """Put a copy of its index.json into the cache of a dataset."""
    path = Path(folder, INDEX)
    if path.exists():
        return
    unfinished = Path(folder, f'{INDEX}.{uuid.uuid4().hex}.tmp')
    unfinished.write_text(json.dumps(index))
    os.replace(unfinished, path)


def hold_cache(folder: str, alone: bool) -> tuple[int, bool]:
    """A descriptor that holds a cache for as long as it is open, here or in a forked process; and whether nobody else
    was using the cache. ValueError: another run does, and one of the two drops shards from it.

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
    raise ValueError(f'--local {folder} is in use by {who}, and a --cache_limit would drop shards that are being read; '
                     'give this run another folder, or wait')


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
