"""A model that draws and the networks that judge, all with random weights, as files that evaluate.py takes."""
import io
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTokenizerFast,
    CLIPVisionConfig,
)

from sdbench.inputs import captions
from sdbench.models.drawing import build_pipeline
from sdbench.models.feature_extractors import LAYER, NAME
from sdbench.models.loading import build_text_encoder, build_vae, find_model


class RandomInception(FeatureExtractorInceptionV3):
    """That of torch-fidelity, which cannot be made without weights, with random ones that keep the scale of features.
    """

    def load_state_dict(self, state_dict, *args, **kwargs):
        for module in self.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight, nonlinearity='relu')


def save_inception(path: Path) -> str:
    """Weights of InceptionV3 in the layout of torch-fidelity's file."""
    nothing = io.BytesIO()
    torch.save({}, nothing)
    nothing.seek(0)
    torch.manual_seed(2)
    torch.save(RandomInception(NAME, [LAYER], feature_extractor_weights_path=nothing).state_dict(), path)
    return str(path)


def tokenizer_of_letters() -> CLIPTokenizerFast:
    """That of the program with a token for each letter, which is made and loaded in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captions, 'clip_merges', tuple)
        return captions.pipeline_tokenizer()


def save_clip(folder: Path) -> str:
    """A CLIP model of one layer, with its processor, as transformers saves them."""
    torch.manual_seed(7)
    sizes = {'hidden_size': 32, 'intermediate_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 2}
    tokenizer = tokenizer_of_letters()
    text = CLIPTextConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16))
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={'shortest_edge': 32}, crop_size={'height': 32, 'width': 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return str(folder)


def save_pipeline(folder: Path) -> str:
    """A pipeline of the tiny model that draws pictures of 32 pixels."""
    files = find_model('tiny')
    torch.manual_seed(4)
    unet = UNet2DConditionModel.from_config(files.configs['unet'] | {'sample_size': 4})
    pipeline = build_pipeline(unet, build_vae(files, 'fp32'), files.configs['scheduler'],
                              build_text_encoder(files, 'fp32'), tokenizer_of_letters())
    pipeline.save_pretrained(folder)
    return str(folder)
