"""Ctrl-C and SIGTERM end a run after its batch on all ranks, with a record and a checkpoint to resume from."""
import fcntl
import json
import os
import pty
import signal
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
from composer import Callback
from composer.devices import DeviceCPU

from benchmark import main
from sdbench.training.checkpoints import checkpoints_in, load_checkpoint
from sdbench.training.ranks import GracefulStop
from tests.runs import TINY, Signalled, assert_same_training, start, wait_until


def images_of(training: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(f'{training}-samples').glob('*/*')}


@pytest.mark.parametrize('length', ['4ba', '7ba'])
def test_a_run_that_a_signal_ends_leaves_a_record_and_a_checkpoint_and_resumes_exactly(
        length, results, tmp_path, shards, held_out, smallest_model, capfd):
    """The launcher passes Ctrl-C on as SIGTERM, so both come, in the fourth batch. After that batch an evaluation and
    images are due, and for 4ba the run is over. The learning rate depends on the length of the run."""
    (tmp_path / 'prompts').write_text('a cat')
    argv = ['--remote', shards, '--use_ema', *TINY, '--model_name', smallest_model, '--pretrained', '--num_workers',
            '1', '--max_duration', length, '--lr_schedule', 'cosine', '--eval_remote', held_out, '--eval_interval',
            '4ba', '--sample_prompts', 'prompts', '--sample_interval', '4ba', '--autoresume', '--save_folder']
    whole = main([*argv, 'whole'])
    with pytest.raises(SystemExit) as exit:
        main([*argv, 'stopped'], [Signalled(signal.SIGINT, signal.SIGTERM)])
    record = json.loads(results.read_text().splitlines()[-1])
    assert (exit.value.code, record['status'], record['trained_batches'], record['evaluations']) == (
        130, 'interrupted', 4, [])
    assert record['images_per_sec'] > 0
    assert images_of('stopped').keys() == {'ba0.png'}  # only of the initial weights
    assert capfd.readouterr().err.count('a signal came') == 1

    # The resumed run evaluates and generates the images that the signal has prevented.
    record = main([*argv, 'stopped'])
    assert (record['first_batch'], record['evaluations']) == (4, whole['evaluations'])
    assert images_of('stopped') == images_of('whole')
    assert_same_training('stopped', 'whole')

    # A training is complete when its record has been written.
    results.unlink()
    with pytest.raises(SystemExit) as exit:
        main([*argv, 'stopped'])
    assert exit.value.code == 0
    assert 'and the record: nothing left to do' in capfd.readouterr().out
    [recorded] = Path('stopped').glob('record-*')
    recorded.unlink()  # as if it had been killed before it wrote the record
    again = main([*argv, 'stopped'])
    assert (again['evaluations'], again['loss']) == (whole['evaluations'], whole['loss'])
    assert [json.loads(line)['first_batch'] for line in results.read_text().splitlines()] == [whole['trained_batches']]


def test_a_signal_before_the_first_batch_leaves_a_record_and_no_checkpoint(results):
    callback = Callback()
    callback.fit_start = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as exit:
        main(['--use_synth_data', *TINY, '--save_folder', 'kept'], [callback])
    record = json.loads(results.read_text())
    assert (exit.value.code, record['status'], record['trained_batches']) == (130, 'interrupted', 0)
    assert not checkpoints_in('kept')


