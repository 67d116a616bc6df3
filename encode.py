"""Encode images once, so that training does not repeat the VAE's share of every step.

    composer encode.py --remote s3://my-bucket/photos --out s3://my-bucket/photos-512 --model_name FOLDER --pretrained
    composer benchmark.py --remote s3://my-bucket/photos-512 --use_ema --model_name FOLDER --pretrained

Each image shard becomes shards of its own, with the moments of the VAE's posterior (float16, so that training draws a
latent anew each time) and the caption. Any number of ranks share the shards; a run that was stopped, when started again
with the same command on any number of ranks, encodes only what is missing. OUT/index.json comes last.
"""
import argparse
import contextlib
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from composer.utils import dist, get_device
from streaming import MDSWriter
from streaming.base.storage import CloudDownloader, CloudUploader
from torch.utils.data import DataLoader, Dataset

from benchmark import (Parser, build_dataset, build_vae, check_shared, checked_index, circumstances, count,
                       finish, join_ranks, latents_of, load_configs, shared_flags, utilization, vae_flops_per_image,
                       vae_moments)
from data import LATENT_COLUMNS, LATENTS, BadSamples, DataError, StreamingLAIONDataset, normalize, stack_images
from safeguard import end_with_launcher

PRECISION = {'fp32': 'fp32', 'bf16': 'amp_bf16', 'fp16': 'amp_fp16'}  # whose peak the MFU is of


class Samples(Dataset):
    """The samples `ids` of a dataset, in that order and without stand-ins: a bad one is its reason."""

    def __init__(self, images: StreamingLAIONDataset, ids: list[int]):
        self.images, self.ids = images, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, position: int) -> dict:
        index = self.ids[position]
        try:
            return self.images.sample(index) | {'id': index}
        except ValueError as error:
            return {'bad': (index, str(error))}

    def collate(self, samples: list[dict]) -> dict:
        """`image` uint8 (B, 3, H, H) of the good samples, their `caption` and `id`, and the `bad_samples`."""
        good = [sample for sample in samples if 'image' in sample]
        batch = {name: [sample[name] for sample in good] for name in ('caption', 'id')}
        if good:
            batch['image'] = stack_images([sample['image'] for sample in good], self.images.image_size)
        return batch | {'bad_samples': [sample['bad'] for sample in samples if 'bad' in sample]}


