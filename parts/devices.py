"""Workers that compute: how many there are, and which device each has."""
import os
import platform
from collections.abc import Callable

import torch

from inputs.errors import DataError, is_out_of_memory, one_line
from parts.local_workers import LocalWorkers
from parts.ray_workers import RayWorkers


def workers_on_devices(make: Callable, preload: str, ray: str | None, num_parts: int) -> LocalWorkers | RayWorkers:
    """The processes that compute: one for each GPU of this machine or of a Ray cluster, or one on the processor.

    Args:
        make: makes the worker of a process from its place.
        preload: the module that the processes need, imported once where that can be.
        ray: address of the cluster; None: this machine.
        num_parts: that are to be made.
    """
    if ray:
        return RayWorkers(make, ray, for_gpus=True)
    if torch.cuda.is_available():
        preload = None  # diffusers asks CUDA for its devices when it is imported: none is left to a fork after that
    return LocalWorkers(make, min(max(1, torch.cuda.device_count()), num_parts), preload)


def is_to_be_on_gpu(ray: str | None) -> bool | None:
    """Whether workers are to have GPUs, for `device_of_worker`. None: a cluster gives each what it has."""
    return None if ray else torch.cuda.is_available()


def name_of_gpu(device: torch.device) -> str | None:
    """Of a worker's device; None: it is a processor, whose name takes a second to find out."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else None


def device_of_worker(place: int, on_gpu: bool | None) -> torch.device:
    """The device of a worker, which is the current one from now on.

    Args:
        place: of the worker among those of its machine: the number of its GPU.
        on_gpu: whether it is to be a GPU; None, on Ray: where Ray has given it one.

    Raises DataError if torch finds no GPU where there is to be one, or it has no room: a processor in its place would
    look like a run that has stopped.
    """
    if on_gpu is None:
        on_gpu = bool(os.environ.get('CUDA_VISIBLE_DEVICES'))
    if not on_gpu and not torch.cuda.is_available():
        return torch.device('cpu')
    if not torch.cuda.is_available():
        raise DataError(f'torch finds no GPU in a worker on {platform.node()}, which was given one; check nvidia-smi '
                        'there, and that its torch is one for CUDA')
    device = torch.device('cuda', place)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        remedy = 'end what else runs on it' if is_out_of_memory(error) else 'check nvidia-smi there'
        raise DataError(f'GPU {place} of {platform.node()} cannot be used ({one_line(error)[:200]}); {remedy}'
                        ) from None
    return device
