"""Drawing with classifier-free guidance (Ho and Salimans 2022), by diffusers' own pipeline."""
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextModel, PreTrainedTokenizerBase

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


def noise_of(number: int, seed: int, latent_size: int) -> torch.Tensor:
    """Noise float32 (number, 4, latent_size, latent_size) on the CPU, that of each picture from a seed of its own."""
    return noise_of_seeds(range(seed, seed + number), latent_size)


def noise_of_samples(numbers: Iterable[int], seed: int, latent_size: int) -> torch.Tensor:
    """Noise float32 (len(numbers), 4, latent_size, latent_size) on the CPU, for the samples of these numbers.

    That of a sample follows from the seed and its number alone, and no two seeds share any.
    """
    seeds = [int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> 1) for number in numbers]
    return noise_of_seeds(seeds, latent_size)


def noise_of_seeds(seeds: Iterable[int], latent_size: int) -> torch.Tensor:
    """Noise float32 (len(seeds), 4, latent_size, latent_size) on the CPU.

    It is the same each time and on every device, and torch's global random state stays as it is.
    """
    pictures = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        pictures.append(torch.randn(4, latent_size, latent_size, generator=generator))
    return torch.stack(pictures)


def denoise(pipeline: StableDiffusionPipeline, noise: torch.Tensor, text: torch.Tensor, empty_text: torch.Tensor,
            steps: int, guidance: float) -> torch.Tensor:
    """Latents float32 (B, 4, H/8, W/8), of unit variance.

    Args:
        pipeline: whose UNet is in eval mode.
        noise: to start from, float32 (B, 4, H/8, W/8).
        text: states of the text encoder for the captions, float32 (B, 77, D).
        empty_text: the same for the empty caption, (1, 77, D).
        steps: of the scheduler.
        guidance: 1 draws by the captions alone.
    """
    height, width = (8 * side for side in noise.shape[2:])
    drawn = pipeline(prompt_embeds=text, negative_prompt_embeds=empty_text.expand_as(text), latents=noise,
                     height=height, width=width, num_inference_steps=steps, guidance_scale=guidance,
                     output_type='latent')
    return drawn.images


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
