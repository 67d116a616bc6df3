"""Encode the images of shards with the VAE, in a process that keeps it from call to call."""
import functools
import os
import platform
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
from streaming.base.format import reader_from_json
from streaming.base.format.mds.reader import MDSReader
from torch.utils.data import DataLoader, Dataset

from sdbench.datasets.output import Output, PartWriter
from sdbench.datasets.workers import Part
from sdbench.errors import BadSample, DataError
from sdbench.flags.commands import Encode
from sdbench.inputs.batches import decode_sample, normalize, stack_images
from sdbench.inputs.captions import CAPTION_COLUMNS, CAPTIONS, to_columns
from sdbench.inputs.images import decode_image
from sdbench.inputs.loader import begin_worker
from sdbench.inputs.shards import MOMENTS
from sdbench.inputs.stream import VerifiedStream, is_readable_in_place
from sdbench.models.loading import build_vae, find_model
from sdbench.models.switches import compile_in_place


class ImageShard(NamedTuple):
    """A shard of images, of which a part is made.

    Attributes:
        entry: its entry in the index.json of the images.
        first: number of its first sample among all.
        is_counted: whether that index.json counts captions, as `from_columns` takes it.
    """
    entry: dict
    first: int
    is_counted: bool

    @property
    def name(self) -> str:
        """Name of its file."""
        return self.entry['raw_data']['basename']


class Batches(Dataset):
    """Batches of images of some shards. No other sample takes the place of a bad one.

    A batch has the number of its `shard` among these, the `image` uint8 (B, 3, H, H) of the good samples, the
    columns of their `captions`, their `number` in the shard, and (number, reason) of each `bad` one.
    """

    def __init__(self, readers: list[MDSReader], shards: list[ImageShard], image_size: int):
        self.readers = readers
        self.shards = shards
        self.image_size = image_size

    def __getitem__(self, key: tuple[int, range]) -> dict:
        """Return the batch of so many samples of a shard."""
        shard, numbers = key
        reader = self.readers[shard]
        batch = {'shard': shard, 'number': [], 'captions': [], 'bad': []}
        images = []
        for number in numbers:
            try:
                sample = decode_sample(reader[number], self.shards[shard].is_counted,
                                       partial(decode_image, image_size=self.image_size))
            except (BadSample, UnicodeDecodeError) as error:
                batch['bad'].append((number, str(error)))
                continue
            images.append(sample['image'])
            batch['number'].append(number)
            batch['captions'].append(to_columns(sample[CAPTIONS]))
        if images:
            batch['image'] = stack_images(images, self.image_size)
        return batch


