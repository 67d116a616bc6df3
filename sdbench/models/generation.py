"""Draw with classifier-free guidance (Ho and Salimans 2022), by diffusers' own pipeline."""
import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoTokenizer, CLIPTextModel, PreTrainedTokenizerBase

from sdbench.errors import UserError, one_line
from sdbench.flags.train import TINY_MODEL
from sdbench.models.loading import load_weights, read_configs
from sdbench.models.names import save_older_names

SAMPLER = 'DDIM'
STEPS = 50
GUIDANCE = 7.5  # scale of classifier-free guidance, as in Stable Diffusion's own pipelines
TINY_GUIDANCE = 2.0  # at 7.5 the tiny model's colours are too loud; docs/training.md has its FID at several scales
NARROWEST_CELL = 128  # pixels of a cell of a grid, so that words fit below the small pictures of the tiny model


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


def guidance_for(model_name: str) -> float:
    """Return the scale of guidance that suits a model."""
    return TINY_GUIDANCE if model_name == TINY_MODEL else GUIDANCE


def with_captions(pictures: Sequence[Image.Image], captions: Sequence[str]) -> list[Image.Image]:
    """Return the pictures, which are of one size, as cells of one size with their captions below them, on white."""
    # the lines of each caption: an average letter is about half as wide as the font is high
    width = max(pictures[0].width, NARROWEST_CELL)
    size = max(12, width // 32)
    font = ImageFont.truetype(Path(matplotlib.get_data_path(), 'fonts/ttf/DejaVuSans.ttf'), size)  # Pillow's has no ü
    texts = [textwrap.fill(caption, 7 * width // (4 * size)) for caption in captions]
    lines = max(text.count('\n') + 1 for text in texts)

    cells = []
    for picture, text in zip(pictures, texts, strict=True):
        cell = Image.new('RGB', (width, picture.height + size // 2 + lines * (size + 4)), 'white')
        cell.paste(picture, ((width - picture.width) // 2, 0))
        ImageDraw.Draw(cell).multiline_text((width // 2, picture.height + 2), text, 'black', font, 'ma', align='center')
        cells.append(cell)
    return cells


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
