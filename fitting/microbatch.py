"""How many images fit into a device's memory at once, found by trying before the run, without Composer's Trainer.

Composer's own search, 'auto', works within the run: where memory runs out in a backward pass, DDP is left in the middle
of its exchange of gradients, and every microbatch of a run that searches is synchronised. Here each try stands alone.
"""
import copy
import gc
import re
from collections.abc import Callable

import torch
from composer import ComposerModel
from composer.core import DataSpec, get_precision_context
from composer.utils import dist, get_device

from fitting.memory import ADAM_MOMENTS, copies_of_weights, has_buckets
from inputs.captions import CAPTION_LENGTH
from inputs.errors import is_out_of_memory
from inputs.shards import LATENTS
from models.diffusion_model import DiffusionModel

SPARE_SHARE = 1 / 32  # of a GPU's memory: the allocator cuts it up a little differently in a long run
BUCKET_BYTES = 32 * 2 ** 20  # more than DistributedDataParallel sends at once, which is 25 MiB

# What CUDA's libraries say where their handles and workspaces find no memory, and kernels that cannot count so many
# elements; not of one image, where there is room for all of it
TOO_LARGE = 'CU(BLAS|DNN)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)|INT_MAX|canUse32BitIndexMath'


def largest_microbatch(model: DiffusionModel, data: DataSpec, share: int, precision: str, use_ema: bool) -> int:
    """The largest part of a device's share of the batch that trains within the memory of every rank.

    The result divides the device's share. Where a size fits, all smaller ones do. One image comes first, which makes
    the handles and workspaces of CUDA's libraries while there is room. Each size is tried on all ranks at once, so that
    none waits for another. A try is what the first two batches of the run do, beside everything that it holds. Weights
    and random state stay as they are, and there is no optimizer yet.

    Args:
        model: with its switches; it is moved to its device. A compiled part runs uncompiled: compiling takes minutes
            for each size, and as a rule a compiled model needs less memory.
        data: what the run will train on.
        share: images of a batch on each device.
        precision: amp_bf16, amp_fp16 or fp32.
        use_ema: whether the run keeps an average of the weights.

    Raises ValueError if not even one image fits.
    """
    get_device().module_to_device(model)
    exchange_a_bucket()

    def is_fitting(size: int) -> bool:
        copies = sum(copies_of_weights(use_ema).values()) - ADAM_MOMENTS
        copies += has_buckets(size, share, dist.get_world_size())
        return on_all_ranks(fits(model, data, size, precision, copies))

    with random_state_kept(), torch.compiler.set_stance('force_eager'):
        size = largest_that_fits(share, is_fitting)
    if size is None:
        raise ValueError(f'not even one image of --image_size {model.image_size} fits into the memory of '
                         f'{memory_of_device()}; use --gradient_checkpointing, a smaller image, or a smaller '
                         '--batch_size')
    return size


def largest_that_fits(share: int, is_fitting: Callable[[int], bool]) -> int | None:
    """The largest divisor of `share` that fits. None: not even 1 does.

    Each is at least twice as large as the one before until one does not fit; then those between are tried.
    """
    sizes = sorted(divisors(share))
    largest = None
    too_large = share + 1
    for size in sizes:
        if largest is None or size >= 2 * largest:
            if not is_fitting(size):
                too_large = size
                break
            largest = size
    if largest is None:
        return None
    for size in sizes:
        if largest < size < too_large:
            if not is_fitting(size):
                break
            largest = size
    return largest


def divisors(number: int) -> list[int]:
    """All of them, the largest first."""
    return [size for size in range(number, 0, -1) if number % size == 0]


