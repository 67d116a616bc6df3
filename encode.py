"""Encode images once, so that training does not repeat the VAE's share of every step.

    python encode.py --remote s3://my-bucket/photos --out s3://my-bucket/photos-512 --model_name FOLDER --pretrained
    composer benchmark.py --remote s3://my-bucket/photos-512 --use_ema --model_name FOLDER --pretrained

Each image shard becomes shards of its own, with the mean and the log variance of each image's latents (float16, so that
training draws a latent anew each time) and the caption. Every GPU of this machine works, or with --ray every GPU of a
Ray cluster. A run that was stopped, when started again with the same command, encodes only what is missing.
OUT/index.json comes last.
"""
from settings.commands import ENCODING_FLAGS, Encode
from settings.ends import leave_to_first_process, one_line_errors
from settings.flags import parse

PROGRAM = 'encode.py'

if __name__ == '__main__':
    leave_to_first_process()
    parse(Encode, __doc__)  # a mistake is answered before the imports, which take seconds

import dataclasses
import hashlib
import json
import shlex
import sys
from functools import partial

from data import BadSamples, refuse_many_bad_samples
from fitting.compiling import compile_mode
from inputs.errors import DataError
from inputs.places import number_of_samples
from inputs.shards import index_hash, read_index, require_columns
from inputs.stores import streaming_address
from inputs.words import counted
from measuring.caution import doubt
from measuring.record import UNMEASURED, circumstances, keep, redacted
from models.flops import flops_of_latents, utilization
from models.latents import origin_of_latents
from models.loading import find_model
from parts.claims import SKIPPED, DoneAlready, claim, finished_parts, release, samples_of_finished
from parts.devices import is_to_be_on_gpu, workers_on_devices
from parts.encoding import EncodingSettings
from parts.engine import Part, make_parts
from parts.local_workers import LocalWorkers
from parts.merge import Merged, merge_parts
from parts.output import Output, open_output
from parts.progress import progress_bar
from parts.ray_workers import RayWorkers
from parts.workers import make_encoder
from settings.here import encoding_here

SHARDS_AT_ONCE = 8  # that a worker is given, so that it can fetch and decode ahead


class Progress:
    """What the workers have said so far.

    Args:
        max_bad_samples: the share that may be bad before the run ends.
    """

    def __init__(self, max_bad_samples: float):
        self.samples = 0  # that were encoded
        self.bad_samples = BadSamples(max_bad_samples)
        self.workers: dict[str, dict] = {}  # the figures of each, by its name

    def add(self, made: dict) -> int:
        """What a worker says of a part; returns the samples that were read. Raises DataError if too many are bad."""
        read = made['samples'] + len(made['bad'])
        self.samples += made['samples']
        self.workers[made['worker']['name']] = made['worker']
        self.bad_samples({'read': read, 'bad_samples': made['bad'], 'caption': ()})
        return read


def read_image_index(flags: Encode) -> dict:
    """The index.json of --remote. Raises ValueError if it holds no images and captions."""
    index = read_index(flags.remote)
    require_columns(flags.remote, index)
    if 'latents' in index:
        raise ValueError(f'--remote {flags.remote} holds latents already')
    return index


def claim_output(flags: Encode, output: Output, origin: dict, index: dict) -> list[int]:
    """Claim OUT for these latents of these images; the numbers of the shards that no earlier run has encoded.

    Raises DoneAlready if that was all of them, and ValueError if OUT is of something else.
    """
    source = hashlib.sha256(json.dumps(index['shards'], sort_keys=True).encode()).hexdigest()
    contents = origin | {'encoder_precision': flags.encoder_precision, 'source_sha256': source}
    num_shards = len(index['shards'])
    done = set()
    if claim(output, {'program': PROGRAM, **contents}):
        samples = samples_of_finished(output)
        if samples is not None:
            raise DoneAlready(samples)
        done = finished_parts(output, num_shards)
    return [shard for shard in range(num_shards) if shard not in done]


def settings_of(flags: Encode, index: dict) -> EncodingSettings:
    """What the workers need to know."""
    return EncodingSettings(
        remote=flags.remote,
        index_hash=index_hash(index),
        local=flags.local,
        keep_copies=flags.local is not None and not flags.cache_limit,
        model_name=flags.model_name,
        pretrained=flags.pretrained,
        image_size=flags.image_size,
        batch_size=flags.batch_size,
        num_workers=flags.num_workers,
        precision=flags.encoder_precision,
        channels_last=flags.channels_last,
        compile=bool(flags.compile),
        compile_mode=compile_mode(flags.compile),
        seed=flags.seed,
        warmup_batches=flags.warmup_batches,
        on_gpu=is_to_be_on_gpu(flags.ray),
    )


def open_workers(flags: Encode, output: Output, index: dict, num_parts: int) -> LocalWorkers | RayWorkers:
    """The processes that encode: one for each GPU."""
    make = partial(make_encoder, output, settings_of(flags, index))
    return workers_on_devices(make, 'parts.encoding', flags.ray, num_parts)


def encode_missing(flags: Encode, output: Output, index: dict, missing: list[int]) -> Progress:
    """Encode what no earlier run has encoded."""
    progress = Progress(flags.max_bad_samples)
    shards = index['shards']
    parts = (Part(number, [shards[number]['raw_data']['basename']]) for number in missing)
    total = number_of_samples(index)
    to_do = sum(shards[number]['samples'] for number in missing)
    print(f'encoding {counted(to_do, "image")} of {redacted(flags.remote)}', file=sys.stderr, flush=True)
    with (open_workers(flags, output, index, len(missing)) as workers,
          progress_bar(total, ' images', total - to_do) as bar):
        for made in make_parts(workers, parts, SHARDS_AT_ONCE):
            bar.update(progress.add(made))
    return progress


