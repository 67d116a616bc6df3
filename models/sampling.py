"""Drawing with classifier-free guidance (Ho and Salimans 2022), by diffusers' own scheduler and decoder."""
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel

STEPS = 50
GUIDANCE = 7.5  # how many times as far as the caption leads away from the empty one


def sampling_scheduler(config: dict[str, Any]) -> DDIMScheduler:
    """DDIM on the noise schedule of a training `config`, with the offset of Stable Diffusion's own pipelines."""
    return DDIMScheduler.from_config(config, steps_offset=1, set_alpha_to_one=False, clip_sample=False)


def noise_of(number: int, seed: int, latent_size: int) -> torch.Tensor:
    """Noise float32 (number, 4, latent_size, latent_size) on the CPU, that of each picture from a seed of its own.

    It is the same each time and on every device, and torch's global random state stays as it is.
    """
    pictures = []
    for index in range(number):
        generator = torch.Generator().manual_seed(seed + index)
        pictures.append(torch.randn(4, latent_size, latent_size, generator=generator))
    return torch.stack(pictures)


@torch.no_grad()
def denoise(unet: UNet2DConditionModel, scheduler: DDIMScheduler, noise: torch.Tensor, text: torch.Tensor,
            empty_text: torch.Tensor) -> torch.Tensor:
    """Latents float32 (B, 4, H/8, W/8), of unit variance, after STEPS steps at GUIDANCE.

    Args:
        unet: in eval mode.
        scheduler: that of `sampling_scheduler`.
        noise: to start from, float32 (B, 4, H/8, W/8).
        text: states of the text encoder for the captions, float32 (B, 77, D).
        empty_text: the same for the empty caption, (1, 77, D).
    """
    conditions = torch.cat([empty_text.expand_as(text), text])  # (2B, 77, D)
    scheduler.set_timesteps(STEPS)
    latents = noise * scheduler.init_noise_sigma
    for timestep in scheduler.timesteps:
        prediction = unet(torch.cat([latents, latents]), timestep, conditions).sample.float()  # (2B, 4, H/8, W/8)
        without_caption, with_caption = prediction.chunk(2)
        guided = without_caption + GUIDANCE * (with_caption - without_caption)
        latents = scheduler.step(guided, timestep, latents).prev_sample
    return latents


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: torch.Tensor, scaling_factor: float) -> torch.Tensor:
    """Pictures uint8 (B, H, W, 3), on the CPU, of latents (B, 4, H/8, W/8); one at a time, to save memory."""
    pictures = []
    for latent in latents.split(1):
        image = vae.decode((latent / scaling_factor).to(vae.dtype)).sample.float()  # (1, 3, H, W) in [-1, 1]
        image = (image / 2 + 0.5).clamp(0, 1) * 255
        pictures.append(image.round().to(torch.uint8).permute(0, 2, 3, 1).cpu())
    return torch.cat(pictures)
