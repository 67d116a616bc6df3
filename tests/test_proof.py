"""`make proof`: every step is one that runs, none that has a record is repeated, and the page says what it must."""
import json
import shlex
import subprocess

import pandas as pd
import pytest
import torch
from composer.utils import dist

import benchmark
from benchmarks.proof import __main__ as proof
from benchmarks.proof.__main__ import Machine, Step, all_steps, prove, smoke_steps
from benchmarks.proof.page import plausibility, write_page
from sdbench.flags.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import SWITCHES, Train
from sdbench.records.read import read_records
from sdbench.report.plans import corrections_of
from tests.runs import ROOT, SMALLEST

A100 = 'NVIDIA A100-SXM4-80GB'
ONE = Machine(1, A100, 79.2, tiny=False)
CPU = Machine(0, 'CPU', 0, tiny=True)
EIGHT = Machine(8, A100, 79.2, tiny=False)
RUN = {'step': 'original', 'step_seconds': 1.0, 'expectation': '', 'stage': 'train', 'num_devices': 1, 'device': A100,
       'model_name': 'sd'}  # a record
MACHINES = [ONE, EIGHT, Machine(1, 'NVIDIA A10', 22.1, False), Machine(2, A100, 79.2, True), CPU]


@pytest.mark.parametrize('machine', MACHINES, ids=str)
def test_every_measurement_is_one_of_its_own_that_the_benchmark_takes(as_on_a_gpu, monkeypatch, machine):
    as_on_a_gpu(count=machine.gpus, name=machine.device)
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 91501)
    monkeypatch.setattr(dist, 'get_world_size', lambda: max(1, machine.gpus))
    monkeypatch.setattr(dist, 'all_gather_object', lambda mine: [mine])
    monkeypatch.setenv('WORLD_SIZE', str(max(1, machine.gpus)))
    monkeypatch.chdir(ROOT)
    steps = all_steps(machine)
    assert len({step.name for step in steps}) == len(steps)
    measured = [complete(parse(Train, '', list(step.flags)), None) for step in steps if step.work == 'measure']
    assert len(set(map(repr, measured))) == len(measured)


def test_every_switch_of_speed_has_a_step():
    flags = {flag.removeprefix('--').removeprefix('no-') for step in all_steps(EIGHT) for flag in step.flags}
    recipes = (ROOT / 'recipes/fastest.txt').read_text() + (ROOT / 'recipes/original.txt').read_text()
    for switch in set(SWITCHES) - {'gradient_checkpointing'}:  # which saves memory
        assert switch in flags or f'--{switch}' in recipes, switch


@pytest.mark.long
def test_a_proof_goes_on_where_it_was_and_its_page_names_what_failed_and_what_was_not_run(tmp_path, monkeypatch):
    steps = [Step('wrong size', 'measure', 60, ('--use_synth_data', '--image_size', '63')), Step('later', 'life', 9000)]
    monkeypatch.setattr(proof, 'all_steps', lambda machine: steps)
    prove(tmp_path, CPU, minutes=100)  # less than the second step takes
    records = (tmp_path / 'records.jsonl').read_text()
    assert [json.loads(line)['step'] for line in records.splitlines()] == ['wrong size']
    page = (tmp_path / 'proof.md').read_text()
    assert 'benchmark.py: error: argument --image_size: 63 is not a multiple of 8' in page
    assert 'Not run yet: later.' in page

    steps[1] = Step('later', 'identity', 1)
    prove(tmp_path, CPU, minutes=0.02)  # it is ended after a second, so that it is still to be run
    assert (tmp_path / 'records.jsonl').read_text() == records
    steps[1] = Step('later', 'identity', 60)  # ten times as long, before it is ended
    prove(tmp_path, CPU, None)
    added = (tmp_path / 'records.jsonl').read_text().removeprefix(records)
    assert json.loads(added)['step'] == 'later'
    assert 'Not run yet' not in (tmp_path / 'proof.md').read_text()

    with pytest.raises(ValueError, match='another machine'):
        prove(tmp_path, ONE, None)
    monkeypatch.setattr(proof, 'program', lambda: {'commit': 'abc'})
    with pytest.raises(ValueError, match='the proof of commit .*, and here is commit abc; give a new one'):
        prove(tmp_path, CPU, None)


