"""Checkpoints as Composer writes them: found, checked, loaded, and saved whole."""
import contextlib
import datetime
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger
from composer.utils import checkpoint as composer_checkpoint
from composer.utils import dist, get_file, maybe_create_object_store_from_uri, parse_uri
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.torch_version import TorchVersion

from inputs.errors import one_line
from inputs.run_lock import give_lock_back, take_lock
from training.checkpoint_files import LATEST, LOCK, NAME, checkpoints_among, damage_in
from training.own_files import PrivateFolder, remove_unfinished, temporary_files_in, written_whole
from training.ranks import SECONDS_FOR_A_CHECKPOINT, first_rank_of_node, on_each_node, on_rank_0, waiting_at_most

PLAIN_TYPES = [datetime.timedelta, TorchVersion]  # in Composer's checkpoints beside tensors and Python's own types


def from_storage(function: Callable[[str], Any], folder: str, flag: str = '--save_folder'):
    """`function(folder)`, with what any storage client raises as a ValueError of one line, which names `flag`."""
    try:
        return function(folder)
    except ValueError:
        raise
    except OSError as error:
        raise ValueError(f'{flag} {folder} cannot be read ({one_line(error)}); check its name and your permissions, '
                         'or try again when its file system has recovered') from None
    except Exception as error:  # every storage client has its own exceptions
        raise ValueError(f'{flag} {folder} cannot be read ({one_line(error)}); check its name and your '
                         'credentials') from None


def checkpoints(folder: str) -> list[str]:
    """Paths or URIs of Composer's checkpoints in a folder or an object store, by batch, the oldest first.

    Raises OSError, or what a storage client raises, if the folder is there and cannot be read.
    """
    store = maybe_create_object_store_from_uri(str(folder))
    if store:
        prefix = os.path.join(parse_uri(folder)[2], '')
        names = [store.get_uri(name) for name in store.list_objects(prefix) if '/' not in name[len(prefix):]]
    else:
        names = [os.path.join(folder, name) for name in names_in(folder)]
    return checkpoints_among(names)


