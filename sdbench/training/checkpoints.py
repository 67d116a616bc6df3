"""Checkpoints as Composer writes them: saved whole, found again, and loaded without running code."""
import contextlib
import datetime
import os
import pickle
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import Callback
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from numpy._core import multiarray as np_multiarray
from torch.serialization import safe_globals
from torch.torch_version import TorchVersion
from tqdm import tqdm

from sdbench.errors import DataError, UserError, disk_is_full, one_line
from sdbench.files import atomic_write, locked
from sdbench.flags.times import is_due
from sdbench.models.names import use_installed_names
from sdbench.stores import addresses_in, download, upload
from sdbench.training.compatibility import Mismatch
from sdbench.training.ranks import on_every_rank, on_rank_0

LATEST = 'latest-rank0.pt'
FILE_NAME = 'ep{epoch}-ba{batch}-rank0.pt'  # as Composer calls it
FILE_NAME_PATTERN = re.compile(r'ep([0-9]+)-ba([0-9]+)-rank0\.pt')  # best-ep1-ba9-rank0.pt is the user's
UNFINISHED = re.compile(r'\.ep[0-9]+-ba[0-9]+-rank0\.pt\.([0-9a-f]+\.)?unfinished')  # what `atomic_write` can leave
LOCK_FILE = '.lock'  # in a --save_folder
RUN_NAME = 'run-name.txt'  # in a --save_folder: the name of the training, for people; no program reads it
TRIAL = '.credentials_validated_successfully'  # in a --save_folder of a store, as Composer calls what it tries
RECORD = 'record.json'  # in a --save_folder: the record of the training, once it is over
SECONDS_FOR_LOCK = 10  # that another run has to let go of it, as one that is ending
PLAIN_TYPES = [  # that Composer's checkpoints hold, apart from tensors and Python's own types
    datetime.timedelta, TorchVersion,
    # the state of NumPy's random generator, of which Composer's own saver keeps an array of uint32
    np.ndarray, np.dtype, np.dtypes.UInt32DType, np_multiarray._reconstruct,
    (np_multiarray._reconstruct, 'numpy.core.multiarray._reconstruct'),  # as NumPy 1 calls it
]


# A folder of checkpoints, or an object store

@contextlib.contextmanager
def locked_save_folder(folder: str | None, autoresume: bool) -> Iterator[None]:
    """Hold the lock of --save_folder on rank 0, so that no other run saves in it. Object stores have no locks.

    Raises UserError on all ranks if another run does, or if there are files that this one does not resume.
    """
    with contextlib.ExitStack() as at_the_end:
        if folder is not None:
            on_rank_0(partial(lock_save_folder, folder, autoresume, at_the_end))
        yield


def lock_save_folder(folder: str, autoresume: bool, at_the_end: contextlib.ExitStack) -> None:
    """Lock a --save_folder until `at_the_end` gives it back. Raises UserError as `locked_save_folder` does."""
    require_own(folder, autoresume)
    if '://' in folder:
        return
    at_the_end.enter_context(locked(Path(folder, LOCK_FILE), f'--save_folder {folder}', SECONDS_FOR_LOCK))
    require_own(folder, autoresume)  # the run that had the lock may have saved

    # under the lock an unfinished checkpoint is that of a run that was killed while it saved
    for name in os.listdir(folder):
        if UNFINISHED.fullmatch(name):
            os.remove(os.path.join(folder, name))


def require_own(folder: str, autoresume: bool) -> None:
    """Raise UserError if a --save_folder holds what this run does not go on with."""
    others = []
    for path in names_in(folder):
        name = os.path.basename(path)
        if not name.startswith('.') and name not in (RUN_NAME, RECORD):
            others.append(path)
    if others and not autoresume:
        raise UserError(f'--save_folder {folder} already holds files; give a new one, or --autoresume to go on from '
                        'there')
    if any(not os.path.isdir(path) for path in others) and not checkpoints_in(folder):
        raise UserError(f'--save_folder {folder} holds files and no checkpoint of benchmark.py; give a new one')


