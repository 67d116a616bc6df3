"""What compiling changes in a step: kernels are fused, so that fewer bytes move and fewer results are kept.

torch's compiler leaves products, convolutions and attention to their libraries, whose arithmetic stays. It fuses all
else: a bias is added, a norm computed and a layout changed while a tensor is read anyway. How much is left depends
little on the shapes of a UNet and its images, so that it was counted beforehand, with torch 2.7: docs/forecast.md says
how, and names the commit that can count again.
"""
import dataclasses

import numpy as np

from sdbench.flags.train import Train
from sdbench.forecast.count import CASTS, CONVOLUTIONS, FUSED, ITEMS, LAYOUTS, NORMS, POINTWISE, StepMemory
from sdbench.forecast.speed import StepWork, Work

# What is left of an eager step with norms in half precision and images in channels_last: shares of an image's bytes and
# of kernels, by kind of operator. Bytes that are no image's, as of weights and their casts, all stay, and so does all
# of a kind that is not here, but for LAYOUTS.
Shares = dict[str, tuple[float, float]]
WHOLE: Shares = {CONVOLUTIONS: (0.49, 0.49), FUSED: (0.66, 0.65)}
BLOCKS: Shares = {CONVOLUTIONS: (0.59, 0.56), FUSED: (0.70, 0.73)}
ENCODER: Shares = {CONVOLUTIONS: (0.50, 0.51), FUSED: (0.39, 0.43)}  # the VAE's is always compiled whole
# Bytes and number of fused kernels, over those with norms in half precision, by whether it is compiled by blocks
NORMS_IN_FLOAT32 = {False: (1.05, 0.93), True: (1.20, 0.96)}
KEPT = 0.825  # of the bytes that are kept for the backward pass
# Working memory of a whole UNet with gradient checkpointing, over that of an eager one: much of what was not kept is
# computed before it is needed. Of one step that was counted
COMPUTED_EARLY = 3.4


def compiled(step: StepMemory, work: StepWork, settings: Train) -> tuple[StepMemory, StepWork]:
    """Return memory and work of a compiled step.

    Args:
        step: memory of the eager step, with norms in half precision, and images in channels_last.
        work: of the same.
        settings: of the run.
    """
    shares = BLOCKS if settings.compile_blocks else WHOLE
    if not settings.half_precision_norms:
        (nbytes, kernels), (more, fewer) = shares[FUSED], NORMS_IN_FLOAT32[bool(settings.compile_blocks)]
        shares = shares | {FUSED: (nbytes * more, kernels * fewer)}
    model = left_of(work.model, shares)

    # Gradients travel while others are computed only if a graph ends between them. One of the whole UNet returns all
    # its gradients at its end, and holds them until then.
    buckets = work.buckets.copy()
    left = sum(model.values()) / sum(work.model.values()) if settings.compile_blocks else 0
    buckets[:, 1:] *= left
    gradients, _, activations, working = range(len(ITEMS))
    alive = step.alive.copy()
    alive[..., activations] = np.round(alive[..., activations] * KEPT)
    if not settings.compile_blocks:
        if settings.gradient_checkpointing:
            alive[~step.in_encoder, :, working] = np.round(alive[~step.in_encoder, :, working] * COMPUTED_EARLY)
        alive[..., working] += alive[..., gradients]
        alive[..., gradients] = 0
    return (dataclasses.replace(step, alive=alive),
            work._replace(model=model, encoder=left_of(work.encoder, ENCODER), buckets=buckets))


def left_of(work: Work, shares: Shares) -> Work:
    """Return what is left of eager work, with one kind for all that is fused."""
    left = {}
    for kind, amounts in work.items():
        if kind == LAYOUTS:  # a fused kernel changes a layout while it reads for something else
            continue
        if kind in (NORMS, CASTS, POINTWISE):
            kind = FUSED
        nbytes, kernels = shares.get(kind, (1, 1))
        left[kind] = left.get(kind, 0) + amounts * [1, nbytes, 1, kernels]
    return left
