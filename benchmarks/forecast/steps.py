"""Trace the work of the steps whose speed was published, each as its source ran it."""
from functools import cache

import pandas as pd
import torch
from composer import ComposerModel
from composer.algorithms.ema.ema import compute_ema as composers_compute_ema

from benchmark import build_model
from sdbench.forecast.compiling import compiled_work
from sdbench.forecast.speed import BatchSplit, StepWork, Work
from sdbench.forecast.step import EMA_UPDATE, OPTIMIZER
from sdbench.forecast.trace import build_on_meta, trace_step, work_by_kind, work_of_update
from sdbench.inputs.tokenizer import CAPTION_LENGTH
from sdbench.setup import Setup, settings_of_setup

LOOPED_OPTIMIZER = 'mosaicml/diffusion-benchmark'  # torch 1 launched separate kernels for the update of each weight
# FSDP: each GPU updates a fraction of the weights, which is too little to count. Its communication is counted as DDP's.
SHARDED_OPTIMIZER = 'mosaicml/diffusion'
# Bytes that MLPerf's fused Adam moves per weight: it reads a gradient in half precision and float32 copies of the
# weight and of two moments, and writes these three copies and the weight in half precision.
BYTES_OF_FUSED_ADAM = 2 + 3 * 4 + 3 * 4 + 2


# Columns of the points on which a step depends, besides its update
STEP = ['image_size', 'encoders', 'precision', 'encoder_precision', 'half_precision_norms', 'compile']


def layout_of(point: pd.Series) -> BatchSplit:
    """Return how a point's source split its batch over GPUs and microbatches."""
    devices = int(point['num_devices'])
    images = int(point['batch_size'] / devices)
    return BatchSplit(int(point['device_train_microbatch_size']), images, devices)


def work_of(point: pd.Series) -> StepWork:
    """Return the work of a step with its update as a point's source ran it."""
    model, work = trace(*point[STEP])
    update = work_of_their_update(model, point['program'], point['use_ema'] == 'yes', point['compile'])
    return work._replace(update=update)


@cache
def trace(image_size: int, encoders: str, precision: str, encoder_precision: str, half_precision_norms: str,
          compile: bool | str) -> tuple[ComposerModel, StepWork]:
    """Trace a step without its update. Return the model, which has no memory, and the work.

    The sources ran eager steps in channels first and compiled steps in channels_last.
    """
    # Use the most similar setup of this repository.
    autocast = 'amp_fp16' if precision == 'fp16' else precision
    setup = Setup(image_size=int(image_size), precision=autocast, encoder_precision=encoder_precision,
                  channels_last=bool(compile), half_precision_norms=half_precision_norms == 'yes').with_defaults()
    model = build_on_meta(settings_of_setup(setup), build_model)

    # Change the model where this repository has no such flag.
    if encoders == 'none':  # stored text states, which cost nothing, replace the text encoder
        model.vae = None
        width = model.text_encoder.config.hidden_size
        model.text_states = lambda caption: torch.empty(len(caption), CAPTION_LENGTH, width)
    if precision == 'fp16':
        # Autocast then casts neither weights nor gradients. The `to` of diffusers would print a warning.
        torch.nn.Module.to(model.unet, torch.float16)

    _, work = trace_step(model, autocast)
    return model, compiled_work(work, setup) if compile else work


@cache
def work_of_their_update(model: ComposerModel, program: str, use_ema: bool, compile: bool | str) -> Work:
    """Return the work of AdamW as the source's program ran it, and of Composer's EMA if the source used it."""
    if compile:
        weights = sum(weight.numel() for weight in model.unet.parameters())
        return work_by_kind([(OPTIMIZER, 0, 0, BYTES_OF_FUSED_ADAM * weights, 1)])
    if program == SHARDED_OPTIMIZER:
        return {}
    optimizer = torch.optim.AdamW(model.unet.parameters(), foreach=program != LOOPED_OPTIMIZER)
    work = work_of_update(OPTIMIZER, optimizer.step)
    if use_ema:
        # Composer's EMA averaged the frozen encoders, too. An EMA of the model with itself takes the same work.
        work |= work_of_update(EMA_UPDATE, lambda: composers_compute_ema(model, model, 0.999))
    return work