class Encoder:
    """The VAE on a device, and how fast it has encoded.

    Args:
        settings: of the encoding.
        on_gpu: it is on the GPU of this process, or else on the CPU.
    """

    def __init__(self, settings: Encode, on_gpu: bool):
        self.settings = settings
        self.name = uuid.uuid4().hex
        self.device = torch.device('cuda', torch.cuda.current_device()) if on_gpu else torch.device('cpu')
        files = find_model(settings.model_name, settings.pretrained)

        # the VAE as it encodes; random weights are the same on all devices
        torch.manual_seed(settings.seed)
        self.vae = build_vae(files, settings.encoder_precision).to(self.device)
        if settings.channels_last:
            self.vae.to(memory_format=torch.channels_last)
        if settings.compile:
            compile_in_place([self.vae.encoder], settings.compile)

        self.latent_size = files.latent_size(settings.image_size)
        self.clock = [time.perf_counter()]  # when each batch ended
        self.encoded = [0]  # images so far, after each batch

    def encode(self, output: Output, parts: list[Part], copies: str | None) -> None:
        """Encode one part after the other.

        Args:
            output: where to.
            parts: each of one ImageShard.
            copies: folder for the shards while they are read; None: they are read in place.
        """
        settings = self.settings
        shards = [part.sources[0] for part in parts]
        entries = [shard.entry for shard in shards]
        stream = VerifiedStream({'version': 2, 'shards': entries}, settings.remote, copies)
        readers = [reader_from_json(stream.local, '', entry) for entry in entries]

        def keys_of_batches() -> Iterator[tuple[int, range]]:
            # The shards are fetched one after the other while others are encoded. An empty one has one batch without
            # samples, so that its part is written as well.
            with ThreadPoolExecutor(1) as fetcher:
                for shard, _ in enumerate(fetcher.map(stream.prepare_shard, readers)):
                    samples = len(readers[shard])
                    for start in range(0, max(1, samples), settings.batch_size):
                        yield shard, range(start, min(start + settings.batch_size, samples))

        loader = DataLoader(Batches(readers, shards, settings.image_size), batch_size=None, sampler=keys_of_batches(),
                            num_workers=settings.num_workers, pin_memory=self.device.type == 'cuda',
                            worker_init_fn=begin_worker)
        for number, batches in groupby(loader, itemgetter('shard')):
            self.encode_part(output, parts[number], batches)
            if copies is not None:
                readers[number].evict()

    def encode_part(self, output: Output, part: Part, batches: Iterator[dict]) -> None:
        """Encode the batches of a part's shard, and list its bad samples by their number among all."""
        [shard] = part.sources
        columns = CAPTION_COLUMNS | {MOMENTS: f'ndarray:float16:8,{self.latent_size},{self.latent_size}'}
        writer = PartWriter(output, part.name, columns)
        skipped = []

        def write(moments: list[np.ndarray], captions: list[dict]) -> None:
            for of_image, its_captions in zip(moments, captions, strict=True):
                writer.write({MOMENTS: of_image, **its_captions})

        writing = []
        with ThreadPoolExecutor(1) as thread:  # which writes a batch while the GPU is at the next
            for batch in batches:
                writing.append(thread.submit(write, self.moments_of(batch, shard), batch['captions']))
                for number, reason in batch['bad']:
                    skipped.append({'source': shard.name, 'key': shard.first + number, 'reason': reason})
                self.encoded.append(self.encoded[-1] + len(batch['number']))
                self.clock.append(time.perf_counter())
        for written in writing:
            written.result()
        writer.finish(skipped)

    @torch.no_grad()
    def moments_of(self, batch: dict, shard: ImageShard) -> list[np.ndarray]:
        """Return the moments of each of a batch's good images, float16 (8, H/8, H/8).

        Raises DataError if one is not finite.
        """
        if not batch['number']:
            return []
        images = batch['image'].to(self.device, non_blocking=True)
        if self.settings.compile:  # the encoder would be compiled again for another number of images
            missing = self.settings.batch_size - len(images)
            images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))
        images = normalize({'image': images}, self.settings.image_size)['image'].to(self.vae.dtype)
        moments = self.vae.encode(images).latent_dist.parameters.half()  # (B, 8, H/8, W/8)
        moments = moments[:len(batch['number'])].cpu()
        for number, of_image in zip(batch['number'], moments, strict=True):
            if not of_image.isfinite().all():
                raise DataError(f'sample {shard.first + number} has moments that are not finite in float16, with '
                                f'--encoder_precision {self.settings.encoder_precision}; try another, or leave that '
                                'image out')
        return list(moments.numpy())

    def figures(self) -> dict:
        """Return the speed of this process so far: `measured` images in `measured_batches` and in `seconds`.

        It is the speed after the warm-up, over one batch at least. A single batch counts the loader's start as well.
        """
        begun = min(self.settings.warmup_batches, len(self.clock) - 2)
        device = None  # the name of a processor takes a second to find out
        if self.device.type == 'cuda':
            device = torch.cuda.get_device_name(self.device)
        return {'name': self.name, 'machine': platform.node(), 'device': device,
                'measured': self.encoded[-1] - self.encoded[begun], 'measured_batches': len(self.clock) - 1 - begun,
                'seconds': self.clock[-1] - self.clock[begun]}


encoder_of_process = functools.cache(Encoder)  # built at the first call


def encode_parts(settings: Encode, output: Output, on_gpu: bool, parts: list[Part]) -> dict:
    """Encode shards of images: what a worker does.

    Args:
        settings: of the encoding.
        output: where to.
        on_gpu: whether this process has a GPU, or else works on the CPU.
        parts: each of one ImageShard.

    Returns the figures of this process so far.
    """
    output.require_begun()
    encoder = encoder_of_process(settings, on_gpu)
    if settings.local:
        os.makedirs(settings.local, exist_ok=True)
    in_place = not settings.local and is_readable_in_place(settings.remote, [part.sources[0].entry for part in parts])
    with tempfile.TemporaryDirectory(prefix='shards-', dir=settings.local) as copies:
        encoder.encode(output, parts, None if in_place else copies)
    return encoder.figures()
