"""Docker gives containers 64 MB of shared memory: fewer loader processes than cores are never chosen in silence."""
import os
from types import SimpleNamespace

import pytest

from harness import preflight
from harness.options import benchmark_parser
from harness.preflight import fill_in_training_defaults


def chosen_workers(shared_bytes: int, monkeypatch, *flags: str) -> int:
    """--num_workers for batches of 8 images of 512 pixels, 6 MiB, on four cores with so much free shared memory."""
    disk = SimpleNamespace(f_bavail=shared_bytes // 4096, f_frsize=4096)
    monkeypatch.setattr(preflight.os, 'statvfs', lambda path: disk)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0, 1, 2, 3})
    args = benchmark_parser('').parse_args(['--remote', 'shards', '--batch_size', '8', *flags])
    fill_in_training_defaults(args)
    return args.num_workers


@pytest.mark.parametrize('shared_mib, workers', [(64, 4), (59, 3), (30, 1), (12, 0)])
def test_fewer_workers_than_cores_are_said_in_one_line_with_the_remedy(shared_mib, workers, monkeypatch, capfd):
    assert chosen_workers(shared_mib * 2 ** 20, monkeypatch) == workers
    out, err = capfd.readouterr()
    assert out == ''
    if workers == 4:
        assert err == ''
        return
    assert err.count('\n') == 1 and err.startswith('warning: ')
    assert f'--num_workers is {workers} instead of 4' in err and '/dev/shm' in err and 'docker run --shm-size' in err


def test_only_rank_0_says_so(monkeypatch, capfd):
    monkeypatch.setattr(preflight.dist, 'get_global_rank', lambda: 1)
    assert chosen_workers(12 * 2 ** 20, monkeypatch) == 0
    assert capfd.readouterr().err == ''


def test_a_number_that_the_user_gave_needs_no_warning(monkeypatch, capfd):
    assert chosen_workers(12 * 2 ** 20, monkeypatch, '--num_workers', '0') == 0
    assert capfd.readouterr().err == ''
