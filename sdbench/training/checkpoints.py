"""Save checkpoints in Composer's format, find the newest one, and load it without running code from the file."""
import contextlib
import datetime
import io
import os
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from numpy._core import multiarray as np_multiarray
from torch.serialization import safe_globals
from torch.torch_version import TorchVersion
from tqdm import tqdm

from sdbench.errors import DataError, UserError, disk_is_full, one_line
from sdbench.files import atomic_write, is_url, locked
from sdbench.models.names import use_installed_names
from sdbench.stores import addresses_in, download, upload
from sdbench.stores.addresses import QUICK
from sdbench.training.ranks import on_every_rank, on_rank_0
from sdbench.training.resuming import Mismatch, kept_in, require_same_flags

LATEST = 'latest-rank0.pt'
FILE_NAME = 'ep{epoch}-ba{batch}-rank0.pt'  # as Composer calls it
FILE_NAME_PATTERN = re.compile(r'ep([0-9]+)-ba([0-9]+)-rank0\.pt')  # of the whole name: best-ep1-... is a user's
UNFINISHED = re.compile(r'\.ep[0-9]+-ba[0-9]+-rank0\.pt\.([0-9a-f]+\.)?unfinished')  # files of a killed `atomic_write`
# Other files in a --save_folder:
LOCK_FILE = '.lock'
WRITE_TEST = '.credentials_validated_successfully'  # in a store, to test write access; Composer uses the same name
RECORD = 'record-ba{batch}.json'  # the record of the training, written when it is complete after that many batches
SECONDS_FOR_LOCK = 10  # to wait for another run that is about to end
PLAIN_TYPES = [  # what Composer's checkpoints hold besides tensors and Python's built-in types
    datetime.timedelta, TorchVersion,
    # Composer's own saver also keeps the state of NumPy's random generator, an array of uint32.
    np.ndarray, np.dtype, np.dtypes.UInt32DType, np_multiarray._reconstruct,
    (np_multiarray._reconstruct, 'numpy.core.multiarray._reconstruct'),  # the name in NumPy 1
]


# Find checkpoints in a folder or an object store

@contextlib.contextmanager
def locked_save_folder(folder: str | None, autoresume: bool) -> Iterator[None]:
    """Hold the lock of --save_folder on rank 0, which keeps other runs from saving in it. Object stores have no locks.

    Raises UserError on all ranks if another run holds the lock, or if the folder has files that this run does not
    resume from.
    """
    def lock() -> None:
        refuse_other_files(folder, autoresume)
        if is_url(folder):
            return
        at_the_end.enter_context(locked(Path(folder, LOCK_FILE), f'--save_folder {folder}', SECONDS_FOR_LOCK))
        refuse_other_files(folder, autoresume)  # again, because the run that held the lock before may have saved

        # Remove the unfinished checkpoints of runs that were killed. Because of the lock no process writes here now.
        for name in os.listdir(folder):
            if UNFINISHED.fullmatch(name):
                os.remove(os.path.join(folder, name))

    with contextlib.ExitStack() as at_the_end:
        if folder is not None:
            on_rank_0(lock)
        yield


def refuse_other_files(folder: str, autoresume: bool) -> None:
    """Raise UserError if a --save_folder holds files that are not from the training that this run resumes."""
    others = [path for path in paths_in(folder) if not os.path.basename(path).startswith(('.', 'record', 'run-name'))]
    if others and not autoresume:
        raise UserError(f'--save_folder {folder} already holds files; give a new one, or --autoresume to go on from '
                        'there')
    if any(not os.path.isdir(path) for path in others) and not checkpoints_in(folder):
        raise UserError(f'--save_folder {folder} holds files and no checkpoint of benchmark.py; give a new one')


def paths_in(folder: str, flag: str = '--save_folder') -> list[str]:
    """List the paths or URIs in a folder or an object store, without subfolders; an empty list if it does not exist."""
    if is_url(folder):
        return addresses_in(folder, f'{flag} {folder}')
    if not os.path.lexists(folder):
        return []
    return [os.path.join(folder, name) for name in os.listdir(folder)]


