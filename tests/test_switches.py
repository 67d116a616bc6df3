"""Every switch trains the same model, in half precision by CUDA's rules: how near float32, and what overflows."""
import contextlib
from dataclasses import replace

import pytest
import torch
from composer import Callback

import benchmark
from benchmark import StableDiffusion
from benchmarks.proof import exactness
from sdbench.flags.train import Train
from sdbench.forecast.trace import norms_in_float32
from sdbench.models.loading import DTYPES, find_model
from tests.cuda_rules import Dtypes, composer_on_a_gpu
from tests.runs import TINY, Weights, settings_of

NORMS = ('native_group_norm', 'native_layer_norm')
PRODUCTS = ('convolution', 'addmm', 'mm', 'bmm', '_scaled_dot_product_flash_attention_for_cpu')


@pytest.fixture(scope='module')
def batch() -> dict[str, torch.Tensor]:
    return exactness.draw_batch(8, 'cpu')


def arguments(*argv: str) -> Train:
    return settings_of('--use_synth_data', *TINY, '--results', '/dev/null', *argv)


def loss_and_gradient(*argv: str, dtypes: Dtypes | None = None) -> tuple[float, torch.Tensor]:
    """Return the loss of a model and its gradients as a vector, with norms in float32 as CUDA's autocast has them."""
    with norms_in_float32(), dtypes or contextlib.nullcontext():
        loss, gradient = exactness.loss_and_gradient(argv)
    assert gradient.dtype == torch.float32
    return loss, gradient


@pytest.fixture(scope='module')
def plain():
    return loss_and_gradient(*exactness.EAGER)


@pytest.mark.parametrize('argv, tolerance', exactness.SWITCHES, ids=str)
def test_with_any_switch_loss_and_gradients_are_near_those_of_plain_float32(plain, argv, tolerance):
    loss, gradient = exactness.differences(loss_and_gradient(*argv), plain)
    assert loss < tolerance
    assert gradient < tolerance


@pytest.mark.parametrize('loss, gradient', [(1.0, float('nan')), (float('nan'), 1.0)])
def test_what_is_not_a_number_is_near_nothing(monkeypatch, loss, gradient):
    answers = iter([(1.0, torch.ones(1)), *[(loss, torch.full((1,), gradient))] * len(exactness.SWITCHES)])
    monkeypatch.setattr(exactness, 'loss_and_gradient', lambda *_: next(answers))
    results = exactness.compare_switches()
    assert [result['holds'] for result in results] == [False] * len(exactness.SWITCHES)


@pytest.mark.long
@pytest.mark.skipif(' ' in torch.__file__, reason='torch 2.7.0 gives its own path to the compiler of C++ unquoted')
def test_compiling_leaves_loss_and_gradients_as_they_are(smallest_model):
    argv = [*exactness.EAGER, '--model_name', smallest_model]
    compiled = loss_and_gradient(*argv, '--compile')
    assert max(exactness.differences(compiled, loss_and_gradient(*argv))) < 1e-4


@pytest.mark.parametrize('encoder_precision', ['bf16', 'fp32'])
def test_with_half_precision_norms_unet_and_vae_compute_them_in_half(encoder_precision):
    dtypes = Dtypes()
    loss_and_gradient('--precision', 'amp_bf16', '--encoder_precision', encoder_precision,
                      '--half_precision_norms', dtypes=dtypes)
    assert dtypes.of('native_group_norm', 'native_group_norm_backward') == {torch.bfloat16}
    assert dtypes.of('native_layer_norm_backward') == {torch.bfloat16}


def test_channels_last_reaches_the_convolutions_of_unet_and_vae(batch):
    model = StableDiffusion('tiny', 64)
    benchmark.apply_switches(model, arguments('--channels_last'))
    for part in (model.unet, model.vae.encoder):
        weights = [module.weight for module in part.modules() if isinstance(module, torch.nn.Conv2d)]
        assert len(weights) > 5
        assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


@pytest.mark.parametrize('encoder_precision', ['bf16', 'fp16', 'fp32'])
def test_encoders_that_are_held_in_half_compute_in_half_alone_and_others_are_left_to_autocast(batch, encoder_precision):
    half = DTYPES[encoder_precision] if encoder_precision != 'fp32' else torch.float16
    model = StableDiffusion('tiny', 64, encoder_precision=encoder_precision).train()
    with norms_in_float32(), torch.autocast('cpu', half), Dtypes() as dtypes:
        latents, text = model.encode(batch)
    assert dtypes.of(*PRODUCTS) == {half}
    assert latents.dtype == text.dtype == torch.float32
    assert dtypes.of(*NORMS) == {DTYPES[encoder_precision]}


class Scales(Callback):
    """The scale of the loss at the end of each batch."""

    def __init__(self):
        self.scales = []

    def batch_end(self, state, logger):
        self.scales.append(state.scaler.get_scale())


def test_a_step_whose_scaled_gradients_overflow_is_left_out_and_the_scale_halved(monkeypatch, smallest_with_attention):
    settings = arguments('--model_name', smallest_with_attention, '--encoder_precision', 'fp16',
                         '--device_train_microbatch_size', '2', '--max_duration', '5ba')
    settings = replace(settings, precision='amp_fp16')  # that of a GPU
    witness, scales = Weights(2, value=float('inf')), Scales()
    files = find_model(smallest_with_attention)
    data = benchmark.build_data(settings, files, None)
    with composer_on_a_gpu(monkeypatch), benchmark.StopAtSignal() as stop:
        _, _, trainer = benchmark.build_training(settings, files, data, stop, [witness, scales])
        outcome = benchmark.fit(trainer, stop)
    assert outcome == {'status': 'complete'}  # its loss was finite
    assert scales.scales == [2. ** 16, 2. ** 16, 2. ** 15, 2. ** 15, 2. ** 15]
    assert torch.equal(witness.weights[1], witness.weights[2])
    assert not torch.equal(witness.weights[0], witness.weights[1])
    assert not torch.equal(witness.weights[2], witness.weights[3])
