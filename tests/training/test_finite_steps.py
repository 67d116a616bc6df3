"""What keeps a run from harm: a loss or a gradient that is not finite is never learned, and noise has its own seeds."""
import json
from types import SimpleNamespace

import pytest
import torch
from composer.core import Timestamp

import benchmark
from benchmark import main
from sdbench.training import exact_resume, optimization
from sdbench.training.exact_resume import ExactResume
from sdbench.training.optimization import MOST_SKIPS_IN_A_ROW
from tests.runs import TINY, Weights, failed

ARGV = ['--use_synth_latents', '--use_ema', *TINY, '--max_duration', '5ba']


@pytest.fixture(autouse=True, params=[True, False], ids=['no CUDA', 'CUDA'])
def scaler(request, monkeypatch):
    """Composer makes a GradScaler in every precision; where torch finds CUDA, it is enabled in every precision."""
    monkeypatch.setattr(torch.cuda.amp.common, 'amp_definitely_not_available', lambda: request.param)


@pytest.fixture
def spoil(monkeypatch):
    """Return a function that lets the third loss of a training, or gradients of its third batch, be some value."""
    def spoil(what: str, value: float) -> Weights:
        if what == 'gradient':
            return Weights(2, value=value)
        calls, loss = [], benchmark.StableDiffusion.loss

        def broken(self, outputs, batch):
            calls.append(1)
            return loss(self, outputs, batch) * (value if len(calls) == 3 else 1)
        monkeypatch.setattr(benchmark.StableDiffusion, 'loss', broken)
        return Weights()
    return spoil


@pytest.mark.parametrize('what, value, flags', [
    ('loss', float('nan'), []), ('loss', float('inf'), []), ('gradient', float('nan'), []),
    ('gradient', 3e38, ['--clip_grad_norm', '1'])], ids=str)  # the last cannot be measured
def test_a_loss_or_gradient_that_is_not_finite_is_never_learned(results, capfd, spoil, what, value, flags):
    witness = spoil(what, value)
    line = failed([*ARGV, *flags], results, capfd, [witness])
    assert 'the run failed at batch 3: ' in line
    assert f'{what} of batch 3 is not finite, at microbatch size 4' in line
    assert len(witness.weights) == 2
    assert witness.weights[-1].isfinite().all()
    assert json.loads(results.read_text())['loss'] > 0


@pytest.mark.parametrize('what', ['loss', 'gradient'])
def test_on_nan_skip_leaves_the_step_out_and_counts_it(spoil, what):
    witness = spoil(what, float('nan'))
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
    line = failed([*ARGV[:-1], '50ba', '--on_nan', 'skip'], results, capfd, [witness])
    assert 'the run failed at batch 7' in line
    assert 'the 2 steps before it were skipped' in line
    assert len(witness.weights) == 6
    assert witness.weights[-1].isfinite().all()
    assert MOST_SKIPS_IN_A_ROW == 10


def test_the_noise_of_a_batch_depends_on_seed_batch_and_rank_alone(monkeypatch):
    def noise(seed: int, batch: int, rank: int = 0) -> tuple[float, ...]:
        monkeypatch.setattr(exact_resume.dist, 'get_global_rank', lambda: rank)
        ExactResume(seed).batch_start(SimpleNamespace(timestamp=Timestamp(batch=batch)), None)
        return tuple(torch.rand(4).tolist())
    assert noise(17, 3) == noise(17, 3)
    assert len({noise(17, 3), noise(18, 3), noise(17, 4), noise(17, 3, rank=1)}) == 4
