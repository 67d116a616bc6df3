"""Turn a checkpoint into a pipeline folder of diffusers, to draw with or to train further.

    python export.py checkpoints my-model               # the newest of a folder
    python export.py s3://my-bucket/run1 my-model       # of an object store
    python export.py checkpoints/ep0-ba1000-rank0.pt my-model --live

OUT holds the UNet with its averaged weights where there are any, the VAE, the text encoder, the tokenizer and the
scheduler, all in float32. `diffusers.StableDiffusionPipeline.from_pretrained(OUT)` draws from it.
"""
from cli.early_checks import answer_early, refuse_early_export
from cli.options import export_parser

if __name__ == '__main__':
    answer_early(export_parser(__doc__), refuse_early_export)  # before the imports, which take seconds

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from cli.launcher import Stopped, signals_raise
from inputs.captions import pipeline_tokenizer
from inputs.errors import one_line
from models.loading import ModelFiles, build_vae, find_model
from models.sampling import build_pipeline
from models.trained import text_encoder_of, unet_of, vae_of
from training.checkpoints import load_checkpoint
from training.initial_weights import checkpoint_in, weights_of_checkpoint, with_prefix_removed
from training.own_files import folder_written_whole, remove_unfinished

PIXELS_PER_LATENT = 8  # along each side


@dataclass
class Trained:
    """What a checkpoint holds of the model: tensors by the names that they have in each part.

    Attributes:
        batch: how many batches it was trained for; None where it does not say.
        flags: of the run, such as model_name and image_size; empty if it was not one of benchmark.py.
        live: the weights of the UNet that the optimizer moves.
        averaged: those of the average; None where there is none.
        vae: None where the run trained on latents.
        text_encoder: as it was held in the run, perhaps in half precision.
    """
    batch: int | None
    flags: dict
    live: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor] | None
    vae: dict[str, torch.Tensor] | None
    text_encoder: dict[str, torch.Tensor]


def read_trained(path: str) -> Trained:
    """The model of the checkpoint at `path`. ValueError: it holds none.

    The file is mapped, not read: the optimizer's moments, most of it, never come into memory.
    """
    place = f'CHECKPOINT {path}'
    weights, average = weights_of_checkpoint(path, place)
    live = with_prefix_removed(weights, 'unet.')
    text_encoder = with_prefix_removed(weights, 'text_encoder.')
    if not live or not text_encoder:
        raise ValueError(f'{place} holds no UNet with a text encoder; give one of benchmark.py')
    averaged = None
    if average:
        averaged = live | with_prefix_removed(average['ema_model']['named_parameters_dict'], 'unet.')
    state = load_checkpoint(path, mmap=True)['state']
    batch = state.get('timestamp', {}).get('Timestamp', {}).get('batch')
    return Trained(batch, flags_of(state), live, averaged, with_prefix_removed(weights, 'vae.') or None, text_encoder)


def flags_of(state: dict) -> dict:
    """The flags that the run kept in its checkpoint; empty if it kept none."""
    for callback in dict(state.get('callbacks', ())).values():
        if 'flags' in callback:
            return callback['flags']
    return {}


def find_files(args: argparse.Namespace, trained: Trained) -> ModelFiles:
    """The files of the model that was trained. ValueError: they cannot be had."""
    name = args.model_name or trained.flags.get('model_name')
    if name is None:
        raise ValueError(f'CHECKPOINT {args.checkpoint} does not say what model it is of; give --model_name')
    needs_vae = args.pretrained and trained.vae is None
    return find_model(name, needs_vae)


def trained_pipeline(args: argparse.Namespace, trained: Trained) -> StableDiffusionPipeline:
    """The pipeline, on the CPU. ValueError: the checkpoint does not fit --model_name, or a part cannot be had."""
    files = find_files(args, trained)
    tokenizer = pipeline_tokenizer(args.tokenizer or trained.flags.get('tokenizer'))
    unet_weights = trained.live
    if trained.averaged is not None and not args.live:
        unet_weights = trained.averaged
    sample_size = trained.flags.get('image_size', 0) // PIXELS_PER_LATENT
    try:
        unet = unet_of(files, unet_weights, sample_size)
        vae = build_decoder(args, files, trained)
        text_encoder = text_encoder_of(files, trained.text_encoder)
    except RuntimeError as error:
        raise ValueError(f'--model_name {files.name} is not the model of {args.checkpoint} ({one_line(error)[:200]}); '
                         'give the one that was trained') from None
    return build_pipeline(unet, vae, files.configs['scheduler'], text_encoder, tokenizer)


