"""benchmarks/ladder.py: every rung is a command that the benchmark takes, and none starts that would end too late."""
import argparse
import json
import shlex
import sys
import time
from pathlib import Path

import pytest
from composer.utils import dist

from benchmarks import ladder
from benchmarks.ladder import BEST, EAGER, ORIGINAL, PLAIN, Machine, climb, launcher, recorded, rungs
from tests.runs import settings_of

GPU = 'NVIDIA A100-SXM4-40GB'


class Runs:
    """Stands for runs on GPUs that nobody has here: notes the flags, and appends the record that a run would."""

    def __init__(self, gpus: int = 1, microbatch: int = 8, seconds: float = 0.0, status: str = 'complete'):
        self.machine = Machine(gpus, 91900, GPU)
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


def is_rung(flags: list[str], switches: list[str], data: str = '--use_synth_data') -> bool:
    return flags[0] == data and flags[7:7 + len(switches)] == switches


@pytest.mark.parametrize('gpus', [1, 2])
def test_every_rung_is_a_run_of_its_own_that_the_benchmark_takes(results, monkeypatch, gpus, capfd):
    started = climbed(monkeypatch, results, Runs(gpus))
    monkeypatch.setenv('WORLD_SIZE', str(gpus))
    monkeypatch.setattr(dist, 'get_world_size', lambda: gpus)
    assert len(started) == len(set(map(tuple, started))) == capfd.readouterr().err.count('expected: ') > 19
    runs = {repr(settings_of(*flags)) for flags in started}
    assert len(runs) == len(started)
    switches = {flag for flags in started for flag in flags}
    assert {'--half_precision_norms', '--cast_weights_once', '--cudnn_benchmark', '--compile_blocks',
            'max-autotune-no-cudagraphs', 'reduce-overhead', 'cudnn', 'xformers'} < switches
    assert ('--allreduce_precision' in switches) == (gpus > 1)


def test_the_most_telling_rungs_come_first():
    order = [(rung.switches, rung.data) for rung in rungs(Machine(1, 0, GPU))[:5]]
    images = '--use_synth_data'
    assert order == [(PLAIN, images), (BEST, images), (BEST, '--use_synth_latents'), (EAGER, images),
                     (ORIGINAL, images)]


@pytest.mark.parametrize('found, original', [(16, '4'), (2, '2')])
def test_a_rung_takes_the_microbatch_that_the_search_of_the_defaults_found(results, monkeypatch, found, original):
    started = climbed(monkeypatch, results, Runs(microbatch=found))
    sizes = [flags[-1] if '--device_train_microbatch_size' in flags else None for flags in started]
    assert sizes[:6] == [None, None, None, str(found), original, str(found)]
    [whole] = [flags for flags in started if 'reduce-overhead' in flags]
    assert whole[1:3] == ['--batch_size', str(found)] and whole[-1] == str(found)


def test_a_ladder_is_taken_in_pieces(results, monkeypatch):
    runs = Runs(seconds=170)
    first = climbed(monkeypatch, results, runs, minutes=10)
    assert is_rung(first[0], PLAIN) and 1 < len(first) < 5
    runs.clock = 0
    second = climbed(monkeypatch, results, runs, minutes=10)
    assert not {tuple(flags) for flags in first} & {tuple(flags) for flags in second}
    climbed(monkeypatch, results, runs)
    assert len(runs.started) == len(set(map(tuple, runs.started))) == len(rungs(runs.machine))
    assert climbed(monkeypatch, results, runs) == []


def test_an_interrupted_rung_and_one_of_another_machine_are_run(results, monkeypatch):
    assert climbed(monkeypatch, results, Runs(status='interrupted'))
    assert climbed(monkeypatch, results, Runs())
    assert climbed(monkeypatch, results, Runs(gpus=2))
    assert not recorded(results, Machine(1, 91900, 'NVIDIA H200'))


def test_compiled_rungs_have_an_estimate_of_their_own(results, monkeypatch):
    started = climbed(monkeypatch, results, Runs(seconds=170), minutes=1 + (170 + 330) / 60)
    assert started and not any('--compile' in flags for flags in started)  # 330 s are left, and one may take 340
    assert any(is_rung(flags, EAGER) for flags in started)


def test_without_time_no_rung_starts(results, monkeypatch, capfd):
    assert climbed(monkeypatch, results, Runs(), minutes=1) == []
    assert capfd.readouterr().err.count('no time left for: ') == len(rungs(Runs().machine))


def test_attention_of_a_cudnn_with_faults_is_left_out():
    switches = [rung.switches for rung in rungs(Machine(1, 90501, GPU))]
    assert [*PLAIN, '--attention', 'cudnn'] not in switches


def test_one_gpu_needs_no_launcher_and_several_need_no_command_of_composers():
    assert launcher(Machine(1, 0, GPU))[:-1] == [sys.executable]
    assert launcher(Machine(8, 0, GPU))[:-1] == [sys.executable, '-m', 'composer.cli.launcher', '-n', '8']


def test_a_rung_that_takes_too_long_is_told_to_end():
    assert ladder.run([sys.executable, '-c', 'import time; time.sleep(60)'], 0.1) == -15


@pytest.mark.parametrize('argv, words', [
    ([], 'this machine has no GPU; make smoke measures'), (['abc'], 'abc is not a number above 0'),
    (['--bath', '3'], '--bath is no flag; did you mean --batch?')])
def test_without_a_gpu_or_with_a_bad_flag_one_line_says_so(results, capsys, argv, words):
    with pytest.raises(SystemExit):
        ladder.main([str(results), *argv])
    error = capsys.readouterr().err
    assert words in error and error.count('\n') == 1
