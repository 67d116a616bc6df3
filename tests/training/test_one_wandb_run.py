"""Weights & Biases sees one run, in one folder, which `wandb sync wandb/latest-run` finds."""
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark import main
from tests.forked_runs import run_program
from tests.runs import TINY, wait_until
from tests.training.test_loggers import read_wandb
from training.loggers import build_loggers


def test_an_offline_run_is_one_folder_with_the_record(server, tmp_path):
    argv = ['--use_synth_data', '--use_ema', *TINY, '--wandb_name', 'x', '--wandb_project', 'y', '--results', 'results']
    folder = tmp_path / 'run'
    code, _, errors = run_program(server, folder, main, argv, WANDB_MODE='offline')
    assert code == 0, errors
    latest = Path(folder, 'wandb', 'latest-run').resolve()
    [file] = latest.glob('*.wandb')
    assert [path.name for path in Path(folder, 'wandb').glob('offline-run-*')] == [latest.name]

    def written():
        with contextlib.suppress(AssertionError):
            return 'images_per_sec' in read_wandb(file)[2]
    wait_until(written)


def test_a_run_that_does_not_start_is_one_line(monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.CommError('no\nroute')
    monkeypatch.setattr(wandb, 'init', refuse)
    [logger] = build_loggers({'seed': 17}, tensorboard=None, wandb_name=None, wandb_project='y')
    with pytest.raises(ValueError, match=r'^--wandb_project y: .*not start \(no route\); .*WANDB_MODE=offline$'):
        logger.init(SimpleNamespace(run_name='run'), None)


def run_twice(argv: list[str]) -> None:
    for name in ('a', 'b'):
        main([*argv, '--wandb_name', name])


@pytest.mark.long
def test_two_runs_of_one_process_are_two(server, tmp_path):
    argv = ['--use_synth_data', *TINY, '--results', 'results']
    # a process of its own, since W&B keeps its first folder
    code, _, errors = run_program(server, tmp_path / 'run', run_twice, argv, WANDB_MODE='offline')
    assert code == 0, errors
    folders = list(tmp_path.glob('run/wandb/offline-run-*'))
    assert len(folders) == 2 and all(list(folder.glob('*.wandb')) for folder in folders)
