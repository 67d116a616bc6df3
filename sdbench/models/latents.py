"""Latents: the moments of the VAE's posterior, and what they depend on."""
import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from sdbench.models.loading import ModelFiles


def vae_moments(vae: AutoencoderKL, image: torch.Tensor) -> torch.Tensor:
    """Mean and log variance of the latents (B, 8, H/8, W/8) of images (B, 3, H, W) in [-1, 1]."""
    return vae.encode(image.to(vae.dtype)).latent_dist.parameters


def draw_latents(moments: torch.Tensor, scaling_factor: float, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Latents float32 (B, 4, H/8, W/8), of unit variance, drawn from moments (B, 8, H/8, W/8) of any precision.

    They are drawn anew, or with the standard normal `noise` (B, 4, H/8, W/8).
    """
    # the VAE's own layout, which stored moments have lost: random draws follow it
    moments = moments.to(torch.float32, memory_format=torch.channels_last)
    posterior = DiagonalGaussianDistribution(moments)
    if noise is None:
        return posterior.sample() * scaling_factor
    return (posterior.mean + posterior.std * noise) * scaling_factor


def origin_of_latents(files: ModelFiles, image_size: int) -> dict:
    """What latents depend on: kept in the index.json beside them, and compared when they are trained on."""
    return {'image_size': image_size, 'vae_sha256': files.vae_sha256, 'scaling_factor': files.scaling_factor}
