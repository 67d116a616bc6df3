"""Measure how far a GPU's float32 is from a CPU's, and how far each speed switch is from eager float32 on one device.

    python -m benchmarks.proof.exactness

It trains the tiny model. The last line of the output is the result, and exit status 1 means that a difference is larger
than its tolerance. tests/test_switches.py compares the same switches on a CPU with the same tolerances.
"""
import sys
from collections.abc import Sequence

import numpy as np
import torch

import benchmark
from ema import ShadowModel, compute_ema
from sdbench.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import Run, Train
from sdbench.inputs.batches import NOISE, TIMESTEP
from sdbench.models.switches import process_switches

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
STEPS = 30
SIDE = 64  # pixels
STEPS_TOLERANCE = 1e-3  # relative difference of losses, gradient norms and EMA weights in thirty steps
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


def build(settings: Run, device: torch.device | str) -> benchmark.StableDiffusion:
    """Build the model with its switches. Its weights are initialized on the CPU, so they are the same on any device."""
    torch.manual_seed(0)
    model = benchmark.StableDiffusion(settings.model_name, SIDE, encoder_precision=settings.encoder_precision).train()
    model.prediction_type = 'epsilon'  # as in Stable Diffusion 2 base; the tolerances were chosen for it
    model.to(device)
    benchmark.apply_switches(model, settings)
    return model


def loss_and_gradient(argv: Sequence[str], device: torch.device | str = 'cpu') -> tuple[float, torch.Tensor]:
    """Return the loss of one batch, and its gradients as a vector.

    In fp16 the loss is scaled before the backward pass as a gradient scaler does at its start, and gradients are
    scaled back.
    """
    settings = complete(parse(Train, '', [*PLAIN_FLAGS, *argv], 'benchmark.py'), None)
    scale = 2. ** 16 if settings.precision == 'amp_fp16' else 1.
    precision = settings.precision
    with process_switches(settings):
        model = build(settings, device)
        batch = random_batch(model.latent_size, device)
        kind = torch.device(device).type
        with torch.autocast(kind, AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST):
            outputs = model(batch)
            loss = model.loss(outputs, batch)
        (loss * scale).backward()
    gradients = [parameter.grad.flatten() / scale for parameter in model.unet.parameters()]
    return loss.item(), torch.cat(gradients)


def differences(one: tuple[float, torch.Tensor], other: tuple[float, torch.Tensor]) -> tuple[float, float]:
    """Return the relative differences of two losses, and of two gradient vectors by their norm."""
    loss, gradient = one
    other_loss, other_gradient = other
    gradient_difference = (gradient - other_gradient).norm() / other_gradient.norm()
    return abs(loss - other_loss) / abs(other_loss), float(gradient_difference)


def compare_switches() -> bool:
    """Compare each switch with eager float32 on this device, and tell whether all differences are within tolerances.

    Prints a line for each switch. A switch that cannot run here, such as attention by a library that is not installed,
    prints its error and does not count.
    """
    all_near = True
    plain = loss_and_gradient(EAGER_FLAGS, DEVICE)
    for argv, tolerance in SWITCHES if DEVICE == 'cpu' else [*SWITCHES, *GPU_SWITCHES]:
        flags = ' '.join(argv)
        try:
            loss, gradient = differences(loss_and_gradient(argv, DEVICE), plain)
        except Exception as error:  # whatever the error, compare the other switches
            print(f'{flags}: does not run here: {str(error).strip().splitlines()[0][:200]}')
            continue
        is_near = loss < tolerance and gradient < tolerance
        all_near = all_near and is_near
        print(f'{flags}: {"ok" if is_near else "TOO FAR"}, loss differs by {loss:.1e} and gradients by {gradient:.1e}, '
              f'tolerance {tolerance:g}')
    return all_near


def compare_devices() -> tuple[float, float]:
    """Compare thirty float32 steps with AdamW and EMA on this device with the same steps on the CPU.

    Returns the largest relative difference of a loss or a gradient norm, and the relative difference of the EMA
    weights.
    """
    figures_here, ema_here = train_thirty_steps(DEVICE)
    figures_on_cpu, ema_on_cpu = train_thirty_steps('cpu')
    largest = float((abs(figures_here - figures_on_cpu) / abs(figures_on_cpu)).max())  # NaN if a figure is NaN
    return largest, float((ema_here - ema_on_cpu).norm() / ema_on_cpu.norm())


def train_thirty_steps(device: torch.device | str) -> tuple[np.ndarray, torch.Tensor]:
    """Train thirty steps. Return the loss and the gradient norm of each step, (STEPS, 2), and the EMA weights, (N,)."""
    settings = complete(parse(Train, '', [*PLAIN_FLAGS, *EAGER_FLAGS], 'benchmark.py'), None)
    model = build(settings, device)
    optimizer = benchmark.build_optimizer(model, settings)
    shadow = ShadowModel(model.unet)
    batch = random_batch(model.latent_size, device)
    figures = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.unet.parameters()])
        optimizer.step()
        compute_ema(model.unet, shadow, smoothing=0.9)
        figures.append((loss.item(), float(norm)))
    ema_weights = [parameter.flatten().cpu() for _, parameter in shadow.named_parameters()]
    return np.array(figures), torch.cat(ema_weights)


def main() -> int:
    # TF32 would keep only 10 bits of the factors of a product.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    all_near = compare_switches()
    largest, of_ema_weights = compare_devices()
    print(f'thirty steps in float32 on {DEVICE} and on the CPU differ by {largest:.1e} in a loss or gradient norm, and '
          f'by {of_ema_weights:.1e} in the EMA weights')
    return 0 if all_near and largest < STEPS_TOLERANCE and of_ema_weights < STEPS_TOLERANCE else 1


if __name__ == '__main__':
    sys.exit(main())
