"""What a training needs in memory, whatever the microbatch.

It is counted on a model without memory, which the switches of the run have been applied to, so that a switch changes
what is counted by what it does.
"""
import dataclasses
from collections.abc import Callable

import torch
from composer import ComposerModel

from sdbench.flags.train import Train
from sdbench.models.loading import ModelFiles
from sdbench.training.optimization import ADAM_MOMENTS


def build_on_meta(settings: Train, files: ModelFiles, build_model: Callable[..., ComposerModel]) -> ComposerModel:
    """Build the model of a run with its switches on the meta device: shapes and types alone, always with the VAE.

    Args:
        settings: of the run.
        files: of the model.
        build_model: makes the real one.
    """
    # sizes need no weights, and xformers, which asks for a GPU, keeps what torch's fused attention keeps
    settings = dataclasses.replace(settings, attention='sdpa')
    files = dataclasses.replace(files, pretrained=False)
    return build_model(settings, False, torch.device('meta'), files)


def lasting_bytes(settings: Train, latents: bool, model: ComposerModel, num_devices: int) -> dict[str, int]:
    """Count the bytes of a device, by item, that stay from step to step, whatever the microbatch, and the gradients.

    A model without memory will do. On latents its VAE is not counted.
    """
    unet = parameter_bytes(model.unet)
    needed = {'weights': unet, 'gradients': unet, 'Adam moments': ADAM_MOMENTS * unet}
    if settings.use_ema:
        needed['average of the weights'] = unet
    if num_devices > 1:
        needed['gradient buckets'] = unet  # of DistributedDataParallel, beside the gradients
    needed['text encoder'] = parameter_bytes(model.text_encoder)
    if not latents:
        needed['VAE'] = parameter_bytes(model.vae)
    return needed


def parameter_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of all weights of a module."""
    return sum(parameter.nbytes for parameter in module.parameters())
