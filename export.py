"""Turn a checkpoint into a pipeline folder of diffusers, to draw with or to train further.

    python export.py checkpoints my-model               # the newest of a folder
    python export.py s3://my-bucket/run1 my-model       # of an object store
    python export.py checkpoints/ep0-ba1000-rank0.pt my-model --live

OUT holds the UNet with its averaged weights where there are any, the VAE, the text encoder, the tokenizer and the
scheduler, all in float32. `diffusers.StableDiffusionPipeline.from_pretrained(OUT)` draws from it.
"""
from sdbench.flags.commands import Export
from sdbench.flags.parser import answer_early, parse
from sdbench.flags.times import is_young
from sdbench.process import begin, one_line_errors

PROGRAM = 'export.py'

if __name__ == '__main__':
    answer_early(Export, __doc__)

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator

from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from sdbench.errors import plural
from sdbench.training.weights import TrainedModel, read_trained_model, trained_pipeline


@contextlib.contextmanager
def new_folder(out: str) -> Iterator[str]:
    """Give a folder that becomes OUT at the end of the context, so that OUT is whole or not there."""
    parent = os.path.dirname(os.path.abspath(out))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix='.export-') as around:
        folder = os.path.join(around, 'pipeline')
        yield folder
        os.rename(folder, out)


def warn_of_random_parts(settings: Export, trained: TrainedModel) -> None:
    """Say where the pipeline has a VAE that cannot decode, or a text encoder that knows no words."""
    if trained.vae is None and not settings.pretrained:
        print(f'warning: {settings.checkpoint} has no VAE, because it was trained on latents, and the random one in '
              'its place cannot decode; give --model_name FOLDER --pretrained for the one that encoded',
              file=sys.stderr)
    elif trained.flags and not trained.flags.get('pretrained'):  # the checkpoint of a program of one's own has no flags
        random = 'its text encoder is' if trained.vae is None else 'its VAE and its text encoder are'
        print(f'warning: {settings.checkpoint} was trained without --pretrained, so that {random} random, and pictures '
              'will be noise', file=sys.stderr)


def warn_of_young_average(settings: Export, trained: TrainedModel) -> None:
    """Say where the average is still near the weights that the training started from."""
    half_life = trained.flags.get('ema_half_life')
    if trained.averaged is None or settings.live or not trained.batch:
        return
    if is_young(half_life, trained.batch):
        print('warning: the average is still near the weights that the training started from, since '
              f'--ema_half_life was {half_life}, and the checkpoint is of batch {trained.batch:,}; --live exports the '
              'live weights', file=sys.stderr)


def pipeline_summary(settings: Export, trained: TrainedModel) -> str:
    """Say what was written, how to draw from it, and how to score what it draws."""
    weights = 'averaged'
    if settings.live:
        weights = 'live'
    elif trained.averaged is None:
        weights = 'live (there is no average)'
    age = f' after {plural(trained.batch, "batch", "batches")}' if trained.batch is not None else ''
    pictures = shlex.quote(f'{settings.out}-pictures')
    return (f'{settings.out} holds the pipeline{age}, with the {weights} weights\n'
            f"draw: StableDiffusionPipeline.from_pretrained('{settings.out}')('a photo of a cat').images[0]\n"
            f'score: python evaluate.py {shlex.quote(settings.out)} DATA --out {pictures} '
            '--inception inception.pth --clip clip')


def export(settings: Export) -> None:
    """Write OUT."""
    # the parts of the pipeline
    disable_progress_bar()  # of transformers 5, for a part that is written in a moment
    print(f'reading {settings.checkpoint}', file=sys.stderr, flush=True)
    trained = read_trained_model(settings.checkpoint, 'CHECKPOINT')
    pipeline = trained_pipeline(trained, f'CHECKPOINT {settings.checkpoint}', settings.model_name, settings.tokenizer,
                                settings.pretrained, settings.live)
    warn_of_random_parts(settings, trained)

    # their folder
    with new_folder(settings.out) as folder:
        try:
            pipeline.save_pretrained(folder)
        except SafetensorError as error:  # as it says of a full disk
            raise OSError(f'OUT {settings.out} could not be written: {error}') from None

    # what it is, and what comes next
    warn_of_young_average(settings, trained)
    print(pipeline_summary(settings, trained))


def main(argv: list[str] | None = None) -> None:
    """Export a checkpoint."""
    begin()
    settings = parse(Export, __doc__, argv, PROGRAM)
    with one_line_errors(PROGRAM, f'OUT {settings.out} is whole or not there'):
        export(settings)


if __name__ == '__main__':
    main()
