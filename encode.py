"""Encode images once, so that the VAE, which computes the same in each epoch, is not in the training.

    python encode.py --remote s3://my-bucket/photos --out s3://my-bucket/photos-512 --model_name FOLDER --pretrained
    composer benchmark.py --remote s3://my-bucket/photos-512 --use_ema --model_name FOLDER --pretrained

Each image shard becomes shards of its own, with the mean and the log variance of each image's latents (float16, so that
training draws a latent anew each time) and the caption. Every GPU of this machine works, or with --ray every GPU of a
Ray cluster. What cannot be encoded is left out and listed in OUT/skipped.jsonl. A run that was stopped, when started
again with the same command, encodes only what is missing. OUT/index.json comes last.
"""
from settings.commands import ENCODING_FLAGS, Encode
from settings.ends import one_line_errors
from settings.flags import parse

PROGRAM = 'encode.py'

if __name__ == '__main__':
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
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch.utils.data import DataLoader, Dataset

from fitting.compiling import compile_in_place
from inputs.errors import DataError
from inputs.images import decode_image, normalize_images, stack_images
from inputs.places import is_address, number_of_samples
from inputs.shards import LATENT_COLUMNS, LATENTS, index_hash, read_image_index, read_index
from inputs.verified_stream import Shards, open_shards
from inputs.words import counted
from measuring.record import circumstances, keep, redacted
from models.flops import flops_of_latents, utilization
from models.latents import origin_of_latents, vae_moments
from models.loading import build_vae, find_model
from parts.output import SKIPPED, Output, PartWriter, join_parts, part_name, training_command, write_index
from parts.work import LocalWorkers, Part, RayWorkers, progress_bar, work
from settings.caution import doubt
from settings.here import encoding_here

SHARDS_AT_ONCE = 8  # that a worker is given, so that it can fetch and decode ahead
ON_RAY_AT_ONCE = 32  # on a cluster, where each call starts a process for its GPU


class Samples(Dataset):
    """The samples of shards by (shard, number in it) and without stand-ins: a bad one is its reason."""

    def __init__(self, shards: Shards, image_size: int):
        self.shards = shards
        self.image_size = image_size

    def __getitem__(self, place: tuple[int, int]) -> dict:
        shard, number = place
        try:
            columns = self.shards.readers[shard][number]
            if not columns['caption'].strip():
                raise ValueError('no caption')
            image = decode_image(columns['jpg'], self.image_size)  # uint8 (3, H, H)
        except ValueError as error:  # also of a caption that is not UTF-8
            return {'shard': shard, 'bad': (number, str(error))}
        return {'shard': shard, 'number': number, 'image': image, 'caption': columns['caption']}

    def collate(self, samples: list[dict]) -> dict:
        """`image` uint8 (B, 3, H, H) of the good samples, their `caption` and `number`, the `bad` ones, and `shard`."""
        good = [sample for sample in samples if 'image' in sample]
        batch = {name: [sample[name] for sample in good] for name in ('caption', 'number', 'image')}
        if good:
            batch['image'] = stack_images(batch['image'], self.image_size)
        batch['bad'] = [sample['bad'] for sample in samples if 'bad' in sample]
        batch['shard'] = samples[0]['shard']
        return batch


def batches_of_shards(shards: Shards, numbers: list[int], batch_size: int) -> Iterator[list[tuple[int, int]]]:
    """The places in `Samples` of all samples of some shards, in batches, none of which is of two shards.

    The shards are fetched meanwhile, one after the other.
    """
    with ThreadPoolExecutor(1) as fetcher:
        for shard, reader in zip(numbers, fetcher.map(shards.fetch, numbers), strict=True):
            for start in range(0, len(reader), batch_size):
                yield [(shard, number) for number in range(start, min(start + batch_size, len(reader)))]


