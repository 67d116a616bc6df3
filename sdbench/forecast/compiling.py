"""Calculate the memory and the work of a compiled step from an eager step.

torch's compiler leaves matrix products, convolutions and attention to their libraries, so their arithmetic stays. It
fuses everything else: a bias is added, a norm computed or a layout changed while a tensor is read anyway. A compiled
step therefore moves fewer bytes and keeps fewer activations. The fractions that remain depend little on the shapes of
the UNet and its images, so they were counted once with torch 2.7. docs/forecast-model.md says how, and names the commit
whose program can count them again.
"""
import dataclasses

import numpy as np

from sdbench.forecast.speed import StepWork, Work
from sdbench.forecast.step import CASTS, CONVOLUTIONS, FUSED, ITEMS, LAYOUTS, NORMS, POINTWISE, StepMemory
from sdbench.setup import Setup

# Fractions of the eager step's bytes per image and of its kernels that remain, by kind of operator, for norms in half
# precision and images in channels_last. Bytes that do not depend on the number of images remain, such as weights and
# their casts, and so does each kind that has no entry, except LAYOUTS.
Fractions = dict[str, tuple[float, float]]
WHOLE: Fractions = {CONVOLUTIONS: (0.49, 0.49), FUSED: (0.66, 0.65)}
BLOCKS: Fractions = {CONVOLUTIONS: (0.59, 0.56), FUSED: (0.70, 0.73)}
ENCODER: Fractions = {CONVOLUTIONS: (0.50, 0.51), FUSED: (0.39, 0.43)}  # the VAE encoder is always compiled whole
# Bytes and number of fused kernels with norms in float32, divided by those with norms in half precision. The key is
# whether the UNet is compiled by blocks.
NORMS_IN_FLOAT32 = {False: (1.05, 0.93), True: (1.20, 0.96)}
ACTIVATIONS_KEPT = 0.825  # fraction of the eager activations
# Working memory of a UNet that is compiled whole with gradient checkpointing, divided by the eager UNet's. The
# compiler recomputes many activations before they are needed. Counted for a single step.
RECOMPUTED_EARLY = 3.4


def compiled_work(work: StepWork, setup: Setup) -> StepWork:
    """Return the work of a compiled step with this setup.

    `work` is the work of the eager step with norms in half precision and images in channels_last.
    """
    # The work of the UNet and the VAE encoder
    fractions = BLOCKS if setup.compile_blocks else WHOLE
    if not setup.half_precision_norms:
        nbytes, kernels = fractions[FUSED]
        more_bytes, fewer_kernels = NORMS_IN_FLOAT32[bool(setup.compile_blocks)]
        fractions = fractions | {FUSED: (nbytes * more_bytes, kernels * fewer_kernels)}
    model = after_fusion(work.model, fractions)
    encoder = after_fusion(work.encoder, ENCODER)

    # The all-reduce overlaps with the backward pass only if there are several graphs. A whole UNet is one graph, which
    # returns all gradients at its end, so no work remains after any bucket is full. Column 0 of buckets is bytes.
    buckets = work.buckets.copy()
    if setup.compile_blocks:
        buckets[:, 1:] *= sum(model.values()) / sum(work.model.values())
    else:
        buckets[:, 1:] = 0
    return work._replace(model=model, encoder=encoder, buckets=buckets)


def compiled_memory(step: StepMemory, setup: Setup) -> StepMemory:
    """Return the memory of a compiled step with this setup, from the same eager step as `compiled_work`."""
    gradients, _, activations, working = range(len(ITEMS))
    alive = step.alive.copy()
    alive[..., activations] = np.round(alive[..., activations] * ACTIVATIONS_KEPT)
    if not setup.compile_blocks:  # the graph of a whole UNet holds its gradients as working memory until it ends
        if setup.gradient_checkpointing:
            alive[~step.in_encoder, :, working] = np.round(alive[~step.in_encoder, :, working] * RECOMPUTED_EARLY)
        alive[..., working] += alive[..., gradients]
        alive[..., gradients] = 0
    return dataclasses.replace(step, alive=alive)


def after_fusion(work: Work, fractions: Fractions) -> Work:
    """Return the work that remains of eager work after compiling, with all fused kernels under the kind FUSED."""
    remaining = {}
    for kind, amounts in work.items():
        if kind == LAYOUTS:  # a fused kernel changes the layout while it reads the image for another reason
            continue
        if kind in (NORMS, CASTS, POINTWISE):
            kind = FUSED
        nbytes, kernels = fractions.get(kind, (1, 1))
        factors = np.array([1, nbytes, 1, kernels])  # for the columns of `amounts`: only bytes and kernels change
        remaining[kind] = remaining.get(kind, 0) + amounts * factors
    return remaining
