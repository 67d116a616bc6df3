"""What a trace of a training step finds: memory and work, for any microbatch, and how they are stored.

A stored step has only those operators at which the peak of the memory can be. Nothing here needs torch.
"""
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sdbench.forecast.speed import StepWork, Work

# Kinds of work, as a dry run prints them
PRODUCTS = 'matrix products'
CONVOLUTIONS = 'convolutions'
ATTENTION = 'attention'
NORMS = 'norms'
LAYOUTS = 'scattered reads'  # extra bytes that are read when a group norm changes the layout of a feature map
CASTS = 'casts between precisions'
POINTWISE = 'pointwise, sums and copies'
OPTIMIZER = 'optimizer'
EMA_UPDATE = 'EMA update'
FUSED = 'fused kernels'  # everything in a compiled step that no library computes
GRADIENT_COPIES = 'gradient sums and copies'  # sums over microbatches, and copies to and from the all-reduce buckets

# Items of the memory in use during a step
ITEMS = ('gradients', 'cast weights', 'activations', 'working memory')


# A stored step has the peaks of all microbatches up to this one. No GPU holds more images of Stable Diffusion.
LARGEST_MICROBATCH = 4096


@dataclass(frozen=True)
class StepMemory:
    """Memory in use at each operator of a step, without the weights, as a function of the microbatch."""
    alive: np.ndarray  # int64 (operators, 2, ITEMS): bytes that do not depend on the microbatch, and bytes per image
    in_encoder: np.ndarray  # bool (operators,): whether it belongs to the VAE encoder, which latents make unnecessary
    gradients: int  # bytes of the gradients of all weights together

    def cases(self, accumulated: bool, latents: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers (operators,) of the operators that run, and their memory (operators, 2, ITEMS)."""
        operators = np.flatnonzero(~self.in_encoder) if latents else np.arange(len(self.alive))
        alive = self.alive[operators]
        if accumulated:
            alive[:, :, ITEMS.index('gradients')] = self.gradients, 0
        return operators, alive

    def peak(self, microbatch: int, accumulated: bool, latents: bool = False) -> dict[str, int]:
        """Return the bytes by item at the operator where most memory is in use.

        The items are gradients; weights that are cast to half precision; activations, which autograd keeps for the
        backward pass; and working memory, which is everything else that operators hand to each other. With gradient
        checkpointing, activations that are computed a second time count as working memory.

        `accumulated` tells whether the gradients of an earlier microbatch are already there. If not, gradients appear
        while activations are freed. With `latents` the images themselves still count, with 6 MiB each at 512 px: 3 MiB
        in the batch, and 3 in the copy of it that the Trainer keeps.
        """
        _, alive = self.cases(accumulated, latents)
        alive = alive[:, 0] + microbatch * alive[:, 1]  # fixed bytes + bytes per image, (operators, ITEMS)
        row = alive[alive.sum(axis=1).argmax()]
        return dict(zip(ITEMS, row.tolist(), strict=True))

    def rows_of_peaks(self) -> set[int]:
        """Return the operators at which the peak is for some microbatch, accumulated or not, on images or latents."""
        found = set()
        microbatches = np.arange(1, LARGEST_MICROBATCH + 1)
        for accumulated in (False, True):
            for latents in (False, True):
                operators, alive = self.cases(accumulated, latents)
                fixed, per_image = alive.sum(axis=2).T[:, :, None]  # (operators, 1) each
                found |= {*operators[(fixed + microbatches * per_image).argmax(axis=0)].tolist()}
        return found

    def at(self, operators: set[int]) -> 'StepMemory':
        rows = sorted(operators)
        return replace(self, alive=self.alive[rows], in_encoder=self.in_encoder[rows])


@dataclass(frozen=True)
class Step:
    """What a trace of a step finds."""
    memory: StepMemory
    work: StepWork  # without the update
    updates: list[tuple[Work, int]]  # of the usual and the fused optimizer: work of a step, and bytes of the state
    ema_update: Work
    nbytes: dict[str, int]  # of the weights of `unet`, `text_encoder` and `vae`

    def to_json(self) -> str:
        return json.dumps(self, default=lambda value: value.tolist() if isinstance(value, np.ndarray) else vars(value))

    @classmethod
    def of_json(cls, stored: dict[str, Any]) -> 'Step':
        """Return the step from the values that JSON has stored."""
        memory = stored['memory']
        memory = StepMemory(np.array(memory['alive']), np.array(memory['in_encoder']), memory['gradients'])
        updates = [(arrays(work), nbytes) for work, nbytes in stored['updates']]
        work = StepWork(*map(arrays, stored['work']))
        return cls(memory, work, updates, arrays(stored['ema_update']), stored['nbytes'])


def arrays(part: dict | list) -> Work | np.ndarray:
    """Return the work by kind, or the buckets of a step, from lists."""
    if isinstance(part, dict):
        return {kind: np.array(amounts) for kind, amounts in part.items()}
    return np.array(part)