def checkpoints_in(folder: str, flag: str = '--save_folder') -> list[str]:
    """List the paths or URIs of the checkpoints in a folder or a store, sorted by batch."""
    found = []
    for name in paths_in(folder, flag):
        match = FILE_NAME_PATTERN.fullmatch(os.path.basename(name))
        if match:
            epoch, batch = match.groups()
            found.append((int(batch), int(epoch), name))
    return [name for _, _, name in sorted(found)]


def newest_checkpoint(folder: str, flag: str = '--save_folder') -> str | None:
    """Return the path or URI of the newest complete checkpoint in a folder or store; None if there is none.

    All ranks call this together and get the same answer. A truncated file is skipped with a warning, and is not
    deleted. In a store every file is complete.

    On all ranks raises a UserError that names `flag`, if the newest checkpoint cannot be read or if the nodes see
    different files under this path. Raises OSError or DataError if the folder cannot be listed.
    """
    if is_url(folder):
        saved = on_rank_0(partial(checkpoints_in, folder, flag))
        return saved[-1] if saved else None
    seen = on_every_rank(partial(newest_complete, folder, flag))
    for rank, checkpoint in enumerate(seen):
        if checkpoint != seen[0]:
            raise UserError(f'{flag} {folder} is not the same folder on every node: its newest checkpoint is '
                            f'{seen[0] or "none"} on rank 0, and {checkpoint or "none"} on rank {rank}; give a folder '
                            'that all nodes share, or an object store')
    return seen[0]


def newest_complete(folder: str, flag: str) -> str | None:
    """Return the newest complete checkpoint that this rank sees in a folder. Raises UserError if one is unreadable."""
    for name in reversed(checkpoints_in(folder, flag)):
        # Skip a truncated copy. A file that the disk cannot read now is different: resuming from an older checkpoint
        # would throw away days of training because of an error that may last a minute.
        try:
            with open(name, 'rb') as file:
                file.read(1)  # zipfile would report a read error as a truncated archive
                if zipfile.is_zipfile(file):
                    return name
        except OSError as error:
            raise UserError(f'{flag} {folder}: {name} cannot be read ({error.strerror}); try again when its file '
                            'system has recovered, or move it away') from None
        if dist.get_local_rank() == 0:
            print(f'warning: {name} is truncated, and is skipped', file=sys.stderr)
    return None


# Load a checkpoint

def load_checkpoint(path: str | os.PathLike, label: str | None = None) -> dict:
    """Load a checkpoint to the CPU, without running code that the file may hold.

    The file is memory-mapped: a tensor is read when it is used, and the ranks of a host share the pages. The tensors of
    the text encoder get the names of the installed version of transformers, whichever version has saved them. `label`
    is the name of the file in error messages, if the user knows it by another name than `path`.

    Raises UserError if it holds more than tensors and plain types, and KeyError or TypeError if it holds no model.
    """
    try:
        with safe_globals(PLAIN_TYPES):
            checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise UserError(f'{label or path} is not a checkpoint with tensors and plain types alone, and could run code; '
                        'do not use it') from None
    use_installed_names(checkpoint['state']['model'])
    return checkpoint


@contextlib.contextmanager
def local_copy(name: str | None, flag: str) -> Iterator[str | None]:
    """Give the local path of a checkpoint, or None if `name` is None. A URI is downloaded once per node.

    A downloaded copy is deleted when the context ends. Tensors that are mapped to it can still be read.

    Raises UserError on all ranks if the checkpoint cannot be downloaded.
    """
    if name is None or not is_url(name):
        yield name
        return

    # The first rank of each node downloads the file, and tells the other ranks of the node where it is.
    with tempfile.TemporaryDirectory() as folder:
        first_of_node = dist.get_global_rank() - dist.get_local_rank()
        path = os.path.join(dist.all_gather_object(folder)[first_of_node], 'checkpoint.pt')

        def fetch() -> None:
            if dist.get_local_rank() == 0:
                download(name, path, f'{flag} {name}')
        on_every_rank(fetch)
        yield path
        dist.barrier()  # other ranks of this node may not have opened it yet


