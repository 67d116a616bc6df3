"""benchmarks/ladder.py: every rung is a command that the benchmark takes, and none starts that would end too late."""
import argparse
import json
import shlex
import sys
import time
from pathlib import Path

import pytest

from benchmarks import ladder
from benchmarks.ladder import PLAIN, RUNGS, Machine, climb, launcher, recorded, rungs
from settings.train import SWITCHES
from tests.runs import settings_of

GPU = 'NVIDIA A100-SXM4-40GB'


class Runs:
    """Stands for runs on GPUs that nobody has here: notes the flags, and appends the record that a run would."""

    def __init__(self, gpus: int = 1, microbatch: int = 8, seconds: float = 0.0, status: str = 'complete'):
        self.machine = Machine(gpus, GPU)
        self.microbatch = microbatch
        self.seconds = seconds
        self.status = status
        self.started: list[list[str]] = []
        self.clock = 0.0

    def __call__(self, command: list[str], seconds: float) -> int:
        flags = command[len(launcher(self.machine)):]
        self.started.append(flags[:-2])
        self.clock += self.seconds
        record = {'command': shlex.join(['benchmark.py', *flags]), 'device': GPU, 'num_devices': self.machine.gpus,
                  'status': self.status, 'device_train_microbatch_size': self.microbatch}
        with open(flags[-1], 'a') as file:
            print(json.dumps(record), file=file)
        return 0


def climbed(monkeypatch, results: Path, runs: Runs, minutes: float = float('inf')) -> list[list[str]]:
    """The flags of the rungs that were started."""
    monkeypatch.setattr(ladder, 'run', runs)
    monkeypatch.setattr(time, 'monotonic', lambda: runs.clock)
    before = len(runs.started)
    climb(argparse.Namespace(results=results, minutes=minutes, batch=128, measure_batches=40), runs.machine)
    return runs.started[before:]


@pytest.mark.parametrize('gpus', [1, 2])
def test_every_rung_is_a_run_of_its_own_that_the_benchmark_takes(results, monkeypatch, gpus):
    started = climbed(monkeypatch, results, Runs(gpus))
    assert len(started) == len(set(map(tuple, started))) == len(RUNGS) - (gpus == 1)
    monkeypatch.setenv('WORLD_SIZE', str(gpus))
    runs = {repr(settings_of(*flags)) for flags in started}
    assert len(runs) == len(started)


def test_every_switch_of_speed_has_a_rung():
    flags = {flag for rung in RUNGS for flag in rung.flags}
    for switch in set(SWITCHES) - {'gradient_checkpointing', 'device_train_microbatch_size'}:  # the first saves memory
        assert f'--{switch}' in flags, switch


@pytest.mark.parametrize('found, original', [(16, '4'), (2, '2')])
def test_a_rung_takes_the_microbatch_that_the_search_of_the_defaults_found(results, monkeypatch, found, original):
    started = climbed(monkeypatch, results, Runs(microbatch=found))
    sizes = [flags[-1] if '--device_train_microbatch_size' in flags else None for flags in started]
    assert sizes[:6] == [None, None, None, str(found), original, str(found)]
    [whole] = [flags for flags in started if 'reduce-overhead' in flags]
    assert whole[whole.index('--batch_size') + 1] == whole[-1] == str(found)


def test_a_ladder_is_taken_in_pieces_and_a_compiled_rung_starts_only_with_time_for_it(results, monkeypatch):
    runs = Runs(seconds=170)
    first = climbed(monkeypatch, results, runs, minutes=10)
    assert 1 < len(first) < 5 and first[0][2:2 + len(PLAIN)] == PLAIN
    assert not any('--compile' in flags for flags in first[2:])
    runs.clock = 0
    climbed(monkeypatch, results, runs)
    assert len(runs.started) == len(set(map(tuple, runs.started))) == len(rungs(runs.machine))
    assert climbed(monkeypatch, results, runs) == []


def test_an_interrupted_rung_and_one_of_another_machine_are_run(results, monkeypatch):
    assert climbed(monkeypatch, results, Runs(status='interrupted'))
    assert climbed(monkeypatch, results, Runs())
    assert climbed(monkeypatch, results, Runs(gpus=2))
    assert not recorded(results, Machine(1, 'NVIDIA H200'))


def test_a_rung_that_takes_too_long_is_told_to_end():
    assert ladder.run([sys.executable, '-c', 'import time; time.sleep(60)'], 0.1) == -15


def test_without_a_gpu_it_says_so(results, capsys):
    with pytest.raises(SystemExit):
        ladder.main([str(results)])
    assert 'this machine has no GPU; make smoke measures' in capsys.readouterr().err
