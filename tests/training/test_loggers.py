"""The curves of a run reach TensorBoard and Weights & Biases through Composer's own loggers."""
import pytest

from benchmark import main
from tests.forked_runs import run_program
from tests.runs import TINY, one_error_line

CURVES = {'loss/train/total', 'lr-AdamW/group0', 'l2_norm/grad/global', 'throughput/samples_per_sec', 'images_per_sec'}


def test_tensorboard_has_the_curves_of_a_run_and_its_resume_without_repeated_batches(
        tmp_path, shards, held_out, monkeypatch):
    import tensorboard.main  # noqa: F401, the server needs more packages than the files do
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.event_file_writer import AtomicCounter
    argv = ['--remote', shards, *TINY, '--batch_size', '8', '--num_workers', '0', '--eval_remote', held_out,
            '--eval_interval', '1ep', '--save_folder', str(tmp_path / 'a run'), '--save_interval', '2ba',
            '--autoresume', '--tensorboard', str(tmp_path / 'board'), '--max_duration']
    # TensorBoard sorts files from the same second by a number without leading zeros, so use numbers of equal length.
    monkeypatch.setattr('tensorboard.summary.writer.event_file_writer._global_uid', AtomicCounter(100))
    first = main([*argv, '2ep'])
    (tmp_path / 'a run' / 'ep1-ba6-rank0.pt').unlink()  # as if it had been killed before it saved its last batches
    record = main([*argv, '3ep'])
    [folder] = (tmp_path / 'board').iterdir()
    assert record['training_id'] == first['training_id']
    assert folder.name == f'a-run-{record["training_id"]}'
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()['scalars']) >= CURVES
    assert [loss.step for loss in events.Scalars('loss/train/total')] == list(range(9))
    assert len(events.Scalars('metrics/eval/MeanSquaredError')) == 3
    speeds = {speed.step: speed.value for speed in events.Scalars('images_per_sec')}
    assert abs(speeds[9] / record['images_per_sec'] - 1) < 1e-6
    flops, images = (events.Scalars(f'throughput/{figure}_per_sec')[-1].value for figure in ('flops', 'samples'))
    assert flops / images == pytest.approx(1e12 * record['tflops_per_image'])


def test_a_logger_that_cannot_start_is_a_one_line_error(capfd, monkeypatch):
    import wandb

    def nobody_has_logged_in(**settings):
        assert settings['id'].startswith('kept-') and settings['resume'] == 'allow'
        raise wandb.errors.UsageError('api_key not configured (no-tty).')
    monkeypatch.setattr(wandb, 'init', nobody_has_logged_in)
    argv = ['--use_synth_latents', *TINY, '--wandb_name', 'x', '--save_folder', 'kept', '--autoresume']
    line = one_error_line(argv, capfd)
    assert '--wandb_name' in line and 'api_key not configured' in line and 'WANDB_API_KEY' in line


def main_and_teardown(argv: list[str]) -> None:
    """Train, and end W&B's own process, which would outlive a forked process."""
    import wandb
    main(argv)
    wandb.teardown()


def test_an_offline_wandb_run_has_the_curves_the_settings_and_the_record(server, tmp_path):
    folder = tmp_path / 'run'  # in a separate process, because W&B keeps using its first folder
    argv = ['--use_synth_data', '--use_ema', *TINY, '--measure_batches', '11', '--wandb_name', 'x', '--wandb_project',
            'y', '--results', 'results']
    code, _, errors = run_program(server, folder, main_and_teardown, argv)
    assert code == 0, errors
    [file] = folder.glob('wandb/offline-run-*/*.wandb')
    content = file.read_bytes()
    for key in (*CURVES, 'model_name', 'trained_batches'):
        assert key.encode() in content, key