def refuse_bad_dataset(flags: Encode, num_samples: int, merged: Merged) -> None:
    """Raises DataError if too many samples are bad, over all runs that have encoded a part of them."""
    try:
        refuse_many_bad_samples(num_samples - merged.samples, num_samples, flags.max_bad_samples)
    except DataError as error:
        raise DataError(f'{error}; they are listed in {flags.out}/{SKIPPED}') from None


def encoding_record(flags: Encode, progress: Progress, merged: Merged, num_samples: int,
                flops_per_image: int) -> dict:
    """The record of an encoding: throughput over all workers, and what is stored for an image.

    `samples` are those of this run; `stored_samples` and `bad_samples` are of all runs that have made OUT.
    """
    workers = list(progress.workers.values())
    seconds = max((worker['seconds'] for worker in workers), default=0)
    record = circumstances('encode', dataclasses.asdict(flags), ENCODING_FLAGS) | {
        'dataset': 'streaming',
        'status': 'complete',
        'images_per_sec': None,  # where all was there already
        'images_per_sec_per_device': None,
        'samples': progress.samples,
        'stored_samples': merged.samples,
        'bytes_per_image': merged.bytes / merged.samples,
        'bad_samples': num_samples - merged.samples,
    }
    if workers:
        record['num_devices'] = len(workers)
        record['num_nodes'] = len({worker['machine'] for worker in workers})
        record['channels_last'] = workers[0]['channels_last']
        if workers[0]['device']:
            record |= {'device': workers[0]['device'], 'device_type': 'cuda'}
    if seconds:
        images_per_sec = sum(worker['measured'] for worker in workers) / seconds
        record['images_per_sec'] = images_per_sec
        record['images_per_sec_per_device'] = images_per_sec / len(workers)
        record['measured_batches'] = min(worker['measured_batches'] for worker in workers)
        record |= utilization(images_per_sec / len(workers), flops_per_image, flags.encoder_precision,
                              record['device'])
    else:
        record['status'] = UNMEASURED
    return record


def summary(record: dict, flags: Encode) -> str:
    """The record for people, and the command that trains on what was encoded."""
    speed = ''
    if record['images_per_sec']:
        speed = f', {record["images_per_sec"]:,.4g} images/s'
    caution = ''
    if doubt(record):
        caution = (f'caution         {doubt(record)} of a worker, too few to rely on its images/s; encode more images, '
                   'or use a smaller --batch_size\n')
    skipped = ''
    if record['bad_samples']:
        bad = counted(record['bad_samples'], 'bad sample')
        skipped = f'skipped         {bad}; listed in {flags.out}/{SKIPPED}\n'
    encoded = counted(record['samples'], 'image')
    return (f'encoded         {encoded}{speed}; {record["stored_samples"]:,} stored, '
            f'{record["bytes_per_image"]:,.0f} bytes each\n{caution}{skipped}'
            f'{next_command(record["stored_samples"], flags)}')


def next_command(samples: int, flags: Encode) -> str:
    """The command that trains on what was encoded."""
    model = ['--model_name', flags.model_name, '--image_size', str(flags.image_size)]
    if flags.pretrained:
        model.append('--pretrained')
    command = ['composer', 'benchmark.py', '--remote', streaming_address(flags.out), '--use_ema', *model]
    return f'next            {shlex.join(command)}'


def print_done_already(samples: int, flags: Encode) -> None:
    """That an earlier run has done all, and what to do next."""
    print(f'done already: --out {flags.out} holds {counted(samples, "sample")} of this --remote, made with these flags')
    print(next_command(samples, flags))


def encode(flags: Encode) -> dict:
    """Encode what is missing, and merge; returns the record. Raises DoneAlready if nothing is missing."""
    files = find_model(flags.model_name, flags.pretrained)
    origin = origin_of_latents(files, flags.image_size)
    index = read_image_index(flags)
    output = open_output(flags.out, '--out')
    with output.in_use():
        progress, merged = encode_and_merge(flags, output, origin, index)
    record = encoding_record(flags, progress, merged, number_of_samples(index),
                             flops_of_latents(files.configs['vae'], flags.image_size))
    return keep(record, summary(record, flags), flags.results)


def encode_and_merge(flags: Encode, output: Output, origin: dict, index: dict) -> tuple[Progress, Merged]:
    """Encode what is missing, and make a dataset of it.

    Raises DoneAlready if OUT is one, and DataError if not one image could be encoded, or too many could not.
    """
    missing = claim_output(flags, output, origin, index)
    progress = Progress(flags.max_bad_samples)
    if missing:
        progress = encode_missing(flags, output, index, missing)
    merged = merge_parts(output, len(index['shards']), {'latents': origin},
                         check=partial(refuse_bad_dataset, flags, number_of_samples(index)))
    if not merged.samples:
        release(output, len(index['shards']), PROGRAM)
        raise DataError('not one image could be encoded')
    return progress, merged


def main(argv: list[str] | None = None) -> dict | None:
    """Encode; returns the record, or None where an earlier run has done all."""
    leave_to_first_process()
    flags = parse(Encode, __doc__, argv, PROGRAM)
    stays = f'what is encoded stays in --out {flags.out}, and the same command, started again, goes on from there'
    with one_line_errors(PROGRAM, stays):
        flags = encoding_here(flags)
        try:
            return encode(flags)
        except DoneAlready as done:
            print_done_already(done.samples, flags)
            return None


if __name__ == '__main__':
    main()