def names_in(folder: str, flag: str = '--save_folder') -> list[str]:
    """List the paths or URIs of what lies directly in a folder or an object store; none where it is not there.

    Raises OSError, which names `flag` or the folder, if they cannot be listed.
    """
    if '://' in folder:
        return addresses_in(folder, f'{flag} {folder}')
    if not os.path.lexists(folder):
        return []
    return [os.path.join(folder, name) for name in os.listdir(folder)]


def read_beside(folder: str, name: str) -> str | None:
    """Read a text that lies beside the checkpoints of a folder or a store; None if it is not there.

    Raises OSError or UserError if it cannot be read.
    """
    path = os.path.join(folder, name)
    if path not in names_in(folder):
        return None
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, name)
        download(path, str(copy), f'--save_folder {folder}')
        return copy.read_text(encoding='utf-8')


def write_beside(folder: str, name: str, text: str) -> None:
    """Write a text beside the checkpoints of a folder or a store, whole or not at all. Raises OSError if that fails."""
    path = os.path.join(folder, name)
    if '://' not in folder:
        with atomic_write(path) as file:
            file.write(text.encode())
        return
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, name)
        copy.write_text(text, encoding='utf-8')
        upload(str(copy), path, f'--save_folder {folder}')


def checkpoints_in(folder: str, flag: str = '--save_folder') -> list[str]:
    """List the paths or URIs of Composer's checkpoints in a folder or a store, by batch, the oldest first.

    Raises OSError, which names `flag` or the folder, if it cannot be listed.
    """
    found = []
    for name in names_in(folder, flag):
        match = FILE_NAME_PATTERN.fullmatch(os.path.basename(name))
        if match:
            epoch, batch = match.groups()
            found.append((int(batch), int(epoch), name))
    return [name for _, _, name in sorted(found)]


def newest_checkpoint(folder: str, flag: str = '--save_folder') -> str | None:
    """Return the path or URI of the newest whole checkpoint of a folder or store, for all ranks; None if there is none.

    A newer one that was not written to its end is passed over with a line, and stays. In a store all are whole.

    Raises UserError on all ranks, which names `flag`, if the newest checkpoint cannot be read, or nodes see different
    ones: each would load its own, or wait for the others. Raises OSError or DataError if the folder cannot be listed.
    """
    if '://' in folder:
        return on_rank_0(partial(newest_whole, folder, flag))
    seen = on_every_rank(partial(newest_whole, folder, flag))
    for rank, checkpoint in enumerate(seen):
        if checkpoint != seen[0]:
            raise UserError(f'{flag} {folder} is not the same folder on every node: its newest checkpoint is '
                            f'{seen[0] or "none"} on rank 0, and {checkpoint or "none"} on rank {rank}; give one that '
                            'all nodes share, or an object store')
    return seen[0]


def newest_whole(folder: str, flag: str) -> str | None:
    """Return the newest whole checkpoint that this rank sees.

    Raises UserError if one cannot be read, and OSError if the folder cannot be listed.
    """
    for name in reversed(checkpoints_in(folder, flag)):
        # A copy that was cut short is passed over, and one that a disk refuses is not: training from an older one would
        # undo days for a fault of a minute.
        try:
            if '://' in name:
                return name
            with open(name, 'rb') as file:
                file.read(1)  # zipfile takes a disk's refusal for an archive without an end
                if zipfile.is_zipfile(file):
                    return name
        except OSError as error:
            raise UserError(f'{flag} {folder}: {name} cannot be read ({error.strerror}); try again when its file '
                            'system has recovered, or move it away') from None
        if dist.get_local_rank() == 0:
            print(f'warning: {name} was not written to its end, and is passed over', file=sys.stderr)
    return None


# Loading one

