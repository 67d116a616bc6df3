"""What keeps a run from harm: losses that are not finite, and the signals that end it."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from composer import Callback
from composer.core import Timestamp

import benchmark
from benchmark import main
from ema import EMA
from tests import forked_launcher
from tests.runs import ROOT, TINY, failed, wait_until
from training import safeguard
from training.checkpoints import checkpoints, load_checkpoint
from training.safeguard import SIGNALS, Safeguard


class Weights(Callback):
    """What the weights and their average are when each batch ends."""

    def __init__(self):
        self.seen: list[list[torch.Tensor]] = []

    def batch_end(self, state, logger):
        [ema] = [algorithm for algorithm in state.algorithms if isinstance(algorithm, EMA)]
        tensors = (*state.model.unet.parameters(), *ema.ema_model.parameters())
        self.seen.append([tensor.clone() for tensor in tensors])


@pytest.fixture
def loss_at_batch_2_is(monkeypatch):
    """The training's own loss, but for the third batch."""
    def put(value: float):
        calls, loss = [], benchmark.StableDiffusion.loss

        def broken(self, outputs, batch):
            calls.append(1)
            return loss(self, outputs, batch) * (value if len(calls) == 3 else 1)
        monkeypatch.setattr(benchmark.StableDiffusion, 'loss', broken)
    return put


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_learned(results, capfd, loss_at_batch_2_is, value):
    loss_at_batch_2_is(value)
    weights = Weights()
    line = failed(['--use_synth_data', '--use_ema', *TINY], results, capfd, [weights])
    assert 'the run failed at batch 3: the loss of batch 3 is not finite, at microbatch size 4' in line
    assert len(weights.seen) == 2 and json.loads(results.read_text())['loss'] > 0


def test_on_nan_skip_leaves_the_step_out_and_counts_it(results, loss_at_batch_2_is):
    loss_at_batch_2_is(float('nan'))
    witness = Weights()
    record = main(['--use_synth_data', '--use_ema', *TINY, '--on_nan', 'skip',
                   '--max_duration', '5ba', '--results', str(results)], [witness])
    assert (record['status'], record['skipped_batches']) == ('complete', 1) and record['loss'] > 0
    weights = witness.seen
    half = len(weights[0]) // 2
    assert all(map(torch.equal, weights[1][:half], weights[2][:half]))
    assert not all(map(torch.equal, weights[2][:half], weights[3][:half]))
    assert all(tensor.isfinite().all() for tensor in weights[4])


def test_the_noise_of_a_batch_depends_on_seed_batch_and_rank_alone(monkeypatch):
    def noise(seed: int, batch: int, rank: int = 0) -> tuple[float, ...]:
        monkeypatch.setattr(safeguard.dist, 'get_global_rank', lambda: rank)
        Safeguard(seed).batch_start(SimpleNamespace(timestamp=Timestamp(batch=batch)), None)
        return tuple(torch.rand(4).tolist())
    assert noise(17, 3) == noise(17, 3)
    assert len({noise(17, 3), noise(18, 3), noise(17, 4), noise(17, 3, rank=1)}) == 4


@pytest.mark.parametrize('number', SIGNALS)
def test_a_signal_ends_a_run_with_a_record_of_what_was_measured_and_a_checkpoint(results, tmp_path, monkeypatch,
                                                                                 number):
    class Signalled(Safeguard):
        def batch_start(self, state, logger):
            super().batch_start(state, logger)
            if state.timestamp.batch.value == 3:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(benchmark, 'Safeguard', Signalled)
    with pytest.raises(SystemExit) as exit:
        main(['--use_synth_data', *TINY, '--measure_batches', '100', '--save_folder', str(tmp_path / 'kept'),
              '--results', str(results)])
    record = json.loads(results.read_text())
    assert (exit.value.code, record['status'], record['trained_batches']) == (130, 'interrupted', 3)
    assert record['measured_batches'] == 2 and record['images_per_sec'] > 0
    [checkpoint] = checkpoints(tmp_path / 'kept')
    assert load_checkpoint(checkpoint)['state']['timestamp']['Timestamp']['batch'] == 3


