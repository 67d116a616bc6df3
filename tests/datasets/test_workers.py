"""Every part is made once even if workers die, and a file that kills its worker is named."""
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from sdbench.datasets.sources import File
from sdbench.datasets.workers import LocalWorkers, Part, make_parts
from sdbench.errors import DataError
from tests.runs import wait_until


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def have_no_memory() -> None:
    """Fail like an allocator that reports missing memory, on a system that does not kill the process."""
    raise MemoryError


def make(folder: Path, fatal: dict[str, int], parts: list[Part], die: Callable = kill_itself) -> list[str]:
    """Make a file for each part. `fatal` says how often a part kills its worker."""
    for part in parts:
        with open(folder / f'{part.name}-begun', 'a') as notes:
            print(os.getpid(), file=notes)
        if len(begun(folder, part.name)) <= fatal.get(part.name, 0):
            die()
        (folder / part.name).write_text('made')
    return [part.name for part in parts]


def make_beside_others(folder: Path, fatal: dict[str, int], parts: list[Part]) -> list[str]:
    """Make a part. At first four parts must be in progress, and a fatal one kills its worker; later parts are made."""
    [part] = parts
    is_first = not (folder / f'{part.name}-begun').exists()
    (folder / f'{part.name}-begun').touch()
    if part.name in fatal:
        wait_until(lambda: len(list(folder.glob('*-begun'))) == 4)
        kill_itself()
    while is_first:
        signal.pause()  # until the pool with the dead worker kills this process
    return make(folder, {}, parts)


def begun(folder: Path, name: str) -> list[str]:
    """Return one line for each time that this part was begun."""
    return (folder / f'{name}-begun').read_text().splitlines()


def run(folder: Path, number: int, parts_per_call: int = 1, fatal: dict | None = None, do=make,
        use_gpu: Callable[[int], None] | None = None, workers: int = 2) -> list[str]:
    """Make this number of parts with two or more workers, and return the names that the calls returned."""
    parts = [Part(str(index), [File(f'{index}.tar', 0)]) for index in range(number)]
    with LocalWorkers(partial(do, folder, fatal or {}), workers, use_gpu) as pool:
        answers = make_parts(pool, parts, parts, 'B', parts_per_call)
    return [name for names in answers for name in names]


@pytest.mark.parametrize('die', [kill_itself, have_no_memory])
def test_parts_in_progress_when_a_worker_dies_are_made_again(server, tmp_path, capfd, die):
    answered = run(tmp_path, 8, parts_per_call=4, fatal={'1': 1}, do=partial(make, die=die))
    assert all((tmp_path / str(index)).exists() for index in range(8))
    assert len(answered) == len(set(answered))
    assert len(begun(tmp_path, '1')) == 2
    assert 'a worker died; making the ' in capfd.readouterr().err


def test_a_part_that_kills_its_worker_is_named_and_the_others_in_progress_are_not(server, tmp_path):
    with pytest.raises(DataError) as caught:
        run(tmp_path, 4, fatal={'2': 9}, do=make_beside_others, workers=4)
    assert re.findall(r'\d+\.tar', str(caught.value)) == ['2.tar']
    assert 'ran out of memory' in str(caught.value)


def never_end(folder: Path, parts: list[Part]) -> None:
    (folder / 'pid').write_text(str(os.getpid()))
    while True:
        signal.pause()


def test_leaving_the_pool_kills_a_worker_in_the_middle_of_its_call(server, tmp_path):
    note = tmp_path / 'pid'
    with LocalWorkers(partial(never_end, tmp_path), 1) as pool:
        pool.call([])
        wait_until(lambda: note.exists() and note.read_text())
    wait_until(lambda: not psutil.pid_exists(int(note.read_text())))


def note_gpu(folder: Path, gpu: int) -> None:
    (folder / f'{gpu}-of-{os.getpid()}').touch()


def make_beside_the_other(folder: Path, fatal: dict, parts: list[Part]) -> list[str]:
    """Make parts once both workers have begun, because otherwise one worker could make all before the other begins."""
    wait_until(lambda: len(list(folder.glob('*-of-*'))) == 2)
    return make(folder, fatal, parts)


@pytest.mark.long  # each worker imports everything, because CUDA allows no fork
def test_each_worker_gets_a_different_gpu(tmp_path):
    run(tmp_path, 4, do=make_beside_the_other, use_gpu=partial(note_gpu, tmp_path))
    assert sorted(path.name[0] for path in tmp_path.glob('*-of-*')) == ['0', '1']
