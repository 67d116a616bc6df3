"""Paths that commands are given, of datasets, of stores and of models. No library is needed but for a download."""
import os
import re
from pathlib import Path

HELD_OUT = '-held-out'  # how the name of a dataset of held-out samples ends
INDEX = 'index.json'  # of a dataset, which is whole once it is there
CLAIM = 'claim.json'  # says what is being made in a folder, and is there before anything else


def number_of_samples(index: dict) -> int:
    """Count the samples of a dataset by its index.json."""
    return sum(shard['samples'] for shard in index['shards'])


def sibling_path(folder: str, name: str) -> str:
    """Return FOLDER-NAME, the path of what belongs to a folder and lies next to it.

    The sibling of a folder in a store is on this machine, below the folders of its whole address: s3/BUCKET/KEY-NAME.
    """
    folder = folder.rstrip('/')
    if is_url(folder):
        folder = re.sub(':/+', '/', folder)
    return f'{folder}-{name}'


def is_url(path: str) -> bool:
    """Tell whether a path is a URL of a store, even of an unsupported one. A path that exists here is none."""
    return ('://' in path or path.startswith('dbfs:')) and not os.path.exists(path)


def read_text(path: str, label: str) -> str:
    """Read a text file of the user's: UTF-8, with or without a byte order mark, and any ends of lines.

    Args:
        path: of the file.
        label: its name in error messages: the flag and its value.

    Raises ValueError if it cannot be read, or is in another encoding.
    """
    try:
        text = Path(path).read_text(encoding='utf-8-sig')
    except OSError as error:
        raise ValueError(f'{label} cannot be read ({error.strerror})') from None
    except UnicodeDecodeError:
        text = '\0'
    if '\0' in text:  # which UTF-16 is full of
        raise ValueError(f'{label} is no text in UTF-8; save it as UTF-8, or convert it by iconv')
    return text


def find_or_download(flag: str, name: str, patterns: list[str]) -> Path:
    """Return the folder `name` if it exists; else download that repository of the Hugging Face hub, once.

    Args:
        flag: its name in error messages.
        name: a folder of this machine, or a repository such as stabilityai/stable-diffusion-2-base.
        patterns: which files of the repository are downloaded.

    Raises ValueError if there is neither.
    """
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception:  # wrong names, missing repositories, no network, no access
        raise ValueError(f'{flag} {name} is no folder here, and the hub has no such repository or cannot be reached; '
                         'check the name and the network') from None
