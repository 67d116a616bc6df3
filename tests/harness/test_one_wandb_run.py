"""Weights & Biases sees one run, in one folder, which `wandb sync wandb/latest-run` finds."""
import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from harness.loggers import build_loggers
from tests.harness.test_loggers import read_wandb
from tests.runs import ROOT, TINY, wait_until


def test_an_offline_run_is_one_folder_with_the_record(tmp_path, results):
    command = [sys.executable, str(ROOT / 'benchmark.py'), '--use_synth_data', '--use_ema', *TINY, '--wandb_name', 'x',
               '--wandb_project', 'y', '--results', str(results)]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {'WANDB_MODE': 'offline'}, check=True, capture_output=True)
    latest = Path(tmp_path, 'wandb', 'latest-run').resolve()
    [file] = latest.glob('*.wandb')
    assert [path.name for path in Path(tmp_path, 'wandb').glob('offline-run-*')] == [latest.name]

    def written():
        with contextlib.suppress(AssertionError):
            return 'images_per_sec' in read_wandb(file)[2]
    wait_until(written)


def test_a_run_that_does_not_start_is_one_line(monkeypatch):
    def refuse(**_):
        raise wandb.errors.CommError('no\nroute')
    monkeypatch.setattr(wandb, 'init', refuse)
    args = argparse.Namespace(tensorboard=None, wandb_name=None, wandb_project='y')
    [logger] = build_loggers(args, {'seed': 17})
    with pytest.raises(ValueError, match=r'^--wandb_project y: .*not start \(no route\); .*WANDB_MODE=offline$'):
        logger.init(SimpleNamespace(run_name='run'), None)


def test_two_runs_of_one_process_are_two(tmp_path, results):
    flags = ['--use_synth_data', *TINY, '--results', str(results), '--wandb_name']
    script = f'from benchmark import main; [main({flags} + [name]) for name in "ab"]'
    environment = os.environ | {'WANDB_MODE': 'offline', 'PYTHONPATH': str(ROOT)}  # W&B keeps a process's first folder
    subprocess.run([sys.executable, '-c', script], cwd=tmp_path, env=environment, check=True, capture_output=True)
    folders = list(tmp_path.glob('wandb/offline-run-*'))
    assert len(folders) == 2 and all(list(folder.glob('*.wandb')) for folder in folders)
