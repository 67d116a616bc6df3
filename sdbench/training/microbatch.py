"""Find the largest microbatch that fits into a device's memory, by trials before the run.

Composer's own search, 'auto', works within the run: if memory runs out in a backward pass, DDP is left in the middle of
its all-reduce, and a run that searches synchronizes the ranks at every microbatch. Here each trial stands alone.
"""
import bisect
import dataclasses
import gc
import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from composer import ComposerModel
from composer.core import get_precision_context
from composer.utils import dist, get_device

from sdbench.errors import UserError, is_out_of_memory, plural
from sdbench.flags.train import ENCODERS, Train
from sdbench.inputs.shards import MOMENTS
from sdbench.inputs.tokenizer import CAPTION_LENGTH
from sdbench.training.ranks import print_on_rank_0

SPARE_SHARE = 1 / 32  # of a GPU's memory, kept free for the fragmentation of a long run and for NCCL's channels
SMALLER_MICROBATCH = 'a smaller --device_train_microbatch_size'  # a change that takes less memory

# Errors of CUDA's libraries that find no memory for handles and workspaces, and of kernels whose 32-bit indices do not
# reach that many elements. For a single image they have another cause, and are raised.
TOO_LARGE = 'CU(BLAS|DNN)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)|INT_MAX|canUse32BitIndexMath'


def changes_that_take_less(settings: Train) -> dict[str, Train]:
    """Return the settings of a run with each change that takes less memory, by the change in words.

    What was given already is not among them. The first two take time and change nothing of what is learned.
    """
    half = settings.image_size // 16 * 8
    changes = {}
    if settings.device_train_microbatch_size != 'auto':
        changes[SMALLER_MICROBATCH] = {'device_train_microbatch_size': 1}
    changes['--gradient_checkpointing'] = {'gradient_checkpointing': True}
    changes['without --use_ema'] = {'use_ema': False}
    if half >= 64:
        changes[f'--image_size {half}'] = {'image_size': half}
    changes['latents (encode.py)'] = {'encoders': ENCODERS[True]}  # last: `run_as` does not bring the VAE back
    changed = {change: dataclasses.replace(settings, **flags) for change, flags in changes.items()}
    return {change: other for change, other in changed.items() if other != settings}


