"""What a checkpoint holds of its model, and the pipeline of diffusers that draws with it."""
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline

from inputs.captions import pipeline_tokenizer
from inputs.errors import one_line
from models.loading import ModelFiles, build_vae, find_model
from models.sampling import build_pipeline
from models.trained import text_encoder_of, unet_of, vae_of
from training.checkpoints import load_checkpoint
from training.initial_weights import weights_of_checkpoint, with_prefix_removed

PIXELS_PER_LATENT = 8  # along each side


@dataclass
class Trained:
    """What a checkpoint holds of the model: tensors by the names that they have in each part.

    Attributes:
        batch: how many batches it was trained for; None where it does not say.
        samples: how many images these were.
        flags: of the run, such as model_name and image_size; empty if it was not one of benchmark.py.
        live: the weights of the UNet that the optimizer moves.
        averaged: those of the average; None where there is none.
        vae: None where the run trained on latents.
        text_encoder: as it was held in the run, perhaps in half precision.
    """
    batch: int | None
    samples: int | None
    flags: dict
    live: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor] | None
    vae: dict[str, torch.Tensor] | None
    text_encoder: dict[str, torch.Tensor]


def read_trained(path: str, place: str) -> Trained:
    """The model of the checkpoint at `path`. Raises ValueError, which calls it `place`, if it holds none.

    The file is mapped, not read: the optimizer's moments, most of it, never come into memory.
    """
    weights, average = weights_of_checkpoint(path, place)
    live = with_prefix_removed(weights, 'unet.')
    text_encoder = with_prefix_removed(weights, 'text_encoder.')
    if not live or not text_encoder:
        raise ValueError(f'{place} holds no UNet with a text encoder; give one of benchmark.py')
    averaged = None
    if average:
        averaged = live | with_prefix_removed(average['ema_model']['named_parameters_dict'], 'unet.')
    state = load_checkpoint(path, mmap=True)['state']
    timestamp = state.get('timestamp', {}).get('Timestamp', {})
    return Trained(timestamp.get('batch'), timestamp.get('sample'), flags_of(state), live, averaged,
                   with_prefix_removed(weights, 'vae.') or None, text_encoder)


def flags_of(state: dict) -> dict:
    """The flags that the run kept in its checkpoint; empty if it kept none."""
    for callback in dict(state.get('callbacks', ())).values():
        if 'flags' in callback:
            return callback['flags']
    return {}


def trained_pipeline(trained: Trained, place: str, model_name: str | None = None, tokenizer: str | None = None,
                     pretrained: bool = False, live: bool = False) -> StableDiffusionPipeline:
    """The pipeline of a checkpoint, on the CPU.

    Args:
        trained: what the checkpoint holds.
        place: what errors call it.
        model_name: for the configuration of each part; None: that of the run.
        tokenizer: None: that of the run.
        pretrained: take the VAE from `model_name` where the checkpoint has none, instead of a random one.
        live: draw with the live weights, also where there is an average.

    Raises ValueError if the checkpoint does not fit `model_name`, or a part cannot be had.
    """
    files = files_of(trained, place, model_name, pretrained)
    tokenizer = pipeline_tokenizer(tokenizer or trained.flags.get('tokenizer'))
    unet_weights = trained.live
    if trained.averaged is not None and not live:
        unet_weights = trained.averaged
    sample_size = trained.flags.get('image_size', 0) // PIXELS_PER_LATENT
    try:
        unet = unet_of(files, unet_weights, sample_size)
        vae = decoder_of(files, trained)
        text_encoder = text_encoder_of(files, trained.text_encoder)
    except RuntimeError as error:
        raise ValueError(f'--model_name {files.name} is not the model of {place} ({one_line(error)[:200]}); give the '
                         'one that was trained') from None
    return build_pipeline(unet, vae, files.configs['scheduler'], text_encoder, tokenizer)


def files_of(trained: Trained, place: str, model_name: str | None, pretrained: bool) -> ModelFiles:
    """The files of the model that was trained. Raises ValueError if they cannot be had."""
    name = model_name or trained.flags.get('model_name')
    if name is None:
        raise ValueError(f'{place} does not say what model it is of; give --model_name of export.py')
    return find_model(name, pretrained and trained.vae is None)


def decoder_of(files: ModelFiles, trained: Trained) -> AutoencoderKL:
    """The VAE of the checkpoint, or else that of the model, which is random unless `files` are pretrained."""
    if trained.vae is not None:
        return vae_of(files, trained.vae)
    return build_vae(files, 'fp32')
