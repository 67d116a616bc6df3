"""Repositories of the Hugging Face hub."""
import os
from pathlib import Path

from sdbench.errors import UserError


def find_or_download(flag: str, name: str, patterns: list[str]) -> Path:
    """Return the folder `name` if it exists; else download that repository of the Hugging Face hub, once.

    Args:
        flag: its name in error messages.
        name: a folder of this machine, or a repository such as stabilityai/stable-diffusion-2-base.
        patterns: which files of the repository are downloaded.

    Raises UserError if there is neither.
    """
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception:  # wrong names, missing repositories, no network, no access
        raise UserError(f'{flag} {name} is no folder here, and the hub has no such repository or cannot be reached; '
                        'check the name and the network') from None
