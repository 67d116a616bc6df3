"""Drawing with classifier-free guidance (Ho and Salimans 2022), by diffusers' own pipeline."""
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import AutoTokenizer, CLIPTextModel, PreTrainedTokenizerBase

from sdbench.errors import one_line
from sdbench.models.loading import load_weights

SAMPLER = 'DDIM'
STEPS = 50
GUIDANCE = 7.5  # how many times as far as the caption leads away from the empty one


def build_pipeline(unet: UNet2DConditionModel, vae: AutoencoderKL, scheduler_config: dict[str, Any],
                   text_encoder: CLIPTextModel | None = None,
                   tokenizer: PreTrainedTokenizerBase | None = None) -> StableDiffusionPipeline:
    """The pipeline of these parts, which draws with DDIM and shows no progress bar.

    Args:
        unet: as it is; nothing is copied or moved.
        vae: that decodes.
        scheduler_config: of the training's scheduler; the offset is that of Stable Diffusion's own pipelines.
        text_encoder: None where states of it are given to each call instead of prompts.
        tokenizer: None where there is no text encoder.
    """
    scheduler = DDIMScheduler.from_config(scheduler_config, steps_offset=1, set_alpha_to_one=False, clip_sample=False)
    pipeline = StableDiffusionPipeline(vae, text_encoder, tokenizer, unet, scheduler, safety_checker=None,
                                       feature_extractor=None, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_pipeline(folder: str, label: str) -> StableDiffusionPipeline:
    """The pipeline of a folder in the layout of diffusers, on the CPU in float32, with the sampler of `build_pipeline`.

    Raises ValueError, which calls it `label`, if there is none that loads.
    """
    unet = load_weights(UNet2DConditionModel, Path(folder, 'unet'), label)
    vae = load_weights(AutoencoderKL, Path(folder, 'vae'), label)
    text_encoder = load_weights(CLIPTextModel, Path(folder, 'text_encoder'), label)
    try:
        scheduler_config = DDIMScheduler.load_config(Path(folder, 'scheduler'), local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(os.path.join(folder, 'tokenizer'), local_files_only=True,
                                                  trust_remote_code=False)  # else it may ask on the terminal
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f'{label} has no scheduler or tokenizer that loads ({one_line(error, 300)})') from None
    return build_pipeline(unet, vae, scheduler_config, text_encoder, tokenizer)


def seeded(seeds: Iterable[int]) -> list[torch.Generator]:
    """A generator for each seed: a picture is the same whatever is drawn with it, and on every device."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@torch.no_grad()
def decode(pipeline: StableDiffusionPipeline, latents: torch.Tensor) -> list[Image.Image]:
    """A picture of each of the latents (B, 4, H/8, W/8); one at a time, to save memory.

    Raises ValueError if one is not finite.
    The pipeline itself decodes all at once, and cannot where the VAE is held in another precision than the latents.
    """
    vae = pipeline.vae
    pictures = []
    for latent in latents.split(1):
        image = vae.decode((latent / vae.config.scaling_factor).to(vae.dtype)).sample  # (1, 3, H, W) in [-1, 1]
        if not image.isfinite().all():
            raise ValueError('the VAE has decoded a picture that is not finite; use another precision, or weights')
        pictures += pipeline.image_processor.postprocess(image.float(), output_type='pil')
    return pictures
