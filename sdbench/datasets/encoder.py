"""Encode shards of images with the VAE. A worker process builds the VAE once and uses it in all its calls."""
import functools
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

from sdbench.complete import or_default, workers_per_device
from sdbench.datasets.output import OutputFolder, PartWriter
from sdbench.datasets.workers import Part
from sdbench.errors import BadSample, DataError
from sdbench.flags.commands import Encode
from sdbench.flags.train import Train
from sdbench.inputs.batches import CAPTIONS, MDS_CAPTION_COLUMNS, decode_sample, normalize, stack_images, to_columns
from sdbench.inputs.images import decode_image
from sdbench.inputs.loader import begin_worker
from sdbench.inputs.shards import MOMENTS
from sdbench.inputs.stream import VerifiedStream, is_readable_in_place
from sdbench.models.loading import build_vae, find_model
from sdbench.models.switches import compile_in_place


class ImageShard(NamedTuple):
    """A shard of images, which is encoded into one part of the dataset of latents."""
    entry: dict  # the shard's entry in the index.json of the images
    is_ours: bool  # see `from_columns`

    @property
    def name(self) -> str:
        return self.entry['raw_data']['basename']


class Batches(Dataset):
    """Batches of images from several shards. Bad samples are not replaced, so a batch may have fewer images.

    A batch has `shard`, the position of its shard in `shards`; `image` uint8 (B, 3, H, H), `captions` (MDS columns) and
    `indices` (in the shard) of the good samples; and `bad`, the (index, reason) of each bad sample. Without a good
    sample, it has no `image`.
    """

    def __init__(self, readers: list[MDSReader], shards: list[ImageShard], image_size: int):
        self.readers = readers
        self.shards = shards
        self.image_size = image_size

    def __getitem__(self, key: tuple[int, range]) -> dict:
        """Return the batch with these samples of this shard. `key` is (position of the shard, indices in the shard)."""
        shard, indices = key
        reader = self.readers[shard]
        batch = {'shard': shard, 'indices': [], 'captions': [], 'bad': []}
        images = []
        for index in indices:
            try:
                sample = decode_sample(reader[index], self.shards[shard].is_ours,
                                       partial(decode_image, image_size=self.image_size))
            except (BadSample, UnicodeDecodeError) as error:
                batch['bad'].append((index, str(error)))
                continue
            images.append(sample['image'])
            batch['indices'].append(index)
            batch['captions'].append(to_columns(sample[CAPTIONS]))
        if images:
            batch['image'] = stack_images(images)
        return batch