def arguments_of_two_ranks(results, *flags) -> list[str]:
    """Those of the launcher, for a run that goes on until it is ended."""
    return ['-n', '2', 'tests/training/talking_run.py', '--use_synth_data', *TINY, '--measure_batches', '100000',
            '--results', str(results), *flags]


def wait_until_it_trains(log: Path, has_ended: Callable[[], bool]) -> None:
    """Until the run that prints to `log` has trained for some batches."""
    while not re.search(r'^batch ([6-9]|\d\d+) of 100001', log.read_text(), re.MULTILINE):
        assert not has_ended(), log.read_text()
        time.sleep(0.05)


def group_is_gone(group: int) -> bool:
    """Whether no process of it is left but dead ones."""
    for process in psutil.process_iter(['status']):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info['status'] != psutil.STATUS_ZOMBIE:
                return False
    return True


@pytest.mark.long
def test_ctrl_c_under_the_launcher_leaves_a_record_of_what_was_measured(results, server):
    log = results.with_name('log')
    run = forked_launcher.start(server, log, arguments_of_two_ranks(results))
    wait_until_it_trains(log, lambda: run.exitcode is not None)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to every process
    run.join(300)
    wait_until(lambda: group_is_gone(run.pid))
    record = json.loads(results.read_text())
    assert record['status'] == 'interrupted' and record['measured_batches'] >= 3 and record['images_per_sec'] > 0
    stopped = f'stopped at batch {record["trained_batches"]} of 100001; without --save_folder nothing was saved'
    assert stopped in log.read_text().splitlines()


@pytest.mark.long
def test_the_end_of_the_launcher_ends_the_run_with_a_record_and_a_checkpoint_to_go_on_from(results):
    """A real launcher, and real ranks."""
    log, folder = results.with_name('log'), results.with_name('checkpoints')
    arguments = arguments_of_two_ranks(results, '--use_ema', '--save_folder', str(folder))
    with open(log, 'w') as file:
        run = subprocess.Popen([sys.executable, '-m', 'composer.cli.launcher', *arguments], cwd=ROOT, stdout=file,
                               stderr=file, start_new_session=True, env=os.environ | {'PYTHONPATH': str(ROOT)})
    wait_until_it_trains(log, lambda: run.poll() is not None)
    os.kill(run.pid, signal.SIGTERM)  # to it alone, which passes it on to its ranks
    run.wait(timeout=300)
    wait_until(lambda: group_is_gone(run.pid))  # it ends before its ranks
    record = json.loads(results.read_text())
    assert record['status'] == 'interrupted'
    [checkpoint] = checkpoints(folder)
    assert f'saved {checkpoint}; the same command with --autoresume goes on' in log.read_text()
    done = load_checkpoint(checkpoint)['state']['timestamp']['Timestamp']['batch']
    assert done >= record['measured_batches'] + 1
    argv = ['--use_synth_data', '--use_ema', *TINY, '--max_duration', f'{done + 3}ba', '--save_folder', str(folder)]
    resumed = main([*argv, '--autoresume', '--results', str(results)])
    assert (resumed['status'], resumed['first_batch'], resumed['measured_batches']) == ('complete', done, 2)


def test_signals_that_come_together_are_answered_once(monkeypatch):
    """A launcher passes Ctrl-C on as SIGTERM: Python would say `Signal 15 ignored due to race condition`."""
    complaints = []
    monkeypatch.setattr(sys, 'unraisablehook', complaints.append)
    guard = Safeguard(17)
    guard.updating = True  # else it ends this process
    before = {number: signal.signal(number, guard._interrupt) for number in SIGNALS}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        assert guard.interrupted and not complaints
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_leaves_the_signals_as_they_were(plain_run):
    assert plain_run.signals_after == plain_run.signals_before
