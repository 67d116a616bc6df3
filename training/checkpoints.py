"""Checkpoints as Composer writes them: saved whole, found again, and loaded without running code."""
import contextlib
import datetime
import os
import pickle
import re
import signal
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger
from composer.utils import checkpoint as composer_checkpoint
from composer.utils import dist, maybe_create_object_store_from_uri, parse_uri
from filelock import FileLock, Timeout
from numpy._core import multiarray as np_multiarray
from torch.serialization import safe_globals
from torch.torch_version import TorchVersion

from inputs.errors import one_line
from training.ranks import on_every_rank, on_rank_0
from training.signals import SIGNALS

NAME = 'ep{epoch}-ba{batch}-rank{rank}.pt'
CHECKPOINT_NAME = re.compile(r'ep([0-9]+)-ba([0-9]+)-rank0\.pt')  # the whole of it: best-ep1-ba9-rank0.pt is the user's
LOCK = '.lock'  # in a --save_folder
SECONDS_FOR_LOCK = 10  # that another run has to let go of it, as one that is ending
PLAIN_TYPES = [  # in Composer's checkpoints beside tensors and Python's own types
    datetime.timedelta, TorchVersion,
    # the state of NumPy's random generator, of which Composer's own saver keeps an array of uint32
    np.ndarray, np.dtype, np.dtypes.UInt32DType, np_multiarray._reconstruct,
    (np_multiarray._reconstruct, 'numpy.core.multiarray._reconstruct'),  # as NumPy 1 calls it
]


@contextlib.contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file that takes the name `path` when the context ends and all of it is on the disk; else nothing is left of it.

    What a killed process leaves of it is `.NAME.unfinished`, which the next one that writes it writes over.
    """
    unfinished = Path(path).with_name(f'.{os.path.basename(path)}.unfinished')
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
def saving_alone(folder: str | None, autoresume: bool) -> Iterator[None]:
    """A context in which no other run saves in a --save_folder; a store has no locks.

    Raises ValueError on all ranks if another run does, or if there are files that this one does not resume.
    """
    with contextlib.ExitStack() as at_the_end:
        if folder is not None:
            on_rank_0(partial(take_folder, folder, autoresume, at_the_end))
        yield


def take_folder(folder: str, autoresume: bool, at_the_end: contextlib.ExitStack) -> None:
    """The same, on this rank; `at_the_end` gives the folder back."""
    if not autoresume and any(not os.path.basename(name).startswith('.') for name in names_in(folder)):
        raise ValueError(f'--save_folder {folder} already holds files; give a new one, or --autoresume to go on from '
                         'there')
    if '://' not in folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock = FileLock(Path(folder, LOCK))
        try:
            at_the_end.enter_context(lock.acquire(timeout=SECONDS_FOR_LOCK))
        except Timeout:
            raise ValueError(f'--save_folder {folder} is in use by another run; wait until that has ended') from None


def names_in(place: str, flag: str = '--save_folder') -> list[str]:
    """Paths or URIs of what lies directly in a folder or an object store; none where it is not there.

    Raises ValueError, which names `flag`, if they cannot be listed.
    """
    try:
        store = maybe_create_object_store_from_uri(place)
        if store:
            prefix = os.path.join(parse_uri(place)[2], '')
            return [store.get_uri(name) for name in store.list_objects(prefix) if '/' not in name[len(prefix):]]
        if not os.path.lexists(place):
            return []
        return [os.path.join(place, name) for name in os.listdir(place)]
    except Exception as error:  # every storage client has its own exceptions
        raise ValueError(f'{flag} {place} cannot be read ({one_line(error)}); check its name, and your permissions or '
                         'credentials') from None


def checkpoints_in(place: str, flag: str = '--save_folder') -> list[str]:
    """Those of `names_in` that are Composer's checkpoints, by batch, the oldest first."""
    found = []
    for name in names_in(place, flag):
        match = CHECKPOINT_NAME.fullmatch(os.path.basename(name))
        if match:
            epoch, batch = match.groups()
            found.append((int(batch), int(epoch), name))
    return [name for _, _, name in sorted(found)]


def newest_checkpoint(place: str, flag: str = '--save_folder') -> str | None:
    """Path or URI of the newest whole checkpoint of a folder or an object store, for all ranks; None if there is none.

    A newer one that was not written to its end is passed over with a line, and stays. In a store all are whole.

    Raises ValueError on all ranks, which names `flag`, if the place or the newest checkpoint cannot be read, or nodes
    see different ones: each would load its own, or wait for the others.
    """
    if '://' in place:
        return on_rank_0(partial(newest_whole, place, flag))
    seen = on_every_rank(partial(newest_whole, place, flag))
    for rank, checkpoint in enumerate(seen):
        if checkpoint != seen[0]:
            raise ValueError(f'{flag} {place} is not the same folder on every node: its newest checkpoint is '
                             f'{seen[0] or "none"} on rank 0, and {checkpoint or "none"} on rank {rank}; give one that '
                             'all nodes share, or an object store')
    return seen[0]


