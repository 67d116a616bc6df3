"""Measure how near a GPU's float32 is to a CPU's, and each switch of speed to eager float32 on one device.

The tests compare the switches on a CPU by the same function and the same tolerances.
"""
from collections.abc import Sequence

import numpy as np
import torch

import benchmark
from ema import ShadowModel, compute_ema
from sdbench.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.inputs.batches import NOISE, TIMESTEP
from sdbench.models.switches import process_switches

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
STEPS = 30
SIDE = 64  # pixels
STEPS_TOLERANCE = 1e-3  # of losses and gradient norms in thirty steps, and of the average; relative
HALF = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}
PLAIN = ['--use_synth_data', '--model_name', 'tiny', '--image_size', str(SIDE), '--batch_size', '3',
         '--device_train_microbatch_size', '3', '--dry_run', '1']  # half precision is for GPUs, and tried on CPUs here
EAGER = ['--precision', 'fp32', '--no-channels_last']
# Flags, and how far the loss and all gradients together may be from EAGER, relative
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


def draw_batch(latent_size: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Draw three images with captions, and the noise and timesteps that they get on any device."""
    generator = torch.Generator().manual_seed(5)
    batch = {'image': torch.rand(3, 3, SIDE, SIDE, generator=generator) * 2 - 1,
             'caption': torch.randint(49408, (3, 77), generator=generator),
             NOISE: torch.randn(3, 8, latent_size, latent_size, generator=generator),
             TIMESTEP: torch.randint(1000, (3,), generator=generator)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def build(settings: Train, device: torch.device | str) -> benchmark.StableDiffusion:
    """Build the model with its switches; its weights are drawn on the CPU, so that they are the same on any device."""
    torch.manual_seed(0)
    model = benchmark.StableDiffusion(settings.model_name, SIDE, encoder_precision=settings.encoder_precision).train()
    model.prediction_type = 'epsilon'  # as Stable Diffusion 2 base; tolerances are of that
    model.to(device)
    benchmark.apply_switches(model, settings)
    return model


def loss_and_gradient(argv: Sequence[str], device: torch.device | str = 'cpu') -> tuple[float, torch.Tensor]:
    """Return the loss of one batch and its gradients as a vector; with fp16 the loss is scaled, as a scaler begins."""
    settings = complete(parse(Train, '', [*PLAIN, *argv], 'benchmark.py'), None)
    scale = 2. ** 16 if settings.precision == 'amp_fp16' else 1.
    precision = settings.precision
    with process_switches(settings):
        model = build(settings, device)
        batch = draw_batch(model.latent_size, device)
        kind = torch.device(device).type
        with torch.autocast(kind, HALF.get(precision, torch.bfloat16), enabled=precision in HALF):
            outputs = model(batch)
            loss = model.loss(outputs, batch)
        (loss * scale).backward()
    gradients = [parameter.grad.flatten() / scale for parameter in model.unet.parameters()]
    return loss.item(), torch.cat(gradients)


def differences(one: tuple[float, torch.Tensor], other: tuple[float, torch.Tensor]) -> tuple[float, float]:
    """Return the differences of the loss, and of all gradients by their norm, relative to the other's."""
    loss, gradient = one
    other_loss, other_gradient = other
    gradient_difference = (gradient - other_gradient).norm() / other_gradient.norm()
    return abs(loss - other_loss) / abs(other_loss), float(gradient_difference)


def compare_switches() -> list[dict]:
    """Compare each switch with eager float32 on this device. What cannot be built here says why."""
    results = []
    plain = loss_and_gradient(EAGER, DEVICE)
    for argv, tolerance in SWITCHES if DEVICE == 'cpu' else [*SWITCHES, *GPU_SWITCHES]:
        result = {'flags': ' '.join(argv), 'tolerance': tolerance}
        try:
            loss, gradient = differences(loss_and_gradient(argv, DEVICE), plain)
            result |= {'loss': loss, 'gradient': gradient, 'holds': loss < tolerance and gradient < tolerance}
        except Exception as error:  # one that does not run here leaves the others to be compared
            result |= {'holds': None, 'error': str(error).strip().splitlines()[0][:200]}
        results.append(result)
    return results


def compare_devices() -> tuple[float, float]:
    """Compare thirty steps with AdamW and the average, in float32, on this device and on the CPU.

    Returns the largest difference of a loss or a gradient norm, and that of the average, both relative.
    """
    here, average_here = thirty_steps(DEVICE)
    cpu, average_cpu = thirty_steps('cpu')
    one, other = np.array(here), np.array(cpu)  # (STEPS, 2): loss and norm
    largest = float((abs(one - other) / abs(other)).max())  # NaN where one of them is
    return largest, float((average_here - average_cpu).norm() / average_cpu.norm())


def thirty_steps(device: torch.device | str) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Train; return loss and gradient norm of each step, and the average of the weights (N,) on the CPU."""
    settings = complete(parse(Train, '', [*PLAIN, *EAGER], 'benchmark.py'), None)
    model = build(settings, device)
    optimizer = benchmark.build_optimizer(model, settings)
    average = ShadowModel(model.unet)
    batch = draw_batch(model.latent_size, device)
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.unet.parameters()])
        optimizer.step()
        compute_ema(model.unet, average, 0.9)
        steps.append((loss.item(), float(norm)))
    tensors = [parameter.flatten().cpu() for _, parameter in average.named_parameters()]
    return steps, torch.cat(tensors)
