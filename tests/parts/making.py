"""A worker for tests of the engine: it notes what it is given, and dies or fails where it is told."""
import errno
import os
import signal
import time
from functools import partial
from pathlib import Path

from inputs.errors import DataError
from parts.engine import Part, make_parts
from parts.local_workers import LocalWorkers


class Maker:
    """Notes each part in a file of its number, a line for each attempt: the worker's process and its place.

    Args:
        folder: for the notes.
        fatal: how many workers die of a part, by its number.
        seconds: that a part takes.
        place: of this worker.
    """

    def __init__(self, folder: Path, fatal: dict[int, int], seconds: float, place: int):
        self.folder = folder
        self.fatal = fatal
        self.seconds = seconds
        self.place = place

    def __call__(self, parts: list) -> list[tuple[int, int]]:
        for part in parts:
            with open(self.folder / str(part.number), 'a') as notes:
                print(os.getpid(), self.place, [given.number for given in parts], file=notes)
            time.sleep(self.seconds)
            if part.attempt < self.fatal.get(part.number, 0):
                os.kill(os.getpid(), signal.SIGKILL)
        return [(part.number, part.attempt) for part in parts]


def make_maker(folder: Path, fatal: dict, seconds: float, place: int) -> Maker:
    return Maker(folder, fatal, seconds, place)


def refusing_maker(place: int) -> Maker:
    raise DataError('a disk\nis full')


def failing_maker(place: int) -> Maker:
    return lambda parts: 1 / 0


def cuda_maker(place: int) -> Maker:
    import torch
    return lambda parts: [torch.cuda._is_in_bad_fork()]


def maker_on_a_full_disk(place: int) -> Maker:
    raise OSError(errno.ENOSPC, 'No space left on device')


def hungry_maker(place: int) -> Maker:
    def eat(parts: list) -> list:
        raise MemoryError
    return eat


def start_and_wait(folder: Path) -> None:
    """A command whose worker is at a long part."""
    workers = LocalWorkers(partial(make_maker, folder, {}, 60), 1, 'tests.parts.making')
    list(make_parts(workers, [Part(0, ['0.tar'])]))
