"""A lock of a folder is that of its process alone, not of those that this has forked."""
import os
import signal

import pytest

from inputs.run_lock import give_lock_back, take_lock
from tests.forks import fork, living_child


def hold(lock, ready) -> None:
    """Take a lock, and fork a process that lives on, as a loader's worker does."""
    take_lock(lock, 'the folder')
    child = fork(signal.pause)
    (lock.parent / 'child').write_text(str(child))
    ready()
    signal.pause()


def test_what_a_killed_process_held_is_free_although_its_own_children_live(tmp_path):
    lock = tmp_path / 'lock'
    with living_child(lambda ready: hold(lock, ready)) as holder:
        with pytest.raises(ValueError, match=f'the folder is in use by another run .pid {holder} on '):
            take_lock(lock, 'the folder')
    child = int((tmp_path / 'child').read_text())
    try:
        os.kill(child, 0)  # it is there
        give_lock_back(lock, take_lock(lock, 'the folder'))
        assert not lock.exists()
    finally:
        os.kill(child, signal.SIGKILL)