class Output:
    """A folder, or an object store through a temporary folder, that files are written to and fetched from."""

    def __init__(self, out: str):
        self.out, self.remote = out.rstrip('/'), out.rstrip('/') if '://' in out else None
        self._staging = tempfile.TemporaryDirectory() if self.remote else None  # as long as this lives
        self.folder = self._staging.name if self.remote else self.out

    def target(self, part: str) -> str | tuple[str, str]:
        """`out` for an MDSWriter."""
        folder = os.path.join(self.folder, part)
        return (folder, f'{self.remote}/{part}') if self.remote else folder

    def write(self, name: str, content: dict) -> None:
        """A JSON file, whole or not at all."""
        os.makedirs(self.folder, exist_ok=True)
        path = Path(self.folder, name)
        path.with_suffix('.tmp').write_text(json.dumps(content))
        path.with_suffix('.tmp').rename(path)
        if self.remote:
            CloudUploader.get((self.folder, self.remote), keep_local=True, exist_ok=True).upload_file(name)

    def read(self, name: str) -> dict | None:
        """A JSON file; None if there is none, or a killed run left it cut."""
        path = os.path.join(self.folder, name)
        with contextlib.suppress(Exception):  # every storage client has its own
            if self.remote and not os.path.exists(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                CloudDownloader.direct_download(f'{self.remote}/{name}', path)
            return json.loads(Path(path).read_text())


def samples_of(images: StreamingLAIONDataset, shard: int) -> range:
    """The ids of a shard's samples."""
    first = int(images.sample_offset_per_shard[shard])
    return range(first, first + int(images.samples_per_shard[shard]))


def part_name(shard: int) -> str:
    """The folder for the latents of an image shard."""
    return f'{shard:06}'


def claim(output: Output, latents: dict) -> bool:
    """Say in OUT what its latents are; returns whether an earlier run has, so that there may be some.

    Raises:
        ValueError: OUT is finished, or its latents are others.
    """
    if output.read('index.json'):
        raise ValueError(f'--out {output.out} already holds a dataset; give a new folder')
    stored = output.read('latents.json')
    if stored not in (None, latents):
        raise ValueError(f'--out {output.out} was begun with {stored}, and this run has {latents}; give a new folder')
    try:
        output.write('latents.json', latents)
    except Exception as error:  # every storage client has its own
        raise ValueError(f'--out {output.out} cannot be written ({" ".join(str(error).split())})') from None
    return stored is not None


def encode_samples(vae, samples: Samples, output: Output, args: argparse.Namespace) -> dict:
    """Encode this rank's `samples` into a part of OUT for each of their shards; returns what was counted.

    Raises:
        DataError: too many samples are bad, or moments are not finite in float16.
    """
    images, device, bad = samples.images, next(vae.parameters()).device, BadSamples(args.max_bad_samples)
    loader = DataLoader(samples, args.batch_size, collate_fn=samples.collate, num_workers=args.num_workers,
                        pin_memory=device.type == 'cuda')
    columns = LATENT_COLUMNS | {LATENTS: f'ndarray:float16:8,{args.image_size // 8},{args.image_size // 8}'}
    parts, clock, encoded, writer = [], [time.perf_counter()], [0], None
    with ThreadPoolExecutor(1) as fetcher:
        for batch in map(bad, loader):
            for index, *row in zip(batch['id'], moments_of(vae, batch, args), batch['caption'], strict=True):
                shard = int(images.spanner[index][0])
                if part_name(shard) not in parts:  # samples come shard by shard
                    if writer:
                        writer.finish()
                    parts.append(part_name(shard))
                    writer = MDSWriter(columns=columns, out=output.target(parts[-1]), hashes=['xxh64'], exist_ok=True)
                    fetcher.submit(images.prepare_shard, min(shard + dist.get_world_size(), images.num_shards - 1))
                writer.write(dict(zip((LATENTS, 'caption'), row, strict=True)))
            clock.append(time.perf_counter())
            encoded.append(encoded[-1] + len(batch['id']))
    if writer:
        writer.finish()
    start = min(args.warmup_batches, max(0, len(clock) - 2))
    return {'parts': parts, 'samples': encoded[-1], 'bad': bad.found,
            'measured': encoded[-1] - encoded[start], 'seconds': clock[-1] - clock[start]}


@torch.no_grad()
def moments_of(vae, batch: dict, args: argparse.Namespace) -> list:
    """The moments of a batch, one float16 array (8, H/8, H/8) for each good sample.

    Raises:
        DataError: one is not finite in float16.
    """
    if 'image' not in batch:
        return []
    images = {'image': batch['image'].to(next(vae.parameters()).device, non_blocking=True)}
    moments = vae_moments(vae, normalize(images, args.image_size)['image']).half()  # (B, 8, H/8, W/8)
    finite = moments.isfinite().flatten(1).all(dim=1).tolist()
    if not all(finite):
        raise DataError(f'sample {batch["id"][finite.index(False)]} has moments that are not finite in float16, with '
                        f'--encoder_precision {args.encoder_precision}; try another, or leave that image out')
    return list(moments.cpu().numpy())


def merge(output: Output, parts: list[str], latents: dict) -> dict:
    """The index of all parts, written as OUT/index.json; returns it.

    Raises:
        DataError: a part is not to be seen from here.
    """
    shards = []
    for part in parts:
        index = output.read(f'{part}/index.json')
        if index is None:
            raise DataError(f'--out {output.out} lacks the part {part} that a rank wrote: it is not the same folder on '
                            'every node; use a shared one or an object store')
        for shard in index['shards']:
            shard['raw_data']['basename'] = f'{part}/{shard["raw_data"]["basename"]}'
            shards.append(shard)
    index = {'version': 2, 'shards': shards, 'latents': latents}
    output.write('index.json', index)
    return index


def make_record(args: argparse.Namespace, ranks: list[dict], index: dict, flops_per_image: int) -> dict:
    """The record of an encoding: throughput over all ranks, and what is stored for an image."""
    flags = ['pretrained', 'batch_size', 'num_workers', 'encoder_precision', 'channels_last', 'compile', 'seed']
    stored = sum(shard['samples'] for shard in index['shards'])
    seconds = max(rank['seconds'] for rank in ranks)
    speed = sum(rank['measured'] for rank in ranks) / seconds if seconds else None  # none where all was there
    record = circumstances('encode', args, flags) | {
        'dataset': 'streaming', 'status': 'complete', 'images_per_sec': speed,
        'images_per_sec_per_device': speed and speed / len(ranks),
        'samples': sum(rank['samples'] for rank in ranks), 'stored_samples': stored,
        'bytes_per_image': sum(shard['raw_data']['bytes'] for shard in index['shards']) / stored,
        'bad_samples': len(set.union(*(rank['bad'] for rank in ranks))),
    }
    return record | (utilization(speed / len(ranks), flops_per_image, PRECISION[args.encoder_precision])
                     if speed else {})


def build_parser() -> Parser:
    parser = Parser(prog='encode.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    parents=[shared_flags()])
    parser.add_argument('--out', help='new folder or object store for the latents')
    parser.add_argument('--batch_size', type=count, default=32, help='images at once on each device (default: 32)')
    return parser


def main(argv: list[str] | None = None) -> dict:
    """Encode; returns the record."""
    end_with_launcher()
    parser = build_parser()
    args = parser.parse_args(argv)
    device, rank, ranks = get_device(), dist.get_global_rank(), dist.get_world_size()
    try:
        if not args.remote or not args.out:
            raise ValueError('give both --remote and --out')
        check_shared(args, args.batch_size)
        join_ranks(device, args.dist_timeout)
        configs, folder = load_configs(args.model_name, args.pretrained)
        latents, output = latents_of(args, configs, folder), Output(args.out)
        if 'latents' in checked_index(args):
            raise ValueError(f'--remote {args.remote} holds latents already')
        begun = any(dist.all_gather_object(rank == 0 and claim(output, latents)))
        images = build_dataset(args, batch_size=1, shuffle=False)
        mine = range(rank, images.num_shards, ranks)
        done = [shard for shard in mine if begun and output.read(f'{part_name(shard)}/index.json')]
        torch.manual_seed(args.seed)
        with torch.device(device._device):
            vae = build_vae(configs, folder if args.pretrained else None, args.encoder_precision)
        vae = device.module_to_device(vae)
        if args.channels_last:
            vae.to(memory_format=torch.channels_last)
        if args.compile:
            vae.encoder.compile(dynamic=False)
        samples = Samples(images, [index for shard in sorted({*mine} - {*done}) for index in samples_of(images, shard)])
        counted = encode_samples(vae, samples, output, args)
        counted['parts'] += map(part_name, done)
        everyone = dist.all_gather_object(counted)
        if rank:
            return counted
        index = merge(output, sorted(part for counted in everyone for part in counted['parts']), latents)
    except (ValueError, DataError) as error:  # a worker's comes with its traceback
        parser.error(str(error).splitlines()[-1].removeprefix('data.DataError: '))
    record = make_record(args, everyone, index, vae_flops_per_image(vae, args.image_size))
    text = (f'encoded         {record["samples"]:,} images, {record["images_per_sec"] or 0:,.4g} images/s; '
            f'{record["stored_samples"]:,} are stored, {record["bytes_per_image"]:,.0f} bytes each\n'
            f'next            composer benchmark.py --remote {args.out}')
    return finish(record, text, args.results)


if __name__ == '__main__':
    main()