class Encoder:
    """What a process keeps from call to call: the VAE, and how fast it was.

    Args:
        settings: of the encoding.
        index: the hash of the images' index.json, which must be the same on every machine.
        gpu: its number; None: the processor.
    """

    def __init__(self, settings: Encode, index: str, gpu: int | None):
        self.settings = settings
        self.name = uuid.uuid4().hex
        self.device = torch.device('cpu')
        if gpu is not None:
            self.device = torch.device('cuda', gpu)
            torch.cuda.set_device(self.device)
        self.index = read_index(settings.remote)
        if index_hash(self.index) != index:
            raise DataError(f'--remote {settings.remote} is not the same on every machine; use a shared one or a store')
        samples = (shard['samples'] for shard in self.index['shards'])
        self.first_numbers = [0, *accumulate(samples)]  # of the shards' samples
        self.vae = self.build_vae()
        self.clock = [(0, time.perf_counter())]  # images so far, and when, at the start and after each batch

    def build_vae(self) -> AutoencoderKL:
        """The VAE on its device, its random weights drawn from the seed, with its switches."""
        settings = self.settings
        torch.manual_seed(settings.seed)
        with self.device:
            vae = build_vae(find_model(settings.model_name, settings.pretrained), settings.encoder_precision)
        vae = vae.to(self.device)
        channels_last = settings.channels_last
        if channels_last is None:  # on a cluster each worker decides for its device
            channels_last = self.device.type == 'cuda'
        if channels_last:
            vae.to(memory_format=torch.channels_last)
        if settings.compile:
            compile_in_place([vae.encoder], settings.compile)
        return vae

    def encode(self, output: Output, parts: list[Part], shards: Shards) -> None:
        """Encode a part after the other."""
        settings = self.settings
        samples = Samples(shards, settings.image_size)
        batches = batches_of_shards(shards, [number for part in parts for number in part.files], settings.batch_size)
        loader = DataLoader(samples, batch_sampler=batches, collate_fn=samples.collate,
                            num_workers=settings.num_workers, pin_memory=self.device.type == 'cuda')
        for part, (number, of_shard) in zip(parts, groupby(loader, itemgetter('shard')), strict=True):
            writer = PartWriter(output, part.name, latent_columns(settings.image_size))
            self.encode_shard(number, of_shard, writer)
            if settings.local is None:
                shards.drop(number)

    def encode_shard(self, shard: int, batches: Iterator[dict], writer: PartWriter) -> None:
        """Encode the batches of a shard into a part, which lists the bad samples by their number among all."""
        source = self.index['shards'][shard]['raw_data']['basename']
        skipped = []
        writing = []
        with ThreadPoolExecutor(1) as pen:  # which writes a batch while the GPU is at the next
            for batch in batches:
                writing.append(pen.submit(write_batch, writer, self.moments_of(batch), batch['caption']))
                for number, reason in batch['bad']:
                    skipped.append({'source': source, 'key': self.first_numbers[shard] + number, 'reason': reason})
                self.clock.append((self.clock[-1][0] + len(batch['caption']), time.perf_counter()))
        for written in writing:
            written.result()
        writer.finish(skipped)

    @torch.no_grad()
    def moments_of(self, batch: dict) -> list[np.ndarray]:
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
                raise DataError(f'sample {self.first_numbers[batch["shard"]] + number} has moments that are not finite '
                                f'in float16, with --encoder_precision {self.settings.encoder_precision}; try another, '
                                'or leave that image out')
        return list(moments.numpy())

    def figures(self) -> dict:
        """What is known of this process's speed so far: `measured` images in `measured_batches` and in `seconds`, after
        its warm-up; a single batch is measured with the start of the loader."""
        start = min(self.settings.warmup_batches, max(0, len(self.clock) - 2))
        device = None  # the name of a processor takes a second to find out
        if self.device.type == 'cuda':
            device = torch.cuda.get_device_name(self.device)
        return {'name': self.name, 'machine': platform.node(), 'device': device,
                'measured': self.clock[-1][0] - self.clock[start][0],
                'measured_batches': len(self.clock) - 1 - start,
                'seconds': self.clock[-1][1] - self.clock[start][1]}


def write_batch(writer: PartWriter, moments: list[np.ndarray], captions: list[str]) -> None:
    """Write the samples of a batch."""
    for of_image, caption in zip(moments, captions, strict=True):
        writer.write({LATENTS: of_image, 'caption': caption})


encoders: dict[tuple, Encoder] = {}  # of this process, by what it was made from


def encode_parts(settings: Encode, output: Output, index: str, parts: list[Part], gpu: int | None = None) -> dict:
    """Encode shards of images: what a worker does.

    Args:
        settings: of the encoding.
        output: where to.
        index: the hash of the images' index.json.
        parts: each of the number of a shard.
        gpu: number of the worker's GPU; None: it works on the processor.

    Returns the figures of this process so far, and the number of `images` that the parts are made of.
    """
    output.require_begun()
    made_from = settings, index, gpu
    if made_from not in encoders:
        encoders[made_from] = Encoder(*made_from)
    encoder = encoders[made_from]
    with tempfile.TemporaryDirectory(prefix='shards-') as copies:
        folder = settings.local
        if folder is None and is_address(settings.remote):
            folder = copies
        encoder.encode(output, parts, open_shards(settings.remote, folder, encoder.index))
    return encoder.figures() | {'images': number_of_images(encoder.index, parts)}


def number_of_images(index: dict, parts: list[Part]) -> int:
    """That parts are made of, good and bad ones."""
    return sum(index['shards'][number]['samples'] for part in parts for number in part.files)


