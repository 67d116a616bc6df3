"""Turn a checkpoint into a pipeline folder of diffusers, or into one file for AUTOMATIC1111 and ComfyUI.

    python export.py checkpoints my-model               # the newest checkpoint in a folder
    python export.py s3://my-bucket/run1 my-model       # the newest checkpoint in an object store
    python export.py checkpoints/ep0-ba1000-rank0.pt my-model --raw_weights
    python export.py checkpoints my-model.safetensors --single_file

OUT holds the UNet with its EMA weights if there are any, the VAE, the text encoder, the tokenizer and the scheduler,
all in float32. `diffusers.StableDiffusionPipeline.from_pretrained(OUT)` loads it. If OUT already holds the export of
another checkpoint, that folder is first renamed to OUT-1. With --single_file OUT is a new file, which holds the
weights alone.
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
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

from sdbench.errors import plural, redacted
from sdbench.files import EXPORTED
from sdbench.models.loading import RANDOM, hash_of_weights
from sdbench.models.single_file import original_tensors
from sdbench.training.weights import about_training, read_exported, read_trained_model, trained_pipeline


def export(settings: Export) -> None:
    """Write OUT, unless it already holds the same weights."""
    # Make a pipeline of the checkpoint.
    disable_progress_bar()  # transformers 5 would show one for a second
    print(f'reading {settings.checkpoint}', file=sys.stderr, flush=True)
    trained = read_trained_model(settings.checkpoint, 'CHECKPOINT')
    pipeline = trained_pipeline(trained, f'CHECKPOINT {settings.checkpoint}', settings.model_name, settings.tokenizer,
                                settings.raw_weights)
    if trained.facts.get('vae_sha256') == RANDOM:
        print(f'warning: {settings.checkpoint} was trained without --pretrained, so its VAE and its text encoder have '
              'random weights, and generated images will be noise', file=sys.stderr)

    # Write OUT with a description of its origin, unless it has the same weights already, from whichever file.
    made_of = {'program': PROGRAM, 'checkpoint': redacted(settings.checkpoint),
               **about_training(trained, settings.raw_weights),
               'model_sha256': hash_of_weights(pipeline.unet, pipeline.vae, pipeline.text_encoder)}
    if read_exported(settings.out).get('model_sha256') == made_of['model_sha256']:
        print(f'done already: OUT {settings.out} has the weights of this checkpoint')
    else:
        write(settings, pipeline, made_of)

    # Say how to use it.
    age = f' after {plural(trained.kept["batch"], "batch", "batches")}' if trained.kept['batch'] is not None else ''
    print(f'{settings.out} holds the pipeline{age}, with the {made_of["weights"]} weights')
    if settings.single_file:
        print('generate images: copy it to models/Stable-diffusion of AUTOMATIC1111 or models/checkpoints of ComfyUI')
        if pipeline.scheduler.config.prediction_type == 'v_prediction':
            print('prediction type: v_prediction, which is not in the file; if all images are noise, set it, '
                  'in ComfyUI with the node ModelSamplingDiscrete')
        if pipeline.scheduler.config.rescale_betas_zero_snr:
            print('noise schedule: rescaled to zero terminal SNR, which is not in the file; set it, in ComfyUI with '
                  'zsnr of the node ModelSamplingDiscrete')
    else:
        print('generate images: '
              f"StableDiffusionPipeline.from_pretrained('{settings.out}')('a photo of a cat').images[0]\n"
              'score it: evaluate.py, see docs/evaluating.md')


def write(settings: Export, pipeline: StableDiffusionPipeline, made_of: dict) -> None:
    """Write a pipeline to OUT, which appears only when it is complete. An earlier export in OUT is moved to OUT-1.

    `made_of` becomes OUT/export.json, or an entry of the same name in the metadata of a single file.

    Raises UserError if a single file cannot hold the model.
    """
    out = settings.out
    parent = os.path.dirname(os.path.abspath(out))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix='.export-') as around:
        # Write everything into a temporary folder next to OUT.
        about = json.dumps(made_of)
        if settings.single_file:
            new = Path(around, 'single.safetensors')
            tensors = original_tensors(pipeline, f'CHECKPOINT {settings.checkpoint}')
            save_file(tensors, new, metadata={'format': 'pt', EXPORTED: about})
        else:
            new = Path(around, 'pipeline')
            pipeline.save_pretrained(new)
            (new / EXPORTED).write_text(about)

        # Set permissions according to the umask: safetensors 0.8 makes its files readable for the owner only.
        usual = Path(around, 'usual')
        usual.touch()
        for path in Path(around).rglob('*.safetensors'):
            shutil.copymode(usual, path)

        # Move it to OUT. An earlier export is renamed and not removed, because the user may have changed it.
        if os.path.exists(out):
            names = (f'{out.rstrip("/")}-{number}' for number in itertools.count(1))
            kept = next(name for name in names if not os.path.lexists(name))
            os.rename(out, kept)
            print(f'OUT {out} held the export of another checkpoint, which is in {kept} now')
        os.rename(new, out)


def main(argv: list[str] | None = None) -> None:
    begin()
    settings = parse(Export, __doc__, argv, PROGRAM)
    with one_line_errors(PROGRAM, f'OUT {settings.out} is complete or does not exist'):
        export(settings)


if __name__ == '__main__':
    main()
