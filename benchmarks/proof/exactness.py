"""Measure how far a GPU's float32 is from a CPU's, and how far each speed switch is from eager float32 on one device.

    python -m benchmarks.proof.exactness

Compares the loss and the gradients of one batch of the tiny model. Exit status 1 means that a difference is larger than
its tolerance. tests/models/test_switches.py compares the same switches on a CPU with the same tolerances.
"""
import sys
from collections.abc import Sequence

import torch

import benchmark
from sdbench.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.inputs.batches import NOISE, TIMESTEP
from sdbench.models.switches import process_switches

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
SIDE = 64  # pixels
CPU_TOLERANCE = 1e-3  # relative difference between float32 on a GPU and on a CPU
AUTOCAST = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}
# The tests compare the switches on a CPU, where the flags allow half precision only for a dry run.
PLAIN_FLAGS = ['--use_synth_data', '--model_name', 'tiny', '--image_size', str(SIDE), '--batch_size', '3',
         '--device_train_microbatch_size', '3', '--dry_run', '1']
EAGER_FLAGS = ['--precision', 'fp32', '--no-channels_last']
# Flags, and the largest relative difference from EAGER_FLAGS of the loss, and of the vector of all gradients
SWITCHES = [
    (['--precision', 'fp32', '--channels_last'], 1e-4),
    (['--precision', 'fp32', '--gradient_checkpointing'], 1e-5),
    (['--precision', 'amp_bf16'], 0.02),
    (['--precision', 'amp_fp16', '--encoder_precision', 'fp32'], 0.004),
    (['--precision', 'amp_fp16', '--channels_last', '--gradient_checkpointing'], 0.004),
    (['--precision', 'amp_bf16', '--encoder_precision', 'fp32', '--half_precision_norms'], 0.02),
    (['--precision', 'amp_fp16', '--half_precision_norms'], 0.004),
]
GPU_SWITCHES = [
    (['--precision', 'fp32', '--no-channels_last', '--compile', '--no-compile_blocks'], 1e-4),
    (['--precision', 'amp_bf16', '--attention', 'flash'], 0.02),
    (['--precision', 'amp_bf16', '--attention', 'cudnn'], 0.02),
    (['--precision', 'amp_bf16', '--attention', 'xformers'], 0.02),
]


def random_batch(latent_size: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return three random images with captions, noise and timesteps, which are the same on every device."""
    generator = torch.Generator().manual_seed(5)
    batch = {'image': torch.rand(3, 3, SIDE, SIDE, generator=generator) * 2 - 1,
             'caption': torch.randint(49408, (3, 77), generator=generator),
             NOISE: torch.randn(3, 8, latent_size, latent_size, generator=generator),
             TIMESTEP: torch.randint(1000, (3,), generator=generator)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def loss_and_gradient(argv: Sequence[str], device: torch.device | str = 'cpu') -> tuple[float, torch.Tensor]:
    """Return the loss of one batch, and its gradients as a vector.

    In fp16 the loss is scaled before the backward pass as a gradient scaler does at its start, and gradients are
    scaled back.
    """
    settings = complete(parse(Train, '', [*PLAIN_FLAGS, *argv], 'benchmark.py'), None)
    scale = 2. ** 16 if settings.precision == 'amp_fp16' else 1.
    precision = settings.precision
    with process_switches(settings):
        # The weights are initialized on the CPU, so they are the same on any device.
        torch.manual_seed(0)
        model = benchmark.StableDiffusion(settings.model_name, SIDE, encoder_precision=settings.encoder_precision)
        model.prediction_type = 'epsilon'  # as in Stable Diffusion 2 base; the tolerances were chosen for it
        model.train().to(device)
        benchmark.apply_switches(model, settings)
        batch = random_batch(model.latent_size, device)
        kind = torch.device(device).type
        with torch.autocast(kind, AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST):
            outputs = model(batch)
            loss = model.loss(outputs, batch)
        (loss * scale).backward()
    gradients = [parameter.grad.flatten().cpu() / scale for parameter in model.unet.parameters()]
    return loss.item(), torch.cat(gradients)


def differences(one: tuple[float, torch.Tensor], other: tuple[float, torch.Tensor]) -> tuple[float, float]:
    """Return the relative differences of two losses, and of two gradient vectors by their norm."""
    loss, gradient = one
    other_loss, other_gradient = other
    gradient_difference = (gradient - other_gradient).norm() / other_gradient.norm()
    return abs(loss - other_loss) / abs(other_loss), float(gradient_difference)


def main() -> int:
    # TF32 would keep only 10 bits of the factors of a product.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    plain = loss_and_gradient(EAGER_FLAGS, DEVICE)
    comparisons = [('float32 on the CPU', EAGER_FLAGS, 'cpu', CPU_TOLERANCE)]
    for argv, tolerance in SWITCHES if DEVICE == 'cpu' else [*SWITCHES, *GPU_SWITCHES]:
        comparisons.append((' '.join(argv), argv, DEVICE, tolerance))

    too_far = []
    for name, argv, device, tolerance in comparisons:
        try:
            loss, gradient = differences(loss_and_gradient(argv, device), plain)
        except Exception as error:  # whatever the error, such as a library that is not installed, compare the others
            print(f'{name}: does not run here: {str(error).strip().splitlines()[0][:200]}')
            continue
        print(f'{name}: loss differs by {loss:.1e} and gradients by {gradient:.1e}, tolerance {tolerance:g}')
        if not (loss < tolerance and gradient < tolerance):  # NaN is too far, too
            too_far.append(name)
    print(f'differences from float32 on {DEVICE} that are too large: {"; ".join(too_far) or "none"}')
    return 1 if too_far else 0


if __name__ == '__main__':
    sys.exit(main())
