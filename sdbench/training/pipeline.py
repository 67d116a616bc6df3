"""The pipeline of diffusers that a checkpoint makes."""
from collections.abc import Callable
from functools import partial

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from sdbench.errors import one_line
from sdbench.inputs.captions import hash_of_tokenizer, pipeline_tokenizer
from sdbench.models.drawing import build_pipeline
from sdbench.models.loading import ModelFiles, build_vae, find_model
from sdbench.training.kept import difference_of_models, kept_tokenizer
from sdbench.training.trained import Trained


def trained_pipeline(trained: Trained, label: str, model_name: str | None = None, tokenizer: str | None = None,
                     pretrained: bool = False, live: bool = False) -> StableDiffusionPipeline:
    """The pipeline of a checkpoint, on the CPU.

    Args:
        trained: what the checkpoint holds; its tensors in float32 are not copied.
        label: what errors call it.
        model_name: for the configuration of each part; None: that of the run.
        tokenizer: None: that of the run, which is the model's own unless it had another.
        pretrained: take the VAE from `model_name` where the checkpoint has none, instead of a random one.
        live: draw with the live weights, also where there is an average.

    Raises ValueError if the checkpoint does not fit `model_name`, or a part cannot be had.
    """
    name = model_name or trained.flags.get('model_name')
    if name is None:
        raise ValueError(f'{label} does not say what model it is of; give --model_name of export.py')
    files = find_model(name, pretrained and trained.vae is None)
    difference = difference_of_models(trained.flags, files.configs)
    if difference:
        raise ValueError(f'--model_name {name} is not the model of {label} ({difference}); give the one that was '
                         'trained, with its configuration as it was')
    encoded_by = trained.flags.get('vae_sha256')  # of a run on latents
    if files.pretrained and encoded_by not in (None, files.vae_sha256):
        raise ValueError(f'--model_name {name} has another VAE than the one that encoded the latents of {label}; give '
                         'the model of the encoding')
    unet_config = dict(files.configs['unet'])
    if 'image_size' in trained.flags:
        unet_config['sample_size'] = files.latent_size(trained.flags['image_size'])
    unet_weights = trained.live
    if trained.averaged is not None and not live:
        unet_weights = trained.averaged
    text_config = CLIPTextConfig(**files.configs['text_encoder'])
    try:
        unet = with_weights(partial(UNet2DConditionModel.from_config, unet_config), unet_weights)
        text_encoder = with_weights(partial(CLIPTextModel, text_config), trained.text_encoder)
        if trained.vae is None:
            vae = build_vae(files, 'fp32')  # random unless `files` are pretrained
        else:
            vae = with_weights(partial(AutoencoderKL.from_config, files.configs['vae']), trained.vae)
    except RuntimeError as error:
        raise ValueError(f'--model_name {name} is not the model of {label} ({one_line(error, 200)}); give the one '
                         'that was trained') from None
    tokenizer = pipeline_tokenizer(trained_tokenizer(trained, files, tokenizer, label))
    return build_pipeline(unet, vae, files.configs['scheduler'], text_encoder, tokenizer)


def trained_tokenizer(trained: Trained, files: ModelFiles, given: str | None, label: str) -> str | None:
    """Return the name of the tokenizer that a checkpoint was trained with; None: CLIP's own.

    Args:
        trained: what the checkpoint holds.
        files: of its model.
        given: where the tokenizer is now; None: CLIP's own, that of the run's --tokenizer, or that of the model.
        label: what errors call the checkpoint.

    Raises ValueError if the tokenizer gives other token ids than the one of the training.
    """
    expected = kept_tokenizer(trained.flags)
    if given is None and expected == hash_of_tokenizer():
        return None
    name = given or trained.flags.get('tokenizer') or files.tokenizer
    if expected not in (None, hash_of_tokenizer(name)):
        raise ValueError(f'{label} was trained with another tokenizer than {name or "that of CLIP"}, whose token ids '
                         'differ; give the one of the training as --tokenizer of export.py; to draw with another one, '
                         'put it into the exported pipeline')
    return name


def with_weights(make: Callable[[], torch.nn.Module], weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The module that `make` gives, its parameters made without memory, with `weights` in float32 in their place.

    Raises RuntimeError if they do not fit.
    """
    with init_empty_weights(include_buffers=False):  # positions of tokens are buffers, and no weights
        module = make()
    module.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return module.requires_grad_(False).eval()
