"""Folders of models and tokenizers: on this machine, or from the hub."""
import os
from pathlib import Path


def local_folder(flag: str, name: str, patterns: list[str]) -> Path:
    """The folder `name`, or what matches `patterns` of the hub's repository, downloaded once.

    Raises ValueError if there is neither; it names `flag`.
    """
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception:  # wrong names, missing repositories, no network, no access
        raise ValueError(f'{flag} {name} is no folder here, and the hub has no such repository or cannot be reached; '
                         'check the name and the network') from None