def memory_advice(fits_with: dict[str, bool]) -> str:
    """Say what to do where memory is too small, by whether each change of `changes_that_take_less` is enough."""
    enough = [change for change, fits in fits_with.items() if fits]
    if enough:
        return f'each of these alone is enough: {"; ".join(enough)}'
    if fits_with:
        return f'none of these alone is enough: {"; ".join(fits_with)}; combine them, or use a GPU with more memory'
    return 'use a GPU with more memory'


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of some sizes that fits; None: not even the first does. By halves, each is tried once at most.

    A search on a GPU and a dry run both ask here. The first size comes first: it is of one image, so that CUDA's
    libraries make their handles and workspaces while there is room.
    """
    if not fits(sizes[0]):
        return None
    too_large = bisect.bisect_left(sizes, True, lo=1, key=lambda size: not fits(size))
    return sizes[too_large - 1]


def with_found_microbatch(settings: Train, model: ComposerModel,
                          build_optimizer: Callable[[], torch.optim.Optimizer]) -> Train:
    """Return the settings with the largest microbatch that trains within the memory of every rank, if it is open.

    All ranks try a size at once, so that none waits for another. A trial does what the first two batches of the run do,
    with the memory occupied that the run will occupy. It changes no weights.

    Args:
        settings: of the run.
        model: with its switches; it is moved to its device. Compiled parts run uncompiled: compiling takes minutes for
            each size, and a compiled model usually needs less memory.
        build_optimizer: makes that of the run.

    Raises UserError if not even one image fits.
    """
    if settings.device_train_microbatch_size != 'auto':
        return settings

    # each size on all ranks, until one has no room for it
    get_device().module_to_device(model)

    def fits_on_all(settings: Train, size: int) -> bool:
        copies = int(settings.use_ema) + int(settings.num_devices > 1)  # the average, and the buckets of DDP
        fits_here = fits(model, size, settings.precision, copies, build_optimizer)
        return all(dist.all_gather_object(fits_here))

    with torch.compiler.set_stance('force_eager'):
        largest = largest_that_fits(settings.microbatch_sizes, partial(fits_on_all, settings))
        if largest is None:
            # The run ends here, so the model may change for the trials of what takes less.
            fits_with = {}
            for change, changed in changes_that_take_less(settings).items():
                run_as(model, changed)
                fits_with[change] = fits_on_all(changed, 1)
            raise UserError(f'not even one image of --image_size {settings.image_size} fits into the memory of this '
                            f'device; {memory_advice(fits_with)}')
    print_on_rank_0(f'microbatch: {plural(largest, "image")}, the largest that fits in GPU memory')
    return dataclasses.replace(settings, device_train_microbatch_size=largest)


def run_as(model: ComposerModel, settings: Train) -> None:
    """Let a model run at the image size of other settings, with checkpointing or without, and on latents: for good."""
    model.latent_size = model.latent_size * settings.image_size // model.image_size
    model.image_size = settings.image_size
    if settings.gradient_checkpointing:
        model.unet.enable_gradient_checkpointing()
    else:
        model.unet.disable_gradient_checkpointing()
    if settings.latents:
        model.vae = None


def fits(model: ComposerModel, size: int, precision: str, copies: int,
         build_optimizer: Callable[[], torch.optim.Optimizer]) -> bool:
    """Tell whether a microbatch of `size` images fits on this rank, next to `copies` copies of the weights.

    It frees all memory that the trial took.
    """
    try:
        train_twice(model, size, precision, copies, build_optimizer)
        return True
    except RuntimeError as error:
        if not is_too_large(error, size):
            raise
        return False
    finally:  # after the error and its traceback, which hold tensors, are gone
        model.zero_grad(set_to_none=True)
        gc.collect()  # a library's error can hold its traceback in a cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_too_large(error: RuntimeError, size: int) -> bool:
    """Tell whether fewer images than `size` may avoid an error: memory ran out, or an index passes 32 bits."""
    return is_out_of_memory(error) or (size > 1 and re.search(TOO_LARGE, str(error)) is not None)


def train_twice(model: ComposerModel, size: int, precision: str, copies: int,
                build_optimizer: Callable[[], torch.optim.Optimizer]) -> None:
    """Run forward and backward for two batches of `size` images, with the memory occupied that a run occupies.

    The optimizer makes its state between the two, as in a run: it takes space that the activations of the first batch
    have freed, and those of the second must fit around it.

    Raises RuntimeError if memory runs out.
    """
    # gradients, copies of the weights, and what is kept free
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    occupied = []
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)  # as all but the first microbatch of a batch have them
        occupied += [torch.empty_like(parameter) for _ in range(copies)]
    if torch.cuda.is_available():
        spare = int(torch.cuda.mem_get_info()[1] * SPARE_SHARE)
        occupied.append(torch.empty(spare, dtype=torch.uint8, device='cuda'))

    # the first batch
    forward_and_backward(model, size, precision)

    # a step that leaves the weights as they are: of gradients of 0, which in fp16 may not have been finite, at a rate
    # of 0
    optimizer = build_optimizer()
    torch._foreach_zero_([parameter.grad for parameter in trainable])
    for group in optimizer.param_groups:
        group['lr'] = 0.0
    optimizer.step()

    # the second batch
    forward_and_backward(model, size, precision)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a kernel's own error comes late
    del occupied, optimizer


def forward_and_backward(model: ComposerModel, size: int, precision: str) -> None:
    """Run forward and backward for one blank microbatch, as Composer's Trainer does."""
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
