"""sky.yaml as SkyPilot reads it, and what its commands start on each node. SkyPilot 0.14 itself needs another click."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from composer.cli import launcher

from benchmarks.proof.__main__ import Machine, smoke_steps
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from tests.runs import ROOT

TASK = yaml.safe_load((ROOT / 'sky.yaml').read_text())
# Of the task and of its resources, by SkyPilot's documents; any other key is refused.
TRAINING = {'REMOTE': 's3://bucket/photos', 'SAVE_FOLDER': 's3://bucket/run 1'}
WHOLE = {'SOURCE': 's3://bucket/tars/', 'WORK': 's3://bucket/sd2', 'MODEL': 'sd2'}


def run_on(folder: Path, script: str, rank: int = 0, nodes: int = 1, **envs: str) -> subprocess.CompletedProcess:
    """Run a script of the task in bash, on one of the nodes; programs and the recipe only note how they are called."""
    programs = folder / 'bin'
    programs.mkdir()
    for name in ('composer', 'make', 'uv'):
        program = programs / name
        program.write_text(f'#!/bin/sh\n[ {name} = uv ] && echo /uv/python3.11\n'
                           f'printf "%s\\0" {name} "$@" >> {folder}/called-{name}; echo >> {folder}/called-{name}\n')
        program.chmod(0o755)
    (folder / 'recipes').mkdir()
    (folder / 'recipes/stable-diffusion-2.sh').write_text('env > variables\n')
    addresses = [f'10.0.0.{node + 1}' for node in range(nodes)]
    sky = {'SKYPILOT_NODE_RANK': str(rank), 'SKYPILOT_NODE_IPS': '\n'.join(addresses),
           'SKYPILOT_NUM_NODES': str(nodes), 'SKYPILOT_NUM_GPUS_PER_NODE': '8'}
    environment = {'PATH': f'{programs}:{os.defpath}'} | TASK['envs'] | envs | sky
    return subprocess.run(['bash', '-c', script], cwd=folder, env=environment, text=True, capture_output=True)


def calls(folder: Path, name: str) -> list[list[str]]:
    """Return the arguments of each call of a program."""
    path = folder / f'called-{name}'
    if not path.exists():
        return []
    return [line.split('\0')[1:-1] for line in path.read_text().splitlines()]


def flags_of(arguments: list[str]) -> Train:
    """Return the settings of a call of the launcher."""
    return parse(Train, '', arguments[arguments.index('benchmark.py') + 1:])


def launched(monkeypatch, arguments: list[str]):
    """Return what the launcher of Composer reads in its arguments."""
    monkeypatch.setattr(sys, 'argv', ['composer', *arguments])
    return launcher._parse_args()


def test_setup_makes_an_environment_with_a_python_that_fits(tmp_path):
    run_on(tmp_path, TASK['setup'])
    [arguments] = calls(tmp_path, 'make')
    assert 'PYTHON=/uv/python3.11' in arguments
    done = subprocess.run(['make', '-n', '-B', 'STACK=pinned', *arguments], cwd=ROOT, text=True, capture_output=True)
    assert 'sh install.sh .venv requirements.lock' in done.stdout


@pytest.mark.parametrize('rank, nodes', [(0, 1), (1, 2)])
def test_without_a_remote_the_runs_of_make_smoke_are_over_all_nodes_together(tmp_path, monkeypatch, rank, nodes):
    done = run_on(tmp_path, TASK['run'], rank, nodes)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(ROOT)
    runs = calls(tmp_path, 'composer')
    for arguments, step in zip(runs, smoke_steps(Machine(8 * nodes, 'H100', 79.2, False)), strict=True):
        assert launched(monkeypatch, arguments).world_size == 8 * nodes
        assert flags_of(arguments) == parse(Train, '', list(step.flags))
    ports = {launched(monkeypatch, arguments).master_port for arguments in runs}
    assert len(ports) == 2  # a node that begins the second must not find the end of the first


@pytest.mark.parametrize('rank, nodes', [(0, 1), (0, 2), (1, 2)])
def test_a_training_is_launched_once_on_each_node_and_goes_on_from_its_bucket(tmp_path, monkeypatch, rank, nodes):
    done = run_on(tmp_path, TASK['run'], rank, nodes, **TRAINING)
    assert done.returncode == 0, done.stderr
    [arguments] = calls(tmp_path, 'composer')
    launch = launched(monkeypatch, arguments)
    assert (launch.nproc, launch.world_size) == (8, 8 * nodes)
    assert (launch.node_rank, launch.base_rank) == (rank, 8 * rank)
    assert (launch.master_addr, launch.master_port) == ('10.0.0.1', 29500)
    settings = flags_of(arguments)
    assert settings.autoresume
    assert settings.use_ema
    assert (settings.remote, settings.save_folder) == (TRAINING['REMOTE'], TRAINING['SAVE_FOLDER'])
    assert settings.results == '-'  # a file would end with the machine


def test_the_whole_training_is_the_recipe_with_the_variables_of_the_task(tmp_path):
    done = run_on(tmp_path, TASK['run'], **WHOLE, LATENTS='1')
    assert done.returncode == 0, done.stderr
    variables = dict(line.split('=', 1) for line in (tmp_path / 'variables').read_text().splitlines())
    expected = WHOLE | {'LATENTS': '1', 'RESULTS': '-', 'PHASE_FLAGS': '', 'SCORES': ''}
    assert {name: variables[name] for name in expected} == expected
    assert calls(tmp_path, 'composer') == []
    read = set(re.findall(r'\$\{(\w+):[=?]', (ROOT / 'recipes/stable-diffusion-2.sh').read_text()))
    assert set(expected) <= read


@pytest.mark.parametrize('envs, line', [
    ({'REMOTE': 's3://bucket/photos'}, 'SAVE_FOLDER: is empty; give --env SAVE_FOLDER='),
    (WHOLE | {'WORK': ''}, 'WORK: is empty; give --env WORK='), (WHOLE | {'nodes': 2}, 'SOURCE is for one machine')])
def test_a_training_that_cannot_be_is_refused_in_one_line(tmp_path, envs, line):
    done = run_on(tmp_path, TASK['run'], **envs)
    assert done.returncode != 0
    assert line in done.stderr
    assert done.stderr.count('\n') == 1
    assert calls(tmp_path, 'composer') == []
    assert not (tmp_path / 'variables').exists()
