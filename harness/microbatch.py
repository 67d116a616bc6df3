"""How many images fit into a device's memory at once, found by trying before the run. It knows nothing of the Trainer.

Composer's own search, 'auto', works within the run: where memory runs out in a backward pass, DDP is left in the middle
of its exchange of gradients, and every microbatch of a run that searches is synchronised. Here each try stands alone.
"""
import argparse
import gc
import re
from collections.abc import Callable

import torch
from composer import ComposerModel
from composer.core import DataSpec, get_precision_context
from composer.utils import dist, get_device

from harness.failures import is_out_of_memory
from harness.fake_step import FakeModel
from harness.memory import copies_of_weights, lasting_bytes, needed_bytes, taken_on_a_gpu, trace_training
from inputs.captions import CAPTION_LENGTH
from inputs.shards import LATENTS

SPARE_SHARE = 1 / 32  # of a GPU's memory: the allocator cuts it up a little differently in a long run


def likely_microbatch(args: argparse.Namespace, fake: FakeModel) -> int:
    """The largest part of a device's share that fits into every rank's GPU by calculation, or the least.

    Where there is no GPU it is the whole share.
    """
    sizes = divisors(args.batch_size // dist.get_world_size())
    if not torch.cuda.is_available():
        return sizes[0]
    there = torch.cuda.mem_get_info()[1]
    lasting = lasting_bytes(args, fake.model, dist.get_world_size())
    step = trace_training(args, fake)
    position = 0
    while position < len(sizes) - 1:
        needed = needed_bytes(args, lasting, step, sizes[position], dist.get_world_size())
        if on_all_ranks(taken_on_a_gpu(needed) <= there):
            break
        position += 1
    return sizes[position]


def largest_microbatch(model: ComposerModel, data: DataSpec, args: argparse.Namespace, guess: int) -> int:
    """The largest part of a device's share of the batch that trains within the memory of every rank.

    The result divides the device's share. Where a size fits, all smaller ones do, so that the search may begin
    anywhere. Each size is tried on all ranks at once, so that none waits for another. A try is a forward and a backward
    pass beside everything that the run will hold. Weights and random state stay as they are, and there is no optimizer
    yet.

    Args:
        model: with its switches; it is moved to its device. A compiled part runs uncompiled: compiling takes minutes
            for each size, and as a rule a compiled model needs less memory.
        data: what the run will train on.
        args: of benchmark.py, filled in.
        guess: a divisor of the share, the same on all ranks; the nearer it is, the fewer sizes are tried.

    ValueError: not even one image fits.
    """
    get_device().module_to_device(model)
    share = args.batch_size // dist.get_world_size()
    on_all_ranks(True)  # NCCL takes its own memory when it is first called
    with random_state_kept(), torch.compiler.set_stance('force_eager'):
        size = largest_that_fits(divisors(share), guess, lambda size: on_all_ranks(fits(model, data, args, size)))
    if size is None:
        raise ValueError(f'not even one image of --image_size {args.image_size} fits into the memory of '
                         f'{memory_of_device()}; use --gradient_checkpointing, a smaller image, or a smaller '
                         '--batch_size')
    return size


def largest_that_fits(sizes: list[int], guess: int, is_fitting: Callable[[int], bool]) -> int | None:
    """The first of `sizes`, which fall, that fits; tried from `guess` on, down or up. None: not even the last fits."""
    position = sizes.index(guess)
    if is_fitting(guess):
        while position > 0 and is_fitting(sizes[position - 1]):
            position -= 1
        return sizes[position]
    for size in sizes[position + 1:]:
        if is_fitting(size):
            return size
    return None


def divisors(number: int) -> list[int]:
    """All of them, the largest first."""
    return [size for size in range(number, 0, -1) if number % size == 0]


def random_state_kept():
    """A context after which random numbers go on as if nothing had been drawn in it."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices)


def on_all_ranks(mine: bool) -> bool:
    """Whether it is so on every rank."""
    agreed = torch.tensor(int(mine), device=get_device()._device)
    dist.all_reduce(agreed, 'MIN')
    return bool(agreed.item())


def fits(model: ComposerModel, data: DataSpec, args: argparse.Namespace, size: int) -> bool:
    """Whether `size` images at once can be trained on this rank. Nothing that the try needed is left in memory."""
    try:
        train_once(model, data, args, size)
        return True
    except RuntimeError as error:
        if not is_too_large(error):
            raise
        return False
    finally:  # the error is gone here, and with its traceback the tensors that it held
        free_memory(model)


def is_too_large(error: RuntimeError) -> bool:
    """Whether less than a try's images might do: memory ran out, or a kernel cannot count so many elements."""
    return is_out_of_memory(error) or re.search('INT_MAX|canUse32BitIndexMath', str(error)) is not None


def train_once(model: ComposerModel, data: DataSpec, args: argparse.Namespace, size: int) -> None:
    """Forward and backward of `size` images, beside what a run holds. RuntimeError: they are too many."""
    beside = memory_beside(model, args)
    batch = blank_batch(data, args)
    microbatch = data.microbatch_transforms({name: tensor[:size] for name, tensor in batch.items()})
    with get_precision_context(args.precision):
        outputs = model.train()(microbatch)
        loss = model.loss(outputs, microbatch)
    loss.backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a kernel's own error comes late
    del beside


def free_memory(model: ComposerModel) -> None:
    """Give back what a try allocated."""
    model.zero_grad(set_to_none=True)
    gc.collect()  # a library's error can hold its traceback in a cycle
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_beside(model: ComposerModel, args: argparse.Namespace) -> list[torch.Tensor]:
    """As much memory as a run holds beside weights and activations; the gradients are put where they belong."""
    copies = sum(copies_of_weights(args, dist.get_world_size()).values())
    held = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # all but the first microbatch of a batch find them there
            held += [torch.empty_like(parameter) for _ in range(copies)]
    if torch.cuda.is_available():
        spare = int(torch.cuda.mem_get_info()[1] * SPARE_SHARE)
        held.append(torch.empty(spare, dtype=torch.uint8, device='cuda'))
    return held


def blank_batch(data: DataSpec, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """This device's share of a batch, on the device: `image` uint8 (B, 3, H, H) or `moments`, and `caption` (B, 77)."""
    share = args.batch_size // dist.get_world_size()
    device = get_device()._device
    side = args.image_size
    batch = {'caption': torch.zeros(share, CAPTION_LENGTH, dtype=torch.long, device=device)}
    if data.dataloader.dataset.latents:
        batch[LATENTS] = torch.zeros(share, 8, side // 8, side // 8, dtype=torch.half, device=device)
    else:
        batch['image'] = torch.zeros(share, 3, side, side, dtype=torch.uint8, device=device)
    return batch


def memory_of_device() -> str:
    if not torch.cuda.is_available():
        return 'this device'
    return f'{torch.cuda.get_device_name()} ({torch.cuda.mem_get_info()[1] / 2 ** 30:.0f} GiB)'
