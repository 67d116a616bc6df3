"""Checkpoints as files: their names, and whether one is whole.

Nothing here needs torch, so that commands can ask before their imports.
"""
import io
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterable

from inputs.errors import one_line

NAME = 'ep{epoch}-ba{batch}-rank{rank}.pt'
CHECKPOINT_NAME = re.compile(r'ep([0-9]+)-ba([0-9]+)-rank0\.pt')  # the whole of it: best-ep1-ba9-rank0.pt is the user's
LATEST = 'latest-rank{rank}.pt'
LOCK = 'in-use.lock'  # in a --save_folder, while a run saves there
CONFIG = 'config.json'  # of a UNet that diffusers has saved
ZIP_START = b'PK\x03\x04'


def epoch_and_batch(name: str) -> tuple[int, int] | None:
    """When a checkpoint of this name or path was saved; None if it is none."""
    match = CHECKPOINT_NAME.fullmatch(os.path.basename(name))
    if match is None:
        return None
    epoch, batch = match.groups()
    return int(epoch), int(batch)


def checkpoints_among(names: Iterable[str]) -> list[str]:
    """Those of names, paths or URIs that are checkpoints, by batch, the oldest first."""
    found = []
    for name in names:
        saved = epoch_and_batch(name)
        if saved is not None:
            epoch, batch = saved
            found.append((batch, epoch, name))
    return [name for _, _, name in sorted(found)]


def no_checkpoint_error(place: str, nor: str = '') -> ValueError:
    """The error of a place to read, by its flag, that holds none, `nor` what else it might."""
    return ValueError(f'{place} holds no whole checkpoint{nor}; give one, or the --save_folder of a run')


def unet_folder(path: str) -> str | None:
    """The folder with the UNet in a folder of diffusers, itself or that of a pipeline; None if it is none."""
    for folder in (os.path.join(path, 'unet'), path):
        if os.path.isfile(os.path.join(folder, CONFIG)):
            return folder
    return None


def no_weights_error(place: str) -> ValueError:
    """The error of a place to start from, by its flag, that holds no weights."""
    path = place.partition(' ')[2]
    if '://' not in path and not os.path.exists(path):
        return ValueError(f'{place} does not exist; give a checkpoint, the --save_folder of an earlier run, or a '
                          'folder of diffusers')
    return ValueError(f'{place} is no checkpoint, and holds neither a whole checkpoint nor a UNet of diffusers; give '
                      'the --save_folder of an earlier run')


class WatchedFile(io.FileIO):
    """A file that remembers what the disk refused, because zipfile takes some of that for damage."""
    refusal: OSError | None = None

    def readinto(self, buffer) -> int:
        return self._watched(super().readinto, buffer)

    def readall(self) -> bytes:
        return self._watched(super().readall)

    def _watched(self, read: Callable, *arguments):
        try:
            return read(*arguments)
        except OSError as error:
            self.refusal = error
            raise


def damage_in(path: str) -> str | None:
    """What is damaged in a checkpoint, of which every byte is read; None if it is sound.

    Raises OSError if it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f'{path} is no file; give it another name, or use another folder')
    with WatchedFile(path) as raw, io.BufferedReader(raw, 1 << 20) as file:
        if file.read(len(ZIP_START)) != ZIP_START:
            return 'it is no archive of tensors'
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()  # compares the CRC of each tensor
        except Exception as error:  # of many kinds, where the numbers in an archive are wrong
            if raw.refusal is not None:
                raise raw.refusal from None
            return one_line(error) or type(error).__name__
    if damaged is not None:
        return f'{damaged} in it has changed'
    return None
