"""Count the FLOPs of training on one image.

torch's own counter counts them (1 multiply-add = 2 FLOPs) on the meta device, so nothing is computed. This takes 3 s
for Stable Diffusion 2.
"""
from collections.abc import Callable
from typing import Any

import torch
from composer import ComposerModel
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextModel


def flops_of_an_image(model: ComposerModel) -> dict[str, int]:
    """Count the FLOPs of training on one image of `model.image_size`, for each network of a StableDiffusion.

    The UNet runs forward and backward. The text encoder, and the VAE's encoder if there is a VAE, run forward only.
    """
    # Build networks and inputs without memory. The text encoder runs first, because its states are the UNet's input.
    with torch.device('meta'):
        unet = UNet2DConditionModel.from_config(model.unet.config)
        text_encoder = CLIPTextModel(model.text_encoder.config)
        latents = torch.empty(1, unet.config.in_channels, model.latent_size, model.latent_size)
        caption = torch.empty(1, text_encoder.config.max_position_embeddings, dtype=torch.long)
        timestep = torch.empty(1, dtype=torch.long)
    with torch.no_grad():
        text_flops, output = count_flops(lambda: text_encoder(caption))
    unet_flops, _ = count_flops(lambda: unet(latents, timestep, output[0]).sample.sum().backward())
    vae_flops = 0 if model.vae is None else flops_of_latents(model.vae.config, model.image_size)
    return {'unet': unet_flops, 'text_encoder': text_flops, 'vae': vae_flops}


def flops_of_latents(vae_config: dict, image_size: int) -> int:
    """Count the FLOPs of the VAE's encoder for an image of `image_size` pixels in height and width."""
    with torch.device('meta'), torch.no_grad():
        vae = AutoencoderKL.from_config(vae_config)
        image = torch.empty(1, 3, image_size, image_size)
        flops, _ = count_flops(lambda: vae.encode(image))
    return flops


def count_flops(call: Callable[[], Any]) -> tuple[int, Any]:
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result
