"""Training in half precision by CUDA's rules: what is computed in which type, how near float32, and what overflows."""
import contextlib

import pytest
import torch
from composer import Callback
from torch.nn.parallel import DistributedDataParallel

import benchmark
from benchmark import StableDiffusion
from ema import EMA
from fitting.fake_step import norms_in_float32
from models.loading import DTYPES, find_model
from settings.train import Train
from tests.cuda_rules import HALF, Dtypes, composer_on_a_gpu, one_rank
from tests.runs import TINY, settings_of

NORMS = ('native_group_norm', 'native_layer_norm')
PRODUCTS = ('convolution', 'addmm', 'mm', 'bmm', '_scaled_dot_product_flash_attention_for_cpu')


@pytest.fixture(scope='module')
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {'image': torch.rand(3, 3, 64, 64, generator=generator) * 2 - 1,
            'caption': torch.randint(49408, (3, 77), generator=generator)}


def arguments(*argv: str) -> Train:
    return settings_of('--use_synth_data', *TINY, '--results', '/dev/null', *argv)


def loss_and_gradient(batch, *argv: str, dtypes: Dtypes | None = None) -> tuple[float, torch.Tensor]:
    """Of `tiny`, all gradients as one vector; with fp16 the loss is scaled, as a scaler begins."""
    settings = arguments(*argv)
    torch.manual_seed(0)
    model = StableDiffusion('tiny', 64, encoder_precision=settings.encoder_precision).train()
    benchmark.apply_switches(model, settings)
    scale = 2. ** 16 if settings.precision == 'amp_fp16' else 1.
    torch.manual_seed(1)
    with norms_in_float32(), dtypes or contextlib.nullcontext():
        precision = settings.precision
        with torch.autocast('cpu', HALF.get(precision, torch.bfloat16), enabled=precision in HALF):
            outputs = model(batch)
            loss = model.loss(outputs, batch)
        (loss * scale).backward()
    gradients = [parameter.grad / scale for parameter in model.unet.parameters()]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.fixture(scope='module')
def plain(batch):
    return loss_and_gradient(batch, '--precision', 'fp32')


@pytest.mark.parametrize('argv, tolerance', [
    (['--precision', 'amp_bf16'], 0.02),
    (['--precision', 'amp_fp16', '--encoder_precision', 'fp32'], 0.004),
    (['--precision', 'amp_fp16', '--channels_last', '--gradient_checkpointing'], 0.004),
    (['--precision', 'amp_bf16', '--encoder_precision', 'fp32', '--half_precision_norms'], 0.02),
    (['--precision', 'amp_fp16', '--half_precision_norms'], 0.004),
], ids=str)
def test_loss_and_gradients_are_near_those_of_float32(batch, plain, argv, tolerance):
    """Tolerances are relative: of the loss, and of all gradients together by their norm."""
    loss, gradient = loss_and_gradient(batch, *argv)
    assert loss == pytest.approx(plain[0], rel=tolerance)
    assert (gradient - plain[1]).norm() < tolerance * plain[1].norm()


@pytest.mark.parametrize('precision', HALF)
def test_the_unets_norms_run_in_float32_and_its_products_in_half(batch, precision):
    settings = arguments('--precision', precision)
    model = StableDiffusion('tiny', 64, encoder_precision=settings.encoder_precision).train()
    model.encode = lambda batch: (torch.randn(3, 4, 8, 8), torch.randn(3, 77, model.text_encoder.config.hidden_size))
    with norms_in_float32(), Dtypes() as dtypes:
        with torch.autocast('cpu', HALF[precision]):
            loss = model.loss(model(batch), batch)
        loss.backward()
    assert dtypes.of(*NORMS) == dtypes.of(*(f'{name}_backward' for name in NORMS)) == {torch.float32}
    assert dtypes.of(*PRODUCTS, 'convolution_backward') == {HALF[precision]}
    assert dtypes.of('mse_loss') == {torch.float32}


@pytest.mark.parametrize('encoder_precision', ['bf16', 'fp32'])
def test_with_half_precision_norms_unet_and_vae_compute_them_in_half(batch, encoder_precision):
    dtypes = Dtypes()
    loss_and_gradient(batch, '--precision', 'amp_bf16', '--encoder_precision', encoder_precision,
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
    assert dtypes.of(*PRODUCTS) == {half} and latents.dtype == text.dtype == torch.float32
    assert dtypes.of(*NORMS) == {DTYPES[encoder_precision]}


@pytest.mark.parametrize('precision', HALF)
def test_ddp_gives_the_gradients_that_one_process_has(batch, precision):
    model = StableDiffusion('tiny', 64, encoder_precision='fp32').train()
    gradients = []
    with one_rank(), norms_in_float32():
        wrapped = DistributedDataParallel(model)
        for each in (model, wrapped):
            model.zero_grad()
            torch.manual_seed(1)
            with torch.autocast('cpu', HALF[precision]):
                loss = model.loss(each(batch), batch)
            loss.backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.unet.parameters()]))
    assert torch.equal(*gradients)


