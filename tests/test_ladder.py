"""benchmarks/ladder.py: every run is a command that the benchmark takes, and none that has a record is repeated."""
import json
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.ladder import RUNS, Ladder
from settings.train import SWITCHES
from tests.runs import settings_of

GPU = 'NVIDIA A100-SXM4-40GB'


@pytest.fixture
def climbed(results, monkeypatch):
    """A function that climbs the ladder and gives the flags of the runs that were started, each of which appends the
    record that it would on a GPU."""
    def climb(gpus: int = 1, device: str = GPU, microbatch: int = 8, status: str = 'complete') -> list[list[str]]:
        here = Ladder(Path(results), gpus, device)
        started = []

        def run(command: list[str]) -> SimpleNamespace:
            flags = command[len(here.launcher()):]
            started.append(flags[:-2])
            record = {'command': shlex.join(['benchmark.py', *flags]), 'device': device, 'num_devices': gpus,
                      'status': status, 'device_train_microbatch_size': microbatch}
            with open(results, 'a') as file:
                print(json.dumps(record), file=file)
            return SimpleNamespace(returncode=0)

        with monkeypatch.context() as patch:
            patch.setattr(subprocess, 'run', run)
            here.climb()
        return started

    return climb


@pytest.mark.parametrize('gpus', [1, 2])
def test_every_run_is_one_of_its_own_that_the_benchmark_takes(climbed, monkeypatch, gpus):
    started = climbed(gpus)
    assert len(started) == len(RUNS) - (gpus == 1)
    monkeypatch.setenv('WORLD_SIZE', str(gpus))
    assert len({repr(settings_of(*flags)) for flags in started}) == len(started)
    assert not climbed(gpus)


def test_every_switch_of_speed_has_a_run():
    flags = {flag for run in RUNS for flag in run.flags}
    for switch in set(SWITCHES) - {'gradient_checkpointing', 'device_train_microbatch_size'}:  # the first saves memory
        assert f'--{switch}' in flags, switch


@pytest.mark.parametrize('found, original', [(16, '4'), (2, '2')])
def test_a_run_takes_the_microbatch_that_the_search_of_the_defaults_found(climbed, found, original):
    started = climbed(microbatch=found)
    sizes = [flags[-1] if '--device_train_microbatch_size' in flags else None for flags in started]
    assert sizes[:6] == [None, None, None, str(found), original, str(found)]
    [whole] = [flags for flags in started if 'reduce-overhead' in flags]
    assert whole[whole.index('--batch_size') + 1] == whole[-1] == str(found)


def test_an_interrupted_run_and_one_of_another_machine_are_repeated(climbed):
    assert climbed(status='interrupted')
    assert climbed()
    assert climbed(gpus=2) and climbed(device='NVIDIA H200')
