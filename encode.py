"""Encode images once, so that training does not repeat the VAE's share of every step.

    composer encode.py --remote s3://my-bucket/photos --out s3://my-bucket/photos-512 --model_name FOLDER --pretrained
    composer benchmark.py --remote s3://my-bucket/photos-512 --use_ema --model_name FOLDER --pretrained

Each image shard becomes shards of its own, with the moments of the VAE's posterior (float16, so that training draws a
latent anew each time) and the caption. Any number of ranks share the shards; a run that was stopped, when started again
with the same command on any number of ranks, encodes only what is missing. OUT/index.json comes last.
"""
import argparse
import datetime
import hashlib
import json
import os
import re
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
                       finish, join_ranks, latents_of, load_configs, reason, shared_parser, utilization,
                       vae_flops_per_image, vae_moments)
from data import (LATENT_COLUMNS, LATENTS, BadSamples, DataError, StreamingLAIONDataset, normalize, one_line,
                  stack_images)
from safeguard import end_with_launcher


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
        batch = {name: [sample[name] for sample in good] for name in ('caption', 'id', 'image')}
        if good:
            batch['image'] = stack_images(batch['image'], self.images.image_size)
        return batch | {'read': len(samples), 'bad_samples': [sample['bad'] for sample in samples if 'bad' in sample]}


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
        path = Path(self.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix('.tmp').write_text(json.dumps(content))
        path.with_suffix('.tmp').rename(path)
        if self.remote:
            CloudUploader.get((self.folder, self.remote), keep_local=True, exist_ok=True).upload_file(name)

    def read(self, name: str) -> dict | None:
        """A JSON file; None if there is none."""
        path = Path(self.folder, name)
        if self.remote and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                CloudDownloader.direct_download(f'{self.remote}/{name}', str(path))
            except Exception as error:  # every storage client has its own
                if not re.search('not found|404|NoSuchKey|does not exist', f'{type(error).__name__} {error}'):
                    raise
        return json.loads(path.read_text()) if path.exists() else None


def part_name(shard: int) -> str:
    """The folder for the latents of an image shard."""
    return f'{shard:06}'


def part_index(shard: int) -> str:
    """A part's own index: Streaming's index.json can be there before the shards that it lists."""
    return f'{part_name(shard)}/part.json'


def claim(output: Output, contents: dict) -> bool:
    """Say in OUT what it is made of; True if an earlier run has. ValueError: OUT is finished, or of something else."""
    if output.read('index.json'):
        raise ValueError(f'--out {output.out} already holds a dataset; give a new folder')
    begun = output.read('encoding.json')
    for key, own in contents.items():
        if begun and begun.get(key) != own:
            raise ValueError(f'--out {output.out} was begun with {key} {begun.get(key)}, and this run has {own}; give '
                             'the flags that it was begun with, or a new folder')
    output.write('encoding.json', contents)
    return begun is not None


def encode_samples(vae, samples: Samples, output: Output, args: argparse.Namespace) -> dict:
    """Encode this rank's `samples` into a part of OUT for each of their shards; returns what was counted."""
    images, device, bad = samples.images, next(vae.parameters()).device, BadSamples(args.max_bad_samples)
    loader = DataLoader(samples, args.batch_size, collate_fn=samples.collate, num_workers=args.num_workers,
                        pin_memory=device.type == 'cuda')
    columns = LATENT_COLUMNS | {LATENTS: f'ndarray:float16:8,{args.image_size // 8},{args.image_size // 8}'}
    shard, clock, encoded, writer = None, [time.perf_counter()], [0], None
    with ThreadPoolExecutor(1) as fetcher:
        for batch in map(bad, loader):
            for index, *row in zip(batch['id'], moments_of(vae, batch, args), batch['caption'], strict=True):
                if shard != int(images.spanner[index][0]):  # samples come shard by shard
                    finish_part(writer, shard, output)
                    shard = int(images.spanner[index][0])
                    writer = MDSWriter(columns=columns, out=output.target(part_name(shard)), hashes=['xxh64'],
                                       exist_ok=True)
                    fetcher.submit(images.prepare_shard, min(shard + dist.get_world_size(), images.num_shards - 1))
                writer.write(dict(zip((LATENTS, 'caption'), row, strict=True)))
            clock.append(time.perf_counter())
            encoded.append(encoded[-1] + len(batch['id']))
    finish_part(writer, shard, output)
    start = min(args.warmup_batches, max(0, len(clock) - 2))
    return {'samples': encoded[-1], 'bad': bad.found, 'measured': encoded[-1] - encoded[start],
            'seconds': clock[-1] - clock[start]}


def finish_part(writer: MDSWriter | None, shard: int | None, output: Output) -> None:
    """Bring the last latents of an image shard to OUT, and then say that its part is whole."""
    if writer:
        writer.finish()
        output.write(part_index(shard), output.read(f'{part_name(shard)}/index.json'))


@torch.no_grad()
def moments_of(vae, batch: dict, args: argparse.Namespace) -> list:
    """The moments of a batch, a float16 array (8, H/8, H/8) for each good sample. DataError: one is not finite."""
    if not batch['id']:
        return []
    images = {'image': batch['image'].to(next(vae.parameters()).device, non_blocking=True)}
    moments = vae_moments(vae, normalize(images, args.image_size)['image']).half()  # (B, 8, H/8, W/8)
    finite = moments.isfinite().flatten(1).all(dim=1).tolist()
    if not all(finite):
        raise DataError(f'sample {batch["id"][finite.index(False)]} has moments that are not finite in float16, with '
                        f'--encoder_precision {args.encoder_precision}; try another, or leave that image out')
    return list(moments.cpu().numpy())


def merge(output: Output, num_shards: int, latents: dict) -> dict:
    """Write OUT/index.json, the index of all parts, and return it. DataError: there is not one."""
    shards = []
    for shard in range(num_shards):  # of a shard without a good sample there is no part
        for entry in (output.read(part_index(shard)) or {'shards': []})['shards']:
            entry['raw_data']['basename'] = f'{part_name(shard)}/{entry["raw_data"]["basename"]}'
            shards.append(entry)
    if not shards:
        raise DataError('not one image could be encoded')
    index = {'version': 2, 'shards': shards, 'latents': latents}
    output.write('index.json', index)
    return index


def gather_patiently(own: dict) -> list[dict]:
    """What each rank has counted, however much later than the others one comes; a dead one is noticed all the same."""
    group = torch.distributed.new_group(backend='gloo', timeout=datetime.timedelta(days=30))
    everyone = [own] * dist.get_world_size()
    torch.distributed.all_gather_object(everyone, own, group=group)
    return everyone


def make_record(args: argparse.Namespace, ranks: list[dict], index: dict, flops_per_image: int) -> dict:
    """The record of an encoding: throughput over all ranks, and what is stored for an image."""
    flags = ['pretrained', 'batch_size', 'num_workers', 'encoder_precision', 'channels_last', 'compile', 'seed']
    stored = sum(shard['samples'] for shard in index['shards'])
    seconds = max(rank['seconds'] for rank in ranks)
    speed = sum(rank['measured'] for rank in ranks) / seconds if seconds else None  # none where all was there
    return circumstances('encode', args, flags) | {
        'dataset': 'streaming', 'status': 'complete', 'images_per_sec': speed,
        'images_per_sec_per_device': speed and speed / len(ranks),
        'samples': sum(rank['samples'] for rank in ranks), 'stored_samples': stored,
        'bytes_per_image': sum(shard['raw_data']['bytes'] for shard in index['shards']) / stored,
        'bad_samples': len(set.union(*(rank['bad'] for rank in ranks))),
    } | (utilization(speed / len(ranks), flops_per_image, args.encoder_precision) if speed else {})


def build_parser() -> Parser:
    parser = shared_parser('encode.py', __doc__)
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
        latents, output = latents_of(args.image_size, configs, folder), Output(args.out)
        if 'latents' in (index := checked_index(args)):
            raise ValueError(f'--remote {args.remote} holds latents already')
        source = hashlib.sha256(json.dumps(index['shards'], sort_keys=True).encode()).hexdigest()
        contents = latents | {'encoder_precision': args.encoder_precision, 'source_sha256': source}
        begun = any(dist.all_gather_object(rank == 0 and claim(output, contents)))
        if not all(dist.all_gather_object(output.read('encoding.json') is not None)):
            raise ValueError(f'--out {args.out} is not the same folder on every node; use a shared one or a store')
        images = build_dataset(args, batch_size=1, shuffle=False)
        missing = [shard for shard in range(rank, images.num_shards, ranks)
                   if not begun or output.read(part_index(shard)) is None]
        mine = sorted(shard for part in dist.all_gather_object(missing) for shard in part)[rank::ranks]
        ids = [int(images.sample_offset_per_shard[shard]) + place for shard in mine
               for place in range(images.samples_per_shard[shard])]
        torch.manual_seed(args.seed)
        with torch.device(device._device):
            vae = build_vae(configs, folder, args.encoder_precision)
        vae = device.module_to_device(vae)
        if args.channels_last:
            vae.to(memory_format=torch.channels_last)
        if args.compile:
            vae.encoder.compile(dynamic=False)
        everyone = gather_patiently(encode_samples(vae, Samples(images, ids), output, args))
        if rank:
            return everyone[rank]
        index = merge(output, images.num_shards, latents)
        record = make_record(args, everyone, index, vae_flops_per_image(vae, args.image_size))
        text = (f'encoded         {record["samples"]:,} images, {record["images_per_sec"] or 0:,.4g} images/s; '
                f'{record["stored_samples"]:,} are stored, {record["bytes_per_image"]:,.0f} bytes each\n'
                f'next            composer benchmark.py --remote {args.out}')
        return finish(record, text, args.results)
    except ValueError as error:
        parser.error(one_line(error))
    except Exception as error:
        parser.error(reason(error, f'--batch_size {args.batch_size}'))


if __name__ == '__main__':
    main()
