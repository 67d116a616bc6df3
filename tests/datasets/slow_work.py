"""Work that takes its time, notes what it was at, and dies where it is told.

    python -m tests.datasets.slow_work FOLDER      # two parts, which take a minute
"""
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sdbench.datasets.work import LocalWorkers, Part, work


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def have_no_memory() -> None:
    """Fail as an allocator does that says so, where the system kills nobody."""
    raise MemoryError


def make(folder: Path, seconds: float, fatal: dict[str, int], parts: list[Part], gpu: int | None = None,
         die: Callable = kill_itself) -> list[str]:
    """Make a file for each part, slowly; die of some as often as they say."""
    for part in parts:
        with open(folder / f'{part.name}-begun', 'a') as notes:
            print(os.getpid(), gpu, file=notes)
        time.sleep(seconds)
        if len(begun(folder, part.name)) <= fatal.get(part.name, 0):
            die()
        (folder / part.name).write_text('made')
    return [part.name for part in parts]


def begun(folder: Path, name: str) -> list[str]:
    """Return a line for each time that a part was begun."""
    return (folder / f'{name}-begun').read_text().splitlines()


def run(folder: Path, number: int, at_once: int = 1, seconds: float = 0.0, fatal: dict | None = None,
        do=make, on_gpus: bool = False) -> list[str]:
    """Have so many parts made by two workers, and return the names of those that were answered."""
    parts = [Part(str(index), [f'{index}.tar']) for index in range(number)]
    with LocalWorkers(partial(do, folder, seconds, fatal or {}), 2, on_gpus) as workers:
        answers = list(work(workers, parts, lambda name: (folder / name).exists(), at_once))
    return [name for _, names in answers for name in names]


if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    run(Path(sys.argv[1]), 2, seconds=60)
