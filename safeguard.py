"""What lets a run of days survive: an exact resume, whole checkpoints, signals that lose nothing, a finite loss."""
import datetime
import os
import pickle
import re
import signal
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from composer import Callback
from composer.core import State
from composer.utils import dist, maybe_create_object_store_from_uri
from composer.utils.file_helpers import parse_uri
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.torch_version import TorchVersion

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PLAIN_TYPES = [datetime.timedelta, TorchVersion]  # in Composer's checkpoints beside tensors and Python's own types


class NonFiniteLoss(Exception):
    """The loss of a batch is infinite or not a number."""


class Safeguard(Callback):
    """Makes each batch's noise depend on its number alone, stops what is not finite, and lets no signal cut an update.

    Composer restores the random state in the middle of an epoch only where it spins the loader itself, so every batch
    has a seed of its own, by run, batch and rank. Between a step's gradients and the end of its batch weights,
    optimizer and EMA change; a signal waits for that, so that at any other time the state is that of the last batch.

    Args:
        seed: of the run.
        on_nan: 'stop' ends the run at a loss that is not finite, 'skip' leaves that step out.
        flags: those that must be the same when the run resumes, with their values.
    """

    def __init__(self, seed: int, on_nan: str = 'stop', flags: dict | None = None):
        self.seed, self.on_nan, self.flags = seed, on_nan, flags or {}
        self.skipped_batches = 0
        self.interrupted = False
        self.first_batch = 0  # of this process: more than 0 where it resumed
        self._updating = False
        self._previous: dict = {}  # handlers of SIGNALS before this one's

    def fit_start(self, state, logger) -> None:
        self._previous = {number: signal.signal(number, self._interrupt) for number in SIGNALS}
        self.first_batch = state.timestamp.batch.value
        dataset = state.train_dataloader.dataset
        if self.first_batch and hasattr(dataset, 'load_state_dict'):
            # at an epoch's end Streaming would save the epoch that is over, and repeat its order
            samples = state.timestamp.sample_in_epoch.value
            dataset.load_state_dict(dataset.state_dict(samples, True) | {'epoch': state.timestamp.epoch.value})

    def batch_start(self, state, logger) -> None:
        seeds = np.random.SeedSequence((self.seed, state.timestamp.batch.value, dist.get_global_rank()))
        torch.manual_seed(int(seeds.generate_state(1)[0]))

    def before_train_batch(self, state, logger) -> None:
        self._loss = 0.0

    def after_loss(self, state, logger) -> None:
        self._loss = self._loss + state.loss.detach()

    def after_train_batch(self, state, logger) -> None:
        finite = torch.isfinite(self._loss).int()
        dist.all_reduce(finite, 'MIN')  # the ranks' gradients are one: all step, or none
        if not finite.item():
            if self.on_nan == 'stop':
                raise NonFiniteLoss(f'the loss of batch {state.timestamp.batch.value + 1} is not finite, at microbatch '
                                    f'size {state.device_train_microbatch_size}; --on_nan skip leaves such steps out')
            self.skipped_batches += 1
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)  # without gradients the step changes nothing
        self._updating = True

    def batch_end(self, state, logger) -> None:
        self._updating = False
        if self.interrupted:
            raise SystemExit

    def state_dict(self) -> dict:
        return {'flags': self.flags}

    def load_state_dict(self, state: dict) -> None:
        for flag, value in state['flags'].items():
            if self.flags.get(flag) != value:
                raise ValueError(f'--{flag} was {value}, and is {self.flags.get(flag)} now')

    def release_signals(self) -> None:
        """Leave SIGNALS to whom they were left to before the run."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame) -> None:
        ignore_signals()  # a launcher sends another, and the record comes first
        self.interrupted = True
        if not self._updating:
            raise SystemExit


def ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_launcher() -> None:
    """SIGTERM for this process when the launcher that started it is gone, so that no rank runs on alone (Linux)."""
    if 'LOCAL_RANK' in os.environ and sys.platform == 'linux':
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def checkpoints(folder: str) -> list[str]:
    """Paths or URIs of Composer's checkpoints in a folder or an object store, by batch, the oldest first."""
    store = maybe_create_object_store_from_uri(folder)
    if store is None:
        names = [str(path) for path in Path(folder).glob('*.pt') if not path.is_symlink()]
    else:
        names = [store.get_uri(name) for name in store.list_objects(parse_uri(folder)[2].rstrip('/') + '/')]
    found = [(int(match[1]), name) for name in names if (match := re.search(r'/ep\d+-ba(\d+)-rank0\.pt$', name))]
    return [name for _, name in sorted(found)]


def newest_checkpoint(folder: str) -> str | None:
    """The newest whole checkpoint of a folder, or of an object store, then downloaded; None if there is none.

    Rank 0 looks, for all ranks. A checkpoint that a killed run had not finished is removed.

    Raises:
        ValueError: it cannot be trusted, or other nodes do not see it.
    """
    path = None
    if dist.get_global_rank() == 0:
        for path in reversed(checkpoints(folder)):
            if '://' in path or globals_of(path) is not None:  # an object store shows only what was sent whole
                break
            print(f'removing {path}, which a killed run left unfinished', file=sys.stderr)
            os.remove(path)
            path = None
    path = dist.all_gather_object(path)[0]
    if path and '://' in path:
        path = download(path)
    if path and not all(dist.all_gather_object(os.path.exists(path))):
        raise ValueError(f'--save_folder {folder} is not the same folder on every node; use a shared one or a store')
    plain = {f'{kind.__module__}.{kind.__qualname__}' for kind in PLAIN_TYPES}
    if path and (unsafe := globals_of(path) - plain):
        raise ValueError(f'--save_folder {folder}: {path} would run code when loaded ({min(unsafe)}); it is not of '
                         'this program, do not use it')
    return path


def globals_of(path: str) -> set[str] | None:
    """What a checkpoint would import when loaded; None if it was not written to its end, where its contents stand."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        return set(get_unsafe_globals_in_checkpoint(path))
    except pickle.UnpicklingError as error:  # instructions that torch does not write
        return {str(error)}


def download(uri: str) -> str:
    """Fetch a checkpoint on each node; returns where it lies there."""
    path = os.path.join(tempfile.gettempdir(), 'checkpoint', re.sub(r'\W+', '-', uri))
    if dist.get_local_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        maybe_create_object_store_from_uri(uri).download_object(parse_uri(uri)[2], path, overwrite=True)
    dist.barrier()
    return path


def load_checkpoint(path: str) -> dict:
    """A checkpoint of this program, on the CPU, without running code that someone may have put into it.

    Raises:
        pickle.UnpicklingError: it holds more than tensors and plain types.
    """
    with safe_globals(PLAIN_TYPES):
        return torch.load(path, map_location='cpu', weights_only=True)


def save_interrupted(state: State, folder: str) -> str:
    """Save the state as of the last whole batch, by rank 0 alone, since other ranks may be gone; returns where.

    Composer's own saver, whose names and contents these are, waits for all ranks.
    """
    name = f'ep{state.timestamp.epoch.value}-ba{state.timestamp.batch.value}-rank0.pt'
    store = maybe_create_object_store_from_uri(folder)
    with tempfile.TemporaryDirectory(dir=None if store else folder) as staging:
        path = os.path.join(staging, name)
        torch.save({'state': state.state_dict()}, path)
        if store:
            store.upload_object(f'{parse_uri(folder)[2].rstrip("/")}/{name}', path)
        else:
            os.replace(path, os.path.join(folder, name))
    return f'{folder.rstrip("/")}/{name}'
