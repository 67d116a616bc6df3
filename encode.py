"""Encode images once, so that training does not repeat the VAE's share of every step.

    composer encode.py --remote s3://my-bucket/photos --out s3://my-bucket/photos-512 --model_name FOLDER --pretrained
    composer benchmark.py --remote s3://my-bucket/photos-512 --use_ema --model_name FOLDER --pretrained

Each image shard becomes shards of its own, with the mean and the log variance of each image's latents (float16, so that
training draws a latent anew each time) and the caption. Any number of ranks share the shards; a run that was stopped,
when started again with the same command on any number of ranks, encodes only what is missing. OUT/index.json comes
last.
"""
from harness.options import encode_parser

if __name__ == '__main__':
    encode_parser(__doc__).parse_args()  # a typo is answered before the imports, which take seconds

import argparse
import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from composer.utils import dist, get_device
from diffusers import AutoencoderKL
from streaming import MDSWriter
from torch.utils.data import DataLoader, Dataset

from data import BadSamples, StreamingLAIONDataset, normalize, open_dataset
from harness.compiling import compile_in_place, compile_mode
from harness.failures import reason
from harness.preflight import (best_precision, fill_in_shared_defaults, refuse_bad_shared_flags,
                               refuse_more_ranks_than_gpus)
from harness.progress import EncodingBar
from harness.ranks import SharedCount, end_with_launcher, gather_patiently, join_ranks
from harness.record import circumstances, keep
from inputs.errors import DataError, one_line
from inputs.images import stack_images
from inputs.parts import Output, claim, finish_part, merge_parts, part_index, part_name
from inputs.shards import LATENT_COLUMNS, LATENTS, number_of_samples, read_index, require_cache_for, require_columns
from models.flops import encoding_flops, utilization
from models.latents import origin_of_latents, vae_moments
from models.loading import ModelFiles, build_vae, find_model

FLAGS_IN_RECORD = ['pretrained', 'batch_size', 'num_workers', 'encoder_precision', 'channels_last', 'compile', 'seed']


class Samples(Dataset):
    """The samples `ids` of a dataset, in that order and without stand-ins: a bad one is its reason."""

    def __init__(self, images: StreamingLAIONDataset, ids: list[int]):
        self.images = images
        self.ids = ids

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
        batch['read'] = len(samples)
        batch['bad_samples'] = [sample['bad'] for sample in samples if 'bad' in sample]
        return batch


class PartWriter:
    """Writes latents, which come image shard by image shard, into a part of OUT for each of these.

    Args:
        images: the dataset that the samples are of; the shard that comes next, unless it is encoded already, is
            fetched meanwhile.
        output: where to.
        image_size: of the images, in pixels.
        fetcher: the thread that does.
    """

    def __init__(self, images: StreamingLAIONDataset, output: Output, image_size: int, fetcher: ThreadPoolExecutor):
        self.images = images
        self.output = output
        self.columns = LATENT_COLUMNS | {LATENTS: f'ndarray:float16:8,{image_size // 8},{image_size // 8}'}
        self.shard = None  # that is being written
        self.writer = None
        self.fetcher = fetcher

    def write(self, index: int, moments: np.ndarray, caption: str) -> None:
        """The latents of sample `index`: moments float16 (8, H/8, W/8)."""
        shard = int(self.images.spanner[index][0])
        if shard != self.shard:
            self.finish_part()
            self.shard = shard
            self.writer = MDSWriter(columns=self.columns, out=self.output.target(part_name(shard)), hashes=['xxh64'],
                                    exist_ok=True)
            next_shard = min(shard + dist.get_world_size(), self.images.num_shards - 1)
            self.fetcher.submit(self.images.prepare_shard, next_shard)
        self.writer.write({LATENTS: moments, 'caption': caption})

    def finish_part(self) -> None:
        """Bring the last latents of an image shard to OUT, and then say that its part is whole."""
        if self.writer:
            self.writer.finish()
            finish_part(self.output, self.shard)
            self.writer = None


