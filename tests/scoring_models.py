"""A model that draws and the networks that score, all with random weights, as files that evaluate.py takes."""
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTokenizerFast

from sdbench.inputs import captions
from sdbench.models.drawing import build_pipeline
from sdbench.models.feature_extractors import random_clip, random_inception
from sdbench.models.loading import build_text_encoder, build_vae, find_model


def save_inception(path: Path) -> str:
    """Save weights of InceptionV3 in the layout of torch-fidelity's file."""
    torch.save(random_inception().state_dict(), path)
    return str(path)


def tokenizer_of_letters() -> CLIPTokenizerFast:
    """Build the tokenizer of the program with a token for each letter, which is made and loaded in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captions, 'clip_merges', tuple)
        return captions.pipeline_tokenizer()


def save_clip(folder: Path) -> str:
    """Save a CLIP model of one layer with its processor, as transformers does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captions, 'clip_merges', tuple)
        model, processor = random_clip()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def save_pipeline(folder: Path) -> str:
    """Save a pipeline of the tiny model that draws pictures of 32 pixels."""
    files = find_model('tiny')
    torch.manual_seed(4)
    unet = UNet2DConditionModel.from_config(files.configs['unet'] | {'sample_size': 4})
    pipeline = build_pipeline(unet, build_vae(files, 'fp32'), files.configs['scheduler'],
                              build_text_encoder(files, 'fp32'), tokenizer_of_letters())
    pipeline.save_pretrained(folder)
    return str(folder)
