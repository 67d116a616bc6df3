"""The curves of a run, in TensorBoard's files and at Weights & Biases, by Composer's own loggers."""
import json
from pathlib import Path

from benchmark import main
from tests.forked_runs import run_program
from tests.runs import TINY
from tests.samples import encoded, picture, write_shards

CURVES = {'loss/train/total', 'lr-AdamW/group0', 'l2_norm/grad/global', 'throughput/samples_per_sec', 'images_per_sec'}


def test_a_run_leaves_its_record_and_nothing_else_without_the_flags_of_a_logger(plain_run):
    assert [path.name for path in plain_run.folder.iterdir()] == ['results.jsonl']


def test_tensorboard_has_the_curves_the_evaluations_and_the_figures_of_the_record(tmp_path, shards, results):
    import tensorboard.main  # noqa: F401, the server, which needs more packages than the files
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    held_out = write_shards(tmp_path / 'held', [{'jpg': encoded(picture(1)), 'caption': 'held out'}] * 4)
    record = main(['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--max_duration', '2ep',
                   '--eval_remote', held_out, '--eval_interval', '1ep', '--tensorboard', str(tmp_path / 'board'),
                   '--results', str(results)])
    [folder] = (tmp_path / 'board').iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()['scalars']) >= CURVES
    assert len(events.Scalars('loss/train/total')) == 6
    assert len(events.Scalars('metrics/eval/MeanSquaredError')) == record['evaluations'] == 2
    [speed] = events.Scalars('images_per_sec')
    assert abs(speed.value / record['images_per_sec'] - 1) < 1e-6


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


def main_and_teardown(argv: list[str]) -> None:
    """A run, and the end of W&B's own process, which comes later where a process was forked."""
    import wandb
    main(argv)
    wandb.teardown()


def test_an_offline_run_of_wandb_holds_the_curves_the_settings_and_the_record(server, tmp_path):
    folder = tmp_path / 'run'  # of a process of its own, since W&B keeps its first folder
    argv = ['--use_synth_data', '--use_ema', *TINY, '--measure_batches', '11', '--wandb_name', 'x', '--wandb_project',
            'y', '--results', 'results']
    code, _, errors = run_program(server, folder, main_and_teardown, argv, WANDB_MODE='offline')
    assert code == 0, errors
    [file] = folder.glob('wandb/offline-run-*/*.wandb')
    history, config, summary = read_wandb(file)
    record = json.loads((folder / 'results').read_text())
    assert history >= CURVES
    assert (config['model_name'], config['batch_size'], config['use_ema']) == ('tiny', 4, True)
    assert summary['images_per_sec'] == record['images_per_sec'] and summary['loss'] == record['loss']
