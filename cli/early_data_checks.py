"""What is wrong with a command line of any command but benchmark.py and shows without torch."""
import argparse
import glob
import json
import os
from pathlib import Path

from cli.early_checks import is_read_from_local, refuse_bad_image_size, refuse_missing_source, samples_in
from cli.folders import (
    folder_error,
    is_finished_dataset,
    names_in,
    refuse_bad_results,
    refuse_empty,
    refuse_missing_dataset,
    refuse_occupied_folder,
    refuse_unusable_folder,
)
from inputs.errors import one_line
from inputs.hub import CLIP_MODEL, INCEPTION_WEIGHTS, refuse_impossible_model
from inputs.places import is_address, refuse_mistyped_address
from inputs.text_files import read_captions, refuse_too_few
from parts.names import held_out_beside
from training.checkpoint_files import checkpoints_among, no_checkpoint_error

PIPELINE_INDEX = 'model_index.json'  # of a pipeline folder of diffusers


def refuse_early_encoding(args: argparse.Namespace) -> None:
    """Raises ValueError, with the flag, its value and the remedy, for what encode.py can run on no machine."""
    if not (args.remote or args.local) or not args.out:
        raise ValueError('give both --remote and --out')
    refuse_bad_image_size(args)
    refuse_impossible_model(args.model_name, args.pretrained)
    refuse_missing_source(args)
    refuse_empty('--out', args.out)
    refuse_out_within_source(args)
    refuse_occupied_folder('--out', args.out, 'encode.py')
    refuse_bad_results(args.results)


def refuse_out_within_source(args: argparse.Namespace) -> None:
    """Raises ValueError if --out is a folder below that of the images, whoever made their dataset."""
    flag, source = ('--local', args.local) if is_read_from_local(args) else ('--remote', args.remote)
    if is_address(source) or is_address(args.out):
        return
    if Path(os.path.realpath(source)) in Path(os.path.realpath(args.out)).parents:
        raise ValueError(f'--out {args.out} lies in {flag} {source}; name a folder elsewhere')


def refuse_early_conversion(args: argparse.Namespace) -> None:
    """Raises ValueError if a SOURCE is not there, or OUT is something else than a folder that convert.py can begin or
    go on in.

    `parts` looks at both more closely, and at those in stores.
    """
    for source in args.source:
        refuse_mistyped_address('SOURCE', source)
        if not is_address(source) and not os.path.lexists(source) and not glob.glob(source, recursive=True):
            raise ValueError(f'SOURCE {source} does not exist; give a tar, a folder, or a glob that matches some')
        if is_finished_dataset(source):
            raise ValueError(f'SOURCE {source} holds shards already; train on it with benchmark.py --remote {source}')
    if not args.out.strip():
        raise ValueError('OUT is empty; give a new folder, or an address in a store')
    refuse_occupied_folder('OUT', args.out, 'convert.py')
    if args.held_out:
        refuse_occupied_folder('OUT', held_out_beside(args.out), 'convert.py')


def refuse_early_report(args: argparse.Namespace) -> None:
    """Raises ValueError if records are not there, a file to write is a folder or holds the records, or a picture's name
    says no format.
    """
    records = {os.path.realpath(path) for path in args.records}
    for flag, path, example in (('--csv', args.csv, 'table.csv'), ('--figure', args.figure, 'days.png'),
                                ('--quality', args.quality, 'quality.png')):
        if path is None:
            continue
        if os.path.realpath(path) in records:
            raise ValueError(f'{flag} {path} would overwrite the records; give another file')
        if os.path.isdir(path):
            raise folder_error(flag, path, example)
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise ValueError(f'{flag} {path} cannot be written: there is no folder {folder}; make it, or name another')
    for flag, path in (('--figure', args.figure), ('--quality', args.quality)):
        if path and not Path(path).suffix:
            raise ValueError(f'{flag} {path} has no ending that says its format; use {path}.png')
    for path in args.records:
        if os.path.isdir(path) or not os.path.exists(path):
            why_not = 'Is a directory' if os.path.isdir(path) else 'No such file or directory'
            raise ValueError(f'{path}: {why_not}; give files of JSON lines or CSV')


def refuse_early_export(args: argparse.Namespace) -> None:
    """Raises ValueError if the checkpoint is not there, or OUT is, or is no name of a folder."""
    refuse_empty('CHECKPOINT', args.checkpoint)
    refuse_empty('OUT', args.out)
    if is_address(args.out):
        raise ValueError(f'OUT {args.out} is an address; give a new folder of this machine')
    if '://' not in args.checkpoint and not os.path.exists(args.checkpoint):
        raise ValueError(f'CHECKPOINT {args.checkpoint} is not there; give one, or the --save_folder of a run')
    if os.path.lexists(args.out):
        raise ValueError(f'OUT {args.out} already exists; give a new folder')
    refuse_unusable_folder('OUT', args.out)
    if is_pipeline(args.checkpoint):
        raise ValueError(f'CHECKPOINT {args.checkpoint} is a pipeline already; give the --save_folder of a run')
    if is_finished_dataset(args.checkpoint):
        raise ValueError(f'CHECKPOINT {args.checkpoint} is a dataset; give the --save_folder of a run')
    if os.path.isdir(args.checkpoint) and not checkpoints_among(names_in('CHECKPOINT', args.checkpoint)):
        raise no_checkpoint_error(f'CHECKPOINT {args.checkpoint}')


