"""Every part is made once, whatever workers die; and what kills each of them is named."""
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sdbench.datasets.sources import File
from sdbench.datasets.workers import LocalWorkers, Part, make_parts
from sdbench.errors import DataError


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def have_no_memory() -> None:
    """Fail as an allocator does that says so, where the system kills nobody."""
    raise MemoryError


def make(folder: Path, seconds: float, fatal: dict[str, int], parts: list[Part],
         die: Callable = kill_itself) -> list[str]:
    """Make a file for each part, slowly; die of some as often as they say."""
    for part in parts:
        with open(folder / f'{part.name}-begun', 'a') as notes:
            print(os.getpid(), file=notes)
        time.sleep(seconds)
        if len(begun(folder, part.name)) <= fatal.get(part.name, 0):
            die()
        (folder / part.name).write_text('made')
    return [part.name for part in parts]


def begun(folder: Path, name: str) -> list[str]:
    """Return a line for each time that a part was begun."""
    return (folder / f'{name}-begun').read_text().splitlines()


def run(folder: Path, number: int, at_once: int = 1, seconds: float = 0.0, fatal: dict | None = None,
        do=make, use_gpu: Callable[[int], None] | None = None) -> list[str]:
    """Have so many parts made by two workers, and return the names of those that were answered."""
    parts = [Part(str(index), [File(f'{index}.tar', 0)]) for index in range(number)]
    with LocalWorkers(partial(do, folder, seconds, fatal or {}), 2, use_gpu) as workers:
        answers = make_parts(workers, parts, parts, lambda name: (folder / name).exists(), 'B', at_once)
    return [name for names in answers for name in names]


@pytest.mark.parametrize('die', [kill_itself, have_no_memory])
def test_what_died_workers_were_at_is_made_again_and_what_was_done_is_not(server, tmp_path, capfd, die):
    run(tmp_path, 8, at_once=4, fatal={'1': 2}, do=partial(make, die=die))
    assert all((tmp_path / str(index)).exists() for index in range(8))
    assert len(begun(tmp_path, '1')) == 3
    assert len(begun(tmp_path, '0')) == 1
    assert re.search(r'was lost; what it was at is made again: .*\b1\.tar', capfd.readouterr().err)


def test_parts_of_which_workers_die_three_times_are_named(server, tmp_path):
    with pytest.raises(DataError, match='workers were killed 3 times while they were at .*2.tar.* lack of memory'):
        run(tmp_path, 6, at_once=6, fatal={'2': 9})
    assert len(begun(tmp_path, '2')) == 3
    assert (tmp_path / '0').exists() and (tmp_path / '1').exists()


def note_gpu(folder: Path, gpu: int) -> None:
    (folder / f'{gpu}-of-{os.getpid()}').touch()


@pytest.mark.long
def test_each_worker_is_told_a_gpu_of_its_own(tmp_path):
    run(tmp_path, 4, seconds=0.5, use_gpu=partial(note_gpu, tmp_path))
    assert sorted(path.name[0] for path in tmp_path.glob('*-of-*')) == ['0', '1']
