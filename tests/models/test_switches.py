"""Every switch trains the same model, close to float32, and a step that overflows in fp16 is skipped.

--attention selects the kernel, and --allreduce_precision rounds the gradients.
"""
import functools
import itertools
import json
from dataclasses import replace

import pytest
import torch
from composer import Callback
from composer.trainer import trainer
from torch.nn.attention import SDPBackend

import benchmark
from benchmarks.proof import exactness
from sdbench.forecast.trace import norms_in_float32
from sdbench.models.loading import find_model
from sdbench.models.switches import process_switches
from tests.forked_runs import run
from tests.runs import TINY, Weights, settings_of


def loss_and_gradient(*argv: str) -> tuple[float, torch.Tensor]:
    """Return the loss of a model and its gradients as a vector, with norms in float32 as in CUDA's autocast."""
    with norms_in_float32():
        loss, gradient = exactness.loss_and_gradient(argv)
    assert gradient.dtype == torch.float32
    return loss, gradient


@pytest.fixture(scope='module')
def plain():
    return loss_and_gradient(*exactness.EAGER_FLAGS)


@pytest.mark.parametrize('argv, tolerance', exactness.SWITCHES, ids=str)
def test_with_any_switch_loss_and_gradients_are_near_those_of_plain_float32(plain, argv, tolerance):
    loss, gradient = exactness.differences(loss_and_gradient(*argv), plain)
    assert loss < tolerance
    assert gradient < tolerance


@pytest.mark.long
@pytest.mark.skipif(' ' in torch.__file__, reason='torch 2.7.0 gives its own path to the compiler of C++ unquoted')
def test_compiling_does_not_change_loss_and_gradients(smallest_model):
    argv = [*exactness.EAGER_FLAGS, '--model_name', smallest_model]
    compiled = loss_and_gradient(*argv, '--compile')
    assert max(exactness.differences(compiled, loss_and_gradient(*argv))) < 1e-4


def test_a_step_with_overflowing_gradients_is_skipped_and_the_scale_halved(monkeypatch, smallest_with_attention):
    """The run uses Composer's Trainer as on a GPU in amp_fp16, with norms in float32 as in CUDA's autocast."""
    monkeypatch.setattr(trainer, '_validate_precision', lambda precision, device: None)
    monkeypatch.setattr(trainer, 'get_precision_context', lambda *_, **__: torch.autocast('cpu', torch.float16))
    monkeypatch.setattr(trainer, 'GradScaler', functools.partial(torch.amp.GradScaler, 'cpu'))
    settings = settings_of('--use_synth_data', *TINY, '--model_name', smallest_with_attention, '--encoder_precision',
                           'fp16', '--device_train_microbatch_size', '2', '--max_duration', '5ba')
    settings = replace(settings, precision='amp_fp16')  # complete() would refuse it without a GPU
    witness = Weights(2, value=float('inf'))
    files = find_model(smallest_with_attention)
    data = benchmark.build_data(settings, files, None)
    scales = []

    class Scale(Callback):
        def batch_end(self, state, logger):
            scales.append(state.scaler.get_scale())

    with norms_in_float32():
        record = benchmark.train(settings, files, data, [witness, Scale()])
    assert record['status'] == 'complete'  # the loss was finite
    assert scales[-1] == scales[0] / 2
    changed = [not torch.equal(*pair) for pair in itertools.pairwise(witness.weights[:4])]
    assert changed == [True, False, True]


@pytest.mark.parametrize('attention, order', [
    ('sdpa', None), ('cudnn', ['CUDNN_ATTENTION', 'FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH']),
    ('efficient', ['EFFICIENT_ATTENTION', 'MATH'])])
def test_attention_tries_the_kernel_first_that_is_asked_for(attention, order):
    before = torch._C._get_sdp_priority_order()
    with process_switches(settings_of('--use_synth_data', *TINY, '--attention', attention)):
        tried = torch._C._get_sdp_priority_order()
        assert torch.backends.cuda.cudnn_sdp_enabled() == (attention != 'efficient')
    if order is None:
        assert tried == before
    else:
        assert [SDPBackend(number).name for number in tried[:len(order)]] == order
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.long
def test_all_reduced_gradients_in_bf16_train_nearly_like_gradients_in_float32(server, tmp_path):
    losses = []
    for precision in ('fp32', 'bf16'):
        folder = tmp_path / precision
        argv = ['--use_synth_data', *TINY, '--max_duration', '4ba', '--allreduce_precision', precision]
        assert run(server, 2, argv, folder) == [0, 0], (folder / 'log').read_text()
        record = json.loads((folder / 'results.jsonl').read_text())
        assert (record['allreduce_precision'], record['num_devices']) == (precision, 2)
        losses.append(record['loss'])
    exact, rounded = losses
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-3)
