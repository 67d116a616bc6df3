"""Save a pipeline and the networks for the scores, all with random weights, as files for evaluate.py."""
import io
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTokenizerFast,
    CLIPVisionConfig,
)

from sdbench.inputs.tokenizer import pipeline_tokenizer
from sdbench.models.feature_extractors import Clip
from sdbench.models.generation import build_pipeline
from sdbench.models.loading import build_text_encoder, build_vae, find_model


def tokenizer_of_letters() -> CLIPTokenizerFast:
    """Build the program's tokenizer with one token per letter, which loads faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('sdbench.inputs.tokenizer.clip_merges', tuple)
        return pipeline_tokenizer()


def save_clip(folder: Path) -> str:
    """Save a CLIP model with one layer and its processor in the layout of transformers."""
    tokenizer = tokenizer_of_letters()
    sizes = {'hidden_size': 32, 'intermediate_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 2}
    text = CLIPTextConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    torch.manual_seed(7)
    Clip(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
         ).save_pretrained(folder)
    images = CLIPImageProcessor(size={'shortest_edge': 32}, crop_size={'height': 32, 'width': 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return str(folder)


class RandomInception(FeatureExtractorInceptionV3):
    """InceptionV3 with random weights that keep the scale of the features, made without a file of weights."""

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Initialize the convolutions at random, and ignore the file."""
        for module in self.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight, nonlinearity='relu')


def save_inception(path: str) -> None:
    """Save random weights of InceptionV3, the same each time, in the format of torch-fidelity."""
    no_weights = io.BytesIO()
    torch.save({}, no_weights)
    no_weights.seek(0)
    torch.manual_seed(2)
    network = RandomInception('inception-v3-compat', ['2048'], feature_extractor_weights_path=no_weights)
    torch.save(network.state_dict(), path)


def save_pipeline(folder: Path) -> str:
    """Save a pipeline of the tiny model that generates images of 32 pixels."""
    files = find_model('tiny')
    torch.manual_seed(4)
    unet = UNet2DConditionModel.from_config(files.configs['unet'] | {'sample_size': 4})
    pipeline = build_pipeline(unet, build_vae(files, 'fp32'), files.configs['scheduler'],
                              build_text_encoder(files, 'fp32'), tokenizer_of_letters())
    pipeline.save_pretrained(folder)
    return str(folder)
