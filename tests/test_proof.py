"""`make smoke` and `make proof`: every command is valid, and results are kept and judged."""
import json
import math

import pytest
import torch
from composer.utils import dist

from benchmarks.proof import __main__ as proof
from benchmarks.proof.__main__ import prove
from benchmarks.proof.steps import Machine, Step, all_steps, measuring, refusing
from sdbench.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.forecast.forecast import forecast
from sdbench.gpus import CARDS
from sdbench.records.read import read_all
from sdbench.records.record import append_line
from sdbench.setup import setup_of_record
from tests.runs import ROOT, SMALLEST

A100 = 'NVIDIA A100-SXM4-80GB'
ONE = Machine(1, A100, 79.2)
CPU = Machine(0, 'CPU', 0)
MACHINES = [ONE, Machine(8, A100, 79.2), Machine(1, 'NVIDIA A10', 22.1), CPU]


@pytest.mark.parametrize('machine', MACHINES, ids=str)
def test_every_measurement_has_valid_flags_and_no_two_are_the_same(as_on_a_gpu, monkeypatch, machine):
    as_on_a_gpu(count=machine.gpus, name=machine.device)
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 91501)
    monkeypatch.setattr(dist, 'get_world_size', lambda: max(1, machine.gpus))
    monkeypatch.setattr(dist, 'all_gather_object', lambda mine: [mine])
    monkeypatch.setenv('WORLD_SIZE', str(max(1, machine.gpus)))
    monkeypatch.chdir(ROOT)
    steps = [step for step in all_steps(machine, 'results.jsonl').values() if step.is_measurement]
    measured = [complete(parse(Train, '', list(step.program[1:])), None) for step in steps]
    assert len(set(map(repr, measured))) == len(measured) > 2


def python(code: str, shows: str, fails: bool = False) -> Step:
    return Step(('-c', code), shows, fails)


@pytest.fixture
def steps(monkeypatch) -> dict[str, Step]:
    """The steps of a proof, which writes no page, because a report in a process of its own takes seconds."""
    steps = {'original': python('print("images/s  1,000")', '^images/s'),
             'fastest': python('print("images/s  2,500 on 1 x A100"); print(2)', '^images/s')}
    monkeypatch.setattr(proof, 'write_page', lambda results: None)
    monkeypatch.setattr(proof, 'all_steps', lambda machine, results: steps)
    return steps


def test_smoke_runs_the_first_steps_and_a_proof_continues_with_those_that_have_not_succeeded(
        tmp_path, steps, monkeypatch, capsys):
    def results() -> list[tuple]:
        lines = map(json.loads, (tmp_path / 'results.jsonl').read_text().splitlines())
        return [(line['step'], line['holds'], line['result']) for line in lines]

    steps['hangs'] = python('import time; time.sleep(1000)', '')
    assert prove(tmp_path, ONE, minutes=0)
    both = [('original', True, 'images/s 1,000'), ('fastest', True, 'images/s 2,500 on 1 x A100')]
    assert results() == both
    assert '2.50 times as fast' in capsys.readouterr().out

    monkeypatch.setattr(proof, 'LIMIT', 0.2)
    assert not prove(tmp_path, ONE, math.inf)
    assert results() == [*both, ('hangs', False, 'no end within 0.2 s')]
    monkeypatch.setattr(proof, 'LIMIT', 600)
    steps['hangs'] = python('print("now it works")', 'works')
    steps['later'] = python('print("works")', 'works')
    assert prove(tmp_path, ONE, minutes=1e-9)
    assert 'hangs, later' in capsys.readouterr().out  # not run yet
    assert prove(tmp_path, ONE, math.inf)
    assert results()[3:] == [('hangs', True, 'now it works'), ('later', True, 'works')]
    assert [line[:8] for line in capsys.readouterr().out.splitlines()[:4]] == ['ok      '] * 4


@pytest.mark.parametrize('step, holds, result', [
    (python('print("seen"); exit(1)', 'seen'), False, 'exit status 1: seen'),
    (python('print("other")', 'seen'), False, 'exit status 0'),
    (python('exit("x.py: error: seen")', 'seen', fails=True), True, 'x.py: error: seen'),
    (python('exit("x.py: error: other")', 'seen', fails=True), False, 'exit status 1: x.py: error: other')], ids=str)
