"""The curves of a run, in TensorBoard's files and at Weights & Biases, by Composer's own loggers."""

from pathlib import Path

import pytest

from benchmark import main
from sdbench.training.checkpoints import RUN_NAME
from sdbench.training.loggers import build_loggers, kept_or_new_name, name_of_run
from tests.forked_runs import run_program
from tests.privileges import without_privileges
from tests.runs import TINY, settings_of
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


def test_a_run_that_resumes_goes_on_with_its_curves(tmp_path, results):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    board = tmp_path / 'board'
    argv = ['--use_synth_data', *TINY, '--save_folder', str(tmp_path / 'a run'), '--autoresume', '--tensorboard',
            str(board), '--results', str(results), '--max_duration']
    for duration in ('2ba', '4ba'):
        main([*argv, duration])
    [folder] = board.iterdir()
    assert folder.name.startswith('a-run-')
    losses = EventAccumulator(str(folder)).Reload().Scalars('loss/train/total')
    assert [loss.step for loss in losses] == [0, 1, 2, 3]


def named(*flags: str, checkpoint: str | None = None) -> str | None:
    return kept_or_new_name(settings_of('--use_synth_data', *map(str, flags)), checkpoint)


def test_two_runs_never_share_a_name_and_one_keeps_its_own(tmp_path, monkeypatch):
    """Also where both save into a folder of the same name, and curves are never hidden."""
    for project in ('cats', 'dogs'):
        (tmp_path / project / 'checkpoints').mkdir(parents=True)
    monkeypatch.chdir(tmp_path / 'cats')
    cats = named('--save_folder', 'checkpoints')
    monkeypatch.chdir(tmp_path / 'dogs')
    dogs = named('--save_folder', '../dogs/checkpoints')
    assert cats != dogs
    assert cats.startswith('checkpoints-') and dogs.startswith('checkpoints-')
    assert named('--save_folder', tmp_path / 'cats/checkpoints') == cats
    Path('checkpoints').rename('elsewhere')
    assert named('--save_folder', 'elsewhere') == dogs
    assert named('--save_folder', 'elsewhere', '--run_name', '../my run').startswith('my-run-')
    assert named() is None


def test_a_name_that_is_kept_in_a_store_is_found_again(s3):
    name = named('--save_folder', 's3://bucket/cats/run1')
    assert name.startswith('run1-')
    assert named('--save_folder', 's3://bucket/cats/run1') == name
    assert named('--save_folder', 's3://bucket/dogs/run1') != name


def test_a_file_that_holds_no_name_is_refused_with_its_path(tmp_path):
    (tmp_path / RUN_NAME).write_text('../elsewhere')
    with pytest.raises(ValueError, match=f'{tmp_path}: {RUN_NAME} holds no name of a run; remove it'):
        named('--save_folder', tmp_path)


def test_a_run_that_was_lost_before_its_first_checkpoint_goes_on_at_wandb_by_the_same_command(tmp_path):
    settings = settings_of('--use_synth_data', '--run_name', 'my run', '--wandb_project', 'project', '--save_folder',
                           str(tmp_path))
    for _ in range(2):
        [logger] = build_loggers(settings, name_of_run(settings, None))
        assert logger._init_kwargs['id'] == (tmp_path / RUN_NAME).read_text().strip()
        assert logger._init_kwargs['resume'] == 'allow'


def test_a_folder_for_curves_that_cannot_be_written_to_is_named_with_its_flag(tmp_path):
    settings = settings_of('--use_synth_data', '--tensorboard', str(tmp_path / 'closed'))
    (tmp_path / 'closed').mkdir(mode=0o500)
    with pytest.raises(ValueError, match=f'--tensorboard {tmp_path}/closed cannot be written to .Permission denied'):
        without_privileges(build_loggers, settings, 'run-1')


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
    content = file.read_bytes()
    for key in (*CURVES, 'model_name', 'trained_batches'):
        assert key.encode() in content, key
