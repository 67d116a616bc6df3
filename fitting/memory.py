"""What a training needs in memory, whatever the microbatch, and what there is; said before anything large is built.

It is counted on a model without memory, which the switches of the run have been applied to, so that a switch changes
what is counted by what it does.
"""
import dataclasses
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from composer.utils import dist

from models.diffusion_model import DiffusionModel
from models.loading import ModelFiles
from settings.train import TINY_COMMAND, Train

GIB = 2 ** 30
ADAM_MOMENTS = 2  # that the optimizer keeps of each weight
CONTAINERS_LIMIT = Path('/sys/fs/cgroup/memory.max')


def build_outline(settings: Train, files: ModelFiles, latents: bool,
                  build_model: Callable[..., DiffusionModel]) -> DiffusionModel:
    """The model of a run with its switches on the meta device: shapes and types alone.

    Args:
        settings: of the run.
        files: of the model.
        latents: the training needs no VAE.
        build_model: makes the real one.
    """
    # sizes need no weights, and xformers, which asks for a GPU, keeps what torch's fused attention keeps
    settings = dataclasses.replace(settings, attention='sdpa')
    files = dataclasses.replace(files, pretrained=False)
    return build_model(settings, latents, torch.device('meta'), files)


def lasting_bytes(settings: Train, model: DiffusionModel, num_devices: int) -> dict[str, int]:
    """Bytes of a device, by item, that stay from step to step, whatever the microbatch, and the gradients.

    A model without memory will do.
    """
    unet = parameter_bytes(model.unet)
    needed = {'weights': unet, 'gradients': unet, 'Adam moments': ADAM_MOMENTS * unet}
    if settings.use_ema:
        needed['average of the weights'] = unet
    if num_devices > 1:
        needed['gradient buckets'] = unet  # of DistributedDataParallel, beside the gradients
    needed['text encoder'] = parameter_bytes(model.text_encoder)
    if model.vae is not None:
        needed['VAE'] = parameter_bytes(model.vae)
    return needed


def parameter_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def refuse_too_little_memory(settings: Train, outline: DiffusionModel) -> None:
    """Raises ValueError if the training surely needs more memory than its GPU has, or its ranks find on this host.

    Nothing is counted that depends on the microbatch, which can be made smaller.
    """
    needed = lasting_bytes(settings, outline, dist.get_world_size())
    if torch.cuda.is_available():
        there = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        place = 'this GPU'
    else:
        there = memory_of_host()
        place = 'this machine'
        needed = {item: size * dist.get_local_world_size() for item, size in needed.items()}
    total = sum(needed.values())
    if total > there:
        items = ', '.join(f'{item} {size / GIB:.1f}' for item, size in needed.items())
        raise ValueError(f'--model_name {settings.model_name} needs at least {total / GIB:.1f} GiB of memory to train '
                         f'({items}), and {place} has {there / GIB:.1f}; the tiny model runs here: {TINY_COMMAND}')


def memory_of_host() -> int:
    """Bytes that the processes of this host, or of this container, may take."""
    limits = [psutil.virtual_memory().total]
    if CONTAINERS_LIMIT.is_file():
        limit = CONTAINERS_LIMIT.read_text().strip()
        if limit != 'max':
            limits.append(int(limit))
    return min(limits)
