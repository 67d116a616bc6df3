"""How much arithmetic an image takes, what a device can do at most, and the share of it that was reached."""
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel

from models.peaks import peak_of


def training_flops(unet_config: dict, text_config: CLIPTextConfig, latent_side: int) -> dict[str, int]:
    """FLOPs (1 multiply-add = 2) of one image: the UNet forward and backward, and the text encoder forward.

    Counted by torch on the meta device, so that nothing is computed. `latent_side` is image_size / 8.
    """
    with torch.device('meta'):
        unet = UNet2DConditionModel.from_config(unet_config)
        text_encoder = CLIPTextModel(text_config)
        latents = torch.empty(1, unet.config.in_channels, latent_side, latent_side)
        caption = torch.empty(1, text_config.max_position_embeddings, dtype=torch.long)
        timestep = torch.empty(1, dtype=torch.long)
    with torch.no_grad():
        text_flops, output = count_flops(lambda: text_encoder(caption))
    unet_flops, _ = count_flops(lambda: unet(latents, timestep, output[0]).sample.sum().backward())
    return {'unet': unet_flops, 'text_encoder': text_flops}


def encoding_flops(vae_config: dict, image_size: int) -> int:
    """FLOPs (1 multiply-add = 2) of the VAE's encoder for one image, counted on the meta device."""
    with torch.device('meta'), torch.no_grad():
        vae = AutoencoderKL.from_config(vae_config)
        image = torch.empty(1, 3, image_size, image_size)
        flops, _ = count_flops(lambda: vae.encode(image))
    return flops


def count_flops(call: Callable[[], Any]) -> tuple[int, Any]:
    """FLOPs of a call by torch's own counter, and what the call returned."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


def peak_tflops(precision: str) -> float | None:
    """Dense peak of this GPU; None where it is not known, or for fp32."""
    if not torch.cuda.is_available():
        return None
    return peak_of(torch.cuda.get_device_name(), precision)


def utilization(images_per_sec_per_device: float, flops_per_image: int, precision: str) -> dict[str, float | None]:
    """TFLOPs of an image, TFLOP/s of a device, and its share of the device's peak; None where that is not known."""
    tflops_per_sec = images_per_sec_per_device * flops_per_image / 1e12
    peak = peak_tflops(precision)
    return {'tflops_per_image': flops_per_image / 1e12,
            'tflops_per_sec_per_device': tflops_per_sec,
            'mfu': tflops_per_sec / peak if peak else None}
