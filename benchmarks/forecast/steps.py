"""The work of the steps whose speed was published, each traced as its source ran it."""
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pandas as pd
import torch
from composer import ComposerModel
from composer.algorithms.ema.ema import compute_ema as composers_compute_ema

from benchmark import build_model
from sdbench.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.forecast.compiling import compiled
from sdbench.forecast.count import EMA_UPDATE, OPTIMIZER
from sdbench.forecast.speed import BatchSplit, StepWork, Work
from sdbench.forecast.trace import build_on_meta, trace_step, work_by_kind, work_of_update
from sdbench.inputs.tokenizer import CAPTION_LENGTH
from sdbench.models.loading import AUTOCAST_DTYPES

LOOPED_OPTIMIZER = 'mosaicml/diffusion-benchmark'  # torch 1 updated each weight by kernels of its own
# FSDP: each GPU updates a share of the weights, too little to count. What it exchanges is counted as that of DDP.
SHARDED_OPTIMIZER = 'mosaicml/diffusion'
# What MLPerf's fused Adam moves for a weight: it reads a gradient in half precision and float32 copies of the weight
# and two moments, and writes those three and the weight in half precision
BYTES_OF_FUSED_ADAM = 2 + 3 * 4 + 3 * 4 + 2


class Run(NamedTuple):
    """What a source says of how it ran: the program, and the columns of published_speeds.csv."""
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
    program = point['by'].split(',')[0]  # MLPerf's submitters ran one
    return trace(Run(program, int(point['image_size']), point['encoders'], point['precision'], encoder_precision,
                     point['half_precision_norms'] == 'yes', point['use_ema'] == 'yes', point['compile'] != 'no'))


def layout_of(point: pd.Series) -> BatchSplit:
    """Return how a point's source spread its batch."""
    devices = int(point['num_devices'])
    images = int(point['batch_size'] / devices)
    return BatchSplit(int(point['device_train_microbatch_size']), images, devices)


@cache
def trace(run: Run) -> StepWork:
    """Trace a step, with its update."""
    # runs that differ in their update alone share all else
    model, work = trace_without_update(run._replace(program='', use_ema=False))
    if not run.compile:
        return work._replace(update=their_update(model, run.program, run.use_ema))
    weights = sum(weight.numel() for weight in model.unet.parameters())
    return work._replace(update=work_by_kind([(OPTIMIZER, 0, 0, BYTES_OF_FUSED_ADAM * weights, 1)]))


@cache
def trace_without_update(run: Run) -> tuple[ComposerModel, StepWork]:
    """Trace a step: eager ones had their images in channels first, compiled ones in channels_last."""
    # the flags of this repository that are nearest
    precision = 'amp_fp16' if run.precision == 'fp16' else run.precision
    argv = ['--dry_run', '1', '--image_size', str(run.image_size), '--precision', precision]
    argv.append('--channels_last' if run.compile else '--no-channels_last')
    if run.encoder_precision:
        argv += ['--encoder_precision', run.encoder_precision]
    if run.half_precision_norms:
        argv.append('--half_precision_norms')
    settings = complete(parse(Train, '', argv, 'benchmark.py'), None)
    outline = build_on_meta(settings, build_model)

    # what no flag has
    if run.encoders == 'none':
        outline.vae = None
        take_text_as_encoded(outline)
    if run.precision == 'fp16':
        # autocast then casts neither the weights nor their gradients; diffusers' own `to` warns
        torch.nn.Module.to(outline.unet, AUTOCAST_DTYPES[precision])

    memory, work = trace_step(outline, precision)
    if run.compile:
        _, work = compiled(memory, work, replace(settings, compile=True, compile_blocks=False))
    return outline, work


def take_text_as_encoded(model: ComposerModel) -> None:
    """Let a model take the states of its text encoder from somewhere, at no cost."""
    width = model.text_encoder.config.hidden_size
    model.text_states = lambda caption: torch.empty(len(caption), CAPTION_LENGTH, width)


def their_update(model: ComposerModel, program: str, use_ema: bool) -> Work:
    """Return the work of AdamW of the time, and of Composer's average."""
    if program == SHARDED_OPTIMIZER:
        return {}
    optimizer = torch.optim.AdamW(model.unet.parameters(), foreach=program != LOOPED_OPTIMIZER)
    work = work_of_update({OPTIMIZER: optimizer.step})
    return work | their_average(model) if use_ema else work


@cache
def their_average(model: ComposerModel) -> Work:
    """Return the work of Composer's average, which took the frozen encoders along."""
    return work_of_update({EMA_UPDATE: lambda: composers_compute_ema(model, model, 0.999)})  # of itself: the same work
