"""Real processes communicate over gloo, as several ranks on one node, or as several nodes on this machine."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from composer import Callback
from composer.cli import launcher
from torch.distributed.run import config_from_args, parse_args

import benchmark
from sdbench.training.checkpoints import checkpoints_in
from tests.forked_runs import mount_small_disk, run_program, run_ranks, skip_unless_mounts_are_allowed
from tests.runs import ROOT, TINY, calls_of, free_port, write_noting_programs
from tests.samples import good, write_several_captions
from tests.test_docs import blocks

TINY_RANKS = ['--use_ema', *TINY, '--batch_size', '8', '--measure_batches', '2', '--num_workers', '0']


class BySample(benchmark.StableDiffusion):
    """Trains in float64, with noise and timesteps that depend on each sample's caption and not on the number of ranks.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.unet.double()

    def forward(self, batch):
        outputs = []
        for image, caption in zip(batch['image'], batch['caption'], strict=True):
            torch.manual_seed(int(caption.sum()))
            outputs.append(super().forward({'image': image[None], 'caption': caption[None]}))
        return tuple(map(torch.cat, zip(*outputs, strict=True)))

    def encode(self, batch):
        latents, text = super().encode(batch)
        return latents.double(), text.double()

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(*outputs)


class Witness(Callback):
    """Saves to `file` the number of batches in an epoch, the trained weights and the EMA weights."""

    def __init__(self, file: Path):
        self.file = file

    def fit_end(self, state, logger):
        [ema] = state.algorithms
        torch.save({'batches': len(state.train_dataloader),
                    'weights': [weight.detach() for weight in state.optimizers[0].param_groups[0]['params']],
                    'ema': ema.ema_model.named_parameters_dict}, self.file)


def train_by_sample(file: Path, argv: list[str]) -> None:
    benchmark.StableDiffusion = BySample
    benchmark.main(argv, [Witness(file)])


def test_two_ranks_split_an_epoch_without_overlap_and_train_the_same_weights_as_one_rank(tmp_path, server):
    """The 31 images make three complete batches. An image that both ranks saw would change the weights twice."""
    shards = write_several_captions(tmp_path / 'shards', [good(index) for index in range(31)])
    argv = ['--remote', shards, *TINY_RANKS, '--device_train_microbatch_size', '2', '--results', '/dev/null']
    for names in (['one'], ['first', 'second']):
        logs = [tmp_path / 'log'] * len(names)
        codes = run_ranks(server, logs, train_by_sample, [(tmp_path / name, argv) for name in names])
        assert codes == [0] * len(names), logs[0].read_text()
    one, first, second = (torch.load(tmp_path / name) for name in ('one', 'first', 'second'))

    assert one['batches'] == first['batches'] == second['batches'] == 3
    for part in ('weights', 'ema'):
        torch.testing.assert_close(first[part], one[part], atol=1e-9, rtol=1e-6)
        torch.testing.assert_close(first[part], second[part], atol=0, rtol=0)


def become_node(folder: Path, argv: list[str]) -> None:
    """Train like a node that shares neither /dev/shm nor temporary files nor its cache with another."""
    del os.environ['NODE_RANK']  # torchrun does not set it
    os.environ['TMPDIR'] = tempfile.tempdir = tempfile.mkdtemp(dir=folder)
    mount_small_disk(1000, '/dev/shm')
    benchmark.main([*argv, '--local', f'{folder}/cache'])


@pytest.mark.long
def test_two_nodes_stream_one_remote_into_separate_caches(tmp_path, shards, server):
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


def become_node_with_separate_disk(folder: Path, checkpoint: Path | None, argv: list[str]) -> None:
    """Train like a node with a separate disk at `folder`, which holds the checkpoint if there is one."""
    mount_small_disk(200, str(folder))
    if checkpoint is not None:
        shutil.copy(checkpoint, folder)
    benchmark.main([*argv, '--max_duration', '3ba', '--save_folder', str(folder)])


