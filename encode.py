"""Encode images with the VAE once, before training. Otherwise training repeats the same computation in each epoch.

    python encode.py --remote s3://my-bucket/photos --out s3://my-bucket/photos-512 --model_name FOLDER --pretrained
    composer benchmark.py --remote s3://my-bucket/photos-512 --use_ema --model_name FOLDER --pretrained

Each shard of images becomes one or more shards with the captions and, in float16, the mean and the log variance of each
image's latents. Training samples new latents from this distribution each time. encode.py uses all GPUs of this machine,
or with --ray all GPUs of a Ray cluster. Images that cannot be encoded are skipped and logged in OUT/skipped.jsonl. If a
run was stopped, start the same command again: it encodes only the missing shards. OUT/index.json is written last. To
forecast the speed of encoding on GPUs, use --dry_run of benchmark.py.
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
from sdbench.datasets.output import SKIPPED, OutputFolder, join_parts, part_name, write_index
from sdbench.datasets.workers import LocalWorkers, Part, RayWorkers, make_parts
from sdbench.errors import DataError, plural, redacted
from sdbench.flags.training_command import training_command
from sdbench.inputs.batches import CAPTIONS
from sdbench.inputs.shards import DRAW, HELD_OUT_SIDE, IMAGES_HASH, index_hash, number_of_samples, read_image_index
from sdbench.models.flops import flops_of_latents
from sdbench.models.loading import find_model
from sdbench.records.metrics import ENCODING_LINES, summary_lines
from sdbench.records.record import append_record, make_record
from sdbench.records.status import COMPLETE, UNMEASURED, why_unreliable

SHARDS_PER_CALL = 8  # several, because a worker fetches and decodes the next shards while it encodes
SHARDS_PER_RAY_CALL = 32  # more on a cluster, where each call starts a new process for its GPU


def main(argv: list[str] | None = None) -> dict | None:
    """Run the command. Return its record, or None if an earlier run has encoded everything."""
    begin()
    settings = parse(Encode, __doc__, argv, PROGRAM)
    how_to_continue = f'encoded shards are kept in --out {settings.out}; start the same command again to continue'
    with one_line_errors(PROGRAM, how_to_continue):
        return encode(complete_encoding(settings))


def encode(settings: Encode) -> dict | None:
    """Encode the missing shards, and make a dataset of all. Return the record, or None if no shard was missing."""
    # Describe the parts of the dataset. The name of a part is a hash of its shard and of all settings that change the
    # latents, so a part of that name in OUT never needs to be encoded again.
    output = OutputFolder(settings.out, '--out')
    files = find_model(settings.model_name, settings.pretrained)
    origin = files.origin_of_latents(settings.image_size)
    index = read_image_index(settings.remote)
    facts = {'encoder_precision': settings.encoder_precision, **origin}
    if not settings.pretrained:
        # Random weights depend on the configuration and the seed.
        facts |= {'model_name': absolute_if_folder(settings.model_name), 'seed': settings.seed}
        print(f'{PROGRAM}: warning: without --pretrained the VAE has random weights, and a model that trains on these '
              'latents cannot generate images; give --model_name FOLDER --pretrained', file=sys.stderr)
    parts = [Part(part_name(facts, entry), [ImageShard(entry, CAPTIONS in index)], entry['samples'])
             for entry in index['shards']]

    with output.begun({'program': PROGRAM, **facts}, [settings.remote]):
        # Encode the missing parts.
        done = output.parts()
        missing = [part for part in parts if not done.get(part.name)]
        if missing:
            speed = encode_missing(settings, output, parts, missing)

        # Join all parts into one dataset. Copy the names of captions, and whether it is held out, from the images.
        joined = join_parts(output, [part.name for part in parts])
        if joined.samples == 0:
            raise DataError(f'no image could be encoded; {settings.out}/{SKIPPED} gives the reasons')
        about = {fact: index[fact] for fact in (DRAW, CAPTIONS) if fact in index}
        write_index(output, joined, latents=origin | {IMAGES_HASH: index_hash(index)}, **about)

    # Suggest the next command: latents of held-out images are for an evaluation, other latents for training.
    notes = {}
    if joined.skipped:
        notes['skipped'] = joined.skipped_line(settings.out)
    if index.get(DRAW, {}).get('side') == HELD_OUT_SIDE:
        notes['next'] = f'--eval_remote {settings.out} of a training on the latents of the other samples'
    else:
        size = ['--image_size', str(settings.image_size)]
        notes['next'] = training_command(settings.out, joined.samples, settings.model_name, settings.pretrained, size)
    if not missing:
        print(f'done already: --out {settings.out} holds {plural(joined.samples, "sample")} of this --remote')
        print(*summary_lines(ENCODING_LINES, notes), sep='\n')
        return None

    # Append the record of this run to --results.
    counts = {
        'tflops_per_image': flops_of_latents(files.configs['vae'], settings.image_size) / 1e12,
        'samples': sum(joined.samples_of[part.name] for part in missing),  # in this run
        'stored_samples': joined.samples,  # in all runs for this OUT
        'bytes_per_image': joined.bytes / joined.samples,
        'bad_samples': number_of_samples(index) - joined.samples,
    }
    record = make_record('encode', settings, speed | counts)
    notes['encoded'], notes['stored'] = (plural(record[key], 'image') for key in ('samples', 'stored_samples'))
    if record['status'] == UNMEASURED:
        notes['why_no_speed'] = f'all images of this run were skipped, as {settings.out}/{SKIPPED} says'
    elif why_unreliable(record):
        notes['caution'] = f'{why_unreliable(record)} per device, too few to rely on images/s'
    summary = '\n'.join(summary_lines(ENCODING_LINES, record | notes))
    return append_record(record, summary, settings.results)


def absolute_if_folder(name: str | None) -> str | None:
    """Return the absolute path of a folder, which is valid in any process. Return any other name unchanged."""
    return os.path.abspath(name) if name and os.path.isdir(name) else name


def encode_missing(settings: Encode, output: OutputFolder, parts: list[Part], missing: list[Part]) -> dict:
    """Encode the missing parts: with one process per GPU, with one process on the CPU, or on a Ray cluster.

    Returns the record's keys about speed.
    """
    # Prepare the function that workers call. Relative paths become absolute, because workers run in other folders.
    to_do = sum(part.size for part in missing)
    print(f'encoding {plural(to_do, "image")} from {redacted(settings.remote)}', file=sys.stderr, flush=True)
    paths = {flag: absolute_if_folder(getattr(settings, flag)) for flag in ('remote', 'model_name')}
    on_gpus = not settings.cpu if settings.ray else torch.cuda.is_available()
    do = partial(encode_parts, dataclasses.replace(settings, **paths), output, on_gpus)

    # Choose the workers.
    if settings.ray:
        parts_per_call = SHARDS_PER_RAY_CALL
        workers = RayWorkers(do, settings.ray, on_gpus)
    else:
        parts_per_call = SHARDS_PER_CALL
        number = min(max(1, torch.cuda.device_count()), len(missing))
        workers = LocalWorkers(do, number, torch.cuda.set_device if on_gpus else None)

    # Let them encode. A process reports its measurements with each call, and the last report covers all its calls.
    with workers:
        answers = make_parts(workers, parts, missing, ' images', parts_per_call)
        slots = workers.slots()
    figures = list({answer['name']: answer for answer in answers}.values())

    # The speed is the mean speed of a device, times the number of devices that worked at the same time. There are never
    # more devices than slots, because a process that replaced a dead one reports as well, but on the same device.
    devices = min(len(figures), slots)
    images = sum(worker['measured'] for worker in figures)  # none if all images of this run were skipped
    seconds = sum(worker['seconds'] for worker in figures)
    speed = {
        'status': COMPLETE if images else UNMEASURED,
        'num_devices': devices,
        'num_nodes': len({worker['machine'] for worker in figures}),
        'images_per_sec': images / seconds * devices if images else None,
        'measured_batches': sum(worker['measured_batches'] for worker in figures) // devices,
    }
    if figures[0]['device']:
        speed |= {'device': figures[0]['device'], 'device_type': 'cuda'}
    return speed


if __name__ == '__main__':
    main()
