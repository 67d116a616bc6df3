"""Find the largest microbatch that fits into GPU memory, with trial steps before the run starts.

Composer's own search (`device_train_microbatch_size='auto'`) runs inside training. If it runs out of memory in a
backward pass, DDP is stuck in the middle of an all-reduce, and while it searches, the ranks synchronize at every
microbatch. The trials here run outside of DDP, so a failed one leaves nothing behind.
"""
import dataclasses
import gc
import re
from collections.abc import Callable

import torch
from composer import ComposerModel
from composer.core import get_precision_context
from composer.utils import dist, get_device

from sdbench.errors import UserError, is_out_of_memory, plural
from sdbench.flags.train import Run, divisors
from sdbench.inputs.shards import MOMENTS
from sdbench.inputs.tokenizer import CAPTION_LENGTH
from sdbench.setup import changes_that_take_less, largest_that_fits, setup_of_settings
from sdbench.training.ranks import print_on_rank_0

RESERVED_FRACTION = 1 / 32  # of GPU memory, kept free for the fragmentation of a long run and for NCCL's channels

# CUDA's libraries raise these errors if there is no memory for their handles and workspaces, and kernels with 32-bit
# indices raise them for too many elements. With a single image the cause is something else, so they are raised.
TOO_LARGE = 'CU(BLAS|DNN)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)|INT_MAX|canUse32BitIndexMath'


def with_found_microbatch(settings: Run, model: ComposerModel,
                          build_optimizer: Callable[[], torch.optim.Optimizer]) -> Run:
    """Return the settings with a microbatch of `auto` replaced by the largest one that fits on every rank.

    A trial does what the first two batches of the run do, while the memory that the run needs for other things is
    occupied. It does not change the weights. All ranks try each size at the same time, because each needs the others'
    answers.

    The model has its switches already, and is moved to its device. Compiled parts run uncompiled, because compiling
    takes minutes for each size, and a compiled model usually needs less memory.

    Raises UserError if not even one image fits.
    """
    if settings.device_train_microbatch_size != 'auto':
        return settings
    get_device().module_to_device(model)
    copies = int(settings.use_ema) + int(settings.num_devices > 1)  # the EMA weights, and the buckets of DDP

    def fits_on_all(size: int) -> bool:
        return all(dist.all_gather_object(fits(model, size, settings.precision, copies, build_optimizer)))

    with torch.compiler.set_stance('force_eager'):
        largest = largest_that_fits(divisors(settings.device_batch_size), fits_on_all)
    if largest is None:
        raise UserError(f'not even one image of --image_size {settings.image_size} fits into the memory of this '
                        f'device; {less_memory(settings)}')
    print_on_rank_0(f'microbatch: {plural(largest, "image")}, the largest that fits in GPU memory')
    return dataclasses.replace(settings, device_train_microbatch_size=largest)


def less_memory(settings: Run) -> str:
    """Return advice for a training that ran out of memory. It skips changes that the user has already made."""
    changes = changes_that_take_less(setup_of_settings(settings))
    if not changes:
        return 'use a GPU with more memory'
    return f'use {", or ".join(changes)}; --dry_run with the same flags says which of these fit'


def fits(model: ComposerModel, size: int, precision: str, copies: int,
         build_optimizer: Callable[[], torch.optim.Optimizer]) -> bool:
    """Tell whether a microbatch of `size` images fits into the memory of this rank, and free the memory of the trial.

    During the trial, `copies` more tensors of the size of the weights (EMA, DDP buckets) are allocated.

    Raises RuntimeError if the trial fails for another reason than its size.
    """
    try:
        train_twice(model, size, precision, copies, build_optimizer)
        return True
    except RuntimeError as error:
        if is_out_of_memory(error) or (size > 1 and re.search(TOO_LARGE, str(error))):
            return False
        raise
    finally:  # by now the error and its traceback, which held tensors, are gone
        model.zero_grad(set_to_none=True)
        gc.collect()  # an error from a library can hold its traceback in a reference cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def train_twice(model: ComposerModel, size: int, precision: str, copies: int,
                build_optimizer: Callable[[], torch.optim.Optimizer]) -> None:
    """Train on two batches of `size` images, with as much memory occupied as in a run.

    The optimizer allocates its state between the two batches, as in a run. The state takes memory that the activations
    of the first batch have freed, and the activations of the second batch must fit around it.

    Raises RuntimeError if memory runs out.
    """
    # Allocate what a real step holds besides activations: gradients, EMA weights and DDP buckets, and a reserve for
    # fragmentation and NCCL.
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    occupied = []
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)  # every microbatch of a batch except the first one finds gradients
        occupied += [torch.empty_like(parameter) for _ in range(copies)]
    if torch.cuda.is_available():
        reserved = int(torch.cuda.mem_get_info()[1] * RESERVED_FRACTION)
        occupied.append(torch.empty(reserved, dtype=torch.uint8, device='cuda'))

    forward_and_backward(model, size, precision)

    # Take one optimizer step to allocate its state. Gradients and learning rate are zero, so the weights do
    # not change. (In fp16 the gradients of the trial may be inf or NaN, which is why they are zeroed first.)
    optimizer = build_optimizer()
    torch._foreach_zero_([parameter.grad for parameter in trainable])
    for group in optimizer.param_groups:
        group['lr'] = 0.0
    optimizer.step()

    # Train on the second batch, which holds the peak of the run.
    forward_and_backward(model, size, precision)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # errors inside of kernels are reported only now
    del occupied, optimizer


def forward_and_backward(model: ComposerModel, size: int, precision: str) -> None:
    """Run forward and backward for one microbatch of zeros, as Composer's Trainer does."""
    microbatch = blank_batch(model, size, get_device()._device)
    with get_precision_context(precision):
        outputs = model.train()(microbatch)
        loss = model.loss(outputs, microbatch)
    loss.backward()


def blank_batch(model: ComposerModel, size: int, device: str) -> dict[str, torch.Tensor]:
    """Make a batch of zeros: `image` (B, 3, H, H) or `moments` (B, 8, H/8, H/8), and `caption` int64 (B, 77)."""
    batch = {'caption': torch.zeros(size, CAPTION_LENGTH, dtype=torch.long, device=device)}
    if model.vae is None:
        batch[MOMENTS] = torch.zeros(size, 8, model.latent_size, model.latent_size, dtype=torch.half, device=device)
    else:
        batch['image'] = torch.zeros(size, 3, model.image_size, model.image_size, device=device)
    return batch
