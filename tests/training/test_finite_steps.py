"""A loss or gradient that is inf or NaN never changes the weights, and the noise of each batch has its own seed."""
import json
from types import SimpleNamespace

import pytest
import torch
from composer.core import Timestamp

from benchmark import StableDiffusion, main
from sdbench.training import optimization
from sdbench.training.resuming import ExactResume
from tests.runs import TINY, Weights, failed

ARGV = ['--use_synth_latents', '--use_ema', *TINY, '--max_duration', '5ba']


@pytest.fixture(autouse=True, params=[True, False], ids=['no CUDA', 'CUDA'])
def scaler(request, monkeypatch):
    """Test with and without CUDA: with CUDA, Composer has an enabled GradScaler in every precision."""
    monkeypatch.setattr(torch.cuda.amp.common, 'amp_definitely_not_available', lambda: request.param)


@pytest.fixture
def corrupt(monkeypatch):
    """Return a function that sets the third loss, or gradients of the third batch, to a value."""
    def corrupt(what: str, value: float) -> Weights:
        if what == 'gradient':
            return Weights(2, value=value)
        factors = iter([1, 1, value, 1, 1])
        loss = StableDiffusion.loss
        monkeypatch.setattr(StableDiffusion, 'loss', lambda *arguments: loss(*arguments) * next(factors))
        return Weights()
    return corrupt


@pytest.mark.parametrize('what, value, flags', [
    ('loss', float('nan'), []), ('loss', float('inf'), []), ('gradient', float('nan'), []),
    ('gradient', 3e38, ['--clip_grad_norm', '1'])], ids=str)  # the norm of the last overflows
def test_a_loss_or_gradient_that_is_not_finite_never_changes_the_weights(results, capfd, corrupt, what, value, flags):
    witness = corrupt(what, value)
    line = failed([*ARGV, *flags], results, capfd, [witness])
    assert f'{what} of batch 3 is not finite' in line
    assert len(witness.weights) == 2
    assert witness.weights[-1].isfinite().all()
    assert json.loads(results.read_text())['loss'] > 0


@pytest.mark.parametrize('what', ['loss', 'gradient'])
def test_on_nan_skip_leaves_the_step_out_and_counts_it(corrupt, what):
    witness = corrupt(what, float('nan'))
    record = main([*ARGV, '--on_nan', 'skip'], [witness])
    assert (record['status'], record['skipped_batches']) == ('complete', 1)
    assert record['loss'] > 0
    assert torch.equal(witness.weights[1], witness.weights[2])
    assert not torch.equal(witness.weights[2], witness.weights[3])
    assert witness.weights[4].isfinite().all()
    assert witness.averages[4].isfinite().all()


def test_too_many_skips_in_a_row_end_the_run(results, capfd, monkeypatch):
    monkeypatch.setattr(optimization, 'MOST_SKIPS_IN_A_ROW', 2)
    witness = Weights(1, 2, 4, 5, 6)
    failed([*ARGV, '--max_duration', '50ba', '--on_nan', 'skip'], results, capfd, [witness])
    assert len(witness.weights) == 6
    assert witness.weights[-1].isfinite().all()


def test_the_noise_of_a_batch_depends_only_on_seed_batch_and_rank(monkeypatch):
    def noise(seed: int, batch: int, rank: int = 0) -> tuple[float, ...]:
        monkeypatch.setenv('RANK', str(rank))
        ExactResume(seed).batch_start(SimpleNamespace(timestamp=Timestamp(batch=batch)), None)
        return tuple(torch.rand(4).tolist())
    assert noise(17, 3) == noise(17, 3)
    assert len({noise(17, 3), noise(18, 3), noise(17, 4), noise(17, 3, rank=1)}) == 4
