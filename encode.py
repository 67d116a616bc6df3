"""Encode images once, so that the VAE, which computes the same in each epoch, is not in the training.

    python encode.py --remote s3://my-bucket/photos --out s3://my-bucket/photos-512 --model_name FOLDER --pretrained
    composer benchmark.py --remote s3://my-bucket/photos-512 --use_ema --model_name FOLDER --pretrained

Each image shard becomes shards of its own, with the mean and the log variance of each image's latents (float16, so that
training draws a latent anew each time) and the caption. Every GPU of this machine works, or with --ray every GPU of a
Ray cluster. What cannot be encoded is left out and listed in OUT/skipped.jsonl. A run that was stopped, when started
again with the same command, encodes only what is missing. OUT/index.json comes last.
"""
from sdbench.exits import one_line_errors
from sdbench.flags.commands import ENCODING_FLAGS, Encode
from sdbench.flags.parser import parse
from sdbench.flags.threads import sleep_while_waiting

PROGRAM = 'encode.py'

if __name__ == '__main__':
    sleep_while_waiting()
    parse(Encode, __doc__)  # a mistake is answered before the imports, which take seconds

import dataclasses
import os
import platform
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch.utils.data import DataLoader, Dataset

from sdbench.datasets.output import SKIPPED, Output, PartWriter, join_parts, part_name, training_command, write_index
from sdbench.datasets.work import LocalWorkers, Part, RayWorkers, work
from sdbench.errors import DataError, plural, redacted
from sdbench.inputs.images import decode_image, normalize_images, stack_images
from sdbench.inputs.shards import IMAGES, LATENT_COLUMNS, MOMENTS, index_hash, read_image_index
from sdbench.inputs.stream import Shards, is_readable_in_place, open_shards
from sdbench.measuring.record import append_record, run_metadata
from sdbench.measuring.reliability import why_unreliable
from sdbench.models.compiling import compile_in_place
from sdbench.models.flops import flops_of_latents, utilization
from sdbench.models.latents import origin_of_latents, vae_moments
from sdbench.models.loading import ModelFiles, build_vae, find_model
from sdbench.paths import HELD_OUT, number_of_samples
from sdbench.progress_bar import progress_bar
from sdbench.training.resolve import resolve_encoding_defaults

SHARDS_AT_ONCE = 8  # that a worker is given, so that it can fetch and decode ahead
ON_RAY_AT_ONCE = 32  # on a cluster, where each call starts a process for its GPU


class ImageShard(NamedTuple):
    """A shard of images, which a part is made of.

    Attributes:
        entry: its own in the index.json of the images.
        first: number of its first sample among all.
    """
    entry: dict
    first: int

    @property
    def name(self) -> str:
        """Of its file."""
        return self.entry['raw_data']['basename']


class Batches(Dataset):
    """Batches of shards, without stand-ins: a bad sample is its reason.

    A batch has the number of its `shard` among these, the images uint8 (B, 3, H, H) of the good samples, their
    `caption` and their `number` in the shard, and (number, reason) of each `bad` one.
    """

    def __init__(self, shards: Shards, image_size: int):
        self.shards = shards
        self.image_size = image_size

    def __getitem__(self, key: tuple[int, range]) -> dict:
        shard, numbers = key
        reader = self.shards.readers[shard]
        batch = {'shard': shard, 'number': [], 'caption': [], 'bad': []}
        images = []
        for number in numbers:
            try:
                columns = reader[number]
                if not columns['caption'].strip():
                    raise ValueError('no caption')
                images.append(decode_image(columns['jpg'], self.image_size))
            except ValueError as error:  # also of a caption that is not UTF-8
                batch['bad'].append((number, str(error)))
                continue
            batch['number'].append(number)
            batch['caption'].append(columns['caption'])
        if images:
            batch['image'] = stack_images(images, self.image_size)
        return batch


def keys_of_batches(shards: Shards, batch_size: int) -> Iterator[tuple[int, range]]:
    """The shard of each batch and the numbers of its samples; a shard without samples has one batch without samples.

    The shards are fetched meanwhile, one after the other.
    """
    with ThreadPoolExecutor(1) as fetcher:
        for shard, reader in enumerate(fetcher.map(shards.fetch, range(len(shards.readers)))):
            for start in range(0, max(1, len(reader)), batch_size):  # so that its part is written as well
                yield shard, range(start, min(start + batch_size, len(reader)))


