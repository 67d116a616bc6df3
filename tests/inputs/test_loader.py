"""A loader measures the wait for it, and its workers end with their rank."""
import os
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from data import begin_worker
from sdbench.errors import known_reason
from sdbench.inputs.loader import TimedDataLoader
from tests.runs import wait_until


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index


def test_the_wait_excludes_training_and_is_reported_once(monkeypatch):
    now = [0.0]

    def slow(samples):
        now[0] += 3
        return samples
    monkeypatch.setattr('time.perf_counter', lambda: now[0])
    loader = TimedDataLoader(Numbers(), 12, collate_fn=slow)
    batches = iter(loader)
    next(batches)
    now[0] += 100  # a training step
    assert (loader.seconds_waited(), loader.seconds_waited()) == (3, 0)
    next(batches)
    assert next(batches, None) is None
    assert loader.seconds_waited() == 3


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGBUS])
def test_a_killed_loader_worker_is_reported_in_one_line_with_the_fix(number, capfd):
    loader = TimedDataLoader(Numbers(), 2, num_workers=1, collate_fn=lambda _: os.kill(os.getpid(), number))
    with pytest.raises(RuntimeError) as error:
        list(loader)
    line = known_reason(error.value)
    assert '--num_workers' in line and '--shm-size' in line
    assert '\n' not in line
    assert 'Traceback' not in capfd.readouterr().err


def note_and_wait(note: Path, samples: list) -> None:
    """Write this process's id into a file, and wait forever."""
    note.write_text(str(os.getpid()))
    signal.pause()


def load_in_worker(start_method: str, note: Path) -> None:
    """Load batches with a worker process that makes none."""
    list(DataLoader(Numbers(), num_workers=1, worker_init_fn=begin_worker, collate_fn=partial(note_and_wait, note),
                    multiprocessing_context=start_method))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize('start_method', ['fork', 'forkserver'])  # Python 3.14's default is the second
def test_a_loaders_worker_that_waits_ends_when_its_rank_is_killed(server, tmp_path, start_method):
    note = tmp_path / 'pid'
    rank = server.Process(target=load_in_worker, args=(start_method, note))
    rank.start()
    wait_until(lambda: note.exists() and note.read_text())
    worker = int(note.read_text())
    assert is_alive(worker)
    rank.kill()
    wait_until(lambda: not is_alive(worker))
