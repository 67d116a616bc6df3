"""The folders that cache the shards of a remote, one for each."""
import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from pathlib import Path

from inputs.shards import number_of_samples, read_index


def cache_folder(remote: str) -> str:
    """The default cache of a remote: its own folder, so that two remotes never mix."""
    return os.path.join(tempfile.gettempdir(), 'mds-cache', hashlib.sha256(remote.encode()).hexdigest()[:16])


def claim_cache(folder: str, remote: str, split: str | None = None, index: dict | None = None) -> None:
    """Mark `folder` as the cache of `remote`. ValueError: it is another's, holds another dataset, or is not writable.

    Streaming takes the index.json and the shards that are in a folder for those of any remote. Every rank may call
    this at once, and other runs, too: each looks for itself, and the first marker that appears stays.

    Args:
        folder: may hold shards that another program has cached; of the same dataset they are adopted.
        remote: folder or object store with the shards.
        split: subfolder of both.
        index: the index.json of `remote`, where it was read already; else it is, if there is one to compare it with.
    """
    marker = Path(folder, 'remote.txt')
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        claimed_for = read_marker(marker)
        cached_file = Path(folder, split or '', 'index.json')
        if claimed_for in (None, remote) and cached_file.exists():
            if index is None:
                index = read_index(os.path.join(remote, split or ''))
            require_same_index(cached_file, index, folder, remote, is_claimed=claimed_for is not None)
        if claimed_for is None:
            claimed_for = write_marker(marker, remote)
    except OSError as error:
        raise ValueError(f'--local {folder} cannot be written: {error.strerror}') from None
    if claimed_for != remote:
        raise ValueError(f'--local {folder} caches {claimed_for}; give {remote} another folder')


def read_marker(marker: Path) -> str | None:
    """The remote that a folder caches; None if nobody has claimed it."""
    try:
        return marker.read_text()
    except FileNotFoundError:
        return None


def write_marker(marker: Path, remote: str) -> str:
    """Claim a folder, unless another process was faster; returns the remote that it is claimed for."""
    unfinished = marker.with_name(f'remote.{uuid.uuid4().hex}.tmp')
    unfinished.write_text(remote)
    try:
        os.link(unfinished, marker)  # appears whole, and only if there is none
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.rename(unfinished, marker)
    unfinished.unlink(missing_ok=True)
    return marker.read_text()


def require_same_index(cached_file: Path, index: dict, folder: str, remote: str, is_claimed: bool) -> None:
    """ValueError: the index.json that a folder has cached is not `index`, that of the remote."""
    cached = {}
    with contextlib.suppress(ValueError):  # of JSON, of Unicode
        cached = json.loads(cached_file.read_bytes())
    if cached == index:
        return
    difference = difference_of(cached, index)
    if is_claimed:
        raise ValueError(f'--remote {remote} has changed since --local {folder} was filled from it ({difference}); '
                         'remove that folder, or give the remote another one')
    raise ValueError(f'--local {folder} holds another dataset than --remote {remote} ({difference}); give the remote '
                     'another folder, or remove this one')


def difference_of(cached: dict, index: dict) -> str:
    """What people can tell two index.json by."""
    here = number_of_samples(index)
    try:
        there = number_of_samples(cached)
    except (KeyError, TypeError):
        return 'its index.json is damaged'
    if there == here:
        return 'its index.json has other shards or other hashes than that of the remote'
    return f'its index.json has {there:,} samples, and that of the remote {here:,}'