def encode_samples(vae: AutoencoderKL, samples: Samples, output: Output, args: argparse.Namespace,
                   progress: EncodingBar) -> dict:
    """Encode this rank's `samples` into a part of OUT for each of their shards; returns what was counted."""
    device = next(vae.parameters()).device
    loader = DataLoader(samples, args.batch_size, collate_fn=samples.collate, num_workers=args.num_workers,
                        pin_memory=device.type == 'cuda')
    bad_samples = BadSamples(args.max_bad_samples)
    encoded = [0]  # images so far, at the start and after each batch
    clock = [time.perf_counter()]  # when that was
    with ThreadPoolExecutor(1) as fetcher:
        writer = PartWriter(samples.images, output, args.image_size, fetcher)
        for batch in loader:
            read = batch['read']  # the bad ones, too
            batch = bad_samples(batch)
            for sample in zip(batch['id'], moments_of(vae, batch, args), batch['caption'], strict=True):
                writer.write(*sample)
            encoded.append(encoded[-1] + len(batch['id']))
            clock.append(time.perf_counter())
            progress.advance(read)
        writer.finish_part()
    start = min(args.warmup_batches, max(0, len(clock) - 2))
    return {'samples': encoded[-1], 'bad': bad_samples.found,
            'measured': encoded[-1] - encoded[start], 'seconds': clock[-1] - clock[start]}


@torch.no_grad()
def moments_of(vae: AutoencoderKL, batch: dict, args: argparse.Namespace) -> list[np.ndarray]:
    """The moments of a batch, a float16 array (8, H/8, H/8) for each good sample. DataError: one is not finite."""
    if not batch['id']:
        return []
    images = {'image': batch['image'].to(next(vae.parameters()).device, non_blocking=True)}
    images = normalize(images, args.image_size)['image']  # (B, 3, H, H) in [-1, 1]
    if args.compile:  # a compiled encoder is compiled anew for each number of images
        missing = args.batch_size - len(images)
        images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))
    moments = vae_moments(vae, images)[:len(batch['id'])].half()  # (B, 8, H/8, W/8)
    finite = moments.isfinite().flatten(1).all(dim=1).tolist()
    if not all(finite):
        raise DataError(f'sample {batch["id"][finite.index(False)]} has moments that are not finite in float16, with '
                        f'--encoder_precision {args.encoder_precision}; try another, or leave that image out')
    return list(moments.cpu().numpy())


def refuse_bad_encoding(args: argparse.Namespace) -> None:
    """ValueError, with the flag, its value and the remedy, for what cannot run."""
    if not args.remote or not args.out:
        raise ValueError('give both --remote and --out')
    refuse_bad_shared_flags(args, args.batch_size)


def read_image_index(args: argparse.Namespace) -> dict:
    """The index.json of --remote. ValueError: it holds no images and captions."""
    index = read_index(args.remote)
    require_columns(args.remote, index)
    require_cache_for(args.remote, index, args.cache_limit)
    if 'latents' in index:
        raise ValueError(f'--remote {args.remote} holds latents already')
    return index


def begin(args: argparse.Namespace, output: Output, origin: dict, index: dict) -> bool:
    """Claim OUT for these latents of these images; True if an earlier run has begun it. ValueError: it cannot be."""
    source = hashlib.sha256(json.dumps(index['shards'], sort_keys=True).encode()).hexdigest()
    contents = origin | {'encoder_precision': args.encoder_precision, 'source_sha256': source}
    is_begun = False
    if dist.get_global_rank() == 0:
        is_begun = claim(output, contents)
    is_begun = any(dist.all_gather_object(is_begun))
    if not all(dist.all_gather_object(output.read('encoding.json') is not None)):
        raise ValueError(f'--out {args.out} is not the same folder on every node; use a shared one or a store')
    return is_begun


def missing_samples(images: StreamingLAIONDataset, output: Output, is_begun: bool) -> tuple[list[int], int]:
    """The ids of the samples that this rank has to encode, and how many all ranks have.

    They are those of its share of the shards that have no part yet.
    """
    rank = dist.get_global_rank()
    ranks = dist.get_world_size()
    missing = []
    for shard in range(rank, images.num_shards, ranks):  # the ranks share the looking, and then what is missing
        if not is_begun or output.read(part_index(shard)) is None:
            missing.append(shard)
    all_missing = sorted(shard for found in dist.all_gather_object(missing) for shard in found)
    ids = []
    for shard in all_missing[rank::ranks]:
        first = int(images.sample_offset_per_shard[shard])
        ids += range(first, first + int(images.samples_per_shard[shard]))
    return ids, sum(int(images.samples_per_shard[shard]) for shard in all_missing)


