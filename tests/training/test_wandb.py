"""Weights & Biases sees one run, in one folder, which `wandb sync wandb/latest-run` finds."""
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark import main
from tests.forked_runs import run_program
from tests.runs import TINY, one_error_line, wait_until
from training.loggers import build_loggers


def read_wandb(path: Path) -> tuple[set, dict, dict]:
    """Keys of the history, the config and the summary in an offline run's file."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore
    store, history, config, summary = DataStore(), set(), {}, {}
    store.open_for_scan(str(path))
    while data := store.scan_data():
        entry = Record()
        entry.ParseFromString(data)
        history |= {item.key or '/'.join(item.nested_key) for item in entry.history.item}
        for found, updates in ((summary, (entry.summary.update, entry.run.summary.update)),
                               (config, (entry.config.update, entry.run.config.update))):
            for update in updates:
                found |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in update}
    return history, config, summary


def files_of_runs(folder: Path) -> list[Path]:
    """W&B's files of the runs in a folder, each when W&B's own process has written all of it."""
    files = sorted(folder.glob('wandb/offline-run-*/*.wandb'))
    for file in files:
        def is_written(file=file) -> bool:
            with contextlib.suppress(AssertionError):
                return 'images_per_sec' in read_wandb(file)[2]
        wait_until(is_written)
    return files


@pytest.fixture(scope='module')
def offline_run(server, tmp_path_factory) -> Path:
    """The folder of a run in a process of its own, since W&B keeps its first folder."""
    folder = tmp_path_factory.mktemp('wandb') / 'run'
    argv = ['--use_synth_data', '--use_ema', *TINY, '--measure_batches', '8', '--wandb_name', 'x', '--wandb_project',
            'y', '--results', 'results']
    code, _, errors = run_program(server, folder, main, argv, WANDB_MODE='offline')
    assert code == 0, errors
    return folder


def test_an_offline_run_is_one_folder(offline_run):
    [file] = files_of_runs(offline_run)
    assert Path(offline_run, 'wandb', 'latest-run').resolve() == file.parent


def test_an_offline_run_holds_the_curves_the_settings_and_the_record(offline_run):
    [file] = files_of_runs(offline_run)
    history, config, summary = read_wandb(file)
    record = json.loads((offline_run / 'results').read_text())
    assert {'loss/train/total', 'throughput/samples_per_sec', 'throughput/device/flops_per_sec'} <= history
    assert (config['model_name'], config['batch_size'], config['use_ema']) == ('tiny', 4, True)
    assert summary['images_per_sec'] == record['images_per_sec'] and summary['loss'] == record['loss']


def test_wandb_without_login_is_one_line(results, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv('WANDB_MODE', 'online')
    monkeypatch.setenv('NETRC', str(tmp_path / 'none'))
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.delenv('WANDB_API_KEY', raising=False)
    error = one_error_line(['--use_synth_data', *TINY, '--wandb_name', 'x', '--results', results], capfd)
    assert '--wandb_name x' in error and 'wandb login' in error


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
    code, _, errors = run_program(server, tmp_path / 'run', run_twice, argv, WANDB_MODE='offline')
    assert code == 0, errors
    folders = list(tmp_path.glob('run/wandb/offline-run-*'))
    assert len(folders) == 2 and all(list(folder.glob('*.wandb')) for folder in folders)
