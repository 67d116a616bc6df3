"""The curves of a run, in TensorBoard's files and at Weights & Biases, by Composer's own loggers."""
from pathlib import Path

import pytest

from benchmark import main
from sdbench.training.checkpoints import RUN_NAME
from sdbench.training.loggers import kept_name, name_of_run
from tests.forked_runs import run_program
from tests.runs import TINY, one_error_line, settings_of

CURVES = {'loss/train/total', 'lr-AdamW/group0', 'l2_norm/grad/global', 'throughput/samples_per_sec', 'images_per_sec'}


def test_tensorboard_has_curves_evaluations_and_figures_of_a_run_and_of_its_resume(
        tmp_path, shards, held_out, monkeypatch):
    import tensorboard.main  # noqa: F401, the server, which needs more packages than the files
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.event_file_writer import AtomicCounter
    argv = ['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--eval_remote', held_out,
            '--eval_interval', '1ep', '--save_folder', str(tmp_path / 'a run'), '--save_interval', '2ba',
            '--autoresume', '--tensorboard', str(tmp_path / 'board'), '--max_duration']
    # TensorBoard sorts files of one second by a number without leading zeros, which here has three digits each time
    monkeypatch.setattr('tensorboard.summary.writer.event_file_writer._global_uid', AtomicCounter(100))
    main([*argv, '2ep'])
    (tmp_path / 'a run' / 'ep1-ba6-rank0.pt').unlink()  # as if it had been killed before it saved its last batches
    record = main([*argv, '3ep'])
    [folder] = (tmp_path / 'board').iterdir()
    assert folder.name.startswith('a-run-')
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()['scalars']) >= CURVES
    assert [loss.step for loss in events.Scalars('loss/train/total')] == list(range(9))
    assert len(events.Scalars('metrics/eval/MeanSquaredError')) == 3
    speeds = {speed.step: speed.value for speed in events.Scalars('images_per_sec')}
    assert abs(speeds[9] / record['images_per_sec'] - 1) < 1e-6
    flops, images = (events.Scalars(f'throughput/{figure}_per_sec')[-1].value for figure in ('flops', 'samples'))
    assert flops / images == pytest.approx(1e12 * record['tflops_per_image'])


def named(*flags: str) -> str | None:
    """Return the name of a run with these flags, which has curves."""
    settings = settings_of('--use_synth_data', '--tensorboard', 'board', *map(str, flags))
    return name_of_run(settings, kept_name(settings.save_folder))


def test_two_runs_never_share_a_name_one_keeps_its_own(tmp_path, monkeypatch, s3):
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
    in_store = named('--save_folder', 's3://bucket/cats/run1')
    assert in_store.startswith('run1-')
    assert named('--save_folder', 's3://bucket/cats/run1') == in_store
    assert named('--save_folder', 's3://bucket/dogs/run1') != in_store


def test_a_logger_that_cannot_start_is_one_line_and_the_same_command_goes_on_as_the_same_run(capfd, monkeypatch):
    import wandb
    asked_for = []

    def nobody_has_logged_in(**settings):
        asked_for.append((settings['id'], settings['resume']))
        raise wandb.errors.UsageError('api_key not configured (no-tty).')
    monkeypatch.setattr(wandb, 'init', nobody_has_logged_in)
    argv = ['--use_synth_latents', *TINY, '--wandb_name', 'x', '--save_folder', 'kept', '--autoresume']
    for _ in range(2):
        line = one_error_line(argv, capfd)
    assert '--wandb_name' in line
    assert '(api_key not configured (no-tty).); log in by `wandb login` or WANDB_API_KEY, or set WANDB_MODE' in line
    assert asked_for == [(Path('kept', RUN_NAME).read_text().strip(), 'allow')] * 2


def main_and_teardown(argv: list[str]) -> None:
    """Train, and end W&B's own process, which would end later where a process was forked."""
    import wandb
    main(argv)
    wandb.teardown()


def test_an_offline_run_of_wandb_holds_the_curves_the_settings_and_the_record(server, tmp_path):
    folder = tmp_path / 'run'  # of a process of its own, since W&B keeps its first folder
    argv = ['--use_synth_data', '--use_ema', *TINY, '--measure_batches', '11', '--wandb_name', 'x', '--wandb_project',
            'y', '--results', 'results']
    code, _, errors = run_program(server, folder, main_and_teardown, argv)
    assert code == 0, errors
    [file] = folder.glob('wandb/offline-run-*/*.wandb')
    content = file.read_bytes()
    for key in (*CURVES, 'model_name', 'trained_batches'):
        assert key.encode() in content, key