def load_checkpoint(path: str | os.PathLike, map_location: str = 'cpu', label: str | None = None) -> dict:
    """Load a checkpoint without running code that the file may hold.

    The file is mapped, so that a tensor is read when it is used, and the ranks of a host share it. The text encoder's
    tensors have the names of the installed version of transformers, whichever has saved them. `label` is its name in
    error messages, where `path` is not what the user knows.

    Raises UserError if it holds more than tensors and plain types, and KeyError or TypeError if it holds no model.
    """
    try:
        with safe_globals(PLAIN_TYPES):
            checkpoint = torch.load(path, map_location=map_location, weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise UserError(f'{label or path} holds more than tensors and plain types, or none, and could run code; do '
                        'not use it') from None
    use_installed_names(checkpoint['state']['model'])
    return checkpoint


@contextlib.contextmanager
def fetched(name: str | None, flag: str) -> Iterator[str | None]:
    """Give the path of a checkpoint, or None; for one in a store that of a copy, one on each node.

    What is mapped of the copy stays readable when it has gone with the context.

    Raises UserError on all ranks if it cannot be had.
    """
    if name is None or '://' not in name:
        yield name
        return

    # the first rank of a node fetches it for all
    with tempfile.TemporaryDirectory() as folder:
        first_of_node = dist.get_global_rank() - dist.get_local_rank()
        path = os.path.join(dist.all_gather_object(folder)[first_of_node], 'checkpoint.pt')

        def fetch() -> None:
            if dist.get_local_rank() == 0:
                download(name, path, f'{flag} {name}')
        on_every_rank(fetch)
        yield path
        dist.barrier()  # the other ranks of this node may still open it


def callback_state(state: dict, key: str) -> dict:
    """Return what the callback that has saved `key` keeps in the state of a checkpoint; empty if there is none."""
    for saved in dict(state.get('callbacks', ())).values():
        if key in saved:
            return saved
    return {}


class Resume(Callback):
    """Loads the checkpoint that a run resumes from, in the place of the Trainer's `load_path`.

    Composer 0.32's own loading would run code that a file holds. It also skips each tensor that only the checkpoint or
    only the model has, without a warning (strict=False).

    Args:
        folder: the --save_folder, for error messages.
        checkpoint: path or URI of the checkpoint, for error messages.
        path: path of the same checkpoint on this machine.
    """

    def __init__(self, folder: str, checkpoint: str, path: str):
        self.folder = folder
        self.checkpoint = checkpoint
        self.path = path

    def before_load(self, state: State, logger: Logger) -> None:
        """Load the whole state of the training.

        Raises UserError if the checkpoint is from another run or model. Other errors stay what they are.
        """
        checkpoint = load_checkpoint(self.path, label=self.checkpoint)
        try:
            state.load_state_dict(checkpoint['state'], logger, strict=True)
        except (RuntimeError, Mismatch) as error:
            is_mismatch = isinstance(error, Mismatch) or 'loading state_dict' in str(error)  # torch's, about tensors
            if not is_mismatch:
                raise
            raise UserError(f'--save_folder {self.folder}: {self.checkpoint} does not fit this run '
                            f'({one_line(error, 200)}); resume it as it was made, or give a new --save_folder; to '
                            f'start there from these weights, add --load_weights {self.checkpoint}') from None


# Saving them

class AtomicCheckpointSaver(Callback):
    """Saves the state of a training as Composer does, and is made for runs of days.

    A checkpoint is whole or not there, even if the run is killed or a disk fills, and it replaces a file of the same
    name. Composer's own saver (0.32) writes into the file that a resume looks for, ends the run if the user has removed
    an old checkpoint or an upload has failed, and forgets the checkpoints of the run that is resumed.

    An upload that fails is a warning, and the next checkpoint takes its place. The last one is sent again at the end of
    the training. If that fails too, it stays on this machine and the run ends with an error.

    Args:
        folder: folder or object store for the checkpoints. In a folder, `latest-rank0.pt` is a link to the newest.
        save_interval: time between checkpoints, in batches. There is one more at the end of the training.
        to_keep: number of checkpoints that stay in a folder, the newest that this run and the run that it resumes have
            written; None keeps all. A store keeps all.
    """

    def __init__(self, folder: str, save_interval: str, to_keep: int | None = None):
        self.address = folder
        self.is_store = '://' in folder
        self.folder = tempfile.mkdtemp() if self.is_store else folder  # where files are written, on this machine
        self.save_interval = save_interval
        self.to_keep = to_keep
        self.saved: list[str] = []  # names of this training's checkpoints, the oldest first
        self._sender = ThreadPoolExecutor(1)
        self._sending: Future | None = None  # of the newest checkpoint of a store, as `_send` returns

    def state_dict(self) -> dict[str, Any]:
        return {'saved': self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the checkpoints of the run that is resumed, so that they make room for newer ones."""
        if 'saved' in state:
            self.saved = [*state['saved']]
        else:  # of an older version, with the paths that they had then
            self.saved = [os.path.basename(path) for path, _ in state['all_saved_checkpoints_to_timestamp']]

    def init(self, state: State, logger: Logger) -> None:
        """Make the folder, and try whether a store can be written to. Raises OSError on all ranks if it cannot."""
        os.makedirs(self.folder, exist_ok=True)

        def try_to_write() -> None:
            with tempfile.NamedTemporaryFile() as file:
                upload(file.name, f'{self.address.rstrip("/")}/{TRIAL}', f'--save_folder {self.address}')
        if self.is_store:
            on_rank_0(try_to_write)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save a checkpoint if it is time for one, or if the training ends with this batch."""
        batch = state.timestamp.batch.value
        if not is_due(batch, self.save_interval, state.max_duration.to_timestring()):
            return
        name = FILE_NAME.format(epoch=state.timestamp.epoch.value, batch=batch)
        self.saved.append(name)  # first, so that a checkpoint counts itself
        content = state.state_dict()
        if not any(content['scaler'].values()):  # as on a CPU: on a GPU a GradScaler refuses to load an empty state
            del content['scaler']
        if dist.get_global_rank() == 0:
            self._write(name, content)
        dist.barrier()  # the other ranks wait here, and not in the next batch, which is measured

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Write a checkpoint, and send it to the store or make room for it. Raises DataError if the disk is full."""
        path = os.path.join(self.folder, name)
        try:
            with atomic_write(path) as file:
                torch.save({'state': content}, file)  # as Composer's Trainer(load_path) takes it
        except Exception as error:
            if not disk_is_full(error):
                raise
            raise DataError(f'a disk is full: for --save_folder {self.address} a checkpoint is written to '
                            f'{self.folder}; free some of it, keep less with --save_num_checkpoints_to_keep or, on '
                            'the way to a store, set TMPDIR to a folder with more room') from None
        if self.is_store:
            unsent = self._unsent()
            if unsent is not None:
                Path(unsent).unlink(missing_ok=True)  # this newer one takes its place
            self._sending = self._sender.submit(self._send, path)
            return

        # A file under the name of the link is the user's copy, and stays.
        link = os.path.join(self.folder, LATEST)
        if os.path.islink(link) or not os.path.exists(link):
            Path(link).unlink(missing_ok=True)
            os.symlink(name, link)

        # Only the checkpoints that the user has left here count.
        self.saved = [name for name in self.saved if os.path.exists(os.path.join(self.folder, name))]
        while self.to_keep is not None and len(self.saved) > self.to_keep:
            os.remove(os.path.join(self.folder, self.saved.pop(0)))

    def _send(self, path: str) -> str | None:
        """Send a file to the store, and remove it here; where that fails, warn and return its path.

        A thread calls this while the training goes on, and leaves the sending to a process: a thread would compete with
        the training for Python's lock (GIL). While 900 MB were sent on two cores, the tiny model's training lost 3.4 to
        3.9 s to a thread, and 0.6 to 1.6 s to a process. The `upload_file_async` of Composer's RemoteUploader
        copies the file first, while the training waits, and the next batch ends a run whose upload has failed.
        """
        name = os.path.basename(path)
        command = [sys.executable, '-m', 'sdbench.stores', path, f'{self.address.rstrip("/")}/{name}']
        # It works where the run does: credentials may be files that are named from there. Its session is its own, since
        # the signals that end a run go to all processes of its group.
        environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
        sent = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        if sent.returncode == 0:
            os.remove(path)
            return None
        why = sent.stderr.strip().rpartition('\n')[2]
        tqdm.write(f'warning: {name} could not be sent to --save_folder {self.address} ({why}); it is tried again at '
                   'the end, or the next one takes its place', file=sys.stderr)
        return path

    def _unsent(self) -> str | None:
        """Wait for the newest checkpoint on its way to a store; return its path if it has not come there."""
        return self._sending and self._sending.result()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait for the last checkpoint, and send it once more if that failed.

        Raises DataError if it fails again; then the file stays on this machine.
        """
        unsent = self._unsent()
        if unsent is not None and self._send(unsent) is not None:
            raise DataError(f'the last checkpoint could not be sent to --save_folder {self.address}: it is {unsent}')