class Snapshot(NamedTuple):
    """What a process has encoded at a moment."""
    batches: int
    images: int
    seconds: float  # of the clock


class Encoder:
    """What a process keeps from call to call: the VAE, and how fast it was.

    Args:
        settings: of the encoding.
        gpu: its number; None: the processor.
    """

    def __init__(self, settings: Encode, gpu: int | None):
        self.settings = settings
        self.name = uuid.uuid4().hex
        self.device = torch.device('cpu')
        if gpu is not None:
            self.device = torch.device('cuda', gpu)
            torch.cuda.set_device(self.device)
        files = find_model(settings.model_name, settings.pretrained)
        self.vae = self.build_vae(files)
        self.latent_size = files.latent_size(settings.image_size)
        self.now = Snapshot(0, 0, time.perf_counter())
        self.warm = self.now  # where the measurement begins

    def build_vae(self, files: ModelFiles) -> AutoencoderKL:
        """The VAE on its device, with its switches. Random weights are drawn from the seed, the same on each device."""
        settings = self.settings
        torch.manual_seed(settings.seed)
        vae = build_vae(files, settings.encoder_precision)
        vae = vae.to(self.device)
        channels_last = settings.channels_last
        if channels_last is None:  # on a cluster each worker decides for its device
            channels_last = self.device.type == 'cuda'
        if channels_last:
            vae.to(memory_format=torch.channels_last)
        if settings.compile:
            compile_in_place([vae.encoder], settings.compile)
        return vae

    def encode(self, output: Output, parts: list[Part], copies: str | None) -> None:
        """Encode a part after the other; `copies` is a folder for their shards, None where these are read in place."""
        settings = self.settings
        shards = open_shards(settings.remote, copies, [part.files[0].entry for part in parts])
        loader = DataLoader(Batches(shards, settings.image_size), batch_size=None,
                            sampler=keys_of_batches(shards, settings.batch_size), num_workers=settings.num_workers,
                            pin_memory=self.device.type == 'cuda')
        for number, batches in groupby(loader, itemgetter('shard')):
            self.encode_part(output, parts[number], batches)
            shards.drop(number)

    def encode_part(self, output: Output, part: Part, batches: Iterator[dict]) -> None:
        """Encode the batches of a part's shard. The part lists the bad samples by their number among all."""
        [shard] = part.files
        writer = PartWriter(output, part.name, latent_columns(self.latent_size))
        skipped = []
        writing = []
        with ThreadPoolExecutor(1) as pen:  # which writes a batch while the GPU is at the next
            for batch in batches:
                writing.append(pen.submit(write_batch, writer, self.moments_of(batch, shard), batch['caption']))
                for number, reason in batch['bad']:
                    skipped.append({'source': shard.name, 'key': shard.first + number, 'reason': reason})
                self.count(len(batch['caption']))
        for written in writing:
            written.result()
        writer.finish(skipped)

    @torch.no_grad()
    def moments_of(self, batch: dict, shard: ImageShard) -> list[np.ndarray]:
        """The moments of each of a batch's good images, float16 (8, H/8, W/8).

        Raises DataError if one is not finite.
        """
        if not batch['number']:
            return []
        images = normalize_images(batch['image'].to(self.device, non_blocking=True), self.settings.image_size)
        if self.settings.compile:  # a compiled encoder is compiled anew for each number of images
            missing = self.settings.batch_size - len(images)
            images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))
        moments = vae_moments(self.vae, images)[:len(batch['number'])].half().cpu()
        for number, of_image in zip(batch['number'], moments, strict=True):
            if not of_image.isfinite().all():
                raise DataError(f'sample {shard.first + number} has moments that are not finite in float16, with '
                                f'--encoder_precision {self.settings.encoder_precision}; try another, or leave that '
                                'image out')
        return list(moments.numpy())

    def count(self, images: int) -> None:
        """Note that a batch has ended. What is measured begins behind the warm-up, and has a batch at least."""
        if self.now.batches <= self.settings.warmup_batches:
            self.warm = self.now
        self.now = Snapshot(self.now.batches + 1, self.now.images + images, time.perf_counter())

    def figures(self) -> dict:
        """What is known of this process's speed so far: `measured` images in `measured_batches` and in `seconds`, after
        its warm-up; a single batch is measured with the start of the loader."""
        device = None  # the name of a processor takes a second to find out
        if self.device.type == 'cuda':
            device = torch.cuda.get_device_name(self.device)
        return {'name': self.name, 'machine': platform.node(), 'device': device,
                'measured': self.now.images - self.warm.images,
                'measured_batches': self.now.batches - self.warm.batches,
                'seconds': self.now.seconds - self.warm.seconds}