def test_nodes_that_see_different_checkpoints_end_with_a_one_line_error(tmp_path, server):
    skip_unless_mounts_are_allowed('/dev/shm')
    argv = ['--use_synth_data', *TINY_RANKS, '--autoresume', '--results', str(tmp_path / 'records')]
    benchmark.main([*argv, '--max_duration', '1ba', '--save_folder', 'before'])
    [checkpoint] = map(Path, checkpoints_in('before'))
    folder = tmp_path / 'kept'
    folder.mkdir()
    nodes = [(folder, None, argv), (folder, checkpoint.absolute(), argv)]
    logs = [tmp_path / f'log{rank}' for rank in (0, 1)]
    codes = run_ranks(server, logs, become_node_with_separate_disk, nodes, nodes=2)
    assert 2 in codes, logs[0].read_text()
    line = logs[0].read_text().splitlines()[-1]
    assert line.startswith('benchmark.py: error: --save_folder')
    assert f'none on rank 0, and {folder / checkpoint.name} on rank 1' in line


def test_the_commands_of_the_page_for_slurm_and_torchrun_start_one_run_on_all_nodes(tmp_path, monkeypatch):
    """SLURM has two nodes here. Fake launchers note their arguments."""
    write_noting_programs(tmp_path, 'composer', 'torchrun')
    for name, script in (('srun', 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'),
                         ('scontrol', 'echo first-node; echo another-node')):
        (tmp_path / name).write_text(f'#!/bin/sh\n{script}\n')
        (tmp_path / name).chmod(0o755)
    environment = {'PATH': f'{tmp_path}:{os.defpath}', 'SLURM_NNODES': '2', 'SLURM_JOB_NODELIST': 'two-nodes'}
    for block in blocks(ROOT / 'docs/machines.md', 'sh'):
        assert '--gpus-per-node=8' in block or '#SBATCH' not in block
        if '#SBATCH' in block or 'torchrun ' in block:
            subprocess.run(['bash', '-c', block], cwd=tmp_path, env=environment, check=True)

    ranks = []
    for arguments in calls_of(tmp_path, 'composer'):
        monkeypatch.setattr(sys, 'argv', ['composer', *arguments])
        launch = launcher._parse_args()
        ranks.append((launch.nproc, launch.world_size, launch.node_rank, launch.base_rank))
        assert (launch.master_addr, launch.master_port) == ('first-node', 29500)
    assert ranks == [(8, 16, 0, 0), (8, 16, 1, 8)]
    [arguments] = calls_of(tmp_path, 'torchrun')
    config, _, command = config_from_args(parse_args([word.replace('N', '3') for word in arguments]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.rdzv_configs['rank']) == (4, 4, 8, 3)
    assert config.rdzv_endpoint.startswith('HOST:')
    assert 'benchmark.py' in command


def test_a_missing_rank_ends_the_run_after_the_timeout_with_a_one_line_error(server, tmp_path):
    argv = ['--use_synth_data', *TINY_RANKS, '--dist_timeout', '1', '--results', '/dev/null']
    first_of_two = {'RANK': '0', 'LOCAL_RANK': '0', 'NODE_RANK': '0', 'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '1',
                    'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    code, _, errors = run_program(server, tmp_path / 'run', benchmark.main, argv, **first_of_two)
    [line] = errors.splitlines()
    assert code == 2
    assert line.startswith('benchmark.py: error: the 2 processes of this run did not meet')


def test_a_user_error_is_printed_once_on_rank_0(server, tmp_path):
    logs = [tmp_path / f'log{rank}' for rank in range(2)]
    argv = ['--use_synth_data', *TINY_RANKS, '--batch_size', '9']
    codes = run_ranks(server, logs, benchmark.main, [(argv,)] * 2)
    assert 2 in codes
    assert logs[0].read_text() == 'benchmark.py: error: --batch_size 9 is not divisible by 2 devices; use 8\n'
    assert 'error' not in logs[1].read_text()