def newest_whole(place: str, flag: str) -> str | None:
    """The same, as this rank sees it."""
    for name in reversed(checkpoints_in(place, flag)):
        try:
            if '://' in name or is_whole(name):
                return name
        except OSError as error:
            raise ValueError(f'{flag} {place}: {name} cannot be read ({error.strerror}); try again when its file '
                             'system has recovered, or move it away') from None
        if dist.get_local_rank() == 0:
            print(f'warning: {name} was not written to its end, and is passed over', file=sys.stderr)
    return None


def is_whole(path: str) -> bool:
    """Whether a file is an archive with its end. Raises OSError if it cannot be read."""
    with open(path, 'rb') as file:
        file.read(1)  # zipfile takes a disk's refusal for an archive without an end
        return zipfile.is_zipfile(file)


@contextlib.contextmanager
def tensors_alone_are_loaded(name: str | os.PathLike | None) -> Iterator[None]:
    """A context in which torch.load runs no code that a file holds, also where Composer 0.32 asks it to.

    Raises ValueError if the checkpoint `name`, which is loaded in it, holds more than tensors and plain types.
    """
    flag = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
    before = os.environ.get(flag)
    os.environ[flag] = '1'
    try:
        with safe_globals(PLAIN_TYPES):
            yield
    except pickle.UnpicklingError:
        raise ValueError(f'{name} holds more than tensors and plain types, or none, and could run code; do not use it'
                         ) from None
    finally:
        if before is None:
            del os.environ[flag]
        else:
            os.environ[flag] = before


def load_checkpoint(path: str | os.PathLike, mmap: bool = False) -> dict:
    """A checkpoint, on the CPU. Raises ValueError if it holds more than tensors and plain types, such as code.

    With `mmap` a tensor is read from the file when it is used, once for all ranks of a host.
    """
    with tensors_alone_are_loaded(path):
        return torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)


class WholeCheckpoints(CheckpointSaver):
    """Composer's saver, which leaves either a whole checkpoint or none, also where the run is killed or a disk fills.

    Composer 0.32 writes in place, into the name that a resume looks for. It forgets what the run that is resumed has
    saved, so that this never makes room, and ends the run where a checkpoint that it would remove is gone.

    Args:
        folder: or object store.
        save_interval: a time.
        to_keep: the newest that stay in a folder, of those that this run, or the one that it resumes, has written; None
            keeps all. A store keeps all.
    """

    def __init__(self, folder: str, save_interval: str, to_keep: int | None = None):
        remote_file_name = None
        to_keep = to_keep or -1
        if '://' in folder:
            remote_file_name = os.path.join(parse_uri(folder)[2], NAME)
            to_keep = 0  # of the copies on this machine
        super().__init__(folder, NAME, remote_file_name, latest_remote_file_name=None, save_interval=save_interval,
                         overwrite=True,  # files newer than the one resumed from, which a killed run left
                         num_checkpoints_to_keep=to_keep,
                         ignore_keys=leave_out)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over those of the run that is resumed, by their names: its folder may have another name now."""
        super().load_state_dict(state)
        paths = [os.path.join(self.folder, os.path.basename(path)) for path in self.all_saved_checkpoints_to_timestamp]
        self.saved_checkpoints = [path for path in paths if os.path.exists(path)]
        # at an epoch's end Composer would save the same batch again, under the name of the next epoch
        self.last_checkpoint_batch = max(saved.batch for saved in self.all_saved_checkpoints_to_timestamp.values())

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        write_in_place = composer_checkpoint._write_checkpoint_file
        composer_checkpoint._write_checkpoint_file = write_whole
        try:
            super()._save_checkpoint(state, logger)
        finally:
            composer_checkpoint._write_checkpoint_file = write_in_place

    def _upload_checkpoint(self, *arguments, **named) -> None:
        """The process that this starts keeps signals blocked: a terminal and a cluster send them to it as well."""
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            super()._upload_checkpoint(*arguments, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)

    def _rotate_checkpoints(self, sharding_enabled: bool = False) -> None:
        while len(self.saved_checkpoints) > self.num_checkpoints_to_keep:
            Path(self.saved_checkpoints.pop(0)).unlink(missing_ok=True)


def leave_out(state_dict: dict[str, Any]) -> None:
    """Take out of what Composer saves what a resume has no use for."""
    del state_dict['rng']  # Safeguard seeds every batch
    if not any(state_dict['state']['scaler'].values()):  # as on a CPU; on a GPU a GradScaler refuses to load none
        del state_dict['state']['scaler']


def write_whole(state_dict: dict[str, Any], filename: str) -> None:
    """Save what Composer saves, under its name once it is on the disk."""
    with written_whole(filename) as file:
        torch.save(state_dict, file)
