"""Draw with classifier-free guidance (Ho and Salimans 2022), by diffusers' own pipeline."""
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import AutoTokenizer, CLIPTextModel, PreTrainedTokenizerBase

from sdbench.errors import UserError, one_line
from sdbench.models.loading import load_weights, read_configs
from sdbench.models.names import save_older_names

SAMPLER = 'DDIM'
STEPS = 50
GUIDANCE = 7.5  # scale of classifier-free guidance, as in Stable Diffusion's own pipelines


def build_pipeline(unet: UNet2DConditionModel, vae: AutoencoderKL, scheduler_config: dict[str, Any],
                   text_encoder: CLIPTextModel | None = None,
                   tokenizer: PreTrainedTokenizerBase | None = None) -> StableDiffusionPipeline:
    """Build a pipeline of these parts, which draws with DDIM and shows no progress bar.

    Args:
        unet: as it is; nothing is copied or moved.
        vae: that decodes.
        scheduler_config: of the training's scheduler; the offset is that of Stable Diffusion's own pipelines.
        text_encoder: which from here on saves the names of transformers 4; None where states of it are given to each
            call instead of prompts.
        tokenizer: None where there is no text encoder.
    """
    scheduler = DDIMScheduler.from_config(scheduler_config, steps_offset=1, set_alpha_to_one=False, clip_sample=False)
    pipeline = StableDiffusionPipeline(vae, text_encoder, tokenizer, unet, scheduler, safety_checker=None,
                                       feature_extractor=None, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    if text_encoder is not None:
        save_older_names(text_encoder)
    return pipeline


def load_pipeline(folder: str, label: str) -> StableDiffusionPipeline:
    """Load a pipeline folder of diffusers, on the CPU in float32, with the sampler of `build_pipeline`.

    Raises UserError, which calls it `label`, if there is none that loads.
    """
    configs = read_configs(Path(folder), label)
    unet = load_weights(UNet2DConditionModel, Path(folder, 'unet'), label)
    vae = load_weights(AutoencoderKL, Path(folder, 'vae'), label)
    text_encoder = load_weights(CLIPTextModel, Path(folder, 'text_encoder'), label)
    try:
        tokenizer = AutoTokenizer.from_pretrained(os.path.join(folder, 'tokenizer'), local_files_only=True,
                                                  trust_remote_code=False)  # else it may ask on the terminal
    except Exception as error:  # transformers raises many kinds
        raise UserError(f'{label} has no tokenizer that loads ({one_line(error, 300)})') from None
    return build_pipeline(unet, vae, configs['scheduler'], text_encoder, tokenizer)


def seeded(seeds: Iterable[int]) -> list[torch.Generator]:
    """Make a generator for each seed, on the CPU, so that a picture is the same in every batch and on every device."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@torch.no_grad()
def decode(pipeline: StableDiffusionPipeline, latents: torch.Tensor) -> list[Image.Image]:
    """Decode latents (B, 4, H/8, W/8) into pictures, one at a time to save memory.

    The pipeline itself decodes all at once, and cannot where the VAE is held in another precision than the latents.

    Raises UserError if a picture is not finite.
    """
    vae = pipeline.vae
    pictures = []
    for latent in latents.split(1):
        image = vae.decode((latent / vae.config.scaling_factor).to(vae.dtype)).sample  # (1, 3, H, W) in [-1, 1]
        if not image.isfinite().all():
            raise UserError('the VAE has decoded a picture that is not finite; use another precision, or weights')
        pictures += pipeline.image_processor.postprocess(image.float(), output_type='pil')
    return pictures