def build_decoder(args: argparse.Namespace, files: ModelFiles, trained: Trained) -> AutoencoderKL:
    """The VAE of the checkpoint, or else that of --model_name, which is random without --pretrained."""
    if trained.vae is not None:
        return vae_of(files, trained.vae)
    if not args.pretrained:
        print(f'export.py: warning: {args.checkpoint} has no VAE, because it was trained on latents, and the random '
              'one in its place cannot decode; give --model_name FOLDER --pretrained for the one that encoded',
              file=sys.stderr)
    return build_vae(files, 'fp32')


@contextlib.contextmanager
def new_folder(out: str) -> Iterator[str]:
    """A folder beside OUT that takes its name at the end, so that OUT is whole or not there. ValueError: it is there.

    What killed exports left beside OUT is removed.
    """
    out = os.path.abspath(out)
    if os.path.lexists(out):
        raise ValueError(f'OUT {out} already exists; give a new folder')
    remove_unfinished(os.path.dirname(out))
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(folder_written_whole(out))
        except OSError as error:
            raise ValueError(f'OUT {out} cannot be made: {error.strerror}; name another') from None
        yield folder


def warn_of_young_average(args: argparse.Namespace, trained: Trained) -> None:
    """Say where the average is still near the weights that the training started from."""
    half_life = str(trained.flags.get('ema_half_life') or '')
    if trained.averaged is None or args.live or not trained.batch or not half_life.endswith('ba'):
        return
    if 4 * float(half_life.removesuffix('ba')) > trained.batch:
        print('export.py: warning: the average is still near the weights that the training started from, since '
              f'--ema_half_life was {half_life}, and the checkpoint is of batch {trained.batch:,}; --live exports the '
              'live weights', file=sys.stderr)


def summary(args: argparse.Namespace, trained: Trained) -> str:
    """What was written, and how to draw from it."""
    kind = 'averaged'
    if args.live:
        kind = 'live'
    elif trained.averaged is None:
        kind = 'live (there is no average)'
    age = f' after {trained.batch:,} batches' if trained.batch is not None else ''
    return (f'{args.out} holds the pipeline{age}, with the {kind} weights\n'
            f"draw: StableDiffusionPipeline.from_pretrained('{args.out}')('a photo of a cat').images[0]")


def export(args: argparse.Namespace) -> None:
    """Write OUT."""
    disable_progress_bar()  # of transformers 5, for a part that is written in a moment
    with new_folder(args.out) as folder, checkpoint_in(args.checkpoint, 'CHECKPOINT') as path:
        if path is None:
            raise ValueError(f'CHECKPOINT {args.checkpoint} holds no whole checkpoint; give one, or the --save_folder '
                             'of a run')
        trained = read_trained(path)
        trained_pipeline(args, trained).save_pretrained(folder)
    warn_of_young_average(args, trained)
    print(summary(args, trained))


def what_is_there(out: str) -> str:
    """Of OUT, where a signal has ended the export, in words."""
    if os.path.lexists(out):
        return f'OUT {out} is whole'
    return f'nothing is left of OUT {out}'


def main(argv: list[str] | None = None) -> None:
    """Export a checkpoint."""
    parser = export_parser(__doc__)
    args = parser.parse_args(argv)
    try:
        with signals_raise():
            refuse_early_export(args)
            export(args)
    except KeyboardInterrupt:
        parser.end(130, f'interrupted; {what_is_there(args.out)}')
    except Stopped:
        parser.end(143, f'ended by SIGTERM; {what_is_there(args.out)}')
    except ValueError as error:
        parser.error(one_line(error))
    except (OSError, SafetensorError) as error:
        parser.error(f'OUT {args.out} could not be written: {one_line(error)}')


if __name__ == '__main__':
    main()