def write_batch(writer: PartWriter, moments: list[np.ndarray], captions: list[str]) -> None:
    """Write the samples of a batch."""
    for of_image, caption in zip(moments, captions, strict=True):
        writer.write({MOMENTS: of_image, 'caption': caption})


encoders: dict[int | None, Encoder] = {}  # that of this process, by its GPU


def encode_parts(settings: Encode, output: Output, parts: list[Part], gpu: int | None = None) -> dict:
    """Encode shards of images: what a worker does.

    Args:
        settings: of the encoding.
        output: where to.
        parts: each of one ImageShard.
        gpu: number of the worker's GPU; None: it works on the processor.

    Returns the figures of this process so far, and the number of `images` that the parts are made of.
    """
    output.require_begun()
    if gpu not in encoders:
        encoders[gpu] = Encoder(settings, gpu)
    if settings.local:
        os.makedirs(settings.local, exist_ok=True)
    in_place = not settings.local and is_readable_in_place(settings.remote, [part.files[0].entry for part in parts])
    with tempfile.TemporaryDirectory(prefix='shards-', dir=settings.local) as copies:
        encoders[gpu].encode(output, parts, None if in_place else copies)
    return encoders[gpu].figures() | {'images': number_of_images(parts)}


def number_of_images(parts: list[Part]) -> int:
    """That parts are made of, good and bad ones."""
    return sum(shard.entry['samples'] for part in parts for shard in part.files)


def parts_of(shards: list[dict], facts: dict) -> list[Part]:
    """A part for each shard of the index: its name follows from the shard's entry and the `facts` of the encoding."""
    parts = []
    first = 0
    for entry in shards:
        parts.append(Part(part_name(facts, entry), [ImageShard(entry, first)]))
        first += entry['samples']
    return parts


def latent_columns(latent_size: int) -> dict[str, str]:
    """Names and MDS types of shards of latents of this height and width."""
    return LATENT_COLUMNS | {MOMENTS: f'ndarray:float16:8,{latent_size},{latent_size}'}


def whole_name(name: str | None) -> str | None:
    """The name by which any process finds a folder; another name as it is."""
    return os.path.abspath(name) if name and os.path.isdir(name) else name


def open_workers(settings: Encode, output: Output, most: int) -> LocalWorkers | RayWorkers:
    """The processes that encode: one for each GPU, or one on the processor; at `most` so many."""
    names = {flag: whole_name(getattr(settings, flag)) for flag in ('remote', 'local', 'model_name')}
    do = partial(encode_parts, dataclasses.replace(settings, **names), output)
    if settings.ray:
        return RayWorkers(do, settings.ray, on_gpus=not settings.cpu)
    return LocalWorkers(do, min(max(1, torch.cuda.device_count()), most), on_gpus=torch.cuda.is_available())


def encode_missing(settings: Encode, output: Output, total: int, missing: list[Part]) -> tuple[list[dict], int]:
    """Encode what no earlier run has encoded, of `total` images; returns the figures of each process, and how many work
    at once."""
    figures = {}  # by the name of a process
    devices = 0
    to_do = number_of_images(missing)
    print(f'encoding {plural(to_do, "image")} of {redacted(settings.remote)}', file=sys.stderr, flush=True)
    at_once = ON_RAY_AT_ONCE if settings.ray else SHARDS_AT_ONCE
    with (open_workers(settings, output, len(missing)) as workers,
          progress_bar(total, ' images', total - to_do) as bar):
        for answer in work(workers, missing, output.is_done, at_once):
            figures[answer['name']] = answer
            devices = min(len(figures), workers.slots())  # a successor of a process is on the same device
            bar.update(answer['images'])
    return list(figures.values()), devices


