"""Images become the moments of their latents: what a worker of encode.py does, a part for each shard of images."""
import os
import platform
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch.utils.data import DataLoader, Dataset

from fitting.compiling import compile_in_place
from inputs.errors import DataError, is_out_of_memory
from inputs.images import decode_image, normalize_images, stack_images
from inputs.shards import LATENT_COLUMNS, LATENTS, index_hash, read_index
from inputs.verified_stream import Shards, open_shards
from models.latents import vae_moments
from models.loading import build_vae, find_model
from parts.claims import require_same_place
from parts.devices import device_of_worker, name_of_gpu
from parts.engine import Part
from parts.output import Output
from parts.writer import PartWriter


@dataclass(frozen=True)
class EncodingSettings:
    """What is encoded, and how.

    Attributes:
        remote: the shards of images.
        index_hash: of their index.json.
        local: folder that keeps copies of them; None: a copy lives for as long as it is read.
        keep_copies: whether copies in `local` stay.
        model_name, pretrained: which VAE.
        image_size: in pixels.
        batch_size: images at once.
        num_workers: processes that decode, for each device.
        precision: of the VAE: bf16, fp16 or fp32.
        channels_last: memory format of its convolutions; None: on a GPU.
        compile: whether it is compiled, and in which mode of torch.compile; None is torch's default.
        compile_mode: the same.
        seed: of random weights.
        warmup_batches: of each worker that no clock counts.
        on_gpu: see `device_of_worker`.
    """
    remote: str
    index_hash: str
    local: str | None
    keep_copies: bool
    model_name: str
    pretrained: bool
    image_size: int
    batch_size: int
    num_workers: int
    precision: str
    channels_last: bool | None
    compile: bool
    compile_mode: str | None
    seed: int
    warmup_batches: int
    on_gpu: bool | None


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
        except UnicodeDecodeError:
            return {'shard': shard, 'bad': (number, 'the caption is not UTF-8')}
        except ValueError as error:
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


class BatchesOfShards:
    """The samples of some shards in batches, none of which is of two shards. The next shard is fetched meanwhile."""

    def __init__(self, shards: Shards, numbers: list[int], batch_size: int):
        self.shards = shards
        self.numbers = numbers
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        with ThreadPoolExecutor(1) as fetcher:
            fetched = fetcher.submit(self.shards.fetch, self.numbers[0])
            for shard, following in zip(self.numbers, [*self.numbers[1:], None], strict=True):
                samples = len(fetched.result())
                if following is not None:
                    fetched = fetcher.submit(self.shards.fetch, following)
                for start in range(0, samples, self.batch_size):
                    yield [(shard, number) for number in range(start, min(start + self.batch_size, samples))]


