"""The networks behind FID and CLIP score, InceptionV3 and CLIP, as torchmetrics takes them."""
import os
from functools import partial

import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torchmetrics.multimodal.clip_score import CLIPScore
from transformers import CLIPModel, CLIPProcessor

from sdbench.errors import UserError, one_line
from sdbench.hub import CLIP_MODEL
from sdbench.models.loading import load_weights

INCEPTION = 'inception-v3-compat'  # torch-fidelity's, in which TensorFlow's weights of 2015 give TensorFlow's features
LAYER = '2048'  # its last pool
NETWORK = f'{INCEPTION} {LAYER}'
# where to get the weights; nothing is fetched here
INCEPTION_WEIGHTS = ('https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/'
                     'weights-inception-2015-12-05-6726825d.pth')
RESIZE = 'to 299 pixels, bilinear as in TensorFlow 1'  # what it does itself before its first layer
PUBLISHED_SHA256 = '6726825d'  # how the hash of the weights begins that published FIDs are made with


class Inception(FeatureExtractorInceptionV3):
    """torch-fidelity's InceptionV3, whose features are a tensor, as FrechetInceptionDistance takes a network.

    That of torchmetrics itself resizes with antialias since 1.9, which makes another FID.
    """
    num_features = int(LAYER)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return features float32 (B, 2048) of pictures uint8 (B, 3, H, W)."""
        return super().forward(pictures)[0]


def load_inception(path: str) -> Inception:
    """Load InceptionV3 with the weights of a file, on the CPU, in float32 and in eval mode.

    Raises UserError if the file is not there, or holds something else.
    """
    remedy = f'fetch it: curl -L -o inception.pth {INCEPTION_WEIGHTS}'
    if not os.path.isfile(path):
        raise UserError(f'--inception {path} is not there; {remedy}')
    try:
        torch.load(path, map_location='cpu', weights_only=True)  # torch-fidelity would run what is in the user's file
        return Inception(INCEPTION, [LAYER], feature_extractor_weights_path=path)
    except Exception:  # of nearly any kind, for what is no file of tensors, and of no use to the reader
        raise UserError(f"--inception {path} is not torch-fidelity's file with the weights of InceptionV3; {remedy}"
                        ) from None


class Clip(CLIPModel):
    """A CLIPModel whose features are tensors, as torchmetrics 1.9 and older takes them; transformers 5 wraps them."""

    def get_image_features(self, *args, **kwargs) -> torch.Tensor:
        """Return embeddings float32 (B, D)."""
        features = super().get_image_features(*args, **kwargs)
        return getattr(features, 'pooler_output', features)

    def get_text_features(self, *args, **kwargs) -> torch.Tensor:
        """Return embeddings float32 (B, D)."""
        features = super().get_text_features(*args, **kwargs)
        return getattr(features, 'pooler_output', features)


def load_clip(folder: str) -> CLIPScore:
    """Load the CLIP model of a folder in the layout of transformers, and make the CLIP score of it.

    A caption that is longer than the model takes is cut before its last token, where torchmetrics would cut that off.

    Raises UserError if there is no such model.
    """
    remedy = f'fetch one: hf download {CLIP_MODEL} --local-dir clip'
    if not os.path.isdir(folder):
        raise UserError(f'--clip {folder} is no folder; {remedy}')
    try:
        model = load_weights(Clip, folder, f'--clip {folder}')
        processor = CLIPProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for files that are not there or damaged
        raise UserError(f'--clip {folder} is no folder with a CLIP model and its processor ({one_line(error, 300)}); '
                        f'{remedy}') from None
    most = model.config.text_config.max_position_embeddings
    return CLIPScore(lambda: (model, partial(processor, truncation=True, max_length=most)))
