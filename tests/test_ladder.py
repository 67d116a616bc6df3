"""benchmarks/ladder.sh: every rung is a command that the benchmark takes, and none starts that would end too late."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from composer.utils import dist

from harness.early_checks import refuse_bad_modes, refuse_flags_alone
from harness.options import benchmark_parser
from harness.preflight import fill_in_training_defaults, refuse_bad_switches
from tests.runs import ROOT


def climb(tmp_path: Path, *arguments: str, gpus: int) -> tuple[list[list[str]], str]:
    """The ladder with a launcher that only notes what it is told: the flags of each rung, and what was said."""
    launcher = tmp_path / 'bin' / 'composer'
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> "$RUNGS"\n')
    launcher.chmod(0o755)
    results = tmp_path / 'ladder.jsonl'
    record = {'device': 'X', 'num_devices': gpus, 'image_size': 512, 'images_per_sec': 1.0}
    results.write_text(json.dumps(record) + '\n')
    rungs = tmp_path / 'rungs'
    rungs.touch()
    path = os.pathsep.join([str(launcher.parent), str(Path(sys.executable).parent), os.environ['PATH']])
    done = subprocess.run([ROOT / 'benchmarks' / 'ladder.sh', results, *arguments], capture_output=True, text=True,
                          env=os.environ | {'PATH': path, 'RUNGS': str(rungs), 'GPUS': str(gpus)})
    assert done.returncode == 0, done.stderr
    assert results.with_suffix('.png').stat().st_size > 1000
    return [line.split()[3:] for line in rungs.read_text().splitlines()], done.stderr


@pytest.mark.parametrize('gpus', [1, 2])
def test_every_rung_is_a_run_of_its_own_that_the_benchmark_takes(tmp_path, monkeypatch, gpus):
    rungs, said = climb(tmp_path, gpus=gpus)
    monkeypatch.setattr(dist, 'get_world_size', lambda: gpus)
    assert len(rungs) == len(set(map(tuple, rungs))) == said.count('expected: ') > 25
    for flags in rungs:
        args = benchmark_parser('').parse_args(flags)
        fill_in_training_defaults(args)
        refuse_bad_switches(args)
        refuse_bad_modes(args)
        refuse_flags_alone(args)
    switches = {flag for flags in rungs for flag in flags}
    assert {'--half_precision_norms', '--channels_last_norms', '--cast_weights_once', '--cudnn_benchmark',
            '--compile_blocks', 'max-autotune-no-cudagraphs', 'reduce-overhead', 'cudnn', 'xformers'} < switches
    assert ('--allreduce_precision' in switches) == (gpus > 1)


def test_without_time_no_rung_starts_and_what_there_is_is_shown(tmp_path):
    rungs, said = climb(tmp_path, '1', gpus=1)
    assert not rungs and said.count('no time left for: ') > 25
