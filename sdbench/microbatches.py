"""Choose a microbatch, and suggest what takes less memory. Nothing here needs torch.

Both the search on a GPU and a dry run use these functions.
"""
import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace

from sdbench.setup import Setup

SMALLER_MICROBATCH = 'a smaller --device_train_microbatch_size'  # a key of `changes_that_take_less`


def changes_that_take_less(setup: Setup) -> dict[str, Setup]:
    """Return the setup with each change that saves memory, keyed by a description of the change.

    Changes that the user has already made are skipped. The first two make a step slower, but train the same model.
    """
    half = setup.image_size // 16 * 8
    changes = {}
    if setup.microbatch is not None:
        changes[SMALLER_MICROBATCH] = {'microbatch': 1}
    changes['--gradient_checkpointing'] = {'gradient_checkpointing': True}
    changes['without --use_ema'] = {'use_ema': False}
    if half >= 64:
        changes[f'--image_size {half}'] = {'image_size': half}
    changes['latents (encode.py)'] = {'latents': True}
    changed = {change: replace(setup, **flags) for change, flags in changes.items()}
    return {change: other for change, other in changed.items() if other != setup}


def memory_advice(fits_with: dict[str, bool]) -> str:
    """Return advice for a GPU with too little memory, from the changes that take less: is each alone enough?"""
    enough = [change for change, fits in fits_with.items() if fits]
    if enough:
        return f'each of these alone is enough: {"; ".join(enough)}'
    if fits_with:
        return f'none of these alone is enough: {"; ".join(fits_with)}; combine them, or use a GPU with more memory'
    return 'use a GPU with more memory'


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest size for which `fits` is true, by binary search; None if not even the smallest size fits.

    Both the search on a GPU and a dry run use this. The smallest size, one image, is tried first, because CUDA's
    libraries then allocate their handles and workspaces while there is still memory. The sizes are in ascending order,
    and `fits` is called at most once for each of them.
    """
    if not fits(sizes[0]):
        return None
    too_large = bisect.bisect_left(sizes, True, lo=1, key=lambda size: not fits(size))
    return sizes[too_large - 1]