def load_training(state: State, logger: Logger, path: str, label: str, folder: str, flags: dict) -> None:
    """Load the whole state of a training from a checkpoint.

    It replaces the `load_path` of Composer's Trainer, which would run code from the file, and would ignore without a
    warning tensors that exist only in the checkpoint or only in the model (strict=False).

    `path` is the checkpoint on this machine, `label` and `folder` are its path or URI and the --save_folder for error
    messages, and `flags` are those of this run, from `facts_to_keep`.

    Raises UserError if the checkpoint is from another run or model.
    """
    checkpoint = load_checkpoint(path, label=label)['state']
    try:
        require_same_flags(kept_in(checkpoint).get('flags', flags), flags)
        state.model.load_state_dict(checkpoint['model'])
    except (Mismatch, RuntimeError) as error:  # torch lists missing and unexpected keys, and different shapes
        raise UserError(f'--save_folder {folder}: {label} does not fit this run ({one_line(error, 200)}); resume it '
                        'as it was made, or give a new --save_folder; to start there from these weights, give '
                        f'--load_weights {label}') from None
    del checkpoint['model']
    with warnings.catch_warnings():  # callbacks had other names in earlier versions; `kept_in` has read their states
        warnings.filterwarnings('ignore', '.* is not in the state_dict')
        state.load_state_dict(checkpoint, logger)


# Save checkpoints

