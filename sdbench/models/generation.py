"""Generate images with classifier-free guidance (Ho and Salimans 2022) and diffusers' own pipeline."""
import math
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
GUIDANCE = 7.5  # scale of classifier-free guidance, the default of Stable Diffusion's own pipelines
TINY_GUIDANCE = 2.0  # at 7.5 the tiny model's colours are too bright; docs/laptop.md has its FID at several scales
NARROWEST_CELL = 128  # pixels: leaves room for a caption below the small images of the tiny model


def build_pipeline(unet: UNet2DConditionModel, vae: AutoencoderKL, scheduler_config: dict[str, Any],
                   text_encoder: CLIPTextModel | None = None,
                   tokenizer: PreTrainedTokenizerBase | None = None) -> StableDiffusionPipeline:
    """Build a pipeline that samples with DDIM and shows no progress bar.

    The networks are neither copied nor moved. `scheduler_config` is that of the training's scheduler. From now on the
    text encoder saves the tensor names of transformers 4. Without a text encoder and a tokenizer, each call needs text
    states instead of prompts.
    """
    # steps_offset and set_alpha_to_one as in Stable Diffusion's own pipelines
    scheduler = DDIMScheduler.from_config(scheduler_config, steps_offset=1, set_alpha_to_one=False, clip_sample=False)
    pipeline = StableDiffusionPipeline(vae, text_encoder, tokenizer, unet, scheduler, safety_checker=None,
                                       feature_extractor=None, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    if text_encoder is not None:
        save_older_names(text_encoder)
    return pipeline


def load_pipeline(folder: str, label: str) -> StableDiffusionPipeline:
    """Load a pipeline folder of diffusers, on the CPU in float32, with the sampler of `build_pipeline`.

    Raises UserError, which begins with `label`, if it cannot be loaded.
    """
    configs = read_configs(Path(folder), label)
    unet = load_weights(UNet2DConditionModel, Path(folder, 'unet'), label)
    vae = load_weights(AutoencoderKL, Path(folder, 'vae'), label)
    text_encoder = load_weights(CLIPTextModel, Path(folder, 'text_encoder'), label)
    try:
        tokenizer = AutoTokenizer.from_pretrained(os.path.join(folder, 'tokenizer'), local_files_only=True,
                                                  trust_remote_code=False)  # unless False, it may ask the user
    except Exception as error:  # transformers raises many kinds
        raise UserError(f'{label} has a folder tokenizer that does not load ({one_line(error, 300)}); copy it again '
                        'from the model') from None
    return build_pipeline(unet, vae, configs['scheduler'], text_encoder, tokenizer)


def guidance_for(model_name: str) -> float:
    return TINY_GUIDANCE if model_name == TINY_MODEL else GUIDANCE


@torch.no_grad()
def generate(pipeline: StableDiffusionPipeline, seeds: Iterable[int], side: int, steps: int, guidance: float,
             **prompts: Any) -> list[Image.Image]:
    """Generate an image of `side` pixels for each seed. `prompts` are the pipeline's arguments about the prompts.

    The noise is made on the CPU, and each image has its own seed, so it is the same on every device and in batches of
    any size. Images are decoded one after the other to save memory: the pipeline itself would decode the whole batch
    together, and fails if the VAE's precision is not the latents'.

    Raises UserError if an image is not finite.
    """
    noise = [torch.Generator().manual_seed(seed) for seed in seeds]
    latents = pipeline(**prompts, generator=noise, height=side, width=side, num_inference_steps=steps,
                       guidance_scale=guidance, output_type='latent').images  # (B, 4, H/8, W/8)
    vae = pipeline.vae
    images = []
    for latent in latents.split(1):
        with torch.autocast(latent.device.type, enabled=False):  # a training generates in its own precision
            image = vae.decode((latent / vae.config.scaling_factor).to(vae.dtype)).sample  # (1, 3, H, W) in [-1, 1]
        if not image.isfinite().all():
            raise UserError('the VAE has decoded an image with inf or NaN; use another precision or other weights')
        images += pipeline.image_processor.postprocess(image.float(), output_type='pil')
    return images


def captioned_grid(images: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    """Return a nearly square grid of images of equal size, in their order, on white, with captions below them."""
    # Wrap each caption to the width of a cell. A letter is on average about half as wide as the font is high.
    width = max(images[0].width, NARROWEST_CELL)
    size = max(12, width // 32)
    font = ImageFont.truetype(Path(matplotlib.get_data_path(), 'fonts/ttf/DejaVuSans.ttf'), size)  # Pillow's lacks ü
    texts = [textwrap.fill(caption, 7 * width // (4 * size)) for caption in captions]
    lines = max(text.count('\n') + 1 for text in texts)

    # Draw all cells as high as the longest caption needs.
    height = images[0].height + size // 2 + lines * (size + 4)
    columns = math.ceil(math.sqrt(len(images)))
    grid = Image.new('RGB', (columns * width, math.ceil(len(images) / columns) * height), 'white')
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        row, column = divmod(number, columns)
        middle = column * width + width // 2
        grid.paste(image, (middle - image.width // 2, row * height))
        ImageDraw.Draw(grid).multiline_text((middle, row * height + image.height + 2), text, 'black', font, 'ma',
                                            align='center')
    return grid
