"""Every part is made once even if workers die or the command is killed, and a file that kills its worker is named."""
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

import convert
from sdbench.datasets.sources import File
from sdbench.datasets.workers import LocalWorkers, Part, make_parts
from sdbench.errors import DataError
from tests.runs import files_of, start, wait_until, workers_of
from tests.samples import sample_files, write_tar


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def have_no_memory() -> None:
    """Fail like an allocator that reports missing memory, on a system that does not kill the process."""
    raise MemoryError


def begin(folder: Path, part: Part) -> int:
    """Note that a part is begun, and return how often it was begun so far."""
    note = folder / f'{part.name}-begun'
    with open(note, 'a') as file:
        file.write('x')
    return note.stat().st_size


def make(folder: Path, die: Callable, parts: list[Part]) -> list[str]:
    """Make parts. The first time, part 1 ends its worker."""
    for part in parts:
        if begin(folder, part) == 1 and part.name == '1':
            die()
    return [part.name for part in parts]


def make_beside_others(folder: Path, parts: list[Part]) -> list[str]:
    """Make a part. At first four parts must be in progress, and part 2 kills its worker each time."""
    [part] = parts
    is_first = begin(folder, part) == 1
    if part.name == '2':
        wait_until(lambda: len(list(folder.glob('*-begun'))) == 4)
        kill_itself()
    while is_first:
        signal.pause()  # until the pool with the dead worker kills this process
    return [part.name]


def run(do: Callable, number: int, parts_per_call: int = 1, workers: int = 2, use_gpu: Callable | None = None) -> list:
    """Make this number of parts, and return the names that the calls returned."""
    parts = [Part(str(index), [File(f'{index}.tar', 0)]) for index in range(number)]
    with LocalWorkers(do, workers, use_gpu) as pool:
        answers = make_parts(pool, parts, parts, 'B', parts_per_call)
    return [name for names in answers for name in names]


@pytest.mark.parametrize('die', [kill_itself, have_no_memory])
def test_parts_in_progress_when_a_worker_dies_are_made_again(server, tmp_path, capfd, die):
    answered = run(partial(make, tmp_path, die), 8, parts_per_call=4)
    assert sorted(answered) == list('01234567')
    assert (tmp_path / '1-begun').stat().st_size == 2
    assert 'a worker died' in capfd.readouterr().err


def test_a_part_that_kills_its_worker_is_named_and_the_others_in_progress_are_not(server, tmp_path):
    with pytest.raises(DataError, match='ran out of memory') as caught:
        run(partial(make_beside_others, tmp_path), 4, workers=4)
    assert re.findall(r'\d+\.tar', str(caught.value)) == ['2.tar']


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


def wait_for_the_other(folder: Path, parts: list[Part]) -> list[str]:
    """Make nothing before both workers have begun, because otherwise one worker could make all parts."""
    wait_until(lambda: len(list(folder.glob('*-of-*'))) == 2)
    return [part.name for part in parts]


@pytest.mark.long  # each worker imports everything, because CUDA allows no fork
def test_each_worker_gets_a_different_gpu(tmp_path):
    run(partial(wait_for_the_other, tmp_path), 4, use_gpu=partial(note_gpu, tmp_path))
    assert sorted(path.name[0] for path in tmp_path.glob('*-of-*')) == ['0', '1']


@pytest.mark.long
@pytest.mark.parametrize('number, status', [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])  # 130 as after Ctrl-C
def test_an_interrupted_conversion_goes_on_and_writes_the_same_bytes(s3, tmp_path, number, status):
    for index in range(9):
        s3.put(f'tars/{index}.tar', write_tar('x.tar', sample_files('x', index)).read_bytes())
    flags = ['--size_limit', '1kb', '--num_workers', '2']
    out = tmp_path / 'out'
    convert.main(['s3://bucket/tars', 'undisturbed', *flags])

    # Interrupt the command when some parts are complete.
    s3.delay = 0.3
    command = start(tmp_path / 'log', 'convert.py', 's3://bucket/tars', out, *flags)
    wait_until(lambda: list(out.glob('*/index.json')))
    done = {path: path.stat().st_mtime_ns for part in out.glob('*/index.json') for path in part.parent.iterdir()}
    workers = workers_of(command)
    os.kill(command.pid, number)
    log = (tmp_path / 'log').read_text
    assert command.wait(300) == status, log()
    wait_until(lambda: not any(psutil.pid_exists(worker) for worker in workers))
    s3.delay = 0
    if status == 130:
        assert log().splitlines()[-1].startswith('convert.py: error: ')
        assert 'Traceback' not in log()

    # Start the same command again. Incomplete files of the killed process may remain.
    assert not (out / 'index.json').exists()
    convert.main(['s3://bucket/tars', 'out', *flags])
    whole = {name: content for name, content in files_of(out).items() if '.unfinished' not in name}
    assert whole == files_of(tmp_path / 'undisturbed')
    assert done
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())