def names_in(folder: str | os.PathLike) -> list[str]:
    """Of the files in a folder; none if it is not there. Raises OSError if it cannot be read."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def refuse_files_of_another_run(folder: str) -> None:
    """Raises ValueError if the checkpoints of a new run would lie among files, in a folder or a store."""
    names = []
    if '://' in folder:
        names = from_storage(checkpoints, folder)
    elif os.path.isdir(folder):
        names = os.listdir(folder)
    if set(names) - {LOCK}:
        raise ValueError(f'--save_folder {folder} already holds files; give a new one, or --autoresume to go on from '
                         'there')


@contextlib.contextmanager
def saving_alone(folder: str | None) -> Iterator[None]:
    """A context in which no other run saves in a --save_folder, as far as its file system has locks; a store has none.

    Raises ValueError on all ranks if another run does.
    """
    if folder is None or '://' in folder:
        yield
        return
    lock = Path(folder, LOCK)
    is_new = not lock.parent.exists()
    held = []  # on rank 0

    def take() -> None:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            held.append(take_lock(lock, f'--save_folder {folder}'))
        except OSError as error:
            raise ValueError(f'--save_folder {folder} cannot be written: {error.strerror}; name another') from None

    on_rank_0(take)
    try:
        yield
    finally:
        for taken in held:
            give_lock_back(lock, taken)
            if is_new:
                with contextlib.suppress(OSError):  # it holds what was saved
                    lock.parent.rmdir()


@contextlib.contextmanager
def newest_checkpoint(folder: str) -> Iterator[str | None]:
    """The path of the newest sound checkpoint of a --save_folder; None if there is none.

    A damaged one that is newer is set aside, under the name NAME.damaged, and in a store left where it is. What killed
    runs left unfinished in the folder is removed. One from a store is downloaded, and removed at the context's end.

    Raises ValueError on all ranks if one cannot be read, it cannot be trusted, or other nodes do not see it.
    """
    found = on_rank_0(partial(from_storage, tidied_checkpoints, folder))
    with newest_sound(found, f'--save_folder {folder}', set_aside=True) as path:
        yield path


def tidied_checkpoints(folder: str) -> list[str]:
    """As `checkpoints`; what killed runs left unfinished beside them is removed, and said."""
    if '://' not in folder:
        remove_unfinished(folder)
    return checkpoints(folder)


@contextlib.contextmanager
def newest_sound(found: list[str], place: str, set_aside: bool = False) -> Iterator[str | None]:
    """The path of the last of `found` that is not damaged, for all ranks; None if there is none.

    Only as many are looked at as it takes. With `set_aside` a damaged one in a folder is renamed.

    Args:
        found: paths or URIs, the same on all ranks, the oldest first.
        place: what errors call where they lie, a flag with its value.
        set_aside: whether they are those of this run.
    """
    for number, name in reversed(list(enumerate(found))):
        with fetched(name, place) as path:
            damage = damage_on_any_node(path, place, is_download=path != name)
            if damage is None:
                require_harmless(path, place)
                yield path
                return
        on_rank_0(partial(report_damage, name, damage, set_aside, number > 0))
    yield None


@contextlib.contextmanager
def sound_checkpoint(name: str, place: str) -> Iterator[str]:
    """The path of a checkpoint, fetched where it lies in a store.

    Raises ValueError on all ranks if it is none, or damaged.
    """
    with fetched(name, place) as path:
        damage = damage_on_any_node(path, place, is_download=path != name)
        if damage is not None:
            raise ValueError(f'{place}: {name} is no checkpoint, or was not written to its end, or is damaged '
                             f'({damage}); use another')
        require_harmless(path, place)
        yield path


@contextlib.contextmanager
def fetched(name: str, place: str) -> Iterator[str]:
    """The path of a checkpoint: itself, or for the URI of an object in a store a copy in a private folder on each node.
    """
    if '://' not in name:
        is_there = first_rank_of_node() == 0 or os.path.lexists(name)
        if not all(dist.all_gather_object(is_there)):
            raise ValueError(f'{place} is not the same folder on every node; use a shared one or a store')
        yield name
        return
    with contextlib.ExitStack() as stack:
        if dist.get_local_rank() == 0:
            folder = stack.enter_context(PrivateFolder())
        paths = on_each_node(lambda: download(name, os.path.join(folder, 'checkpoint.pt'), place))
        yield paths[first_rank_of_node()]
        dist.barrier()  # the other ranks of this node may still read it


def download(uri: str, path: str, place: str) -> str:
    """`path`, which then holds the object of that URI. Raises ValueError if it cannot be had."""
    try:
        get_file(uri, path, overwrite=True, progress_bar=False)
    except Exception as error:  # every storage client has its own exceptions
        raise ValueError(f'{place}: {uri} cannot be fetched ({type(error).__name__}: {one_line(error)[:200]}); check '
                         f'its name, your credentials, and the room in {os.path.dirname(os.path.dirname(path))}'
                         ) from None
    return path


def damage_on_any_node(path: str, place: str, is_download: bool) -> str | None:
    """What is damaged in a checkpoint; None if nothing is. Each node reads its own download, rank 0 a shared file."""
    find_damage = partial(from_storage, damage_in, path, place + ':')
    if not is_download:
        return on_rank_0(find_damage)
    damages = on_each_node(find_damage)
    return next(filter(None, damages.values()), None)


def report_damage(name: str, damage: str, set_aside: bool, has_another: bool) -> None:
    """Say that a damaged checkpoint is passed over, and what follows, and where it is this run's own, in a folder, give
    it another name.

    Args:
        name: path or URI.
        damage: in words.
        set_aside: whether it is this run's own.
        has_another: whether there is one before it.
    """
    what_is_done = 'is passed over'
    if set_aside and '://' not in name:
        try:
            what_is_done = f'is now {rename_aside(name)}'
        except OSError as error:
            raise ValueError(f'{name} is damaged ({damage}), and cannot be renamed: {error.strerror}; move it away'
                             ) from None
    what_follows = 'there is none before it'
    if has_another:
        what_follows = 'going back to the checkpoint before it'
    elif set_aside:
        what_follows += ': the run starts anew'
    print(f'warning: {name} is damaged ({damage}) and {what_is_done}; {what_follows}', file=sys.stderr)


def rename_aside(path: str) -> str:
    """Give a damaged file the first name of PATH.damaged, PATH.damaged-2 and so on that is free; returns it."""
    aside = f'{path}.damaged'
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = f'{path}.damaged-{number}'
    os.rename(path, aside)
    return aside


def require_harmless(path: str, place: str) -> None:
    """Raises ValueError on all ranks if a checkpoint would run code when loaded, or is an archive of another kind."""
    on_each_node(partial(require_plain_types, path, place))


def require_plain_types(path: str, place: str) -> None:
    """Raises ValueError if a checkpoint holds more than tensors, Python's own types and PLAIN_TYPES."""
    try:
        contents = set(get_unsafe_globals_in_checkpoint(path))
    except pickle.UnpicklingError as error:  # instructions that torch does not write
        contents = {str(error)}
    except (RuntimeError, KeyError, EOFError, OSError) as error:
        raise ValueError(f'{place}: {path} is no checkpoint, or was not written to its end ({one_line(error)[:200]}); '
                         'use another') from None
    plain = {f'{kind.__module__}.{kind.__qualname__}' for kind in PLAIN_TYPES}
    unsafe = contents - plain
    if unsafe:
        raise ValueError(f'{place}: {path} would run code when loaded ({min(unsafe)}); it is not of this program, do '
                         'not use it')


