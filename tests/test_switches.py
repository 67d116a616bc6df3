"""Every switch trains the same model: loss and gradients of a small one against plain float32, from the same seed."""
import pytest
import torch

import benchmark
from benchmark import StableDiffusion, apply_switches
from data import collate, normalize
from inputs.captions import build_tokenizer
from inputs.images import decode_image
from tests.runs import settings_of


def batch_of(samples: list[dict], image_size: int) -> dict[str, torch.Tensor]:
    stored = [{'image': decode_image(sample['jpg']), 'caption': sample['caption']} for sample in samples[:4]]
    return normalize(collate(stored, build_tokenizer(), image_size), image_size)


@pytest.fixture(scope='module')
def batch(samples) -> dict[str, torch.Tensor]:
    return batch_of(samples, 64)


def loss_and_gradients(batch, argv: list[str], model_name: str = 'tiny') -> tuple[float, dict[str, torch.Tensor]]:
    image_size = batch['image'].shape[-1]
    settings = settings_of('--use_synth_data', '--model_name', model_name, '--image_size', image_size, *argv)
    torch.manual_seed(0)
    model = StableDiffusion(model_name, image_size, encoder_precision=settings.encoder_precision).train()
    apply_switches(model, settings)
    torch.manual_seed(1)
    loss = model.loss(model(batch), batch)
    loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in model.unet.named_parameters()}


def assert_same(switched: tuple, plain: tuple, tolerance: float) -> None:
    """Tolerances are relative: of the loss, and of all gradients together by their norm."""
    loss, gradients = switched
    assert loss == pytest.approx(plain[0], rel=tolerance)
    error = torch.stack([(gradients[name] - gradient).norm() for name, gradient in plain[1].items()]).norm()
    assert error / torch.stack([gradient.norm() for gradient in plain[1].values()]).norm() < tolerance
    assert gradients.keys() == plain[1].keys()  # compiling in place leaves the names of checkpoints alone


@pytest.fixture(scope='module')
def plain(batch):
    return loss_and_gradients(batch, ['--no-channels_last'])


@pytest.mark.parametrize('argv, tolerance', [
    (['--channels_last'], 1e-4),
    (['--gradient_checkpointing'], 1e-5),
    (['--encoder_precision', 'bf16'], 0.05),
    (['--encoder_precision', 'fp16'], 0.01),
], ids=str)
def test_a_switch_leaves_loss_and_gradients_as_they_are(batch, plain, argv, tolerance):
    assert_same(loss_and_gradients(batch, argv), plain, tolerance)


@pytest.mark.long
@pytest.mark.skipif(' ' in torch.__file__, reason='torch 2.7.0 gives its own path to the compiler of C++ unquoted')
def test_compiling_leaves_loss_and_gradients_as_they_are(samples, smallest_model):
    batch = batch_of(samples, 32)
    plain = loss_and_gradients(batch, ['--no-channels_last'], smallest_model)
    assert_same(loss_and_gradients(batch, ['--compile'], smallest_model), plain, 1e-4)


def test_the_fused_optimizer_takes_the_same_steps():
    weights = []
    for flag in ('--fused_optimizer', '--no-fused_optimizer'):
        settings = settings_of('--use_synth_data', flag)
        torch.manual_seed(0)
        model = StableDiffusion('tiny', 64)
        optimizer = benchmark.build_optimizer(model, settings)
        assert optimizer.param_groups[0]['fused'] == (flag == '--fused_optimizer')
        for step in range(3):
            for index, parameter in enumerate(model.unet.parameters()):
                generator = torch.Generator().manual_seed(1000 * step + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.unet.parameters()]))
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)


def test_microbatches_give_the_gradient_of_the_batch(batch):
    torch.manual_seed(0)
    model = StableDiffusion('tiny', 64).train()
    latents, text = model.encode(batch)
    noise, timesteps = torch.randn_like(latents), torch.randint(1000, (4,))

    def gradient(*parts: slice) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            noised = model.scheduler.add_noise(latents[part], noise[part], timesteps[part])
            prediction = model.unet(noised, timesteps[part], text[part]).sample
            (model.loss((prediction, noise[part]), batch) * len(noise[part]) / 4).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.unet.parameters()])

    torch.testing.assert_close(gradient(slice(0, 2), slice(2, 4)), gradient(slice(0, 4)), atol=1e-6, rtol=1e-4)
