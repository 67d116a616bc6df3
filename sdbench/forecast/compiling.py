"""What compiling changes in a step: kernels are fused, so that fewer bytes move and fewer results are kept.

torch's compiler leaves products, convolutions and attention to their libraries, whose arithmetic stays. It fuses all
else: a bias is added, a norm computed and a layout changed while a tensor is read anyway. How much is left depends
little on the shapes of a UNet and its images, so that it is counted beforehand: `python -m benchmarks.forecast.shares`
has the compiler schedule the kernels of many steps, compares them with the eager steps that trace.py counts, and prints
the shares that stand here, with the error that each of those steps is met with.
"""
import dataclasses
from collections import defaultdict

import numpy as np

from sdbench.flags.train import Train
from sdbench.forecast.count import CASTS, CONVOLUTIONS, FUSED, ITEMS, NORMS, POINTWISE, StepMemory
from sdbench.forecast.speed import Bucket, StepWork, Work

# What is left of an eager step with norms in half precision and images in channels_last: shares of an image's bytes and
# of kernels, by kind of operator. Bytes that are no image's, as of weights and their casts, all stay, and so does all
# of a kind that is not here.
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
    fixed, per_image = left_of(work.fixed, work.per_image, shares)
    encoder_fixed, encoder_per_image = left_of(work.encoder_fixed, work.encoder_per_image, ENCODER)

    # Gradients travel while others are computed only if a graph ends between them. One of the whole UNet returns all
    # its gradients at its end, and holds them until then.
    buckets = []
    for bucket in work.buckets:
        left = Bucket(bucket.nbytes, Work(), Work())
        if settings.compile_blocks:
            left = Bucket(bucket.nbytes, in_proportion(bucket.fixed, work.fixed, fixed),
                          in_proportion(bucket.per_image, work.per_image, per_image))
        buckets.append(left)
    gradients, _, activations, working = range(len(ITEMS))
    alive = []
    for rows in (step.fixed, step.per_image):
        rows = rows.copy()
        rows[:, activations] = np.round(rows[:, activations] * KEPT)
        if not settings.compile_blocks:
            if settings.gradient_checkpointing:
                rows[~step.in_encoder, working] = np.round(rows[~step.in_encoder, working] * COMPUTED_EARLY)
            rows[:, working] += rows[:, gradients]
            rows[:, gradients] = 0
        alive.append(rows)

    step = dataclasses.replace(step, fixed=alive[0], per_image=alive[1])
    return step, dataclasses.replace(work, fixed=fixed, per_image=per_image, buckets=buckets,
                                     encoder_fixed=encoder_fixed, encoder_per_image=encoder_per_image)


def left_of(fixed: dict[str, Work], per_image: dict[str, Work], shares: Shares) -> tuple[dict, dict]:
    """Return what is left of eager work, whatever the microbatch and for each image, with one kind for all fused."""
    left_fixed, left_per_image = defaultdict(Work), defaultdict(Work)
    for kind in fixed:
        name = FUSED if kind in (NORMS, CASTS, POINTWISE) else kind
        nbytes, kernels = shares.get(name, (1, 1))
        left_fixed[name] += fixed[kind]._replace(kernels=fixed[kind].kernels * kernels)
        left_per_image[name] += per_image[kind]._replace(nbytes=per_image[kind].nbytes * nbytes)
    return dict(left_fixed), dict(left_per_image)


def in_proportion(part: Work, eager: dict[str, Work], left: dict[str, Work]) -> Work:
    """Return a part of eager work times what is left of all of it."""
    before, after = sum(eager.values(), Work()), sum(left.values(), Work())
    return Work(*(share * new / max(old, 1) for share, new, old in zip(part, after, before, strict=True)))
