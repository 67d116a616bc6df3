"""What training needs of its model beside Composer's own methods."""
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from composer import ComposerModel
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel


class DiffusionModel(ComposerModel):
    """A model with the parts of Stable Diffusion, of which the UNet learns; benchmark.StableDiffusion is one.

    Attributes:
        unet, text_encoder, scheduler: those parts.
        vae: None where the training is on latents.
        image_size: in pixels.
        scaling_factor: of the latents.
        flops_per_image: of each part.
        encoders_attention: makes a context that the frozen encoders run in.
    """
    unet: UNet2DConditionModel
    vae: AutoencoderKL | None
    text_encoder: CLIPTextModel
    scheduler: DDPMScheduler
    image_size: int
    scaling_factor: float
    flops_per_image: dict[str, int]
    encoders_attention: Callable[[], AbstractContextManager]

    def text_states(self, caption: torch.Tensor) -> torch.Tensor:
        """States of the text encoder, float32 (B, 77, D), for token ids int64 (B, 77)."""
        raise NotImplementedError