def build_encoder(args: argparse.Namespace, files: ModelFiles) -> AutoencoderKL:
    """The VAE on its device, its random weights drawn from the seed, with its switches."""
    device = get_device()
    torch.manual_seed(args.seed)
    with torch.device(device._device):
        vae = build_vae(files, args.encoder_precision)
    vae = device.module_to_device(vae)
    if args.channels_last:
        vae.to(memory_format=torch.channels_last)
    if args.compile:
        compile_in_place([vae.encoder], compile_mode(args))
    return vae


def make_record(args: argparse.Namespace, ranks: list[dict], index: dict, flops_per_image: int) -> dict:
    """The record of an encoding: throughput over all ranks, and what is stored for an image."""
    stored_samples = number_of_samples(index)
    seconds = max(rank['seconds'] for rank in ranks)
    record = circumstances('encode', args, FLAGS_IN_RECORD) | {
        'dataset': 'streaming',
        'status': 'complete',
        'images_per_sec': None,  # where all was there already
        'images_per_sec_per_device': None,
        'samples': sum(rank['samples'] for rank in ranks),
        'stored_samples': stored_samples,
        'bytes_per_image': sum(shard['raw_data']['bytes'] for shard in index['shards']) / stored_samples,
        'bad_samples': len(set.union(*(rank['bad'] for rank in ranks))),
    }
    if seconds:
        images_per_sec = sum(rank['measured'] for rank in ranks) / seconds
        record['images_per_sec'] = images_per_sec
        record['images_per_sec_per_device'] = images_per_sec / len(ranks)
        record |= utilization(images_per_sec / len(ranks), flops_per_image, args.encoder_precision)
    return record


def summary(record: dict, out: str) -> str:
    """The record for people, and the command that trains on what was encoded."""
    speed = record['images_per_sec'] or 0
    return (f'encoded         {record["samples"]:,} images, {speed:,.4g} images/s; {record["stored_samples"]:,} are '
            f'stored, {record["bytes_per_image"]:,.0f} bytes each\n'
            f'next            composer benchmark.py --remote {out}')


def encode(args: argparse.Namespace) -> dict:
    """Encode what is missing, and merge; on rank 0 the record, on others what they counted."""
    join_ranks(get_device(), args.dist_timeout)
    files = find_model(args.model_name, args.pretrained)
    origin = origin_of_latents(files, args.image_size)
    index = read_image_index(args)
    output = Output(args.out)
    is_begun = begin(args, output, origin, index)
    images = open_dataset(args.remote, args.local, image_size=args.image_size, index=index,
                          cache_limit=args.cache_limit, batch_size=1, shuffle=False)
    count = SharedCount('encoded')  # before the ranks meet again, in missing_samples
    ids, of_all_ranks = missing_samples(images, output, is_begun)
    vae = build_encoder(args, files)
    with EncodingBar(count, of_all_ranks) as progress:
        ranks = gather_patiently(encode_samples(vae, Samples(images, ids), output, args, progress))
        progress.advance(0)  # to what the other ranks have done since
    if dist.get_global_rank():
        return ranks[dist.get_global_rank()]
    index = merge_parts(output, images.num_shards, {'latents': origin})
    if not index['shards']:
        raise DataError('not one image could be encoded')
    record = make_record(args, ranks, index, encoding_flops(vae.config, args.image_size))
    return keep(record, summary(record, args.out), args.results)


def main(argv: list[str] | None = None) -> dict:
    """Encode; returns the record."""
    end_with_launcher()
    parser = encode_parser(__doc__)
    args = parser.parse_args(argv)
    try:
        refuse_more_ranks_than_gpus()
        fill_in_shared_defaults(args, args.batch_size, best_precision())
        refuse_bad_encoding(args)
        return encode(args)
    except ValueError as error:
        parser.error(one_line(error))
    except Exception as error:
        parser.error(reason(error, f'--batch_size {args.batch_size}'))


if __name__ == '__main__':
    main()
