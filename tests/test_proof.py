"""`make proof`: every step is one that runs, none that has a record is repeated, and the page says what it must."""
import json
import math
import shlex
import subprocess

import pandas as pd
import pytest
import torch
from composer.utils import dist

import benchmark
from benchmarks.proof import __main__ as proof
from benchmarks.proof.__main__ import Machine, all_steps, check, prove
from sdbench.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.records.read import read_all
from sdbench.records.record import append_line
from sdbench.report.plans import find_corrections
from tests.runs import ROOT, SMALLEST

A100 = 'NVIDIA A100-SXM4-80GB'
ONE = Machine(1, A100, 79.2, tiny=False)
CPU = Machine(0, 'CPU', 0, tiny=True)
EIGHT = Machine(8, A100, 79.2, tiny=False)
MACHINES = [ONE, EIGHT, Machine(1, 'NVIDIA A10', 22.1, False), Machine(2, A100, 79.2, True), CPU]


@pytest.mark.parametrize('machine', MACHINES, ids=str)
def test_every_measurement_is_one_of_its_own_that_the_benchmark_takes(as_on_a_gpu, monkeypatch, machine):
    as_on_a_gpu(count=machine.gpus, name=machine.device)
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 91501)
    monkeypatch.setattr(dist, 'get_world_size', lambda: max(1, machine.gpus))
    monkeypatch.setattr(dist, 'all_gather_object', lambda mine: [mine])
    monkeypatch.setenv('WORLD_SIZE', str(max(1, machine.gpus)))
    monkeypatch.chdir(ROOT)
    flags_of_runs = [program[1:] for program in all_steps(machine).values() if program[0] == 'benchmark.py']
    measured = [complete(parse(Train, '', list(flags)), None) for flags in flags_of_runs]
    assert len(set(map(repr, measured))) == len(measured)


@pytest.mark.long
def test_a_proof_goes_on_where_it_was_and_its_page_names_what_failed_and_what_was_not_run(tmp_path, monkeypatch):
    pytest.importorskip('itables', reason='needs itables: pip install itables')
    wrong_size = ('benchmark.py', '--use_synth_data', '--image_size', '63')
    hangs = ('-c', 'import time; time.sleep(1000)')
    steps = {'hangs': hangs, 'wrong size': wrong_size, 'later': check('life')}
    monkeypatch.setattr(proof, 'all_steps', lambda machine: dict(steps))
    monkeypatch.setattr(proof, 'LIMIT', 1)
    prove(tmp_path, CPU, minutes=0.01)  # so that no second step begins
    records = (tmp_path / 'records.jsonl').read_text()
    assert [json.loads(line)['step'] for line in records.splitlines()] == ['hangs']
    page = (tmp_path / 'proof.html').read_text()
    assert 'no end within 1 s' in page
    assert 'Not run yet: wrong size, later.' in page

    monkeypatch.setattr(proof, 'LIMIT', 600)
    del steps['later']
    prove(tmp_path, CPU, math.inf)
    added = (tmp_path / 'records.jsonl').read_text().removeprefix(records)
    assert [json.loads(line)['step'] for line in added.splitlines()] == ['wrong size']
    page = (tmp_path / 'proof.html').read_text()
    assert 'benchmark.py: error: argument --image_size: 63 is not a multiple of 8' in page
    assert 'Not run yet' not in page

    with pytest.raises(ValueError, match='the proof of machine 0 x CPU, and here is machine 1 x'):
        prove(tmp_path, ONE, math.inf)
    monkeypatch.setattr(proof, 'git_commit', lambda: 'abc')
    with pytest.raises(ValueError, match='the proof of commit .*, and here is commit abc; give a new one'):
        prove(tmp_path, CPU, math.inf)


def test_smoke_on_a_gpu_appends_the_forecast_of_each_run_by_which_it_corrects_a_plan(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(proof, 'RESULTS', tmp_path / 'results.jsonl')
    flags = ['--use_synth_data', '--model_name', SMALLEST, '--image_size', '16', '--batch_size', '64']
    [found] = benchmark.main([*flags, '--dry_run', '8', '--gpu', A100])

    pages = []

    def run(command: list[str], **_) -> subprocess.CompletedProcess:
        if 'report.py' in command:
            pages.append(command[2:])
        elif '--dry_run' in command:
            benchmark.main(command[command.index('benchmark.py') + 1:])
        else:
            command = f'benchmark.py {shlex.join(flags)} --device_train_microbatch_size auto --results results.jsonl'
            measured = found | {'status': 'complete', 'device_train_microbatch_size': 1, 'command': command}
            append_line(json.dumps(measured), str(proof.RESULTS))
        return subprocess.CompletedProcess(command, 0, '')  # of git as well

    monkeypatch.setattr(proof.subprocess, 'run', run)
    monkeypatch.setattr('sdbench.forecast.dry_run.with_one_change', lambda settings: {'none': settings})
    assert proof.smoke(Machine(8, A100, 39.4, False)) == 0
    rows = pd.DataFrame(read_all([str(tmp_path / 'results.jsonl')]))
    corrections, _ = find_corrections(rows, {*zip(rows['device'], rows['compile'], strict=True)})
    assert len(corrections) == 1
    assert pages == [[str(tmp_path / 'results.jsonl'), '--html', str(tmp_path / 'results.html')]]

    # a forecast that fails is a failure of the command
    status = {'--dry_run': 2}
    monkeypatch.setattr(proof.subprocess, 'run', lambda command, **_: subprocess.CompletedProcess(
        command, max(status.get(word, 0) for word in command), ''))
    assert proof.smoke(Machine(8, A100, 39.4, False)) == 1