class CheckpointSaver:
    """Saves checkpoints that Composer can load, and is robust enough for runs that take days.

    A checkpoint appears under its name only when it is complete, even if the run is killed or the disk fills up. It
    replaces a file with the same name. Composer's own saver (0.32) writes directly into the file that a resume looks
    for, ends the run if the user has removed an old checkpoint or an upload has failed, and forgets which checkpoints
    the resumed run has written.

    If an upload to a store fails, the run prints a warning, and the next checkpoint replaces the failed one. The last
    checkpoint is sent again at the end of the training. If that fails too, the run ends with an error that names the
    file on this machine.

    Args:
        folder: folder or object store for the checkpoints. In a folder, `latest-rank0.pt` is a link to the newest.
        to_keep: number of checkpoints to keep in a folder. Older ones are removed if this run, or the run that it
            resumes, has written them. None keeps all, and a store always keeps all.
        saved: names of the checkpoints that the resumed run has written, the oldest first.

    Raises OSError on all ranks if the folder or the store cannot be written to.
    """

    def __init__(self, folder: str, to_keep: int | None = None, saved: Sequence[str] = ()):
        self.address = folder
        self.is_store = is_url(folder)
        self.folder = tempfile.mkdtemp() if self.is_store else folder  # where files are written, on this machine
        self.to_keep = to_keep
        self.saved = [*saved]  # names of this training's checkpoints
        self._has_links = True  # until the file system has refused one
        self._sending: tuple[str, subprocess.Popen] | None = None  # the newest checkpoint, and its upload
        os.makedirs(self.folder, exist_ok=True)

        def try_to_write() -> None:
            upload(io.BytesIO(), f'{folder.rstrip("/")}/{WRITE_TEST}', f'--save_folder {folder}', QUICK)
        if self.is_store:
            on_rank_0(try_to_write)

    def save(self, state: State) -> None:
        """Save a checkpoint. All ranks call this together. Raises DataError if the disk is full."""
        # Make room first: after a full disk, the user resumes with a smaller --save_num_checkpoints_to_keep.
        if dist.get_global_rank() == 0:
            self._remove_oldest()
        name = FILE_NAME.format(epoch=state.timestamp.epoch.value, batch=state.timestamp.batch.value)
        self.saved.append(name)  # before state_dict(), because the saved state must list this file too
        content = state.state_dict()
        if not any(content['scaler'].values()):  # on a CPU it is empty, and a GradScaler on a GPU refuses to load that
            del content['scaler']
        if dist.get_global_rank() == 0:
            self._write(name, content)
        dist.barrier()  # the other ranks wait here and not in the next batch, which may be measured

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Write a checkpoint, and send it to the store or remove the oldest ones. Raises DataError on a full disk."""
        path = os.path.join(self.folder, name)
        try:
            with atomic_write(path) as file:
                torch.save({'state': content}, file)  # the layout that Composer's Trainer(load_path) reads
        except Exception as error:
            if not disk_is_full(error):
                raise
            raise DataError(f'a disk is full: for --save_folder {self.address} a checkpoint is written to '
                            f'{self.folder}; free some of it, keep less with --save_num_checkpoints_to_keep or, on '
                            'the way to a store, set TMPDIR to a folder with more room') from None

        # In a store, send the file once the one before it has arrived or has failed.
        if self.is_store:
            unsent, reason = self._wait_for_upload()
            if unsent:
                os.remove(unsent)
                tqdm.write(f'warning: {os.path.basename(unsent)} could not be sent to --save_folder {self.address} '
                           f'({reason}); {name} replaces it', file=sys.stderr)
            self._start_upload(path)
            return

        # In a folder, let the link point to the new file. A regular file with that name is the user's, and stays. Some
        # file systems have no links (exFAT, Google Drive, some network shares), and nothing here needs one.
        link = os.path.join(self.folder, LATEST)
        try:
            if self._has_links and (os.path.islink(link) or not os.path.exists(link)):
                Path(link).unlink(missing_ok=True)
                os.symlink(name, link)
        except OSError as error:
            self._has_links = False
            tqdm.write(f'warning: {link} cannot be a link to the newest checkpoint ({error.strerror}); the '
                       'checkpoints themselves are complete', file=sys.stderr)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Remove the oldest checkpoints of this training in a folder, and forget what the user has removed or moved."""
        if self.is_store:
            return
        self.saved = [name for name in self.saved if os.path.exists(os.path.join(self.folder, name))]
        while self.to_keep is not None and len(self.saved) > self.to_keep:
            os.remove(os.path.join(self.folder, self.saved.pop(0)))

    def _start_upload(self, path: str) -> None:
        """Start to send a file to the store, in a process.

        An upload in a thread competes with the training for Python's global lock (GIL): while 900 MB were sent on two
        cores, the training of the tiny model lost 3.4 to 3.9 s to a thread, and 0.6 to 1.6 s to a process. Composer's
        RemoteUploader copies the file first while the training waits, and ends a run whose upload has failed.
        """
        command = [sys.executable, '-m', 'sdbench.stores', path, f'{self.address.rstrip("/")}/{os.path.basename(path)}']
        # The process runs in the working directory of the training, because credentials may be files with relative
        # paths. It has its own session, because a signal that ends the run goes to every process in the run's session.
        environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
        self._sending = path, subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True,
                                               start_new_session=True)

    def _wait_for_upload(self) -> tuple[str | None, str]:
        """Wait until the upload in progress has ended. Return the path of its file and the reason if it has failed.

        A file that has arrived is removed here.
        """
        if self._sending is None:
            return None, ''
        path, process = self._sending
        self._sending = None
        _, said = process.communicate()
        if process.returncode != 0:
            return path, said.strip().rpartition('\n')[2]
        os.remove(path)
        return None, ''

    def finish(self) -> None:
        """Wait for the upload of the last checkpoint, and send it once more if that has failed.

        Raises DataError if it fails again. The file then stays on this machine.
        """
        unsent, reason = self._wait_for_upload()
        if unsent:
            self._start_upload(unsent)
            unsent, reason = self._wait_for_upload()
        if unsent:
            raise DataError(f'the last checkpoint could not be sent to --save_folder {self.address} ({reason}): it is '
                            f'{unsent}')

    def close(self) -> None:
        """Let an upload end after the run has failed, and name its file if it could not be sent."""
        unsent, reason = self._wait_for_upload()
        if unsent:
            tqdm.write(f'warning: the last checkpoint could not be sent to --save_folder {self.address} ({reason}): it '
                       f'is {unsent}', file=sys.stderr)
