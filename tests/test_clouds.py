"""The commands in sky.yaml start the right programs on each node, and mcli reads and sends mcloud.yaml.

SkyPilot 0.14 itself needs another click.
"""
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml
from composer.cli import launcher
from mcli import RunConfig
from mcli.models.run_config import FinalRunConfig

from benchmarks.proof.steps import Machine, first_steps
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from tests.runs import ROOT, calls_of, write_noting_programs
from tests.samples import write_files

TASK = yaml.safe_load((ROOT / 'sky.yaml').read_text())
TRAINING = {'REMOTE': 's3://bucket/photos', 'MODEL': 'sd2', 'SAVE_FOLDER': 's3://bucket/run 1'}
WHOLE = {'SOURCE': 's3://bucket/tars/', 'WORK': 's3://bucket/sd2', 'MODEL': 'sd2'}


def run_on(folder: Path, script: str, rank: int = 0, nodes: int = 1, **envs: str) -> subprocess.CompletedProcess:
    """Run a script of the task in bash on one node. Programs and the recipe only record how they are called."""
    write_noting_programs(folder, 'composer', 'make', 'uv')
    write_files(folder, {'uv': '#!/bin/sh\necho /uv/python3.11\n',
                         'recipes/stable-diffusion-2.sh': 'env > variables\n'})
    addresses = [f'10.0.0.{node + 1}' for node in range(nodes)]
    sky = {'SKYPILOT_NODE_RANK': str(rank), 'SKYPILOT_NODE_IPS': '\n'.join(addresses),
           'SKYPILOT_NUM_NODES': str(nodes), 'SKYPILOT_NUM_GPUS_PER_NODE': '8'}
    environment = {'PATH': f'{folder}:{os.defpath}'} | TASK['envs'] | envs | sky
    return subprocess.run(['bash', '-c', script], cwd=folder, env=environment, text=True, capture_output=True)


def flags_of(arguments: list[str]) -> Train:
    """Return the settings in the arguments of the launcher."""
    return parse(Train, '', arguments[arguments.index('benchmark.py') + 1:])


def launched(monkeypatch, arguments: list[str]):
    """Return the options that Composer's launcher parses."""
    monkeypatch.setattr(sys, 'argv', ['composer', *arguments])
    return launcher._parse_args()


def test_setup_makes_an_environment_with_a_supported_python(tmp_path):
    run_on(tmp_path, TASK['setup'])
    [arguments] = calls_of(tmp_path, 'make')
    assert 'PYTHON=/uv/python3.11' in arguments
    done = subprocess.run(['make', '-n', '-B', 'STACK=pinned', *arguments], cwd=ROOT, text=True, capture_output=True)
    assert 'sh install.sh .venv requirements.lock' in done.stdout


@pytest.mark.parametrize('rank, nodes', [(0, 1), (1, 2)])
def test_without_a_remote_make_smoke_runs_on_all_nodes_together(tmp_path, monkeypatch, rank, nodes):
    done = run_on(tmp_path, TASK['run'], rank, nodes)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(ROOT)
    runs = calls_of(tmp_path, 'composer')
    expected = first_steps(Machine(8 * nodes, 'H100', 79.2))
    for arguments, step in zip(runs, expected.values(), strict=True):
        assert launched(monkeypatch, arguments).world_size == 8 * nodes
        assert flags_of(arguments) == parse(Train, '', list(step.program[1:]))
    ports = {launched(monkeypatch, arguments).master_port for arguments in runs}
    assert len(ports) == 2  # a node that begins the second must not find the end of the first


@pytest.mark.parametrize('rank, nodes', [(0, 1), (0, 2), (1, 2)])
def test_a_training_is_launched_once_per_node_and_resumes_from_its_bucket(tmp_path, monkeypatch, rank, nodes):
    done = run_on(tmp_path, TASK['run'], rank, nodes, **TRAINING)
    assert done.returncode == 0, done.stderr
    [arguments] = calls_of(tmp_path, 'composer')
    launch = launched(monkeypatch, arguments)
    assert (launch.nproc, launch.world_size) == (8, 8 * nodes)
    assert (launch.node_rank, launch.base_rank) == (rank, 8 * rank)
    assert (launch.master_addr, launch.master_port) == ('10.0.0.1', 29500)
    settings = flags_of(arguments)
    assert (settings.autoresume, settings.use_ema) == (True, True)
    assert (settings.model_name, settings.pretrained, settings.caption_drop) == ('sd2', True, 0.1)
    assert (settings.remote, settings.save_folder) == (TRAINING['REMOTE'], TRAINING['SAVE_FOLDER'])
    assert settings.results == '-'  # a file would end with the machine


def test_the_whole_training_is_the_recipe_with_the_variables_of_the_task(tmp_path):
    done = run_on(tmp_path, TASK['run'], **WHOLE, LATENTS='')
    assert done.returncode == 0, done.stderr
    variables = dict(line.split('=', 1) for line in (tmp_path / 'variables').read_text().splitlines())
    expected = WHOLE | {'LATENTS': '', 'RESULTS': '-', 'PHASE_FLAGS': '@recipes/fastest.txt', 'SCORES': ''}
    assert {name: variables[name] for name in expected} == expected
    assert calls_of(tmp_path, 'composer') == []
    read = set(re.findall(r'\$\{(\w+):?[=?]', (ROOT / 'recipes/stable-diffusion-2.sh').read_text()))
    assert set(expected) <= read


@pytest.mark.parametrize('envs, words', [
    (TRAINING | {'MODEL': ''}, '--env MODEL='), (TRAINING | {'SAVE_FOLDER': ''}, '--env SAVE_FOLDER='),
    (WHOLE | {'WORK': ''}, '--env WORK='), (WHOLE | {'nodes': 2}, 'SOURCE needs one machine')])
def test_an_impossible_training_is_refused_in_one_line(tmp_path, envs, words):
    done = run_on(tmp_path, TASK['run'], **envs)
    assert done.returncode != 0
    assert words in done.stderr
    assert done.stderr.count('\n') == 1
    assert calls_of(tmp_path, 'composer') == []
    assert not (tmp_path / 'variables').exists()


def test_mcloud_yaml_runs_both_examples_on_eight_gpus_once_its_comments_are_uncommented(tmp_path, caplog):
    path = tmp_path / 'mcloud.yaml'
    path.write_text(re.sub(r'# (?=composer |S3_ENDPOINT_URL|cluster:)', '', (ROOT / 'mcloud.yaml').read_text()))
    with warnings.catch_warnings(), caplog.at_level('WARNING', 'mcli'):  # as mcli complains of a field it does not know
        warnings.simplefilter('error')
        sent = FinalRunConfig.finalize_config(RunConfig.from_file(path)).to_create_run_api_input()['runInput']
    assert caplog.messages == []
    assert sent['compute'] == {'gpus': 8, 'gpuType': 'a100_40gb', 'cluster': 'my-cluster'}
    lines = [shlex.split(line, comments=True) for line in sent['command'].splitlines()]
    enter, install, *runs = [words for words in lines if words]
    assert enter == ['cd', 'diffusion-benchmark']
    assert install == ['pip', 'install', '-r', 'requirements.txt']
    assert [words[:2] for words in runs] == [['composer', 'benchmark.py']] * 2
    synthetic, streaming = [parse(Train, '', words[2:]) for words in runs]
    assert (synthetic.use_ema, synthetic.use_synth_data, synthetic.device_train_microbatch_size) == (True, True, 4)
    assert (streaming.use_ema, streaming.remote) == (True, 's3://my-bucket/laion/mds')
