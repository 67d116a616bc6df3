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
from composer.utils import dist, get_file, maybe_create_object_store_from_uri, parse_uri
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.torch_version import TorchVersion

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGREE_SECONDS = 15  # after a signal, for the ranks to reach the end of a batch together
PLAIN_TYPES = [datetime.timedelta, TorchVersion]  # in Composer's checkpoints beside tensors and Python's own types


class NonFiniteLoss(Exception):
    """The loss of a batch is infinite or not a number."""


class Safeguard(Callback):
    """Makes each batch's noise depend on its number alone, stops what is not finite, and lets no signal cut an update.

    Composer restores the random state in the middle of an epoch only where it spins the loader itself, so every batch
    has a seed of its own, by run, batch and rank. From a step's gradients to the end of its batch weights, optimizer
    and EMA change; a signal waits for that, so that at any other time the state is that of the last batch. Several
    ranks agree on a last batch: one that left alone would leave the others waiting for it on their GPUs.

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
        self.updating = False  # between two consistent states
        self._stop = False
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
        go_on = torch.tensor(not self.interrupted, device=self._loss.device)
        agreed = torch.stack([torch.isfinite(self._loss), go_on]).int()
        dist.all_reduce(agreed, 'MIN')  # the ranks' gradients are one: all step, or none
        finite, go_on = agreed.tolist()
        self._stop = not go_on
        if not finite:
            if self.on_nan == 'stop':
                raise NonFiniteLoss(f'the loss of batch {state.timestamp.batch.value + 1} is not finite, at microbatch '
                                    f'size {state.device_train_microbatch_size}; --on_nan skip leaves such steps out')
            self.skipped_batches += 1
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)  # without gradients the step changes nothing
        self.updating = True

    def batch_end(self, state, logger) -> None:
        self.updating = False
        if self._stop:
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
        if dist.get_world_size() > 1 and number != signal.SIGALRM:
            signal.signal(signal.SIGALRM, self._interrupt)
            signal.alarm(AGREE_SECONDS)
            return
        self._stop = True
        if not self.updating:
            raise SystemExit


def ignore_signals() -> None:
    signal.alarm(0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_launcher() -> None:
    """SIGTERM for this process when the launcher that started it is gone, so that no rank runs on alone (Linux)."""
    if 'LOCAL_RANK' in os.environ and sys.platform == 'linux':
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def checkpoints(folder: str) -> list[str]:
    """Paths or URIs of Composer's checkpoints in a folder or an object store, by batch, the oldest first."""
    if store := maybe_create_object_store_from_uri(folder):
        prefix = os.path.join(parse_uri(folder)[2], '')
        names = [store.get_uri(name) for name in store.list_objects(prefix) if '/' not in name[len(prefix):]]
    else:
        names = map(str, Path(folder).glob('*.pt'))
    found = [(int(match[1]), name) for name in names if (match := re.search(r'\bep\d+-ba(\d+)-rank0\.pt$', name))]
    return [name for _, name in sorted(found)]


def newest_checkpoint(folder: str) -> str | None:
    """The newest whole checkpoint of a folder, or of an object store, then downloaded; None if there is none.

    Rank 0 looks, for all ranks, and removes what a killed run left unfinished. ValueError: it cannot be trusted, or
    other nodes do not see it.
    """
    found = checkpoints(folder) if dist.get_global_rank() == 0 else []
    while found and '://' not in found[-1] and globals_of(found[-1]) is None:  # a store shows only what was sent whole
        print(f'removing {found[-1]}, which a killed run left unfinished', file=sys.stderr)
        os.remove(found.pop())
    path = dist.all_gather_object(found[-1] if found else None)[0]
    if path is None:
        return None
    if '://' in path:
        own = os.path.join(tempfile.gettempdir(), f'checkpoint-{os.getuid()}')
        uri, path = path, os.path.join(own, re.sub(r'\W+', '-', path))
        if dist.get_local_rank() == 0:
            os.makedirs(own, mode=0o700, exist_ok=True)
            get_file(uri, path, overwrite=True, progress_bar=False)
        dist.barrier()
    if not all(dist.all_gather_object(os.path.exists(path))):
        raise ValueError(f'--save_folder {folder} is not the same folder on every node; use a shared one or a store')
    plain = {f'{kind.__module__}.{kind.__qualname__}' for kind in PLAIN_TYPES}
    if unsafe := globals_of(path) - plain:
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


def load_checkpoint(path: str) -> dict:
    """A checkpoint, on the CPU; pickle.UnpicklingError if it holds more than tensors and plain types, such as code."""
    with safe_globals(PLAIN_TYPES):
        return torch.load(path, map_location='cpu', weights_only=True)


def save_interrupted(state: State, folder: str) -> None:
    """Save the state as of the last whole batch, by rank 0 alone, since other ranks may be gone.

    Composer's own saver, whose names and contents these are, waits for all ranks.
    """
    name = f'ep{state.timestamp.epoch.value}-ba{state.timestamp.batch.value}-rank0.pt'
    if store := maybe_create_object_store_from_uri(folder):
        with tempfile.TemporaryDirectory() as staging:
            path = os.path.join(staging, name)
            torch.save({'state': state.state_dict()}, path)
            store.upload_object(os.path.join(parse_uri(folder)[2], name), path)
        return
    path = Path(folder, name)
    torch.save({'state': state.state_dict()}, path)  # cut by a kill, it is not taken for a whole one
    link = Path(folder, 'latest.tmp')
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(Path(folder, 'latest-rank0.pt'))
