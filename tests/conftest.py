"""Small real things that the tests share: photographs, MDS shards, a diffusers folder."""
import io
import os
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE='1', WANDB_MODE='offline')  # before any library reads them
os.environ.setdefault('OMP_NUM_THREADS', '1')  # the models are tiny, and other tests run beside this one

import numpy as np
import pytest
import torch
from PIL import Image
from streaming import MDSWriter


TINY = ['--model_name', 'tiny', '--image_size', '64', '--batch_size', '4', '--warmup_batches', '1',
        '--measure_batches', '3']


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """A smooth random RGB picture: JPEG keeps it nearly as it is."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.BICUBIC)


def encoded(image: Image.Image, format: str = 'JPEG', **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def write_shards(folder, samples: list[dict], columns=None, size_limit: int = 1 << 14) -> str:
    columns = columns or {'jpg': 'bytes', 'caption': 'str'}
    with MDSWriter(out=str(folder), columns=columns, size_limit=size_limit) as writer:  # several shards
        for sample in samples:
            writer.write(sample)
    return str(folder)


@pytest.fixture
def results(tmp_path) -> Path:
    return tmp_path / 'results.jsonl'


@pytest.fixture(scope='session')
def samples() -> list[dict]:
    """24 JPEGs of 64 by 64 pixels, each with a caption of its own."""
    return [{'jpg': encoded(picture(i), quality=95), 'caption': f'picture number {i}'} for i in range(24)]


@pytest.fixture(scope='session')
def shards(tmp_path_factory, samples) -> str:
    return write_shards(tmp_path_factory.mktemp('data') / 'shards', samples)


@pytest.fixture(scope='session')
def model_folder(tmp_path_factory) -> str:
    """A diffusers folder as `save_pretrained` writes it, with a tokenizer, that predicts v."""
    from diffusers import DDPMScheduler
    from transformers import PreTrainedTokenizerFast

    from benchmark import StableDiffusion
    from inputs.captions import clip_tokenizer
    torch.manual_seed(1)
    folder, model = tmp_path_factory.mktemp('model'), StableDiffusion('tiny', image_size=64)
    for part in ('unet', 'vae', 'text_encoder'):
        getattr(model, part).save_pretrained(folder / part)
    DDPMScheduler.from_config({**model.scheduler.config, 'prediction_type': 'v_prediction'}) \
        .save_pretrained(folder / 'scheduler')
    PreTrainedTokenizerFast(tokenizer_object=clip_tokenizer(), pad_token='<|endoftext|>', model_max_length=77) \
        .save_pretrained(folder / 'tokenizer')
    return str(folder)
