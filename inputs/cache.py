"""The folders that cache the shards of a remote, one for each."""
import hashlib
import os
import tempfile
from pathlib import Path


def cache_folder(remote: str) -> str:
    """The default cache of a remote: its own folder, so that two remotes never mix."""
    return os.path.join(tempfile.gettempdir(), 'mds-cache', hashlib.sha256(remote.encode()).hexdigest()[:16])


def claim_cache(folder: str, remote: str) -> None:
    """Mark `folder` as the cache of `remote`: Streaming would mix two. ValueError: it is another's, or not writable."""
    marker = Path(folder, 'remote.txt')
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            unfinished = Path(folder, f'remote.{os.getpid()}.tmp')
            unfinished.write_text(remote)
            unfinished.rename(marker)  # appears whole: other ranks read it now
        claimed_for = marker.read_text()
    except OSError as error:
        raise ValueError(f'--local {folder} cannot be written: {error.strerror}') from None
    if claimed_for != remote:
        raise ValueError(f'--local {folder} caches {claimed_for}; give {remote} another folder')
