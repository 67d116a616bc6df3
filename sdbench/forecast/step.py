"""What a trace of a training step finds: memory and work, for any microbatch, and how they are stored.

A stored step has only those operators at which the peak of the memory can be. Nothing here needs torch.
"""
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


@dataclass(frozen=True)
class StepMemory:
    """Memory in use at each operator of a step, without the weights, as a function of the microbatch.

    Attributes:
        alive: int64 (operators, 2, ITEMS), bytes that do not depend on the microbatch, and bytes per image in it.
        in_encoder: bool (operators,), whether the operator belongs to the VAE encoder, which training on latents skips.
        gradients: bytes of the gradients of all weights together.
    """
    alive: np.ndarray
    in_encoder: np.ndarray
    gradients: int

    def peak(self, microbatch: int, accumulated: bool, latents: bool = False) -> dict[str, int]:
        """Return the bytes by item at the operator where most memory is in use.

        The items are gradients; weights that are cast to half precision; activations, which autograd keeps for the
        backward pass; and working memory, which is everything else that operators hand to each other. With gradient
        checkpointing, activations that are computed a second time count as working memory.

        Args:
            microbatch: number of images that go through the model together.
            accumulated: whether the gradients of an earlier microbatch are already there. If not, gradients appear
                while activations are freed.
            latents: whether the images were encoded before the training. The images themselves are still counted, with
                6 MiB each at 512 px: 3 MiB in the batch, and 3 in the copy of it that the Trainer keeps.
        """
        alive = self.alive[:, 0] + microbatch * self.alive[:, 1]  # fixed bytes + bytes per image, (operators, ITEMS)
        if latents:
            alive = alive[~self.in_encoder]
        if accumulated:
            alive[:, ITEMS.index('gradients')] = self.gradients
        row = alive[alive.sum(axis=1).argmax()]
        return dict(zip(ITEMS, row.tolist(), strict=True))

    def rows_of_peaks(self) -> set[int]:
        """Return the operators at which the peak is for some microbatch, accumulated or not, on images or latents."""
        found = set()
        for gradients in (None, self.gradients):
            for operators in (np.arange(len(self.alive)), np.flatnonzero(~self.in_encoder)):
                alive = self.alive[operators].copy()  # (operators, 2, ITEMS)
                if gradients is not None:
                    alive[:, :, ITEMS.index('gradients')] = gradients, 0
                fixed, per_image = alive.sum(axis=2).T
                found |= {int(operators[row]) for row in highest_lines(fixed, per_image)}
        return found

    def at(self, operators: set[int]) -> 'StepMemory':
        """Return the memory at these operators alone."""
        rows = sorted(operators)
        return replace(self, alive=self.alive[rows], in_encoder=self.in_encoder[rows])


def highest_lines(fixed: np.ndarray, slope: np.ndarray) -> list[int]:
    """Return the lines that are the highest, and of equally high ones the first, at some whole number from 1 on.

    Args:
        fixed: int64 (lines,), their values at 0.
        slope: int64 (lines,).
    """
    found = []
    number = 1
    while True:
        highest = int((fixed + number * slope).argmax())
        found.append(highest)
        steeper = slope > slope[highest]
        if not steeper.any():
            return found
        # Only steeper lines can be higher later. Continue where the first of them reaches this one.
        reach = -((fixed[steeper] - fixed[highest]) // (slope[steeper] - slope[highest]))
        number = max(number + 1, int(reach.min()))


@dataclass(frozen=True)
class Step:
    """What a trace of a step finds.

    Attributes:
        memory: memory of the step.
        work: work of the step without its update.
        updates: work of an optimizer step and bytes of the optimizer's state, by whether it is the fused one.
        ema_update: work of an update of the EMA weights.
        nbytes: bytes of the weights of `unet`, `text_encoder` and `vae`.
        is_sd2: whether the UNet has the shape of Stable Diffusion 2's.
    """
    memory: StepMemory
    work: StepWork
    updates: dict[bool, tuple[Work, int]]
    ema_update: Work
    nbytes: dict[str, int]
    is_sd2: bool

    def as_json(self) -> dict[str, Any]:
        """Return the step as values that JSON can store without loss."""
        memory = {'alive': self.memory.alive.tolist(), 'in_encoder': self.memory.in_encoder.tolist(),
                  'gradients': self.memory.gradients}
        work = {name: listed(part) for name, part in self.work._asdict().items()}
        updates = [[is_fused, listed(update), state] for is_fused, (update, state) in self.updates.items()]
        return {'memory': memory, 'work': work, 'updates': updates, 'ema_update': listed(self.ema_update),
                'nbytes': self.nbytes, 'is_sd2': self.is_sd2}

    @classmethod
    def of_json(cls, stored: dict[str, Any]) -> 'Step':
        """Return the step of such values."""
        memory = StepMemory(np.array(stored['memory']['alive'], dtype=np.int64),
                            np.array(stored['memory']['in_encoder'], dtype=bool), stored['memory']['gradients'])
        work = StepWork(**{name: arrays(part) for name, part in stored['work'].items()})
        updates = {is_fused: (arrays(update), state) for is_fused, update, state in stored['updates']}
        return cls(memory, work, updates, arrays(stored['ema_update']), stored['nbytes'], stored['is_sd2'])


def listed(part: Work | np.ndarray) -> dict | list:
    """Return the work by kind, or the buckets of a step, as lists."""
    if isinstance(part, dict):
        return {kind: amounts.tolist() for kind, amounts in part.items()}
    return part.tolist()


def arrays(part: dict | list) -> Work | np.ndarray:
    """Return the work or the buckets from lists."""
    if isinstance(part, dict):
        return {kind: np.array(amounts) for kind, amounts in part.items()}
    return np.array(part)
