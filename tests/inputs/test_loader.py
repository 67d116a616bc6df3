"""What a loader says of itself: how long it was waited for, and what lies ready."""
import os
import signal

import pytest
from torch.utils.data import Dataset

from sdbench.errors import known_reason
from sdbench.inputs.loader import TimedDataLoader


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index


def test_the_wait_is_the_loaders_own_and_is_told_once(monkeypatch):
    now = [0.0]

    def slow(samples):
        now[0] += 3
        return samples
    monkeypatch.setattr('time.perf_counter', lambda: now[0])
    loader = TimedDataLoader(Numbers(), 12, collate_fn=slow)
    batches = iter(loader)
    next(batches)
    now[0] += 100  # a step of the training
    assert (loader.seconds_waited(), loader.seconds_waited()) == (3, 0)
    next(batches)
    assert next(batches, None) is None
    assert loader.seconds_waited() == 3


@pytest.mark.parametrize('number, words', [(signal.SIGKILL, 'signal: Killed'), (signal.SIGBUS, 'signal: Bus error')])
def test_a_killed_process_of_a_loader_is_one_line_with_the_remedy(number, words, capfd):
    loader = TimedDataLoader(Numbers(), 2, num_workers=1, collate_fn=lambda _: os.kill(os.getpid(), number))
    with pytest.raises(RuntimeError) as error:
        list(loader)
    line = known_reason(error.value)
    assert words in line and '--num_workers' in line and '--shm-size' in line
    assert '\n' not in line
    assert 'Traceback' not in capfd.readouterr().err
