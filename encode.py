"""Encode images once, so that the VAE, which computes the same in each epoch, is not in the training.

    python encode.py --remote s3://my-bucket/photos --out s3://my-bucket/photos-512 --model_name FOLDER --pretrained
    composer benchmark.py --remote s3://my-bucket/photos-512 --use_ema --model_name FOLDER --pretrained

Each image shard becomes shards of its own, with the mean and the log variance of each image's latents (float16, so that
training draws another latent each time) and the caption. Every GPU of this machine works, or with --ray every GPU of a
Ray cluster. What cannot be encoded is left out and listed in OUT/skipped.jsonl. A run that was stopped, when started
again with the same command, encodes only what is missing. OUT/index.json comes last. How fast GPUs would encode is said
by the --dry_run of the training.
"""
from sdbench.flags.commands import Encode
from sdbench.flags.parser import answer_early, parse
from sdbench.process import begin, one_line_errors

PROGRAM = 'encode.py'

if __name__ == '__main__':
    answer_early(Encode, __doc__)

import dataclasses
import os
import sys
from functools import partial

import torch

from sdbench.complete import complete_encoding
from sdbench.datasets.encoder import ImageShard, encode_parts
from sdbench.datasets.output import SKIPPED, Output, done_already, join_parts, part_name, write_index
from sdbench.datasets.workers import LocalWorkers, Part, RayWorkers, make_parts
from sdbench.errors import DataError, plural, redacted
from sdbench.flags.training_command import training_command
from sdbench.inputs.captions import CAPTIONS
from sdbench.inputs.shards import DRAW, HELD_OUT_SIDE, IMAGES_HASH, index_hash, number_of_samples, read_image_index
from sdbench.models.flops import flops_of_latents
from sdbench.models.loading import find_model
from sdbench.records.figures import ENCODING_LINES, summary_lines
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, why_unreliable

SHARDS_AT_ONCE = 8  # that a worker is given, so that it can fetch and decode ahead
ON_RAY_AT_ONCE = 32  # on a cluster, where each call starts a process for its GPU


def main(argv: list[str] | None = None) -> dict | None:
    """Encode, and return the record, or None if an earlier run has done all."""
    begin()
    settings = parse(Encode, __doc__, argv, PROGRAM)
    stays = f'what is encoded stays in --out {settings.out}, and the same command, started again, goes on from there'
    with one_line_errors(PROGRAM, stays):
        return encode(complete_encoding(settings))