class Encoder:
    """Encode shards with the VAE on the GPU of this process, or on the CPU, and measure the speed."""

    def __init__(self, settings: Encode, on_gpu: bool):
        self.settings = settings
        self.name = uuid.uuid4().hex  # identifies this process in the reports of its calls
        self.device = torch.device('cuda', torch.cuda.current_device()) if on_gpu else torch.device('cpu')
        files = find_model(settings.model_name, settings.pretrained)

        # Build the VAE. Seed its weights, because random weights must be the same on all devices.
        torch.manual_seed(settings.seed)
        self.vae = build_vae(files, settings.encoder_precision).to(self.device)
        if settings.channels_last:
            self.vae.to(memory_format=torch.channels_last)
        if settings.compile:
            compile_in_place([self.vae.encoder], settings.compile)

        self.latent_size = files.latent_size(settings.image_size)
        self.clock = [time.perf_counter()]  # time at which each batch ended
        self.encoded = [0]  # images encoded so far, after each batch

    def encode(self, output: OutputFolder, parts: list[Part], copies: str | None) -> None:
        """Encode the parts, in order, into a dataset. The source of each part is one ImageShard.

        `copies` is a folder for temporary copies of the shards, each removed once it is encoded. None reads the shards
        in place.
        """
        # Open the shards.
        settings = self.settings
        shards = [part.sources[0] for part in parts]
        entries = [shard.entry for shard in shards]
        stream = VerifiedStream({'version': 2, 'shards': entries}, settings.remote, copies)
        readers = [reader_from_json(stream.local, '', entry) for entry in entries]

        def keys_of_batches() -> Iterator[tuple[int, range]]:
            # Fetch the next shards while earlier ones are encoded. An empty shard gets one batch without samples,
            # because its part must be written as well.
            with ThreadPoolExecutor(1) as fetcher:
                for shard, _ in enumerate(fetcher.map(stream.prepare_shard, readers)):
                    samples = len(readers[shard])
                    for start in range(0, max(1, samples), settings.batch_size):
                        yield shard, range(start, min(start + settings.batch_size, samples))

        # Encode the batches, which the loader decodes in order, shard by shard.
        workers = or_default(settings.num_workers, workers_per_device(torch.cuda.device_count()))
        loader = DataLoader(Batches(readers, shards, settings.image_size), batch_size=None, sampler=keys_of_batches(),
                            num_workers=workers, pin_memory=self.device.type == 'cuda',
                            worker_init_fn=begin_worker)
        for position, batches in groupby(loader, itemgetter('shard')):
            self.encode_part(output, parts[position], batches)
            if copies is not None:
                readers[position].evict()

    def encode_part(self, output: OutputFolder, part: Part, batches: Iterator[dict]) -> None:
        """Encode the batches of one part, write its shards, and log its bad samples by their index in the shard."""
        [shard] = part.sources
        columns = MDS_CAPTION_COLUMNS | {MOMENTS: f'ndarray:float16:8,{self.latent_size},{self.latent_size}'}
        writer = PartWriter(output, part.name, columns)
        skipped = []

        def write(moments: list[np.ndarray], captions: list[dict]) -> None:
            for image_moments, image_captions in zip(moments, captions, strict=True):
                writer.write({MOMENTS: image_moments, **image_captions})

        # Write each batch in a thread while the GPU encodes the next batch.
        writing = []
        with ThreadPoolExecutor(1) as thread:
            for batch in batches:
                writing.append(thread.submit(write, self.encode_batch(batch, shard), batch['captions']))
                for index, reason in batch['bad']:
                    skipped.append({'source': shard.name, 'key': index, 'reason': reason})
                self.encoded.append(self.encoded[-1] + len(batch['indices']))
                self.clock.append(time.perf_counter())

        # Raise any error of the thread before the part is marked as complete.
        for written in writing:
            written.result()
        writer.finish(skipped)

    @torch.no_grad()
    def encode_batch(self, batch: dict, shard: ImageShard) -> list[np.ndarray]:
        """Return the moments of each good image in a batch, float16 (8, H/8, H/8).

        Raises DataError if the moments of an image are not finite.
        """
        if not batch['indices']:
            return []

        # Encode. Pad the batch to its full size for a compiled encoder, which otherwise compiles again for each size.
        images = batch['image'].to(self.device, non_blocking=True)
        if self.settings.compile:
            missing = self.settings.batch_size - len(images)
            images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))
        images = normalize({'image': images})['image'].to(self.vae.dtype)
        moments = self.vae.encode(images).latent_dist.parameters.half()  # (B, 8, H/8, W/8)
        moments = moments[:len(batch['indices'])].cpu()

        # Stop at infinite values and NaN, which would make the training loss NaN.
        for index, image_moments in zip(batch['indices'], moments, strict=True):
            if not image_moments.isfinite().all():
                raise DataError(f'sample {index} of {shard.name} has moments that are not finite in float16, with '
                                f'--encoder_precision {self.settings.encoder_precision}; try another precision, or '
                                'remove that image')
        return list(moments.numpy())

    def figures(self) -> dict:
        """Return the speed of this process so far: `measured` images in `measured_batches` and in `seconds`.

        Warm-up batches do not count, but the last batch always does. A single batch includes the loader's start.
        `name` identifies the process. `device` is the name of the GPU, and None for a CPU.
        """
        first = min(Train.warmup_batches, len(self.clock) - 2)  # number of batches that do not count
        device = None  # also for a CPU, because looking up its name takes a second
        if self.device.type == 'cuda':
            device = torch.cuda.get_device_name(self.device)
        return {'name': self.name, 'machine': platform.node(), 'device': device,
                'measured': self.encoded[-1] - self.encoded[first], 'measured_batches': len(self.clock) - 1 - first,
                'seconds': self.clock[-1] - self.clock[first]}


encoder_of_process = functools.cache(Encoder)  # a process builds it in its first call


def encode_parts(settings: Encode, output: OutputFolder, on_gpu: bool, parts: list[Part]) -> dict:
    """Encode shards of images in a worker process. Return the `figures()` of this process so far."""
    output.require_begun()
    encoder = encoder_of_process(settings, on_gpu)
    in_place = is_readable_in_place(settings.remote, [part.sources[0].entry for part in parts])
    with tempfile.TemporaryDirectory(prefix='shards-') as copies:
        encoder.encode(output, parts, None if in_place else copies)
    return encoder.figures()
