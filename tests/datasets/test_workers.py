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
from tests.runs import wait_until


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


def make_beside_others(folder: Path, seconds: float, fatal: dict[str, int], parts: list[Part]) -> list[str]:
    """Make a part, at first only while four parts are in flight, of which one kills its worker."""
    [part] = parts
    is_first = not (folder / f'{part.name}-begun').exists()
    (folder / f'{part.name}-begun').touch()
    if part.name in fatal:
        wait_until(lambda: len(list(folder.glob('*-begun'))) == 4)
        kill_itself()
    while is_first:
        time.sleep(1)  # until the pool of the dead worker is ended
    return make(folder, seconds, {}, parts)


def begun(folder: Path, name: str) -> list[str]:
    """Return a line for each time that a part was begun."""
    return (folder / f'{name}-begun').read_text().splitlines()


def run(folder: Path, number: int, at_once: int = 1, seconds: float = 0.0, fatal: dict | None = None,
        do=make, use_gpu: Callable[[int], None] | None = None, workers: int = 2) -> list[str]:
    """Have so many parts made by two workers or more, and return the names of those that were answered."""
    parts = [Part(str(index), [File(f'{index}.tar', 0)]) for index in range(number)]
    with LocalWorkers(partial(do, folder, seconds, fatal or {}), workers, use_gpu) as pool:
        answers = make_parts(pool, parts, parts, lambda name: (folder / name).exists(), 'B', at_once)
    return [name for names in answers for name in names]


@pytest.mark.parametrize('die', [kill_itself, have_no_memory])
def test_what_was_in_flight_when_a_worker_died_is_made_again_and_what_was_done_is_not(server, tmp_path, capfd, die):
    answered = run(tmp_path, 8, at_once=4, fatal={'1': 1}, do=partial(make, die=die))
    assert all((tmp_path / str(index)).exists() for index in range(8))
    assert len(answered) == len(set(answered))
    assert len(begun(tmp_path, '1')) == 2
    assert len(begun(tmp_path, '0')) == 1
    assert 'a worker was lost; parts in flight are made again, one at a time' in capfd.readouterr().err


def test_a_part_that_kills_its_worker_is_named_and_no_other_that_was_in_flight(server, tmp_path):
    with pytest.raises(DataError) as caught:
        run(tmp_path, 4, fatal={'2': 9}, do=make_beside_others, workers=4)
    assert re.findall(r'\d+\.tar', str(caught.value)) == ['2.tar']
    assert 'had no memory' in str(caught.value)


def note_gpu(folder: Path, gpu: int) -> None:
    (folder / f'{gpu}-of-{os.getpid()}').touch()


def make_beside_the_other(folder: Path, seconds: float, fatal: dict, parts: list[Part]) -> list[str]:
    """Make parts once both workers have begun: a slow one may begin when the other could have made all."""
    wait_until(lambda: len(list(folder.glob('*-of-*'))) == 2)
    return make(folder, seconds, fatal, parts)


@pytest.mark.long  # each worker imports everything, because CUDA allows no fork
def test_each_worker_is_told_a_gpu_of_its_own(tmp_path):
    run(tmp_path, 4, do=make_beside_the_other, use_gpu=partial(note_gpu, tmp_path))
    assert sorted(path.name[0] for path in tmp_path.glob('*-of-*')) == ['0', '1']
