"""The networks that pictures are judged by: InceptionV3 as torch-fidelity has it, for FID, and CLIP, for its score."""
import contextlib
import hashlib
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from PIL import Image
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import AutoTokenizer, CLIPModel, PreTrainedTokenizerBase

from inputs.errors import one_line
from inputs.hub import CLIP_MODEL, INCEPTION_WEIGHTS

NETWORK = 'inception-v3-compat'  # torch-fidelity's, in which TensorFlow's weights of 2015 give TensorFlow's features
LAYER = '2048'  # its last pool
RESIZE = 'to 299 pixels, bilinear as in TensorFlow 1'  # what it does itself before its first layer
PUBLISHED_SHA256 = '6726825d'  # how the hash of the weights begins that published FIDs are made with

# Of a CLIP model: how its pictures are resized and scaled. The second is what transformers 5 saves.
PROCESSORS = ('preprocessor_config.json', 'processor_config.json')


def sha256_of(path: Path) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def hash_of_files(folder: Path) -> str:
    """A SHA-256 of the files of a folder that bear on what is made with them: weights, configurations, vocabularies."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob('*')):
        if path.suffix in ('.json', '.safetensors', '.txt'):
            digest.update(f'{path.name} {sha256_of(path)} '.encode())
    return digest.hexdigest()


def load_inception(path: str) -> FeatureExtractorInceptionV3:
    """InceptionV3 on the CPU, in float32 and in eval mode, with the weights of a file.

    It takes uint8 (B, 3, H, W) and returns a tuple of features, here only that of LAYER, float32 (B, 2048).
    Raises ValueError if these are no weights of it.
    """
    try:
        weights = torch.load(path, map_location='cpu', weights_only=True)
        refuse_unusable_weights(weights)
        shapes = io.BytesIO()  # torch-fidelity would run what is in the user's file
        torch.save({name: tensor.to('meta') for name, tensor in weights.items()}, shapes)
        shapes.seek(0)
        with torch.device('meta'):  # to draw random weights first takes longer than all else here
            inception = FeatureExtractorInceptionV3(NETWORK, [LAYER], feature_extractor_weights_path=shapes)
        inception.load_state_dict(weights, assign=True)
        return inception.float()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, KeyError, RuntimeError, TypeError,
            ValueError) as error:
        raise ValueError(f'--inception {path} holds no weights of InceptionV3 ({one_line(error)[:200]}); fetch '
                         f'{INCEPTION_WEIGHTS}') from None


def refuse_unusable_weights(weights: dict[str, torch.Tensor]) -> None:
    """Raises ValueError if one cannot take part in a network in float32, which assigning it would not show."""
    for name, tensor in weights.items():
        if tensor.is_meta:
            raise ValueError(f'{name} has no values, but a shape alone')
        if tensor.layout != torch.strided:
            raise ValueError(f'{name} is {str(tensor.layout).removeprefix("torch.")}, not dense')
        is_counter = name.endswith('num_batches_tracked')  # an integer, of a normalization
        if not tensor.is_floating_point() and not is_counter:
            raise ValueError(f'{name} is of {str(tensor.dtype).removeprefix("torch.")}, not of floating point')


@torch.no_grad()
def inception_features(inception: FeatureExtractorInceptionV3, pictures: torch.Tensor) -> torch.Tensor:
    """The features float32 (B, 2048) of pictures uint8 (B, 3, H, W), on the CPU."""
    with convolutions_in_float32():
        return inception(pictures)[0].float().cpu()


@contextlib.contextmanager
def convolutions_in_float32() -> Iterator[None]:
    """A context without TF32, which would round what is judged by."""
    convolutions = getattr(torch.backends.cudnn, 'conv', None)
    if not hasattr(convolutions, 'fp32_precision'):  # before torch 2.9, which warns of the older setting
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
        return
    before = convolutions.fp32_precision
    convolutions.fp32_precision = 'ieee'
    try:
        yield
    finally:
        convolutions.fp32_precision = before


@dataclass
class Clip:
    """A CLIP model in float32, and what turns pictures and captions into its inputs."""
    model: CLIPModel
    image_processor: transformers.CLIPImageProcessor
    tokenizer: PreTrainedTokenizerBase

    @torch.no_grad()
    def cosines(self, pictures: list[Image.Image], captions: list[str]) -> torch.Tensor:
        """The cosine of each picture's embedding and its caption's, float32 (B,) on the CPU.

        Captions are cut to the length that the model takes.
        """
        tokens = self.tokenizer(captions, padding=True, truncation=True, return_tensors='pt',
                                max_length=self.model.config.text_config.max_position_embeddings)
        pixels = self.image_processor(images=pictures, return_tensors='pt')
        device = self.model.device
        with convolutions_in_float32():
            embedded = self.model(**tokens.to(device), **pixels.to(device))  # embeddings of length 1, (B, D)
        return (embedded.image_embeds * embedded.text_embeds).sum(dim=1).float().cpu()


def load_clip(folder: str) -> Clip:
    """The CLIP model of a folder in the layout of transformers, on the CPU. Raises ValueError if there is none.

    Pillow resizes, as CLIP was trained with. In transformers 5 that has another name, and the old one resizes by torch.
    """
    image_processor = getattr(transformers, 'CLIPImageProcessorPil', None) or transformers.CLIPImageProcessor
    try:
        model, loading = CLIPModel.from_pretrained(folder, use_safetensors=True, local_files_only=True,
                                                   output_loading_info=True)
        missing = sorted(loading['missing_keys'])
        if missing:
            raise ValueError(f'{len(missing)} weights are missing, first {missing[0]}')
        return Clip(model.float().requires_grad_(False).eval(),
                    image_processor.from_pretrained(folder, local_files_only=True),
                    AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except Exception as error:  # transformers and safetensors raise many kinds for files that are not there or damaged
        if not any(Path(folder, name).is_file() for name in PROCESSORS):
            raise ValueError(f'--clip {folder} has no {" or ".join(PROCESSORS)}; save its CLIPProcessor there too'
                             ) from None
        raise ValueError(f'--clip {folder} holds no CLIP model with its processor ({one_line(error)[:200]}); fetch '
                         f'one: hf download {CLIP_MODEL} --local-dir {folder}') from None