class Encoder:
    """A worker that makes a part of latents of each shard of images.

    Args:
        output: where to.
        settings: of the encoding.
        place: of this worker among those of its machine: the number of its GPU.

    Raises DataError if this machine does not see the same OUT or the same images as the one that gives it parts.
    """

    def __init__(self, output: Output, settings: EncodingSettings, place: int):
        self.output = output
        self.settings = settings
        self.name = uuid.uuid4().hex
        self.device = device_of_worker(place, settings.on_gpu)
        require_same_place(output)
        index = read_index(settings.remote)
        if index_hash(index) != settings.index_hash:
            raise DataError(f'--remote {settings.remote} is not the same on every machine; use a shared one or a store')
        self.first_numbers = [0, *accumulate(shard['samples'] for shard in index['shards'])]  # of the shards' samples
        self.copies = None
        if settings.local is None and not os.path.isdir(settings.remote):
            self.copies = tempfile.TemporaryDirectory(prefix='shards-')  # as long as this lives
        self.shards = open_shards(settings.remote, self.copies.name if self.copies else settings.local, index)
        self.vae = build_encoder(settings, self.device)
        self.clock = [(0, time.perf_counter())]  # images so far, and when, at the start and after each batch

    def __call__(self, parts: list[Part]) -> list[dict]:
        """Encode a part after the other; returns what there is to say of each.

        A part's index keeps its bad samples, each with its number among all samples.
        """
        settings = self.settings
        samples = Samples(self.shards, settings.image_size)
        loader = DataLoader(samples, batch_sampler=BatchesOfShards(self.shards, [part.number for part in parts],
                                                                   settings.batch_size),
                            collate_fn=samples.collate, num_workers=settings.num_workers,
                            pin_memory=self.device.type == 'cuda')
        batches = self.encoded(loader)
        batch = next(batches, None)
        made = []
        for part in parts:
            writer = PartWriter(self.output, part.number, latent_columns(settings.image_size), attempt=part.attempt)
            stored = 0
            bad = []
            while batch is not None and batch['shard'] == part.number:
                for moments, caption in zip(batch['moments'], batch['caption'], strict=True):
                    writer.write({LATENTS: moments, 'caption': caption})
                stored += len(batch['caption'])
                bad += [(self.first_numbers[part.number] + number, reason) for number, reason in batch['bad']]
                self.clock.append((self.clock[-1][0] + len(batch['caption']), time.perf_counter()))
                batch = next(batches, None)
            writer.finish(skipped=[{'source': name, 'key': number, 'reason': reason}
                                   for name in part.files for number, reason in bad])
            if self.copies or not settings.keep_copies:
                self.shards.drop(part.number)
            made.append({'number': part.number, 'samples': stored, 'bad': bad, 'worker': self.figures()})
        return made

    def encoded(self, loader: DataLoader) -> Iterator[dict]:
        """Each batch with its `moments`, float16 (8, H/8, H/8) of each image.

        A batch is given when the next one is on its way through the VAE, so that the GPU works while this one is
        written.
        """
        before = None
        for batch in loader:
            batch['moments'], batch['ready'] = self.moments_of(batch)
            if before is not None:
                yield self.finished(before)
            before = batch
        if before is not None:
            yield self.finished(before)

    @torch.no_grad()
    def moments_of(self, batch: dict) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The moments of a batch's good images, float16 (B, 8, H/8, W/8) on the CPU, and when they will be there.

        Raises DataError if they do not fit into memory.
        """
        if not batch['number']:
            return torch.empty(0), None
        images = normalize_images(batch['image'].to(self.device, non_blocking=True), self.settings.image_size)
        if self.settings.compile:  # a compiled encoder is compiled anew for each number of images
            missing = self.settings.batch_size - len(images)
            images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))
        try:
            moments = vae_moments(self.vae, images)[:len(batch['number'])].half()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise DataError(f'out of memory at --batch_size {self.settings.batch_size}; use a smaller one') from None
        moments = moments.to('cpu', non_blocking=True)
        if self.device.type == 'cpu':
            return moments, None
        ready = torch.cuda.Event()
        ready.record()
        return moments, ready

    def finished(self, batch: dict) -> dict:
        """A batch whose moments are there. Raises DataError if one is not finite."""
        if batch['ready'] is not None:
            batch['ready'].synchronize()
        finite = batch['moments'].isfinite().flatten(1).all(dim=1).tolist() if batch['number'] else []
        if not all(finite):
            number = self.first_numbers[batch['shard']] + batch['number'][finite.index(False)]
            raise DataError(f'sample {number} has moments that are not finite in float16, with --encoder_precision '
                            f'{self.settings.precision}; try another, or leave that image out')
        batch['moments'] = list(batch['moments'].numpy())
        return batch

    def figures(self) -> dict:
        """What is known of this worker's speed so far: `measured` images in `measured_batches` and in `seconds`, after
        its warm-up; a single batch is measured with the start of the loader."""
        start = min(self.settings.warmup_batches, max(0, len(self.clock) - 2))
        return {'name': self.name, 'machine': platform.node(), 'device': name_of_gpu(self.device),
                'channels_last': uses_channels_last(self.settings, self.device),
                'measured': self.clock[-1][0] - self.clock[start][0],
                'measured_batches': len(self.clock) - 1 - start,
                'seconds': self.clock[-1][1] - self.clock[start][1]}


def build_encoder(settings: EncodingSettings, device: torch.device) -> AutoencoderKL:
    """The VAE on its device, its random weights drawn from the seed, with its switches."""
    torch.manual_seed(settings.seed)
    with device:
        vae = build_vae(find_model(settings.model_name, settings.pretrained), settings.precision)
    vae = vae.to(device)
    if uses_channels_last(settings, device):
        vae.to(memory_format=torch.channels_last)
    if settings.compile:
        compile_in_place([vae.encoder], settings.compile_mode)
    return vae


def uses_channels_last(settings: EncodingSettings, device: torch.device) -> bool:
    """The memory format of a worker's convolutions."""
    if settings.channels_last is None:
        return device.type == 'cuda'
    return settings.channels_last


def latent_columns(image_size: int) -> dict[str, str]:
    """Names and MDS types."""
    return LATENT_COLUMNS | {LATENTS: f'ndarray:float16:8,{image_size // 8},{image_size // 8}'}