def encoding_record(settings: Encode, figures: list[dict], devices: int, stored: dict, flops_per_image: int) -> dict:
    """The record of an encoding: throughput over all devices, and what is stored for an image.

    Args:
        settings: of the encoding.
        figures: of each process.
        devices: that have worked at once.
        stored: the entries that say what this run has encoded, and what is stored by all runs that have made OUT.
        flops_per_image: of the VAE.
    """
    record = run_metadata('encode', dataclasses.asdict(settings), ENCODING_FLAGS) | {
        'dataset': 'streaming', 'status': 'complete', 'num_devices': devices,
        'num_nodes': len({worker['machine'] for worker in figures}), **stored}
    if figures[0]['device']:
        record |= {'device': figures[0]['device'], 'device_type': 'cuda'}
    speed = sum(worker['measured'] for worker in figures) / sum(worker['seconds'] for worker in figures)
    record |= {'images_per_sec': speed * devices, 'images_per_sec_per_device': speed,
               'measured_batches': sum(worker['measured_batches'] for worker in figures) // devices}
    return record | utilization(speed, flops_per_image, settings.encoder_precision, record['device'])


def summary(record: dict, settings: Encode) -> str:
    """The record for people, and the command that trains on what was encoded."""
    caution = ''
    if why_unreliable(record):
        caution = (f'caution         {why_unreliable(record)} of a device, too few to rely on its images/s\n')
    skipped = ''
    if record['bad_samples']:
        bad = plural(record['bad_samples'], 'bad sample')
        skipped = f'skipped         {bad}; listed in {settings.out}/{SKIPPED}\n'
    encoded, stored = (plural(record[key], 'image') for key in ('samples', 'stored_samples'))
    return (f'encoded         {encoded}, {record["images_per_sec"]:,.4g} images/s\n'
            f'stored          {stored}, {record["bytes_per_image"]:,.0f} bytes each\n'
            f'{caution}{skipped}'
            f'{next_line(record["stored_samples"], settings)}')


def next_line(samples: int, settings: Encode) -> str:
    """The command that trains on what was encoded, or what latents of held-out samples are for."""
    if settings.remote.rstrip('/').endswith(HELD_OUT):
        return f'next            --eval_remote {settings.out} of a training on the latents of the other samples'
    size = ['--image_size', str(settings.image_size)]
    command = training_command(settings.out, samples, settings.model_name, settings.pretrained, size)
    return f'next            {command}'


def encode(settings: Encode) -> dict | None:
    """Encode what is missing, and make a dataset of it; returns the record, or None if nothing was missing."""
    output = Output(settings.out, '--out')
    files = find_model(settings.model_name, settings.pretrained)
    origin = origin_of_latents(files, settings.image_size)
    index = read_image_index(settings.remote)
    facts = {'encoder_precision': settings.encoder_precision, **origin}
    if not settings.pretrained:
        facts |= {'model_name': whole_name(settings.model_name), 'seed': settings.seed}  # which random weights
        print(f'{PROGRAM}: warning: without --pretrained the VAE is random, so that no model can draw from these '
              'latents; give --model_name FOLDER --pretrained', file=sys.stderr)
    parts = parts_of(index['shards'], facts)
    with output.begun({'program': PROGRAM, **facts}, [settings.remote]):
        there = output.parts()
        missing = [part for part in parts if not there.get(part.name)]
        if missing:
            figures, devices = encode_missing(settings, output, number_of_samples(index), missing)
        joined = join_parts(output, [part.name for part in parts])
        if joined.samples == 0:
            raise DataError(f'not one image could be encoded; {settings.out}/{SKIPPED} says why')
        write_index(output, joined, latents=origin | {IMAGES: index_hash(index)})
    if not missing:
        print(f'done already: --out {settings.out} holds {plural(joined.samples, "sample")}, all of this --remote')
        print(next_line(joined.samples, settings))
        return None
    stored = {
        'samples': sum(joined.samples_of[part.name] for part in missing),  # of this run
        'stored_samples': joined.samples,  # of all runs that have made OUT
        'bytes_per_image': joined.bytes / joined.samples,
        'bad_samples': number_of_samples(index) - joined.samples,
    }
    flops_per_image = flops_of_latents(files.configs['vae'], settings.image_size)
    record = encoding_record(settings, figures, devices, stored, flops_per_image)
    return append_record(record, summary(record, settings), settings.results_file)


def main(argv: list[str] | None = None) -> dict | None:
    """Encode; returns the record, or None where an earlier run has done all."""
    settings = parse(Encode, __doc__, argv, PROGRAM)
    stays = f'what is encoded stays in --out {settings.out}, and the same command, started again, goes on from there'
    with one_line_errors(PROGRAM, stays):
        return encode(resolve_encoding_defaults(settings))


if __name__ == '__main__':
    main()
