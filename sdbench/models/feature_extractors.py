"""Load InceptionV3 for FID and CLIP for the CLIP score, in the form that torchmetrics takes."""
import inspect
from functools import partial

import torch
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.multimodal.clip_score import CLIPScore
from transformers import CLIPModel, CLIPProcessor

from sdbench.errors import UserError, one_line
from sdbench.models.folders import CLIP_MODEL
from sdbench.models.loading import load_weights

NETWORK = 'inception-v3-compat 2048'  # torch-fidelity's network, whose features equal those from TensorFlow in 2015
# An error message shows this address. Nothing is downloaded here.
INCEPTION_WEIGHTS = ('https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/'
                     'weights-inception-2015-12-05-6726825d.pth')
RESIZE = 'to 299 pixels, bilinear as in TensorFlow 1'  # done by the network itself before its first layer
PUBLISHED_SHA256 = '6726825d'  # the beginning of the hash of the weights behind published FIDs


def load_fid(path: str) -> FrechetInceptionDistance:
    """Return an FID metric whose InceptionV3 has the weights in a file, on the CPU in float32.

    Since torchmetrics 1.9 it resizes with antialiasing unless it is told not to, which changes the FID.

    Raises UserError if the file does not exist or holds something else.
    """
    parameters = inspect.signature(FrechetInceptionDistance).parameters
    without_antialias = {name: False for name in parameters if name == 'antialias'}
    try:
        torch.load(path, map_location='cpu', weights_only=True)  # torch-fidelity itself would run code from the file
        return FrechetInceptionDistance(reset_real_features=False, feature_extractor_weights_path=path,
                                        **without_antialias)
    except Exception:  # torch raises many kinds for a wrong file, and none of their messages would help
        raise UserError(f"--inception {path} is not torch-fidelity's file with the weights of InceptionV3; download "
                        f'it: curl -L -o inception.pth {INCEPTION_WEIGHTS}') from None


class Clip(CLIPModel):
    """A CLIPModel that returns features as tensors, for torchmetrics up to 1.9; transformers 5 returns an object."""

    def get_image_features(self, *args, **kwargs) -> torch.Tensor:  # float32 (B, D)
        features = super().get_image_features(*args, **kwargs)
        return getattr(features, 'pooler_output', features)

    def get_text_features(self, *args, **kwargs) -> torch.Tensor:  # float32 (B, D)
        features = super().get_text_features(*args, **kwargs)
        return getattr(features, 'pooler_output', features)


def load_clip(folder: str) -> CLIPScore:
    """Load a CLIP model from a folder in the layout of transformers, and return a CLIP score metric that uses it.

    A caption that is too long for the model is truncated but keeps its end token, which torchmetrics would cut off.

    Raises UserError if there is no such model.
    """
    try:
        model = load_weights(Clip, folder, f'--clip {folder}')
        processor = CLIPProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for missing or damaged files
        raise UserError(f'--clip {folder} is not a folder with a CLIP model and its processor '
                        f'({one_line(error, 300)}); download one: hf download {CLIP_MODEL} --local-dir clip') from None
    most = model.config.text_config.max_position_embeddings
    return CLIPScore(lambda: (model, partial(processor, truncation=True, max_length=most)))
