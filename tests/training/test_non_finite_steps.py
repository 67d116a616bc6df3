"""A gradient that is not finite ends a run, or its step is left out, before weights and average take it in."""
import json

import pytest
import torch
from composer import Callback

import benchmark
from ema import EMA
from tests.runs import TINY
from training import safeguard
from training.safeguard import MOST_SKIPS_IN_A_ROW, seconds_to_agree


class Weights(Callback):
    """All weights and averages when each batch ends, and what the gradients are made before the optimizer sees them."""

    def __init__(self, broken_from: int = 2, broken_to: int = 3):  # batches, counted from 0
        self.broken_from = broken_from
        self.broken_to = broken_to
        self.seen: list[torch.Tensor] = []

    def after_train_batch(self, state, logger):
        if self.broken_from <= state.timestamp.batch.value < self.broken_to:
            next(state.model.unet.parameters()).grad[0] = float('nan')

    def batch_end(self, state, logger):
        [ema] = [algorithm for algorithm in state.algorithms if isinstance(algorithm, EMA)]
        tensors = [*state.model.unet.parameters(), *ema.ema_model.parameters()]
        self.seen.append(torch.cat([tensor.detach().flatten() for tensor in tensors]))


@pytest.fixture(autouse=True, params=[True, False], ids=['no CUDA', 'CUDA'])
def scaler(request, monkeypatch):
    """Composer makes a GradScaler in every precision; where torch finds CUDA, it is enabled in every precision."""
    monkeypatch.setattr(torch.cuda.amp.common, 'amp_definitely_not_available', lambda: request.param)


@pytest.fixture
def argv(smallest_model, results) -> list[str]:
    return ['--use_synth_latents', '--use_ema', *TINY, '--model_name', smallest_model, '--results', str(results)]


def test_a_nan_gradient_of_a_finite_loss_ends_the_run_before_it_is_learned(argv, results, capfd):
    weights = Weights()
    with pytest.raises(SystemExit):
        benchmark.main(argv, [weights])
    record = json.loads(results.read_text())
    assert record['status'] == 'failed'
    assert record['error'].startswith('a gradient of batch 3 is not finite, at microbatch size 4')
    assert len(weights.seen) == 2 and weights.seen[-1].isfinite().all()


def test_on_nan_skip_leaves_the_step_of_a_nan_gradient_out(argv):
    weights = Weights()
    record = benchmark.main([*argv, '--max_duration', '5ba', '--on_nan', 'skip'], [weights])
    assert (record['status'], record['skipped_batches']) == ('complete', 1)
    assert all(tensor.isfinite().all() for tensor in weights.seen)


def test_too_many_skips_in_a_row_end_the_run(argv, results, capfd):
    weights = Weights(broken_to=1000)
    with pytest.raises(SystemExit):
        benchmark.main([*argv, '--max_duration', '50ba', '--on_nan', 'skip'], [weights])
    record = json.loads(results.read_text())
    assert f'{MOST_SKIPS_IN_A_ROW} steps before it were left out' in record['error']
    assert len(weights.seen) == 2 + MOST_SKIPS_IN_A_ROW and weights.seen[-1].isfinite().all()


def test_skips_that_are_not_in_a_row_do_not_end_the_run(argv, monkeypatch):
    class EverySecond(Callback):
        def after_train_batch(self, state, logger):
            if state.timestamp.batch.value % 2:
                next(state.model.unet.parameters()).grad[0] = float('inf')

    monkeypatch.setattr(safeguard, 'MOST_SKIPS_IN_A_ROW', 1)
    record = benchmark.main([*argv, '--max_duration', '8ba', '--on_nan', 'skip'], [EverySecond()])
    assert (record['status'], record['skipped_batches']) == ('complete', 4)


@pytest.mark.parametrize('batch_seconds, seconds', [(0.1, 15), (16.0, 32), (7.6, 16)])
def test_after_a_signal_ranks_get_as_long_as_their_batches_take(batch_seconds, seconds):
    assert seconds_to_agree(batch_seconds) == seconds  # 16.0 s: a published batch on 8 GPUs
