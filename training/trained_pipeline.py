"""The model that a checkpoint holds, as a pipeline of diffusers."""
import sys
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline

from inputs.captions import pipeline_tokenizer
from inputs.errors import one_line
from models.loading import ModelFiles, build_vae, find_model
from models.sampling import build_pipeline
from models.trained import text_encoder_of, unet_of, vae_of
from settings.subjects import PipelineFlags
from training.checkpoints import load_checkpoint
from training.initial_weights import weights_of_checkpoint, with_prefix_removed

PIXELS_PER_LATENT = 8  # along each side


@dataclass
class Trained:
    """What a checkpoint holds of the model: tensors by the names that they have in each part.

    Attributes:
        batch: how many batches it was trained for; None where it does not say.
        run_flags: of the run, such as model_name and image_size; empty if it was not one of benchmark.py.
        live: the weights of the UNet that the optimizer moves.
        averaged: those of the average; None where there is none.
        vae: None where the run trained on latents.
        text_encoder: as it was held in the run, perhaps in half precision.
    """
    batch: int | None
    run_flags: dict
    live: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor] | None
    vae: dict[str, torch.Tensor] | None
    text_encoder: dict[str, torch.Tensor]


def read_trained(path: str) -> Trained:
    """The model of the checkpoint at `path`. Raises ValueError if it holds none.

    The file is mapped, not read: the optimizer's moments, most of it, never come into memory.
    """
    place = f'CHECKPOINT {path}'
    weights, average = weights_of_checkpoint(path, place)
    live = with_prefix_removed(weights, 'unet.')
    text_encoder = with_prefix_removed(weights, 'text_encoder.')
    if not live or not text_encoder:
        raise ValueError(f'{place} holds no UNet with a text encoder; give one of benchmark.py')
    averaged = None
    if average:
        averaged = live | with_prefix_removed(average['ema_model']['named_parameters_dict'], 'unet.')
    state = load_checkpoint(path, mmap=True)['state']
    batch = state.get('timestamp', {}).get('Timestamp', {}).get('batch')
    vae = with_prefix_removed(weights, 'vae.') or None
    return Trained(batch, flags_of_run(state), live, averaged, vae, text_encoder)


def flags_of_run(state: dict) -> dict:
    """The flags that the run kept in its checkpoint; empty if it kept none."""
    for callback in dict(state.get('callbacks', ())).values():
        if 'flags' in callback:
            return callback['flags']
    return {}


def files_of_model(flags: PipelineFlags, trained: Trained) -> ModelFiles:
    """The files of the model that was trained. Raises ValueError if they cannot be had."""
    name = flags.model_name or trained.run_flags.get('model_name')
    if name is None:
        raise ValueError(f'CHECKPOINT {flags.checkpoint} does not say what model it is of; give --model_name')
    needs_vae = flags.pretrained and trained.vae is None
    return find_model(name, needs_vae)


def trained_pipeline(flags: PipelineFlags, trained: Trained) -> StableDiffusionPipeline:
    """The pipeline, on the CPU.

    Raises ValueError if the checkpoint does not fit --model_name, or a part cannot be had.
    """
    files = files_of_model(flags, trained)
    tokenizer = pipeline_tokenizer(flags.tokenizer or trained.run_flags.get('tokenizer'))
    unet_weights = trained.live
    if trained.averaged is not None and not flags.live:
        unet_weights = trained.averaged
    sample_size = trained.run_flags.get('image_size', 0) // PIXELS_PER_LATENT
    try:
        unet = unet_of(files, unet_weights, sample_size)
        vae = build_decoder(flags, files, trained)
        text_encoder = text_encoder_of(files, trained.text_encoder)
    except RuntimeError as error:
        raise ValueError(f'--model_name {files.name} is not the model of {flags.checkpoint} ({one_line(error)[:200]}); '
                         'give the one that was trained') from None
    return build_pipeline(unet, vae, files.configs['scheduler'], text_encoder, tokenizer)


def build_decoder(flags: PipelineFlags, files: ModelFiles, trained: Trained) -> AutoencoderKL:
    """The VAE of the checkpoint, or else that of --model_name, which is random without --pretrained."""
    if trained.vae is not None:
        return vae_of(files, trained.vae)
    if not flags.pretrained:
        remedy = 'give --model_name FOLDER --pretrained for the one that encoded'
        if files.name == 'tiny':
            remedy = 'tiny has no other; what draws is trained with --model_name FOLDER --pretrained'
        print(f'warning: {flags.checkpoint} has no VAE, because it was trained on latents, and the random '
              f'one in its place cannot decode; {remedy}', file=sys.stderr)
    return build_vae(files, 'fp32')


def warn_of_young_average(flags: PipelineFlags, trained: Trained) -> None:
    """Say where the average is still near the weights that the training started from."""
    half_life = str(trained.run_flags.get('ema_half_life') or '')
    if trained.averaged is None or flags.live or not trained.batch or not half_life.endswith('ba'):
        return
    if 4 * float(half_life.removesuffix('ba')) > trained.batch:
        print('warning: the average is still near the weights that the training started from, since '
              f'--ema_half_life was {half_life}, and the checkpoint is of batch {trained.batch:,}; --live exports the '
              'live weights', file=sys.stderr)
