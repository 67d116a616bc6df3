"""Turn a checkpoint into a pipeline folder of diffusers, to draw with or to train further.

    python export.py checkpoints my-model               # the newest of a folder
    python export.py s3://my-bucket/run1 my-model       # of an object store
    python export.py checkpoints/ep0-ba1000-rank0.pt my-model --raw_weights

OUT holds the UNet with its EMA weights if there are any, the VAE, the text encoder, the tokenizer and the
scheduler, all in float32. `diffusers.StableDiffusionPipeline.from_pretrained(OUT)` draws from it. Where OUT is what
export.py has made of another checkpoint, that folder is kept under another name.
"""
from sdbench.flags.commands import Export
from sdbench.flags.parser import answer_early, parse
from sdbench.process import begin, one_line_errors

PROGRAM = 'export.py'

if __name__ == '__main__':
    answer_early(Export, __doc__)

import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from diffusers import StableDiffusionPipeline
from transformers.utils.logging import disable_progress_bar

from sdbench.errors import plural, redacted
from sdbench.models.loading import RANDOM, hash_of_weights
from sdbench.paths import EXPORTED
from sdbench.training.weights import about_training, read_exported, read_trained_model, trained_pipeline


def export(settings: Export) -> None:
    """Write OUT, unless it is there as it should be."""
    # The pipeline of the checkpoint.
    disable_progress_bar()  # of transformers 5, for a part that is written in a moment
    print(f'reading {settings.checkpoint}', file=sys.stderr, flush=True)
    trained = read_trained_model(settings.checkpoint, 'CHECKPOINT')
    pipeline = trained_pipeline(trained, f'CHECKPOINT {settings.checkpoint}', settings.model_name, settings.tokenizer,
                                settings.raw_weights)
    if trained.facts.get('vae_sha256') == RANDOM:
        print(f'warning: {settings.checkpoint} was trained without --pretrained, so that its VAE and its text encoder '
              'are random, and pictures will be noise', file=sys.stderr)

    # What it is made of. An OUT of the same weights is done already, whichever file they were read from.
    made_of = {'program': PROGRAM, 'checkpoint': redacted(settings.checkpoint),
               **about_training(trained, settings.raw_weights),
               'model_sha256': hash_of_weights(pipeline.unet, pipeline.vae, pipeline.text_encoder)}
    if read_exported(settings.out).get('model_sha256') == made_of['model_sha256']:
        print(f'done already: OUT {settings.out} has the weights of this checkpoint')
    else:
        write_folder(settings.out, pipeline, made_of)

    # What comes next.
    age = f' after {plural(trained.batch, "batch", "batches")}' if trained.batch is not None else ''
    print(f'{settings.out} holds the pipeline{age}, with the {made_of["weights"]} weights\n'
          f"draw: StableDiffusionPipeline.from_pretrained('{settings.out}')('a photo of a cat').images[0]\n"
          'score: by evaluate.py, see docs/evaluating.md')


def write_folder(out: str, pipeline: StableDiffusionPipeline, made_of: dict) -> None:
    """Write a pipeline to OUT, which is whole or not there. What export.py has written there before moves to OUT-1.

    Args:
        out: folder.
        pipeline: that is written.
        made_of: what OUT/export.json says of it.
    """
    parent = os.path.dirname(os.path.abspath(out))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix='.export-') as around:
        # all of it, beside its place
        folder = Path(around, 'pipeline')
        pipeline.save_pretrained(folder)
        (folder / EXPORTED).write_text(json.dumps(made_of))

        # readable by whom the umask says: safetensors 0.8 lets nobody but the owner read its files
        for path in folder.rglob('*.safetensors'):
            shutil.copymode(folder / EXPORTED, path)

        # its place, which an earlier one leaves: somebody may have changed that, or drawn with it
        if os.path.exists(out):
            names = (f'{out.rstrip("/")}-{number}' for number in itertools.count(1))
            kept = next(name for name in names if not os.path.lexists(name))
            os.rename(out, kept)
            print(f'what was in OUT {out} before, of another checkpoint, is in {kept} now')
        os.rename(folder, out)


def main(argv: list[str] | None = None) -> None:
    """Export a checkpoint."""
    begin()
    settings = parse(Export, __doc__, argv, PROGRAM)
    with one_line_errors(PROGRAM, f'OUT {settings.out} is whole or not there'):
        export(settings)


if __name__ == '__main__':
    main()
