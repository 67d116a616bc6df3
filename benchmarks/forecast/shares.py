"""Count compiled steps, and print what is left of the eager ones: the shares of sdbench/forecast/compiling.py.

    python -m benchmarks.forecast.shares [WORDS ...]     # those whose names have all of these; a minute or two each

Of each step the shares are printed, and in percent how far a step is off that is forecast by the shares in the code: in
images/s of 8 H100 on latents and in memory, at a microbatch of 4 and of 64, and in images encoded a second.
"""
import itertools
import sys
import tempfile
from functools import cache
from pathlib import Path

import pandas as pd

from benchmark import build_model
from benchmarks.forecast.compiled import trace_compiled_step
from benchmarks.variant import write_variant
from sdbench.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import SD2_BASE, TINY_MODEL, Train
from sdbench.forecast.compiling import BLOCKS, ENCODER, KEPT, NORMS_IN_FLOAT32, WHOLE, compiled
from sdbench.forecast.count import CASTS, CONVOLUTIONS, FUSED, NORMS, POINTWISE, StepMemory
from sdbench.forecast.speed import COMPILED, NOTHING, BatchSplit, StepWork, images_per_sec
from sdbench.forecast.trace import build_on_meta, lasting_bytes, trace_step
from sdbench.gpus import CARDS

CARD = CARDS['NVIDIA H100 80GB HBM3']
FUSED_KINDS = (NORMS, CASTS, POINTWISE, FUSED)
# UNets of other shapes, by what they have otherwise than that of Stable Diffusion 2
SHAPES = {'sd1.5': {'attention_head_dim': 8, 'cross_attention_dim': 768, 'use_linear_projection': False},
          'half as wide': {'block_out_channels': [160, 320, 640, 640]}}
TEXT_ENCODERS = {'sd1.5': {'hidden_size': 768, 'intermediate_size': 3072, 'num_hidden_layers': 12,
                           'num_attention_heads': 12, 'hidden_act': 'quick_gelu', 'projection_dim': 768}}
MODELS = [('sd2', 512), ('sd2', 256), ('sd1.5', 512), ('half as wide', 512), (TINY_MODEL, 64)]


def shape(name: str, folder: Path) -> str:
    """Return the --model_name of a model; one of another shape is written to a folder."""
    if name not in SHAPES:
        return {'sd2': SD2_BASE}.get(name, name)
    path = folder / name
    if not path.exists():
        write_variant(SD2_BASE, path, {'unet': SHAPES[name], 'text_encoder': TEXT_ENCODERS.get(name, {})})
    return str(path)


def settings_of(model_name: str, image_size: int, *flags: str) -> Train:
    """Return the settings of a run on latents, with norms in half precision unless `flags` say else."""
    argv = ['--dry_run', '8', '--use_synth_latents', '--channels_last', '--half_precision_norms', '--use_ema',
            '--model_name', model_name, '--image_size', str(image_size), *flags]
    return complete(parse(Train, '', argv, 'benchmark.py'), None)


@cache
def count_eager(model_name: str, image_size: int) -> tuple[StepMemory, StepWork, dict[str, int]]:
    """Return memory and work of an eager step, and the bytes that last from step to step."""
    settings = settings_of(model_name, image_size)
    model = build_on_meta(settings, build_model)
    return *trace_step(model, settings.precision), lasting_bytes(settings, model)


def count_compiled(settings: Train) -> tuple[StepMemory, StepWork]:
    """Return memory and work of a compiled step."""
    return trace_compiled_step(build_on_meta(settings, build_model), settings)


def shares_of(eager: StepWork, counted: StepWork, part: str) -> dict[str, float]:
    """Return compiled over eager, of bytes for each image and of kernels, by kind, of a part of the work."""
    row = {}
    for name, kinds in ((CONVOLUTIONS, (CONVOLUTIONS,)), ('fused', FUSED_KINDS)):
        before, after = (getattr(work, part) for work in (eager, counted))
        share = after[after.index.isin(kinds)].sum() / before[before.index.isin(kinds)].sum()
        row[f'{part} {name} bytes'] = share['image_bytes']
        row[f'{part} {name} kernels'] = share['kernels']
    return row


def kept(memory: StepMemory) -> int:
    """Return the bytes of an image that are kept for the backward pass."""
    return memory.peak(1000, accumulated=True)['activations'] // 1000


def figures_of(memory: StepMemory, work: StepWork, lasting: dict[str, int]) -> pd.Series:
    """Return images/s of 8 GPUs on latents and bytes, each by microbatch, and how many images are encoded a second."""
    figures = {}
    for microbatch in (4, 64):
        split = BatchSplit(microbatch, 256, 8)
        figures[f'images/s at {microbatch}'] = images_per_sec(CARD, work._replace(encoder=NOTHING), split, COMPILED)
        figures[f'memory at {microbatch}'] = sum((lasting | memory.peak(microbatch, True, latents=True)).values())
    figures['encoding'] = images_per_sec(CARD, StepWork(work.encoder), BatchSplit(32, 32), COMPILED)
    return pd.Series(figures)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for (name, size), blocks, norms in itertools.product(
                MODELS, ('--compile_blocks', '--no-compile_blocks'),
                ('--half_precision_norms', '--no-half_precision_norms')):
            title = f'{name} {size} {blocks} {norms}'
            if not all(word in title for word in sys.argv[1:]):
                continue
            settings = settings_of(shape(name, Path(folder)), size, '--compile', blocks, norms)
            *eager, lasting = count_eager(settings.model_name, size)
            counted = count_compiled(settings)

            row = {'step': title, 'kept': kept(counted[0]) / kept(eager[0])}
            for part in ('model', 'encoder'):
                row |= shares_of(eager[1], counted[1], part)
            errors = figures_of(*compiled(*eager, settings), lasting) / figures_of(*counted, lasting) - 1
            row |= (100 * errors).to_dict()
            rows.append(row)
            print(pd.Series(row).to_string(float_format='{:.3f}'.format), end='\n\n', flush=True)
    print(pd.DataFrame(rows).set_index('step').T.to_string(float_format='{:.3f}'.format))
    print(f'in the code: whole {WHOLE}, blocks {BLOCKS}, encoder {ENCODER}, norms in float32 {NORMS_IN_FLOAT32}, '
          f'kept {KEPT}')


if __name__ == '__main__':
    main()