@pytest.mark.parametrize('gib, smallest', [(39.4, False), (22.1, True)])
def test_smoke_is_the_recipes_of_the_original_and_the_fastest_and_smaller_on_small_gpus(gib, smallest):
    original, fastest = smoke_steps(Machine(8, A100, gib, False))
    assert '@recipes/original.txt' in original.flags
    assert '@recipes/fastest.txt' in fastest.flags
    assert original.flags[original.flags.index('--batch_size') + 1] == '512'
    assert ('--no-use_ema' in original.flags) == smallest


def test_smoke_on_a_gpu_appends_the_forecast_of_each_run_by_which_it_corrects_a_plan(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(proof, 'RESULTS', tmp_path / 'results.jsonl')
    flags = ['--use_synth_data', '--model_name', SMALLEST, '--image_size', '16', '--batch_size', '64']
    [found] = benchmark.main([*flags, '--dry_run', '8', '--gpu', A100])

    def run(command: list[str], **_) -> subprocess.CompletedProcess:
        if '--dry_run' in command:
            benchmark.main(command[command.index('benchmark.py') + 1:])
            return subprocess.CompletedProcess(command, 0, '')
        command = f'benchmark.py {shlex.join(flags)} --device_train_microbatch_size auto --results -'
        measured = found | {'status': 'complete', 'device_train_microbatch_size': 1, 'command': command}
        return subprocess.CompletedProcess(command, 0, json.dumps(measured) + '\n')

    monkeypatch.setattr(proof.subprocess, 'run', run)
    assert proof.smoke(Machine(8, A100, 39.4, False)) == 0
    rows = pd.DataFrame(read_records(str(tmp_path / 'results.jsonl')))
    corrections, _ = corrections_of(rows)
    assert len(corrections) == 1


@pytest.mark.long
def test_smoke_on_a_cpu_keeps_the_record_of_its_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(proof, 'RESULTS', tmp_path / 'results.jsonl')
    assert proof.smoke(CPU) == 0
    record = json.loads((tmp_path / 'results.jsonl').read_text())
    assert record['model_name'] == 'tiny'
    assert 'images/s' in capfd.readouterr().out


@pytest.mark.parametrize('microbatch, speed, said', [
    (4, 17.8, 'plausible'), (4, 13.0, 'FAR OFF'), (4, 25.5, 'FAR OFF'), (32, 25.5, 'plausible'), (5, 18, 'nothing is')])
def test_the_page_says_first_where_the_original_is_far_from_what_was_published(tmp_path, microbatch, speed, said):
    """Others found 17.8 images/s on an A100 of 80 GB at a microbatch of 4, and 25.5 at 32."""
    speeds = {'images_per_sec': speed, 'images_per_sec_per_device': speed}
    run = RUN | speeds | {'device_train_microbatch_size': microbatch}
    sentence = plausibility([run])[0]
    assert said in sentence
    write_page(tmp_path, [run], [])
    assert (tmp_path / 'proof.md').read_text().splitlines()[2] == f'- {sentence}'
    assert (tmp_path / 'proof.png').is_file()


def test_a_page_has_no_commands_for_a_terminal(tmp_path):
    run = RUN | {'status': 'failed', 'device': 'A100 \x1b[31m', 'error': 'of \x1b[31m|\n red'}
    write_page(tmp_path, [run], ['later \x1b[0m'])
    page = (tmp_path / 'proof.md').read_text()
    assert '\x1b' not in page
    assert page.startswith('# Proof: 1 x A100  [31m\n')
    assert r'of [31m\| red' in page
