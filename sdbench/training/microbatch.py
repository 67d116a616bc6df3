"""How many images fit into a device's memory at once, found by trying before the run, without Composer's Trainer.

Composer's own search, 'auto', works within the run: where memory runs out in a backward pass, DDP is left in the middle
of its exchange of gradients, and every microbatch of a run that searches is synchronised. Here each try stands alone.
"""
import gc
import re
import sys

import torch
from composer import ComposerModel
from composer.core import DataSpec, get_precision_context
from composer.utils import dist, get_device

from sdbench.errors import is_out_of_memory, plural
from sdbench.flags.train import Train
from sdbench.forecast.memory import ADAM_MOMENTS
from sdbench.inputs.captions import CAPTION_LENGTH
from sdbench.inputs.shards import MOMENTS

SPARE_SHARE = 1 / 32  # of a GPU's memory: a long run cuts it up a little differently, and NCCL's channels take some

# What CUDA's libraries say where their handles and workspaces find no memory, and kernels that cannot count so many
# elements; not of one image, where there is room for all of it
TOO_LARGE = 'CU(BLAS|DNN)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)|INT_MAX|canUse32BitIndexMath'


def find_microbatch(settings: Train, model: ComposerModel, data: DataSpec) -> int:
    """Images that go through the model at once: as asked for, or found. Raises ValueError if not even one fits."""
    if not settings.searches_microbatch:
        return settings.device_train_microbatch_size
    device_batch_size = settings.batch_size // dist.get_world_size()
    microbatch = largest_microbatch(model, data, device_batch_size, settings.precision, settings.use_ema)
    if dist.get_global_rank() == 0:
        found = f'{plural(microbatch, "image")} at once: the largest power of two that fits'
        print(found, file=sys.stderr, flush=True)
    return microbatch


def sizes_to_try(device_batch_size: int) -> list[int]:
    """The powers of two that divide a device's share of the batch, the smallest first."""
    sizes = [1]
    while device_batch_size % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])
    return sizes


def largest_microbatch(model: ComposerModel, data: DataSpec, device_batch_size: int, precision: str,
                       use_ema: bool) -> int:
    """The largest of `sizes_to_try` that trains within the memory of every rank.

    One image comes first, which makes the handles and workspaces of CUDA's libraries while there is room. Each size is
    tried on all ranks at once, so that none waits for another. A try is what the first two batches of the run do,
    beside everything that it holds. The weights stay as they are, and there is no optimizer yet.

    Args:
        model: with its switches; it is moved to its device. A compiled part runs uncompiled: compiling takes minutes
            for each size, and as a rule a compiled model needs less memory.
        data: what the run will train on.
        device_batch_size: images of a batch on each device.
        precision: amp_bf16, amp_fp16 or fp32.
        use_ema: whether the run keeps an average of the weights.

    Raises ValueError if not even one image fits.
    """
    get_device().module_to_device(model)
    copies = int(use_ema) + int(dist.get_world_size() > 1)  # the average, and the buckets of DDP
    largest = 0
    with torch.compiler.set_stance('force_eager'):
        for size in sizes_to_try(device_batch_size):
            if not on_all_ranks(fits(model, data, size, precision, copies)):
                break
            largest = size
    if largest == 0:
        raise ValueError(f'not even one image of --image_size {model.image_size} fits into the memory of this device; '
                         'use --gradient_checkpointing, a smaller image, or a smaller --batch_size')
    return largest


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
        model.zero_grad(set_to_none=True)
        gc.collect()  # a library's error can hold its traceback in a cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_too_large(error: RuntimeError, size: int) -> bool:
    """Whether less than a try's `size` images might do: memory ran out, or a kernel cannot count so many elements."""
    return is_out_of_memory(error) or (size > 1 and re.search(TOO_LARGE, str(error)) is not None)


def train_twice(model: ComposerModel, data: DataSpec, size: int, precision: str, copies: int) -> None:
    """Two batches of `size` images, beside what a run holds. Raises RuntimeError if they are too many.

    Adam's moments come between them, as in a run: they go where the activations of the first have left room, and the
    activations of the second have to find theirs beside them.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    beside = []
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)  # all but the first microbatch of a batch find them there
        beside += [torch.empty_like(parameter) for _ in range(copies)]
    if torch.cuda.is_available():
        spare = int(torch.cuda.mem_get_info()[1] * SPARE_SHARE)
        beside.append(torch.empty(spare, dtype=torch.uint8, device='cuda'))
    forward_and_backward(model, data, size, precision)
    beside += [torch.empty_like(parameter) for parameter in trainable for _ in range(ADAM_MOMENTS)]
    forward_and_backward(model, data, size, precision)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a kernel's own error comes late
    del beside


def forward_and_backward(model: ComposerModel, data: DataSpec, size: int, precision: str) -> None:
    """As Composer's Trainer does it."""
    microbatch = data.microbatch_transforms(blank_batch(model, size, torch.uint8, get_device()._device))
    with get_precision_context(precision):
        outputs = model.train()(microbatch)
        loss = model.loss(outputs, microbatch)
    loss.backward()


def blank_batch(model: ComposerModel, size: int, image_type: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Samples as large as the model takes them: `image` (B, 3, H, H) or `moments`, and `caption` (B, 77)."""
    batch = {'caption': torch.zeros(size, CAPTION_LENGTH, dtype=torch.long, device=device)}
    if model.vae is None:
        batch[MOMENTS] = torch.zeros(size, 8, model.latent_size, model.latent_size, dtype=torch.half, device=device)
    else:
        batch['image'] = torch.zeros(size, 3, model.image_size, model.image_size, dtype=image_type, device=device)
    return batch