def random_state_kept():
    """A context after which random numbers go on as if nothing had been drawn in it."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices)


def exchange_a_bucket() -> None:
    """A sum over all ranks as large as the run's own: NCCL takes the memory for its channels when it is first called.
    """
    if dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(BUCKET_BYTES // 4, device=get_device()._device))


def on_all_ranks(mine: bool) -> bool:
    """Whether it is so on every rank."""
    agreed = torch.tensor(int(mine), device=get_device()._device)
    dist.all_reduce(agreed, 'MIN')
    return bool(agreed.item())


def fits(model: ComposerModel, data: DataSpec, size: int, precision: str, copies: int) -> bool:
    """Whether `size` images at once can be trained on this rank, beside so many copies of the weights.

    Nothing that the try needed is left in memory.
    """
    try:
        train_twice(model, data, size, precision, copies)
        return True
    except RuntimeError as error:
        if not is_too_large(error, size):
            raise
        return False
    finally:  # the error is gone here, and with its traceback the tensors that it held
        free_memory(model)


def is_too_large(error: RuntimeError, size: int) -> bool:
    """Whether less than a try's `size` images might do: memory ran out, or a kernel cannot count so many elements."""
    return is_out_of_memory(error) or (size > 1 and re.search(TOO_LARGE, str(error)) is not None)


def train_twice(model: ComposerModel, data: DataSpec, size: int, precision: str, copies: int) -> None:
    """Two batches of `size` images, beside what a run holds. Raises RuntimeError if they are too many.

    Adam's moments come between them, as in a run: they go where the activations of the first have left room, and the
    activations of the second have to find theirs beside them.
    """
    beside = memory_beside(model, copies)
    forward_and_backward(model, data, size, precision)
    beside += adam_moments(model)
    forward_and_backward(model, data, size, precision)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a kernel's own error comes late
    del beside


def forward_and_backward(model: ComposerModel, data: DataSpec, size: int, precision: str) -> None:
    """As Composer's Trainer does it, which keeps a copy of the microbatch."""
    microbatch = data.microbatch_transforms(blank_microbatch(data, size))
    composers_copy = copy.deepcopy(microbatch)
    with get_precision_context(precision):
        outputs = model.train()(microbatch)
        loss = model.loss(outputs, microbatch)
    loss.backward()
    del composers_copy


def free_memory(model: ComposerModel) -> None:
    """Give back what a try allocated."""
    model.zero_grad(set_to_none=True)
    gc.collect()  # a library's error can hold its traceback in a cycle
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_beside(model: ComposerModel, copies: int) -> list[torch.Tensor]:
    """As much memory as a run holds from its first batch on, beside weights and activations.

    The gradients are put where they belong: all but the first microbatch of a batch find them there.
    """
    held = []
    for parameter in trainable(model):
        parameter.grad = torch.zeros_like(parameter)
        held += [torch.empty_like(parameter) for _ in range(copies)]
    if torch.cuda.is_available():
        spare = int(torch.cuda.mem_get_info()[1] * SPARE_SHARE)
        held.append(torch.empty(spare, dtype=torch.uint8, device='cuda'))
    return held


def adam_moments(model: ComposerModel) -> list[torch.Tensor]:
    """As much memory as the optimizer takes in its first step."""
    return [torch.empty_like(parameter) for parameter in trainable(model) for _ in range(ADAM_MOMENTS)]


def trainable(model: ComposerModel) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def blank_microbatch(data: DataSpec, size: int) -> dict[str, torch.Tensor]:
    """Samples on the device: `image` uint8 (B, 3, H, H) or `moments`, and `caption` (B, 77). The batch that they are
    taken from stays on the host.
    """
    device = get_device()._device
    dataset = data.dataloader.dataset
    side = dataset.image_size
    microbatch = {'caption': torch.zeros(size, CAPTION_LENGTH, dtype=torch.long, device=device)}
    if dataset.latents:
        microbatch[LATENTS] = torch.zeros(size, 8, side // 8, side // 8, dtype=torch.half, device=device)
    else:
        microbatch['image'] = torch.zeros(size, 3, side, side, dtype=torch.uint8, device=device)
    return microbatch


def memory_of_device() -> str:
    if not torch.cuda.is_available():
        return 'this device'
    return f'{torch.cuda.get_device_name()} ({torch.cuda.mem_get_info()[1] / 2 ** 30:.0f} GiB)'
