"""Trace the work of the steps whose speed was published, each as its source ran it."""
from functools import cache
from typing import NamedTuple

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
from sdbench.models.loading import AUTOCAST_DTYPES
from sdbench.setup import Setup, settings_of_setup

LOOPED_OPTIMIZER = 'mosaicml/diffusion-benchmark'  # torch 1 launched separate kernels for the update of each weight
# FSDP: each GPU updates a fraction of the weights, which is too little to count. Its communication is counted as DDP's.
SHARDED_OPTIMIZER = 'mosaicml/diffusion'
# Bytes that MLPerf's fused Adam moves per weight: it reads a gradient in half precision and float32 copies of the
# weight and of two moments, and writes these three copies and the weight in half precision.
BYTES_OF_FUSED_ADAM = 2 + 3 * 4 + 3 * 4 + 2


class Run(NamedTuple):
    """How a source ran: the program, and columns of published_speeds.csv."""
    program: str
    image_size: int
    encoders: str
    precision: str
    encoder_precision: str | None
    half_precision_norms: bool
    use_ema: bool
    compile: bool


def work_of(point: pd.Series) -> StepWork:
    """Return the work of a step as a point's source ran it."""
    encoder_precision = point['encoder_precision'] if isinstance(point['encoder_precision'], str) else None
    program = point['by'].split(',')[0]  # MLPerf's submitters ran the same one
    return trace(Run(program, int(point['image_size']), point['encoders'], point['precision'], encoder_precision,
                     point['half_precision_norms'] == 'yes', point['use_ema'] == 'yes', point['compile'] != 'no'))


def layout_of(point: pd.Series) -> BatchSplit:
    """Return how a point's source split its batch over GPUs and microbatches."""
    devices = int(point['num_devices'])
    images = int(point['batch_size'] / devices)
    return BatchSplit(int(point['device_train_microbatch_size']), images, devices)


@cache
def trace(run: Run) -> StepWork:
    """Return the work of a step with its update. Runs that differ only in the update share a trace."""
    model, work = trace_without_update(run._replace(program='', use_ema=False))
    if not run.compile:
        return work._replace(update=their_update(model, run.program, run.use_ema))
    weights = sum(weight.numel() for weight in model.unet.parameters())
    return work._replace(update=work_by_kind([(OPTIMIZER, 0, 0, BYTES_OF_FUSED_ADAM * weights, 1)]))


@cache
def trace_without_update(run: Run) -> tuple[ComposerModel, StepWork]:
    """Trace a step without its update. Return the model, which has no memory, and the work.

    The sources ran eager steps in channels first and compiled steps in channels_last.
    """
    # Use the most similar setup of this repository.
    precision = 'amp_fp16' if run.precision == 'fp16' else run.precision
    setup = Setup(image_size=run.image_size, precision=precision, encoder_precision=run.encoder_precision,
                  channels_last=run.compile, half_precision_norms=run.half_precision_norms).with_defaults()
    outline = build_on_meta(settings_of_setup(setup), build_model)

    # Change the model where this repository has no such flag.
    if run.encoders == 'none':
        outline.vae = None
        take_text_as_encoded(outline)
    if run.precision == 'fp16':
        # Autocast then casts neither weights nor gradients. The `to` of diffusers would print a warning.
        torch.nn.Module.to(outline.unet, AUTOCAST_DTYPES[precision])

    _, work = trace_step(outline, precision)
    if run.compile:
        work = compiled_work(work, setup)
    return outline, work


def take_text_as_encoded(model: ComposerModel) -> None:
    """Replace a model's text encoder by stored text states, which cost nothing."""
    width = model.text_encoder.config.hidden_size
    model.text_states = lambda caption: torch.empty(len(caption), CAPTION_LENGTH, width)


def their_update(model: ComposerModel, program: str, use_ema: bool) -> Work:
    """Return the work of AdamW as the source's program ran it, and of Composer's EMA if the source used it."""
    if program == SHARDED_OPTIMIZER:
        return {}
    optimizer = torch.optim.AdamW(model.unet.parameters(), foreach=program != LOOPED_OPTIMIZER)
    work = work_of_update(OPTIMIZER, optimizer.step)
    return work | composers_ema(model) if use_ema else work


@cache
def composers_ema(model: ComposerModel) -> Work:
    """Return the work of Composer's EMA, which averaged the frozen encoders, too."""
    # An EMA of the model with itself takes the same work.
    return work_of_update(EMA_UPDATE, lambda: composers_compute_ema(model, model, 0.999))
