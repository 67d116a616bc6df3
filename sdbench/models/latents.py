"""Latents, as moments of the VAE's posterior: computed, drawn from, and told apart by what they depend on."""
import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from sdbench.models.loading import ModelFiles


def vae_moments(vae: AutoencoderKL, image: torch.Tensor) -> torch.Tensor:
    """Encode images (B, 3, H, W) in [-1, 1]; return mean and log variance of their latents, (B, 8, H/8, W/8)."""
    return vae.encode(image.to(vae.dtype)).latent_dist.parameters


def draw_latents(moments: torch.Tensor, scaling_factor: float, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Draw latents float32 (B, 4, H/8, W/8), of unit variance, from moments (B, 8, H/8, W/8) of any precision.

    Without `noise`, standard normal (B, 4, H/8, W/8), each call draws others.
    """
    # the VAE's own layout, which stored moments have lost: random draws follow it
    moments = moments.to(torch.float32, memory_format=torch.channels_last)
    posterior = DiagonalGaussianDistribution(moments)
    if noise is None:
        return posterior.sample() * scaling_factor
    return (posterior.mean + posterior.std * noise) * scaling_factor


def origin_of_latents(files: ModelFiles, image_size: int) -> dict:
    """Return what latents depend on: encode.py keeps it in their index.json, and a training on them compares it."""
    return {'image_size': image_size, 'vae_sha256': files.vae_sha256, 'scaling_factor': files.scaling_factor}