def refuse_early_evaluation(args: argparse.Namespace) -> None:
    """Raises ValueError, with the flag, its value and the remedy, for what evaluate.py can run on no machine."""
    if not args.out:
        raise ValueError('give --out, a new folder for the features of the pictures')
    for flag in ('model', 'data', 'out', 'inception', 'clip', 'reference'):
        name = flag.upper() if flag in ('model', 'data') else f'--{flag}'
        refuse_empty(name, getattr(args, flag))
    refuse_occupied_folder('--out', args.out, 'evaluate.py')
    refuse_bad_model(args)
    refuse_missing_judges(args)
    refuse_missing_data(args)
    if args.image_size is not None:
        refuse_bad_image_size(args)
    refuse_bad_reference(args.reference, args.out)
    refuse_bad_results(args.results)
    refuse_results_among_inputs(args)


def refuse_bad_model(args: argparse.Namespace) -> None:
    """Raises ValueError if MODEL is not there, is another kind of pipeline, or cannot be what the flags say of it."""
    model = args.model
    if not is_address(model) and not os.path.exists(model):
        raise ValueError(f'MODEL {model} is not there; give a checkpoint, the --save_folder of a run, or a pipeline '
                         'folder')
    if not is_pipeline(model):
        if args.ray:
            raise ValueError(f'--ray {args.ray} needs a pipeline folder that all machines see, and MODEL {model} is '
                             'none; make one with export.py')
        if os.path.isdir(model) and not checkpoints_among(names_in('MODEL', model)):
            raise no_checkpoint_error(f'MODEL {model}', ' and no pipeline')
        return
    for flag in ('live', 'model_name', 'pretrained', 'tokenizer'):
        if getattr(args, flag):
            raise ValueError(f'--{flag} says something of a checkpoint, and MODEL {model} is a pipeline; leave it out')
    try:
        kind = json.loads(Path(model, PIPELINE_INDEX).read_text())['_class_name']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'MODEL {model} has a {PIPELINE_INDEX} that is none ({one_line(error)}); give a folder of '
                         'export.py') from None
    if kind != 'StableDiffusionPipeline':
        raise ValueError(f'MODEL {model} is a {kind}, not a StableDiffusionPipeline; give a folder of export.py')


def is_pipeline(model: str) -> bool:
    """Whether a folder holds a pipeline of diffusers."""
    return os.path.isfile(os.path.join(model, PIPELINE_INDEX))


def refuse_bad_reference(reference: str | None, out: str) -> None:
    """Raises ValueError if a --reference that is to be made has no folder, or lies in --out."""
    if not reference or os.path.exists(reference):
        return
    folder = os.path.dirname(os.path.abspath(reference))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f'--reference {reference} cannot be made, since {folder} is no folder to write to; make it, '
                         'or name another file')
    if not is_address(out) and Path(os.path.realpath(out)) in Path(os.path.realpath(reference)).parents:
        raise ValueError(f'--reference {reference} lies in --out {out}; name a file elsewhere, which other evaluations '
                         'can use as well')


def refuse_results_among_inputs(args: argparse.Namespace) -> None:
    """Raises ValueError if the record would be appended to a file that is read."""
    results = os.path.realpath(args.results)
    for name in (args.model, args.data, args.inception, args.reference):
        if name and os.path.realpath(name) == results:
            raise ValueError(f'--results {args.results} is a file that is read; name another')


def refuse_missing_judges(args: argparse.Namespace) -> None:
    """Raises ValueError if there is nothing to judge by, and says where to get it."""
    if not args.inception and not args.clip:
        raise ValueError('give --inception for FID, --clip for the CLIP score, or both')
    if args.inception and not os.path.isfile(args.inception):
        raise ValueError(f'--inception {args.inception} is no file; fetch {INCEPTION_WEIGHTS}')
    if args.clip and not os.path.isfile(os.path.join(args.clip, 'config.json')):
        raise ValueError(f'--clip {args.clip} is no folder with a model; fetch one: hf download {CLIP_MODEL} '
                         f'--local-dir {args.clip}')
    if args.reference and not args.inception:
        raise ValueError(f'--reference {args.reference} is for FID, which needs --inception; give both, or neither')


def refuse_missing_data(args: argparse.Namespace) -> None:
    """Raises ValueError if DATA is not there or has too few captions, or a text that nothing is compared with."""
    reference = args.reference
    if reference and is_address(reference):
        raise ValueError(f'--reference {reference} is an address; name a file of this machine')
    if reference and os.path.isdir(reference):
        raise folder_error('--reference', reference, 'reference.safetensors')
    if not os.path.isfile(args.data):
        refuse_missing_dataset('DATA', args.data)
        samples = samples_in(args.data)
        if samples is not None:
            refuse_too_few(args.data, samples, args.samples, 'sample')
        return
    if args.inception and not reference:
        raise ValueError(f'DATA {args.data} is a text, and FID compares with images; give --reference FILE, or shards '
                         'of images with captions')
    if args.inception and not os.path.exists(reference):
        raise ValueError(f'--reference {reference} is not there, and DATA {args.data} has no images to make it of; '
                         'make it with shards as DATA first')
    read_captions(args.data, args.samples)