def test_a_training_ends_when_its_budget_is_spent_and_a_resume_includes_the_earlier_cost(
        results, monkeypatch, capfd, held_out):
    monkeypatch.setattr('sdbench.process.SECONDS_BETWEEN_LINES', 0)
    argv = ['--use_synth_data', *TINY[:-2], '--max_duration', '3ba', '--save_folder', 'kept', '--autoresume',
            '--dollars_per_gpu_hour', '3600000', '--budget']  # a thousand dollars a second
    with pytest.raises(SystemExit) as exit:
        main([*argv, '1'])
    spent = json.loads(results.read_text())
    assert (exit.value.code, spent['status'], spent['trained_batches']) == (130, 'interrupted', 1)
    assert spent['dollars'] == pytest.approx(spent['gpu_hours'] * 3_600_000)
    output, errors = capfd.readouterr()
    assert '--budget 1 is spent' in output
    assert '$' in errors  # next to the progress
    with pytest.raises(SystemExit) as exit:  # started again, it trains no more batches
        main([*argv, '1'])
    assert exit.value.code == 2
    assert '--budget 1 is spent' in capfd.readouterr().err
    assert len(results.read_text().splitlines()) == 1
    last = main([*argv, '1', '--eval_remote', held_out, '--max_duration', '1ba', '--save_folder', 'last'])
    assert (last['status'], last['eval_batch']) == ('unmeasured', 1)  # complete: no batch is left to pay for
    whole = main([*argv, '1e9', '--dollars_per_gpu_hour', '1'])  # on a cheaper GPU
    assert (whole['status'], whole['first_batch'], whole['trained_batches']) == ('complete', 1, 3)
    assert whole['dollars'] > 1  # earlier hours keep their price
    assert whole['gpu_hours'] > whole['dollars'] / 3_600_000
    assert whole['gpu_hours_by_device'] == {'CPU': whole['gpu_hours']}


def interrupt_twice(note: Path) -> None:
    with GracefulStop():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # a cluster and the launcher both send SIGTERM
            os.kill(os.getpid(), number)
        note.touch()
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_kills_the_process_and_a_second_sigterm_does_not(server, tmp_path):
    process = server.Process(target=interrupt_twice, args=(tmp_path / 'goes on',), daemon=True)
    process.start()
    process.join(600)
    assert process.exitcode == -signal.SIGINT
    assert (tmp_path / 'goes on').exists()


def close_terminal(note: Path, is_ignored: bool) -> None:
    os.setsid()
    terminal, process_side = pty.openpty()
    fcntl.ioctl(process_side, termios.TIOCSCTTY, 0)  # SIGHUP comes when this terminal closes
    os.dup2(process_side, 1)
    os.dup2(process_side, 2)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)  # whatever the tests were started by
    with GracefulStop() as stop:
        os.close(terminal)
        stop.stop_if_wanted(SimpleNamespace(device=DeviceCPU(), stop_training=lambda: None))
        if not is_ignored:
            os.write(1, b'a terminal that has closed refuses this')
        note.write_text(str(stop.interrupted))


@pytest.mark.parametrize('is_ignored', [True, False])
def test_a_closed_terminal_ends_a_run_as_sigterm_does_unless_nohup_ignores_it(server, tmp_path, is_ignored):
    process = server.Process(target=close_terminal, args=(tmp_path / 'note', is_ignored), daemon=True)
    process.start()
    process.join(600)
    assert (tmp_path / 'note').read_text() == str(not is_ignored)


@pytest.mark.long
@pytest.mark.parametrize('send, number', [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)],
                         ids=['Ctrl-C, which comes to every process', 'SIGTERM to the launcher, which passes it on'])
def test_a_signal_under_the_launcher_leaves_a_record_and_a_checkpoint_to_resume_from(results, shards, send, number):
    log, folder = results.with_name('log'), results.with_name('checkpoints')
    argv = ['--remote', shards, '--num_workers', '1', '--use_ema', '--ema_half_life', '2ba', *TINY, '--save_folder',
            str(folder), '--save_interval', '6ba', '--save_num_checkpoints_to_keep', '1', '--results', str(results)]
    run = start(log, '-m', 'composer.cli.launcher', '-n', '2', 'benchmark.py', *argv, '--measure_batches', '100000')
    wait_until(lambda: run.poll() is not None or checkpoints_in(str(folder)))
    send(run.pid, number)
    run.wait(timeout=300)
    wait_until(lambda: results.exists() and results.read_text())  # the launcher ends before its ranks
    record = json.loads(results.read_text())
    [checkpoint] = checkpoints_in(str(folder))
    done = load_checkpoint(checkpoint)['state']['timestamp']['Timestamp']['batch']
    assert (record['status'], record['trained_batches'], record['num_devices']) == ('interrupted', done, 2)
    assert record['images_per_sec'] > 0
    resumed = main([*argv, '--max_duration', f'{done + 3}ba', '--autoresume'])
    assert (resumed['status'], resumed['first_batch'], resumed['measured_batches']) == ('complete', done, 2)