def latent_columns(image_size: int) -> dict[str, str]:
    """Names and MDS types."""
    return LATENT_COLUMNS | {LATENTS: f'ndarray:float16:8,{image_size // 8},{image_size // 8}'}


def whole_name(name: str | None) -> str | None:
    """The name by which any process finds a folder; another name as it is."""
    return os.path.abspath(name) if name and os.path.isdir(name) else name


def open_workers(settings: Encode, output: Output, index: dict, most: int) -> LocalWorkers | RayWorkers:
    """The processes that encode: one for each GPU, or one on the processor; at `most` so many."""
    names = {flag: whole_name(getattr(settings, flag)) for flag in ('remote', 'local', 'model_name')}
    do = partial(encode_parts, dataclasses.replace(settings, **names), output, index_hash(index))
    if settings.ray:
        return RayWorkers(do, settings.ray, for_gpus=True)
    return LocalWorkers(do, min(max(1, torch.cuda.device_count()), most), on_gpus=torch.cuda.is_available())


def encode_missing(settings: Encode, output: Output, index: dict, missing: list[Part]) -> tuple[list[dict], int]:
    """Encode what no earlier run has encoded; returns the figures of each process, and how many work at once."""
    figures = {}  # by the name of a process
    devices = 0
    total = number_of_samples(index)
    to_do = number_of_images(index, missing)
    print(f'encoding {counted(to_do, "image")} of {redacted(settings.remote)}', file=sys.stderr, flush=True)
    at_once = ON_RAY_AT_ONCE if settings.ray else SHARDS_AT_ONCE
    with (open_workers(settings, output, index, len(missing)) as workers,
          progress_bar(total, ' images', total - to_do) as bar):
        for answer in work(workers, missing, output.is_done, at_once):
            figures[answer['name']] = answer
            devices = min(len(figures), workers.places())  # a successor of a process is on the same device
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
    record = circumstances('encode', dataclasses.asdict(settings), ENCODING_FLAGS) | {
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
    if doubt(record):
        caution = (f'caution         {doubt(record)} of a device, too few to rely on its images/s; encode more images, '
                   'or use a smaller --batch_size\n')
    skipped = ''
    if record['bad_samples']:
        bad = counted(record['bad_samples'], 'bad sample')
        skipped = f'skipped         {bad}; listed in {settings.out}/{SKIPPED}\n'
    encoded, stored = (counted(record[key], 'image') for key in ('samples', 'stored_samples'))
    return (f'encoded         {encoded}, {record["images_per_sec"]:,.4g} images/s\n'
            f'stored          {stored}, {record["bytes_per_image"]:,.0f} bytes each\n'
            f'{caution}{skipped}'
            f'{next_line(record["stored_samples"], settings)}')


def next_line(samples: int, settings: Encode) -> str:
    """The command that trains on what was encoded."""
    flags = ['--model_name', settings.model_name, '--image_size', str(settings.image_size)]
    if settings.pretrained:
        flags.append('--pretrained')
    return f'next            {training_command(settings.out, samples, flags)}'


def encode(settings: Encode) -> dict | None:
    """Encode what is missing, and make a dataset of it; returns the record, or None if nothing was missing."""
    files = find_model(settings.model_name, settings.pretrained)
    origin = origin_of_latents(files, settings.image_size)
    index = read_image_index(settings.remote)
    facts = {'encoder_precision': settings.encoder_precision, **origin}
    parts = [Part(part_name(facts, shard), [number]) for number, shard in enumerate(index['shards'])]
    output = Output(settings.out, '--out')
    with output.begun({'program': PROGRAM, 'remote': whole_name(settings.remote), **facts}):
        there = output.parts()
        missing = [part for part in parts if not there.get(part.name)]
        if missing:
            figures, devices = encode_missing(settings, output, index, missing)
        joined = join_parts(output, [part.name for part in parts])
        if joined.samples == 0:
            raise DataError(f'not one image could be encoded; {settings.out}/{SKIPPED} says why')
        write_index(output, joined, latents=origin)
    if not missing:
        print(f'done already: --out {settings.out} holds {counted(joined.samples, "sample")}, all of this --remote')
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
    return keep(record, summary(record, settings), settings.results)


def main(argv: list[str] | None = None) -> dict | None:
    """Encode; returns the record, or None where an earlier run has done all."""
    settings = parse(Encode, __doc__, argv, PROGRAM)
    stays = f'what is encoded stays in --out {settings.out}, and the same command, started again, goes on from there'
    with one_line_errors(PROGRAM, stays):
        return encode(encoding_here(settings))


if __name__ == '__main__':
    main()