class Witness(Callback):
    """The UNet's weights, Adam's state, the average and the scale of the losses at the end of each batch."""

    def __init__(self):
        self.weights, self.adam, self.average, self.scale = [], [], [], []

    def batch_end(self, state, logger):
        [ema] = [algorithm for algorithm in state.algorithms if isinstance(algorithm, EMA)]
        [optimizer] = state.optimizers
        self.weights.append([weight.detach().clone() for weight in state.model.unet.parameters()])
        self.adam.append([tensor.clone() for moments in optimizer.state.values() for tensor in moments.values()])
        self.average.append([tensor.clone() for tensor in ema.ema_model.parameters()])
        self.scale.append(state.scaler.get_scale())


def run_in_fp16(monkeypatch, folder: str, spoil, *argv: str) -> tuple[Witness, dict[str, str], benchmark.Trainer]:
    """Five batches of two microbatches, of which `spoil` makes some overflow: what was seen, and how it ended."""
    settings = arguments('--model_name', folder, '--image_size', '16', '--precision', 'amp_fp16', '--use_ema',
                     '--device_train_microbatch_size', '2', '--max_duration', '5ba', *argv)
    witness = Witness()
    data = benchmark.build_data(settings, find_model(folder))
    with composer_on_a_gpu(monkeypatch), benchmark.StopAtSignal() as stop:
        model, trainer = benchmark.build_run(settings, data, stop, callbacks=[witness])
        spoil(model)
        with benchmark.noting_how_it_ends(trainer) as outcome:
            trainer.fit()
    return witness, outcome, trainer


def skipped(trainer: benchmark.Trainer) -> int:
    """The steps that Safeguard has left out."""
    [safeguard] = [callback for callback in trainer.state.callbacks if isinstance(callback, benchmark.Safeguard)]
    return safeguard.skipped_batches


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def overflow(model: StableDiffusion) -> None:
    """Make a gradient of the second microbatch of batch 3 infinite, which is the sixth backward pass."""
    gradients = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradients.append(gradient)
        return torch.full_like(gradient, float('inf')) if len(gradients) == 6 else gradient

    def watch(module, inputs, output) -> None:
        if output.requires_grad:
            output.register_hook(spoil)
    model.unet.conv_out.register_forward_hook(watch)


def test_a_step_whose_scaled_gradients_overflow_is_left_out_and_the_scale_halved(monkeypatch, smallest_with_attention):
    witness, outcome, trainer = run_in_fp16(monkeypatch, smallest_with_attention, overflow)
    assert outcome == {'status': 'complete'}  # its loss was finite
    assert skipped(trainer) == 0
    assert trainer.state.optimizers[0].param_groups[0]['fused']
    assert witness.scale == [2. ** 16, 2. ** 16, 2. ** 15, 2. ** 15, 2. ** 15]
    assert same(witness.weights[1], witness.weights[2]) and same(witness.adam[1], witness.adam[2])
    assert not same(witness.weights[0], witness.weights[1]) and not same(witness.weights[2], witness.weights[3])
    assert_average_follows(witness, batch=2)


def lose(value: float, call: int):
    """A spoiler that makes the model's loss `value` in one call."""
    def spoil(model):
        calls, loss = [], model.loss

        def spoiled(outputs, batch):
            calls.append(1)
            return loss(outputs, batch) * (value if len(calls) == call + 1 else 1)
        model.loss = spoiled
    return spoil


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_on_nan_skip_leaves_out_a_step_that_was_scaled(monkeypatch, smallest_with_attention, value):
    witness, outcome, trainer = run_in_fp16(monkeypatch, smallest_with_attention, lose(value, 4), '--on_nan', 'skip')
    assert (outcome, skipped(trainer)) == ({'status': 'complete'}, 1)
    assert same(witness.weights[1], witness.weights[2]) and same(witness.adam[1], witness.adam[2])
    assert not same(witness.weights[2], witness.weights[3])
    assert_average_follows(witness, batch=2)


def test_on_nan_stop_ends_a_run_that_was_scaled_before_the_step(monkeypatch, smallest_with_attention):
    witness, outcome, trainer = run_in_fp16(monkeypatch, smallest_with_attention, lose(float('nan'), 4))
    assert outcome['status'] == 'failed' and 'the loss of batch 3 is not finite' in outcome['error']
    assert len(witness.weights) == 2
    assert same(witness.weights[1], [weight.detach() for weight in trainer.state.model.unet.parameters()])


def assert_average_follows(witness: Witness, batch: int) -> None:
    """The average of a batch is that of the batch before it, a step nearer to the weights, which are finite."""
    smoothing = 2 ** (-1 / 1000)
    for before, weight, after in zip(witness.average[batch - 1], witness.weights[batch], witness.average[batch],
                                     strict=True):
        assert weight.isfinite().all()
        torch.testing.assert_close(after, smoothing * before + (1 - smoothing) * weight)
