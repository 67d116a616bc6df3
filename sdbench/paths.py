"""Paths of datasets, of stores and of models; files that appear whole, and folders in which one run works at a time.

No library is needed but for a download and a lock.
"""
import contextlib
import glob
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

HELD_OUT = '-held-out'  # how the name of a dataset of held-out samples ends
INDEX = 'index.json'  # of a dataset, which is whole once it is there
PLACEHOLDER = '{run_name}'  # in a --save_folder, as Composer has it
EXPORTED = 'export.json'  # in a pipeline folder of export.py: what it was made of
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


def with_run_name(folder: str, name: str | None) -> str:
    """Return a --save_folder with `{run_name}` filled in, as Composer does. Other braces are characters of its name.

    Raises ValueError if the run has no name.
    """
    if PLACEHOLDER not in folder:
        return folder
    name = name or os.environ.get('COMPOSER_RUN_NAME') or os.environ.get('RUN_NAME')
    if not name:
        raise ValueError(f'--save_folder {folder} needs --run_name NAME: the same command goes on by that name')
    return folder.replace(PLACEHOLDER, name)


def by_run_name(folder: str, flag: str) -> str:
    """Return a folder to read from, in whose name `{run_name}` may stand for the only run that is there.

    Raises ValueError, which names `flag`, if there are several or none.
    """
    if PLACEHOLDER not in folder or os.path.exists(folder):
        return folder
    found = sorted(glob.glob(glob.escape(folder).replace(PLACEHOLDER, '*')))
    if len(found) == 1:
        return found[0]
    there = f'there are {", ".join(found)}' if found else 'there is no such folder'
    raise ValueError(f'{flag} {folder}: {there}; give the name of the run in the place of {PLACEHOLDER}')


def without_placeholders(path: str, times: int = 1) -> str:
    """Return a path with its braces doubled, since Composer formats paths: `{` is then a character of the name.

    Composer 0.32 formats a path once where it saves or traces, and twice (`times`) where it loads.
    """
    return path.replace('{', '{' * 2 ** times).replace('}', '}' * 2 ** times)


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


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Give a file that takes the name `path` once it is whole and on the disk; after an error nothing is left of it.

    A killed process leaves a file called `.NAME.RANDOM.unfinished`. Several processes may write the same path at once.
    """
    unfinished = Path(path).with_name(f'.{os.path.basename(path)}.{uuid.uuid4().hex}.unfinished')
    try:
        with open(unfinished, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:  # a full disk, and whatever else ends the run
        unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: str | os.PathLike, label: str, seconds: float = 0) -> Iterator[None]:
    """Hold the lock of a folder, which is made where it is not there; the system frees the lock of a killed process.

    Args:
        path: of the lock, a file in the folder.
        label: its name in error messages, the flag and its value.
        seconds: to wait for another run that is ending.

    Raises ValueError if another run holds the lock, or the folder cannot be written to.
    """
    # the folder may be the first thing that a run makes, and a disk that others write to may refuse it
    from filelock import FileLock, Timeout
    lock = FileLock(path, thread_local=False)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        lock.acquire(timeout=seconds)
    except Timeout:
        raise ValueError(f'{label} is in use by another run; wait until that has ended') from None
    except OSError as error:
        raise ValueError(f'{label} cannot be written to ({error.strerror}); give another') from None
    try:
        yield
    finally:
        lock.release()
