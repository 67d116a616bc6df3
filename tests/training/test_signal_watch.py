"""A signal is answered within seconds also by a rank that waits, within torch, for one that is stopped."""
import datetime
import os
import select
import signal
import threading
from pathlib import Path

import torch

from tests.forks import status_of_child
from tests.runs import free_port, wait_until
from training.safeguard import seconds_to_answer
from training.signal_watch import SignalWatch


def wait_for_the_other(rank: int, port: int, folder: Path) -> None:
    """Of two ranks: the second stops itself, and the first waits for it in a collective of torch."""
    store = torch.distributed.TCPStore('127.0.0.1', port, 2, rank == 0, datetime.timedelta(seconds=60))
    torch.distributed.init_process_group('gloo', store=store, rank=rank, world_size=2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.signal(signal.SIGTERM, lambda *_: None)
    SignalWatch([signal.SIGTERM], lambda: 0.5, lambda: (folder / 'saved').write_text('x'))
    (folder / 'waits').touch()
    torch.distributed.all_reduce(torch.ones(1))


def test_a_rank_that_waits_for_a_stopped_one_answers_a_signal(server, tmp_path):
    port = free_port()
    ranks = [server.Process(target=wait_for_the_other, args=(rank, port, tmp_path)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    try:
        wait_until((tmp_path / 'waits').exists)
        os.kill(ranks[0].pid, signal.SIGTERM)
        ranks[0].join(300)
        assert ranks[0].exitcode == 130 and (tmp_path / 'saved').exists()
    finally:
        ranks[1].kill()
        ranks[1].join()


def test_a_signal_that_is_answered_or_comes_to_a_child_is_left_alone():
    concluded = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    watch = SignalWatch([signal.SIGTERM], lambda: 60, concluded.set)
    try:
        assert status_of_child(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 0
        os.write(watch._writer, bytes([signal.SIGCHLD]))  # the last that is written, since it leaves SIGCHLD alone
        wait_until(lambda: not select.select([watch._reader], [], [], 0)[0], 30)
        os.kill(os.getpid(), signal.SIGTERM)
        watch.answer()
        watch.answer()  # twice does nothing
        assert not concluded.is_set() and signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_where_another_rank_has_failed_a_signal_is_answered_before_the_launcher_kills(monkeypatch):
    """The launcher sends SIGKILL 30 s after its signal, and NCCL tells nobody that a rank is gone."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'get_rank', lambda *_: 0)
    monkeypatch.setattr(torch.distributed.distributed_c10d, '_get_default_store', lambda: store)
    assert seconds_to_answer(batch_seconds=600) > 1200
    store.set('failure', 'rank 1: out of memory')
    assert seconds_to_answer(batch_seconds=600) < 10