def encode(settings: Encode) -> dict | None:
    """Encode what is missing, make a dataset of it, and return the record, or None if nothing was missing."""
    # find the images and the VAE, on which the parts depend
    output = Output(settings.out, '--out')
    files = find_model(settings.model_name, settings.pretrained)
    origin = files.origin_of_latents(settings.image_size)
    index = read_image_index(settings.remote)
    facts = {'encoder_precision': settings.encoder_precision, **origin}
    if not settings.pretrained:
        facts |= {'model_name': absolute_if_folder(settings.model_name), 'seed': settings.seed}  # of random weights
        print(f'{PROGRAM}: warning: without --pretrained the VAE is random, so that no model can draw from these '
              'latents; give --model_name FOLDER --pretrained', file=sys.stderr)
    parts = []
    first = 0  # sample of a shard
    for entry in index['shards']:
        parts.append(Part(part_name(facts, entry), [ImageShard(entry, first, CAPTIONS in index)], entry['samples']))
        first += entry['samples']

    with output.begun({'program': PROGRAM, **facts}, [settings.remote]):
        # encode the parts that are missing
        done = output.parts()
        missing = [part for part in parts if not done.get(part.name)]
        if missing:
            figures, devices = encode_missing(settings, output, parts, missing)

        # make a dataset of all parts
        joined = join_parts(output, [part.name for part in parts])
        if joined.samples == 0:
            raise DataError(f'not one image could be encoded; {settings.out}/{SKIPPED} says why')
        about = {fact: index[fact] for fact in (DRAW, CAPTIONS) if fact in index}  # sides and captions of the images
        write_index(output, joined, latents=origin | {IMAGES_HASH: index_hash(index)}, **about)

    # say what was made, and how to go on
    notes = {}
    if joined.skipped:
        notes['skipped'] = joined.skipped_line(settings.out)
    if index.get(DRAW, {}).get('side') == HELD_OUT_SIDE:
        notes['next'] = f'--eval_remote {settings.out} of a training on the latents of the other samples'
    else:
        size = ['--image_size', str(settings.image_size)]
        notes['next'] = training_command(settings.out, joined.samples, settings.model_name, settings.pretrained, size)
    if not missing:
        print(done_already(output, joined, '--remote'), *summary_lines(ENCODING_LINES, notes), sep='\n')
        return None

    # keep the record
    found = {
        'tflops_per_image': flops_of_latents(files.configs['vae'], settings.image_size) / 1e12,
        'samples': sum(joined.samples_of[part.name] for part in missing),  # of this run
        'stored_samples': joined.samples,  # of all runs that have made OUT
        'bytes_per_image': joined.bytes / joined.samples,
        'bad_samples': number_of_samples(index) - joined.samples,
    }
    record = make_record('encode', settings, figures_of_speed(figures, devices) | found)
    notes['encoded'], notes['stored'] = (plural(record[key], 'image') for key in ('samples', 'stored_samples'))
    if why_unreliable(record):
        notes['caution'] = f'{why_unreliable(record)} of a device, too few to rely on its images/s'
    summary = '\n'.join(summary_lines(ENCODING_LINES, record | notes))
    return append_record(record, summary, settings.results_file)


def figures_of_speed(figures: list[dict], devices: int) -> dict:
    """Return for the record how fast all devices together have encoded, from the figures of each process."""
    of_one = sum(worker['measured'] for worker in figures) / sum(worker['seconds'] for worker in figures)
    speed = {
        'status': COMPLETE,
        'num_devices': devices,
        'num_nodes': len({worker['machine'] for worker in figures}),
        'images_per_sec': of_one * devices,
        'measured_batches': sum(worker['measured_batches'] for worker in figures) // devices,
    }
    if figures[0]['device']:
        speed |= {'device': figures[0]['device'], 'device_type': 'cuda'}
    return speed


def absolute_if_folder(name: str | None) -> str | None:
    """Return the path by which any process finds a folder, or another name as it is."""
    return os.path.abspath(name) if name and os.path.isdir(name) else name


def encode_missing(settings: Encode, output: Output, parts: list[Part], missing: list[Part]) -> tuple[list[dict], int]:
    """Have the missing parts encoded: by a process for each GPU, by one on the CPU, or by a Ray cluster.

    Returns the figures of each process, and how many devices have worked at once.
    """
    # the call, with names that any process finds
    to_do = sum(part.size for part in missing)
    print(f'encoding {plural(to_do, "image")} of {redacted(settings.remote)}', file=sys.stderr, flush=True)
    names = {flag: absolute_if_folder(getattr(settings, flag)) for flag in ('remote', 'local', 'model_name')}
    on_gpus = not settings.cpu if settings.ray else torch.cuda.is_available()
    do = partial(encode_parts, dataclasses.replace(settings, **names), output, on_gpus)

    # the workers
    if settings.ray:
        at_once = ON_RAY_AT_ONCE
        workers = RayWorkers(do, settings.ray, on_gpus)
    else:
        at_once = SHARDS_AT_ONCE
        number = min(max(1, torch.cuda.device_count()), len(missing))
        workers = LocalWorkers(do, number, torch.cuda.set_device if on_gpus else None)

    # their work, and how fast each was
    with workers:
        answers = make_parts(workers, parts, missing, output.is_done, ' images', at_once)
        slots = workers.slots()
    figures = {answer['name']: answer for answer in answers}  # the last of each process
    return list(figures.values()), min(len(figures), slots)  # a successor of a process is on the same device


if __name__ == '__main__':
    main()
