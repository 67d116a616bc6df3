"""Every part is made once, whatever workers die; what kills each of them is named, and none outlives its command."""
import signal
from functools import partial

import psutil
import pytest

from sdbench.errors import DataError
from tests.datasets.slow_work import begun, have_no_memory, kill_itself, make, run
from tests.runs import start, wait_until, workers_of


def refuse(*args) -> None:
    raise DataError('a disk\nis full')


def fail(*args) -> None:
    return 1 / 0


def test_every_part_is_made_once_by_two_workers(server, tmp_path):
    assert sorted(run(tmp_path, 9, seconds=0.05)) == [str(index) for index in range(9)]
    lines = [begun(tmp_path, str(index)) for index in range(9)]
    assert {len(line) for line in lines} == {1}
    assert len({line[0] for line in lines}) == 2


@pytest.mark.parametrize('die', [kill_itself, have_no_memory])
def test_what_died_workers_were_at_is_made_again_and_what_was_done_is_not(server, tmp_path, capfd, die):
    run(tmp_path, 8, at_once=4, seconds=0.05, fatal={'1': 2}, do=partial(make, die=die))
    assert all((tmp_path / str(index)).exists() for index in range(8))
    assert len(begun(tmp_path, '1')) == 3
    assert len(begun(tmp_path, '0')) == 1
    assert 'was lost; what it was at is made again: 1.tar' in capfd.readouterr().err


def test_a_part_that_three_workers_die_of_is_named_and_no_other(server, tmp_path):
    with pytest.raises(DataError, match='3 workers were killed, each while it was at 2.tar, often for lack of memory'):
        run(tmp_path, 6, at_once=6, fatal={'2': 9})
    assert len(begun(tmp_path, '2')) == 3
    assert (tmp_path / '0').exists()
    assert (tmp_path / '1').exists()


def test_what_a_worker_raises_is_raised(server, tmp_path):
    with pytest.raises(DataError, match='a disk\nis full'):
        run(tmp_path, 3, do=refuse)
    with pytest.raises(ZeroDivisionError) as error:
        run(tmp_path, 3, do=fail)
    assert 'return 1 / 0' in str(error.value.__cause__)  # where in the worker


@pytest.mark.long
def test_each_worker_is_told_a_gpu_of_its_own(tmp_path):
    run(tmp_path, 4, seconds=0.5, on_gpus=True)
    assert {line.split()[1] for index in range(4) for line in begun(tmp_path, str(index))} == {'0', '1'}


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_command_however_that_comes(tmp_path, number):
    command = start(tmp_path / 'log', '-m', 'tests.datasets.slow_work', tmp_path)
    wait_until(lambda: (tmp_path / '0-begun').exists() and len(workers_of(command)) == 2)
    workers = workers_of(command)
    command.send_signal(number)
    command.wait(300)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in workers))
