"""Count the arithmetic of an image.

FLOPs are counted (1 multiply-add = 2) by torch's own counter on the meta device, so that nothing is computed. That
takes 3 s for Stable Diffusion 2.
"""
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel


def flops_of_an_image(unet_config: dict, text_config: CLIPTextConfig, vae_config: dict | None,
                      image_size: int, latent_size: int) -> dict[str, int]:
    """Count the FLOPs of training on one image, for each part of the model.

    Args:
        unet_config: of the UNet, which runs forward and backward.
        text_config: of the text encoder, which runs forward.
        vae_config: of the VAE, whose encoder runs forward; None: it does not run.
        image_size: height and width of the image in pixels.
        latent_size: height and width of its latents.
    """
    # Networks and inputs without memory: what they compute is all that counts. The text encoder's states are the
    # UNet's input, so that it runs first.
    with torch.device('meta'):
        unet = UNet2DConditionModel.from_config(unet_config)
        text_encoder = CLIPTextModel(text_config)
        latents = torch.empty(1, unet.config.in_channels, latent_size, latent_size)
        caption = torch.empty(1, text_config.max_position_embeddings, dtype=torch.long)
        timestep = torch.empty(1, dtype=torch.long)
    with torch.no_grad():
        text_flops, output = count_flops(lambda: text_encoder(caption))
    unet_flops, _ = count_flops(lambda: unet(latents, timestep, output[0]).sample.sum().backward())
    vae_flops = 0 if vae_config is None else flops_of_latents(vae_config, image_size)
    return {'unet': unet_flops, 'text_encoder': text_flops, 'vae': vae_flops}


def flops_of_latents(vae_config: dict, image_size: int) -> int:
    """Count the FLOPs of the VAE's encoder for an image of `image_size` pixels in height and width."""
    with torch.device('meta'), torch.no_grad():
        vae = AutoencoderKL.from_config(vae_config)
        image = torch.empty(1, 3, image_size, image_size)
        flops, _ = count_flops(lambda: vae.encode(image))
    return flops


def count_flops(call: Callable[[], Any]) -> tuple[int, Any]:
    """Call a function; return the FLOPs that it took, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result
