"""Several real processes over gloo: ranks on one node, and nodes on one machine."""
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import benchmark
from sdbench.training.checkpoints import checkpoints_in
from tests.forked_runs import mount_small_disk, run_program, run_ranks, skip_unless_mounts_are_allowed
from tests.runs import free_port
from tests.training import rank_program

TINY_RANKS = ['--use_ema', '--model_name', 'tiny', '--image_size', '64', '--batch_size', '8', '--warmup_batches', '1',
        '--measure_batches', '2', '--num_workers', '0']


def node(rank: int, port: int) -> dict[str, str]:
    """The environment that a launcher gives to one of two nodes of one process each."""
    return {'RANK': str(rank), 'LOCAL_RANK': '0', 'NODE_RANK': str(rank), 'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '1',
            'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}


@pytest.fixture(scope='module')
def trained(tmp_path_factory, shards, server, smallest_with_attention) -> dict[int, list[dict]]:
    """What each rank of a run on one and on two ranks saw and learned in an epoch of three batches of 8."""
    folders = {ranks: tmp_path_factory.mktemp(f'ranks{ranks}') for ranks in (1, 2)}
    for ranks, folder in folders.items():
        arguments = (folder, '--remote', shards, *TINY_RANKS, '--model_name', smallest_with_attention,
                     '--image_size', '16', '--results', '/dev/null', '--device_train_microbatch_size', '2')
        codes = run_ranks(server, [folder / 'log'] * ranks, rank_program.main, [arguments] * ranks)
        assert codes == [0] * ranks, (folder / 'log').read_text()
    return {ranks: [torch.load(folder / f'rank{rank}.pt') for rank in range(ranks)]
            for ranks, folder in folders.items()}


def test_two_ranks_learn_what_one_learns_from_the_same_batches(trained):
    [one], (first, second) = trained[1], trained[2]
    for part in ('weights', 'average'):
        for name, expected in one[part].items():
            torch.testing.assert_close(first[part][name], expected, atol=1e-9, rtol=1e-6)
            assert torch.equal(first[part][name], second[part][name])


def test_the_ranks_split_an_epoch_without_overlap(trained):
    [one], (first, second) = trained[1], trained[2]
    seen = [tuple(caption) for caption in first['captions'] + second['captions']]
    assert len(seen) == len(set(seen)) == 24
    assert set(seen) == {tuple(caption) for caption in one['captions']}


def test_only_the_last_microbatch_synchronises_gradients(trained):
    assert [rank['synchronised'] for rank in trained[2]] == [3, 3]  # 3 batches, of 2 microbatches each


def become_node(folder: Path, argv: list[str]) -> None:
    """In a process of its own: a node, as far as it has /dev/shm, temporary files and a cache of its own."""
    os.environ['TMPDIR'] = tempfile.tempdir = tempfile.mkdtemp(dir=folder)
    mount_small_disk(1000, '/dev/shm')
    benchmark.main([*argv, '--local', f'{folder}/cache'])


@pytest.mark.long
def test_two_nodes_stream_one_remote_into_caches_of_their_own(tmp_path, shards, server):
    skip_unless_mounts_are_allowed('/dev/shm')
    folders = [tmp_path / f'node{rank}' for rank in (0, 1)]
    for folder in folders:
        folder.mkdir()
    argv = ['--remote', shards, *TINY_RANKS, '--results', str(tmp_path / 'records')]
    logs = [folder / 'log' for folder in folders]
    codes = run_ranks(server, logs, become_node, [(folder, argv) for folder in folders], nodes=2)
    assert codes == [0, 0], [log.read_text() for log in logs]
    assert json.loads((tmp_path / 'records').read_text())['num_nodes'] == 2
    for folder in folders:
        assert list((folder / 'cache').rglob('*.mds'))


def become_node_with_a_disk_of_its_own(folder: Path, checkpoint: Path | None, argv: list[str]) -> None:
    """In a process of its own: a node that finds at `folder` a disk of its own, with that checkpoint or none."""
    mount_small_disk(200, str(folder))
    if checkpoint is not None:
        shutil.copy(checkpoint, folder)
    benchmark.main([*argv, '--save_folder', str(folder)])


@pytest.mark.parametrize('lost', [0, 1])
def test_nodes_that_see_different_checkpoints_end_at_once_with_one_line(lost, tmp_path, smallest_model, server):
    skip_unless_mounts_are_allowed('/dev/shm')
    argv = ['--use_synth_data', *TINY_RANKS, '--model_name', smallest_model, '--image_size', '16', '--autoresume',
            '--results', str(tmp_path / 'records')]
    benchmark.main([*argv, '--max_duration', '1ba', '--save_folder', str(tmp_path / 'before')])
    [checkpoint] = map(Path, checkpoints_in(str(tmp_path / 'before')))
    folder = tmp_path / 'kept'
    folder.mkdir()
    nodes = [(folder, None if rank == lost else checkpoint, [*argv, '--max_duration', '3ba']) for rank in (0, 1)]
    logs = [tmp_path / f'log{rank}' for rank in (0, 1)]
    codes = run_ranks(server, logs, become_node_with_a_disk_of_its_own, nodes, nodes=2)
    assert 2 in codes, logs[0].read_text()
    line = logs[0].read_text().splitlines()[-1]
    seen = ['none' if rank == lost else str(folder / checkpoint.name) for rank in (0, 1)]
    assert line.startswith(f'benchmark.py: error: --save_folder {folder} is not the same folder on every node')
    assert f'{seen[0]} on rank 0, and {seen[1]} on rank 1' in line


def test_a_peer_that_never_comes_ends_the_run_after_the_timeout_with_one_line(server, tmp_path):
    argv = ['--use_synth_data', *TINY_RANKS, '--dist_timeout', '1', '--results', '/dev/null']
    code, _, errors = run_program(server, tmp_path / 'run', benchmark.main, argv, **node(0, free_port()))
    [line] = errors.splitlines()
    assert code == 2
    assert line.startswith('benchmark.py: error: the 2 processes of this run did not meet at')
    assert 'within 1 seconds' in line


def test_bad_input_is_one_line_on_rank_0(server, tmp_path):
    logs = [tmp_path / f'log{rank}' for rank in range(2)]
    argv = ['--use_synth_data', *TINY_RANKS, '--batch_size', '9']
    codes = run_ranks(server, logs, benchmark.main, [(argv,)] * 2)
    assert 2 in codes
    assert logs[0].read_text() == 'benchmark.py: error: --batch_size 9 does not divide over 2 devices; use 8\n'
    assert 'error' not in logs[1].read_text()
