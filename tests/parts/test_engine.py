"""Every part is made once, whatever workers die; what kills each of them is named, and none outlives its command."""
import os
import signal
from functools import partial

import psutil
import pytest
import torch

from inputs.errors import DataError
from parts.engine import Part, WorkerFailed, make_parts
from parts.local_workers import LocalWorkers
from tests.parts.making import (
    cuda_maker,
    failing_maker,
    hungry_maker,
    make_maker,
    maker_on_a_full_disk,
    refusing_maker,
    start_and_wait,
)
from tests.runs import wait_until

PRELOAD = 'tests.parts.making'


def local(make, number: int = 2) -> LocalWorkers:
    return LocalWorkers(make, number, PRELOAD)


def parts(number: int) -> list[Part]:
    return [Part(index, [f'{index}.tar']) for index in range(number)]


def notes(folder, number: int) -> list[str]:
    return (folder / str(number)).read_text().splitlines()


def test_each_part_is_made_once_by_one_of_as_many_workers_as_there_are_places(tmp_path):
    made = list(make_parts(local(partial(make_maker, tmp_path, {}, 0.02)), parts(20)))
    assert sorted(made) == [(number, 0) for number in range(20)]
    given = [line for number in range(20) for line in notes(tmp_path, number)]
    assert len(given) == 20 and len({line.split()[0] for line in given}) == 2
    assert {line.split()[1] for line in given} == {'0', '1'}


def test_what_a_worker_was_at_when_it_died_is_made_by_another(tmp_path):
    made = list(make_parts(local(partial(make_maker, tmp_path, {0: 1, 5: 2}, 0)), parts(8)))
    assert sorted(made) == [(number, {0: 1, 5: 2}.get(number, 0)) for number in range(8)]
    assert [len({line.split()[0] for line in notes(tmp_path, number)}) for number in (0, 5, 7)] == [2, 3, 1]
    assert {line.split()[1] for number in range(8) for line in notes(tmp_path, number)} <= {'0', '1'}


def test_a_part_that_three_workers_died_of_ends_the_run_and_is_named(tmp_path):
    with pytest.raises(DataError, match=r'part 3 \(3.tar\) was given to 3 workers'):
        list(make_parts(local(partial(make_maker, tmp_path, {3: 9}, 0)), parts(4)))
    assert len(notes(tmp_path, 3)) == 3


def test_a_part_that_a_worker_died_of_is_given_alone_and_the_others_with_it_are_made(tmp_path):
    made = list(make_parts(local(partial(make_maker, tmp_path, {2: 1}, 0), number=1), parts(8), parts_at_once=4))
    assert sorted(number for number, _ in made) == list(range(8))
    assert notes(tmp_path, 2)[0].endswith('[0, 1, 2, 3]') and notes(tmp_path, 2)[1].endswith('[2]')
    assert notes(tmp_path, 7)[0].endswith('[7]')  # the last ones are shared out


@pytest.mark.parametrize('make, error, words', [
    (refusing_maker, DataError, '^a disk is full$'),
    (hungry_maker, DataError, 'not enough memory'),
    (maker_on_a_full_disk, DataError, r'^a worker on \S+ cannot go on \(.*No space left on device'),
    (failing_maker, WorkerFailed, 'ZeroDivisionError'),
])
def test_what_a_worker_raises_is_raised_here(make, error, words):
    workers = local(make)
    with pytest.raises(error, match=words):
        list(make_parts(workers, parts(3)))
    assert workers.alive == []


def test_a_run_that_is_left_leaves_no_worker(tmp_path):
    with local(partial(make_maker, tmp_path, {}, 0)) as workers:
        made = make_parts(workers, parts(9))
        next(made)
        processes = [psutil.Process(process.pid) for process, _, _ in workers.alive]
    assert processes and not any(process.is_running() for process in processes)


def test_workers_end_with_their_command_however_that_comes(server, tmp_path):
    command = server.Process(target=start_and_wait, args=(tmp_path,))
    command.start()
    wait_until((tmp_path / '0').exists)
    wait_until(lambda: notes(tmp_path, 0))
    worker = psutil.Process(int(notes(tmp_path, 0)[0].split()[0]))
    os.kill(command.pid, signal.SIGKILL)
    command.join()
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 20)


def test_a_worker_that_is_to_use_a_gpu_is_no_fork_of_one_that_has_asked_cuda():
    torch.cuda.is_available()
    assert list(make_parts(LocalWorkers(cuda_maker, 1, preload=None), parts(1))) == [False]