@contextlib.contextmanager
def tensors_alone_are_loaded() -> Iterator[None]:
    """A context in which torch.load runs no code, whatever lies by then under the name that was looked at.

    Composer 0.32 asks it to run what it finds.
    """
    flag = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
    before = os.environ.get(flag)
    os.environ[flag] = '1'
    try:
        with safe_globals(PLAIN_TYPES):
            yield
    finally:
        if before is None:
            del os.environ[flag]
        else:
            os.environ[flag] = before


def load_checkpoint(path: str, mmap: bool = False) -> dict:
    """A checkpoint, on the CPU; pickle.UnpicklingError if it holds more than tensors and plain types, such as code.

    With `mmap` a tensor is read from the file when it is used, once for all ranks of a host.
    """
    with safe_globals(PLAIN_TYPES):
        return torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)


class WholeCheckpoints(CheckpointSaver):
    """Composer's saver, which leaves either a whole checkpoint or none, also where the run is killed or a disk fills.

    Composer 0.32 writes in place, into the name that a resume looks for, and leaves it to the system when that goes to
    the disk. It removes what stands at the name of the latest checkpoint, a file as well as a link, and ends the run
    where a checkpoint that it would remove is gone. What it stages for an object store, up to two checkpoints, it
    leaves in the temporary folder.

    Args:
        folder: or object store.
        save_interval: a time.
        to_keep: the newest that stay in a folder, of those that this run, or the one that it resumes, has written; None
            keeps all. A store keeps all.
    """

    def __init__(self, folder: str, save_interval: str, to_keep: int | None = None):
        self.to_keep = to_keep
        self._staging = None
        common = {'filename': NAME, 'latest_filename': None, 'latest_remote_file_name': None,
                  'save_interval': save_interval,
                  'overwrite': True,  # files newer than the one resumed from, which a killed run left
                  'ignore_keys': ['rng']}  # Safeguard seeds every batch
        if '://' not in folder:
            super().__init__(folder, remote_file_name=None, num_checkpoints_to_keep=-1, **common)
            return
        self._staging = PrivateFolder()
        with temporary_files_in(self._staging.name):
            super().__init__(folder, remote_file_name=os.path.join(parse_uri(folder)[2], NAME),
                             num_checkpoints_to_keep=1, **common)  # staged

    @property
    def _tends_a_folder(self) -> bool:
        return self._staging is None and dist.get_global_rank() == 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The checkpoints of the run that is resumed go by their names, since its folder may have another name now."""
        super().load_state_dict(state)
        if self._tends_a_folder:
            written = map(os.path.basename, self.all_saved_checkpoints_to_timestamp)
            self.saved_checkpoints = [os.path.join(self.folder, name) for name in written]

    def fit_start(self, state: State, logger: Logger) -> None:
        super().fit_start(state, logger)
        if not self._tends_a_folder:
            return
        link = latest_beside(Path(self.folder, NAME))
        if link.exists() and not link.is_symlink():
            print(f'warning: {link} is no link and stays as it is; it will not be the newest checkpoint of this run',
                  file=sys.stderr)

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        write_in_place = composer_checkpoint._write_checkpoint_file
        composer_checkpoint._write_checkpoint_file = write_whole
        try:
            with waiting_at_most(SECONDS_FOR_A_CHECKPOINT):
                super()._save_checkpoint(state, logger)
        finally:
            composer_checkpoint._write_checkpoint_file = write_in_place
        if self._tends_a_folder:
            self.make_newest(self.saved_checkpoints[-1])

    def make_newest(self, path: str) -> None:
        """Let the link to the latest checkpoint of the folder point to this one, and remove the oldest of the run.

        Those that the user has moved away, or put a link in place of, are no longer the run's.
        """
        point_latest_to(Path(path))
        if self.to_keep is None:
            return
        written = [name for name in dict.fromkeys([*self.saved_checkpoints, path]) if is_plain_file(name)]
        self.saved_checkpoints = written[-self.to_keep:]
        for older in written[:-self.to_keep]:
            Path(older).unlink(missing_ok=True)

    def post_close(self) -> None:
        super().post_close()
        if self._staging is not None:
            self._staging.cleanup()


def is_plain_file(path: str) -> bool:
    """Whether a file lies there, and no link to one."""
    return os.path.isfile(path) and not os.path.islink(path)


def write_whole(state_dict: dict[str, Any], filename: str) -> None:
    """Save what Composer saves, under its name once it is on the disk."""
    with written_whole(filename) as file:
        torch.save(state_dict, file)


def save_interrupted(state: State, folder: str) -> str:
    """Save the state as of the last whole batch, by rank 0 alone, since other ranks may be gone; returns where.

    Composer's own saver, whose names and contents these are, waits for all ranks.

    Args:
        state: of the run, with its WholeCheckpoints among the callbacks.
        folder: or object store.
    """
    saver = next(callback for callback in state.callbacks if isinstance(callback, WholeCheckpoints))
    name = NAME.format(epoch=state.timestamp.epoch.value, batch=state.timestamp.batch.value, rank=0)
    path = os.path.join(folder, name)
    store = maybe_create_object_store_from_uri(folder)
    if store:
        with PrivateFolder() as staging:
            staged = os.path.join(staging, name)
            torch.save({'state': state.state_dict()}, staged)
            store.upload_object(os.path.join(parse_uri(folder)[2], name), staged)
        return path
    if not zipfile.is_zipfile(path):  # else Composer has saved this batch
        if os.path.lexists(path):
            rename_aside(path)
        saver.all_saved_checkpoints_to_timestamp[path] = state.timestamp  # as Composer does: it is in the state
        write_whole({'state': state.state_dict()}, path)
    saver.make_newest(path)
    return path


def leave_out_empty_scaler(checkpoint: dict) -> None:
    """Let a checkpoint that was saved on a CPU be loaded on a GPU, whose GradScaler refuses an empty state.

    Composer 0.32.1 makes and saves a GradScaler in every precision; torch 2.7.0 disables those on a CPU, which have no
    state. Without one in the checkpoint, that of the GPU begins as in a new run.
    """
    states = checkpoint['state'].get('scaler', {})  # by the name of the class
    if not any(states.values()):
        checkpoint['state'].pop('scaler', None)


def point_latest_to(path: Path) -> None:
    """Let the link to the latest checkpoint of a folder point to this one. What is no link is the user's, and stays."""
    link = latest_beside(path)
    if link.is_symlink():
        link.unlink()
    if not link.exists():
        link.symlink_to(path.name)


def latest_beside(path: Path) -> Path:
    """Where the link to the latest checkpoint of a folder is, beside this one."""
    return path.with_name(LATEST.format(rank=0))