def test_a_step_holds_if_it_shows_what_it_must_and_ends_as_it_must(tmp_path, step, holds, result):
    assert proof.run_step(step, CPU, tmp_path / 'results.jsonl', tmp_path / 'log') == (holds, result)


@pytest.mark.parametrize('ratio, holds', [(1.0, True), (0.7, False), (1.3, False)])
def test_a_measurement_far_from_its_forecast_does_not_hold(tmp_path, monkeypatch, ratio, holds):
    results = tmp_path / 'results.jsonl'
    record = {'stage': 'train', 'status': 'complete', 'device': A100, 'num_devices': 1, 'image_size': 512,
              'command': 'benchmark.py', 'device_train_microbatch_size': 8, 'precision': 'amp_bf16',
              'encoders': 'in_loop'}
    speed = ratio * forecast(setup_of_record(record), CARDS[A100]).images_per_sec

    def run(command, log) -> int:
        append_line(json.dumps(record | {'images_per_sec': speed}), str(results))
        log.write_text(f'images/s        {speed}\n')
        return 0

    monkeypatch.setattr(proof, 'run', run)
    expected = f'images/s {speed}; {ratio:.2f} times the forecast'
    assert proof.run_step(measuring(), ONE, results, tmp_path / 'log') == (holds, expected)


def test_results_from_another_machine_or_commit_and_records_by_hand_do_not_count(tmp_path, steps, monkeypatch):
    by_hand = {'device': A100, 'num_devices': 1, 'image_size': 512, 'images_per_sec': 20}
    (tmp_path / 'results.jsonl').write_text(json.dumps(by_hand) + '\n')
    del steps['fastest']
    prove(tmp_path, CPU, math.inf)
    prove(tmp_path, CPU, math.inf)
    prove(tmp_path, ONE, math.inf)
    monkeypatch.setattr(proof, 'git_commit', lambda: 'abc')
    prove(tmp_path, CPU, math.inf)
    here = [json.loads(line)['here'] for line in (tmp_path / 'results.jsonl').read_text().splitlines()[1:]]
    assert [(each['machine'], each['commit'] == 'abc') for each in here] == [
        ('0 x CPU', False), (f'1 x {A100}', False), ('0 x CPU', True)]


@pytest.mark.long
def test_the_page_of_a_proof_has_its_measurements(tmp_path, monkeypatch, capsys):
    pytest.importorskip('itables', reason='needs itables: pip install itables')
    flags = ['--model_name', SMALLEST, '--image_size', '16', '--batch_size', '4', '--measure_batches', '3']
    wrong_size = refusing('63 is not a multiple of 8', '--image_size', '63')
    steps = {'speed': measuring(*flags), 'wrong size': wrong_size}
    monkeypatch.setattr(proof, 'all_steps', lambda machine, results: steps)
    prove(tmp_path, CPU, math.inf)
    printed = capsys.readouterr().out
    assert 'FAILED' not in printed
    assert '63 is not a multiple of 8' in printed
    measured = read_all([str(tmp_path / 'results.jsonl')])
    assert len(measured) == 1
    assert SMALLEST in (tmp_path / 'results.html').read_text()


@pytest.mark.long
def test_the_checks_of_a_proof_hold_on_a_cpu(tmp_path):
    steps = all_steps(CPU, str(tmp_path / 'results.jsonl'))
    for name in ('machine', 'exactness', 'resume', 'loader', 'NaN'):
        holds, result = proof.run_step(steps[name], CPU, tmp_path / 'results.jsonl', tmp_path / name)
        assert holds, (result, (tmp_path / name).read_text())
    step = steps['EMA update']._replace(shows='^update ratio')  # whatever the ratio, which depends on the load
    assert proof.run_step(step, CPU, tmp_path / 'results.jsonl', tmp_path / 'log')[0]
    stages = [json.loads(line)['stage'] for line in (tmp_path / 'results.jsonl').read_text().splitlines()]
    assert stages == ['loader', 'train']
