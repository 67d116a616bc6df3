"""Checkpoints as Composer writes them: found, checked, loaded, and saved where a signal ends a run."""
import datetime
import os
import pickle
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.utils import dist, get_file, maybe_create_object_store_from_uri, parse_uri
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.torch_version import TorchVersion

from inputs.errors import one_line

PLAIN_TYPES = [datetime.timedelta, TorchVersion]  # in Composer's checkpoints beside tensors and Python's own types
CHECKPOINT_NAME = re.compile(r'\bep(\d+)-ba(\d+)-rank0\.pt$')


def from_storage(function: Callable[[str], Any], folder: str, flag: str = '--save_folder'):
    """`function(folder)`, with what any storage client raises as a ValueError of one line, which names `flag`."""
    try:
        return function(folder)
    except ValueError:
        raise
    except Exception as error:  # every storage client has its own exceptions
        raise ValueError(f'{flag} {folder} cannot be read ({one_line(error)}); check its name and your '
                         'credentials') from None


def checkpoints(folder: str) -> list[str]:
    """Paths or URIs of Composer's checkpoints in a folder or an object store, by batch, the oldest first."""
    store = maybe_create_object_store_from_uri(folder)
    if store:
        prefix = os.path.join(parse_uri(folder)[2], '')
        names = [store.get_uri(name) for name in store.list_objects(prefix) if '/' not in name[len(prefix):]]
    else:
        names = [str(path) for path in Path(folder).glob('*.pt')]
    found = []
    for name in names:
        match = CHECKPOINT_NAME.search(name)
        if match:
            epoch, batch = map(int, match.groups())
            found.append((batch, epoch, name))
    return [name for _, _, name in sorted(found)]


def newest_checkpoint(folder: str) -> str | None:
    """The newest whole checkpoint of a folder, or of an object store, then downloaded; None if there is none.

    Rank 0 looks, for all ranks, and removes what a killed run left unfinished. ValueError: it cannot be trusted, or
    other nodes do not see it.
    """
    path = None
    if dist.get_global_rank() == 0:
        path = newest_whole(checkpoints(folder), remove_unfinished=True)
    return fetched_for_all(path, f'--save_folder {folder}')


def fetched_for_all(path: str | None, place: str) -> str | None:
    """The checkpoint that rank 0 found, where every rank can load it, and harmless; None if it found none.

    Args:
        path: on rank 0, a path or the URI of an object in a store.
        place: what errors call it, a flag with its value.

    ValueError: it would run code, or other nodes do not see it.
    """
    path = dist.all_gather_object(path)[0]
    if path is None:
        return None
    if '://' in path:
        path = download(path)
    if not all(dist.all_gather_object(os.path.exists(path))):
        raise ValueError(f'{place} is not the same folder on every node; use a shared one or a store')
    contents = globals_of(path)
    if contents is None:
        raise ValueError(f'{place}: {path} is no checkpoint, or was not written to its end; use another')
    plain = {f'{kind.__module__}.{kind.__qualname__}' for kind in PLAIN_TYPES}
    unsafe = contents - plain
    if unsafe:
        raise ValueError(f'{place}: {path} would run code when loaded ({min(unsafe)}); it is not of this program, do '
                         'not use it')
    return path


def newest_whole(found: list[str], remove_unfinished: bool = False) -> str | None:
    """The last of `found` that was written to its end; None if there is none.

    With `remove_unfinished` later ones are removed: no other run writes them now.
    """
    for path in reversed(found):
        if '://' in path or globals_of(path) is not None:  # a store shows only what was sent whole
            return path
        if remove_unfinished:
            print(f'removing {path}, which a killed run left unfinished', file=sys.stderr)
            os.remove(path)
    return None


def download(uri: str) -> str:
    """The path of a checkpoint that the first rank of each node has fetched from an object store."""
    folder = os.path.join(tempfile.gettempdir(), f'checkpoint-{os.getuid()}')
    path = os.path.join(folder, re.sub(r'\W+', '-', uri))
    if dist.get_local_rank() == 0:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        get_file(uri, path, overwrite=True, progress_bar=False)
    dist.barrier()
    return path


def globals_of(path: str) -> set[str] | None:
    """What a checkpoint would import when loaded; None if it was not written to its end, where its contents stand."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        return set(get_unsafe_globals_in_checkpoint(path))
    except pickle.UnpicklingError as error:  # instructions that torch does not write
        return {str(error)}
    except (RuntimeError, KeyError, EOFError, OSError):  # another kind of archive, or a damaged one
        return None


def load_checkpoint(path: str, mmap: bool = False) -> dict:
    """A checkpoint, on the CPU; pickle.UnpicklingError if it holds more than tensors and plain types, such as code.

    With `mmap` a tensor is read from the file when it is used, once for all ranks of a host.
    """
    with safe_globals(PLAIN_TYPES):
        return torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)


def save_interrupted(state: State, folder: str, to_keep: int | None = None) -> str:
    """Save the state as of the last whole batch, by rank 0 alone, since other ranks may be gone; returns where.

    Composer's own saver, whose names and contents these are, waits for all ranks.

    Args:
        state: of the run.
        folder: or object store.
        to_keep: the newest that stay in a folder; None keeps all.
    """
    name = f'ep{state.timestamp.epoch.value}-ba{state.timestamp.batch.value}-rank0.pt'
    store = maybe_create_object_store_from_uri(folder)
    if store:
        with tempfile.TemporaryDirectory() as staging:
            path = os.path.join(staging, name)
            torch.save({'state': state.state_dict()}, path)
            store.upload_object(os.path.join(parse_uri(folder)[2], name), path)
        return os.path.join(folder, name)
    path = Path(folder, name)
    if path.exists() and globals_of(path) is not None:
        return str(path)  # Composer has saved this batch, whole
    unfinished = Path(folder, f'{name}.tmp')
    torch.save({'state': state.state_dict()}, unfinished)
    unfinished.replace(path)
    link = Path(folder, 'latest.tmp')
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(Path(folder, 'latest-rank0.pt'))
    if to_keep:
        for older in checkpoints(folder)[:-to_keep]:
            os.remove(older)
    return str(path)


def leave_out_empty_scaler(checkpoint: dict) -> None:
    """Let a checkpoint that was saved on a CPU be loaded on a GPU, whose GradScaler refuses an empty state.

    Composer 0.32.1 makes and saves a GradScaler in every precision; torch 2.7.0 disables those on a CPU, which have no
    state. Without one in the checkpoint, that of the GPU begins as in a new run.
    """
    if not checkpoint['state'].get('scaler'):
        checkpoint['state'].pop('scaler', None)
