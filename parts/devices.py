"""Which device a worker computes on."""
import os
import platform

import torch

from inputs.errors import DataError, is_out_of_memory, one_line


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
