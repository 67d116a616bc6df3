"""Encode images once, so that training does not repeat the VAE's share of every step.

    composer encode.py --remote s3://my-bucket/photos --out s3://my-bucket/photos-512 --model_name FOLDER --pretrained
    composer benchmark.py --remote s3://my-bucket/photos-512 --use_ema --model_name FOLDER --pretrained

Each image shard becomes shards of its own, with the mean and the log variance of each image's latents (float16, so that
training draws a latent anew each time) and the caption. Any number of ranks share the shards; a run that was stopped,
when started again with the same command on any number of ranks, encodes only what is missing. OUT/index.json comes
last.
"""
from harness.early_checks import answer_early, refuse_early_encoding
from harness.options import encode_parser

if __name__ == '__main__':
    answer_early(encode_parser(__doc__), refuse_early_encoding)  # before the imports, which take seconds

import argparse
import hashlib
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from composer.utils import dist, get_device
from diffusers import AutoencoderKL
from torch.utils.data import BatchSampler, DataLoader, Dataset

from data import BadSamples, StreamingLAIONDataset, normalize, open_dataset
from harness.compiling import compile_in_place, compile_mode
from harness.crew import AT_SIGTERM, Crew, say_stopped, sigterm_answered
from harness.failures import reason
from harness.launcher import end_with_launcher
from harness.next_command import training_command
from harness.preflight import (best_precision, fill_in_shared_defaults, refuse_bad_shared_flags,
                               refuse_more_ranks_than_gpus)
from harness.progress import EncodingBar
from harness.ranks import SharedCount, gather_patiently, join_ranks
from harness.record import UNMEASURED, circumstances, keep
from inputs.errors import DataError, one_line
from inputs.images import stack_images
from inputs.parts import CLAIM, Merged, Output, PartWriter, claim, finished_parts, merge_parts
from inputs.shards import LATENT_COLUMNS, LATENTS, read_index, require_cache_for, require_columns
from models.flops import encoding_flops, utilization
from models.latents import origin_of_latents, vae_moments
from models.loading import ModelFiles, build_vae, find_model

FLAGS_IN_RECORD = ['pretrained', 'batch_size', 'num_workers', 'encoder_precision', 'channels_last', 'compile', 'seed']


class Samples(Dataset):
    """The samples of a dataset by their ids and without stand-ins: a bad one is its reason."""

    def __init__(self, images: StreamingLAIONDataset):
        self.images = images

    def __len__(self) -> int:
        return self.images.num_samples

    def __getitem__(self, index: int) -> dict:
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


class ShardsInTurn:
    """The image shards that this rank comes for, one after the other: iterating gives the ids of their samples.

    The next shard is taken, and fetched meanwhile, before the last quarter of one is asked for; but not where so few
    are left that another rank might have to wait for it.

    Args:
        images: the dataset.
        missing: the numbers of the shards that have no part yet, the same list on all ranks.
        crew: the ranks that share them.
    """

    def __init__(self, images: StreamingLAIONDataset, missing: list[int], crew: Crew):
        self.images = images
        self.turns = crew.take_turns(missing)
        self.last_taken_ahead = None
        if len(missing) > 2 * crew.size:
            self.last_taken_ahead = missing[-2 * crew.size]
        self.taken: deque[int] = deque()  # shards whose samples were asked for, and that are not written yet

    def __iter__(self) -> Iterator[int]:
        with ThreadPoolExecutor(1) as fetcher:
            next_shard = next(self.turns, None)
            while next_shard is not None:
                shard = next_shard
                next_shard = None
                self.taken.append(shard)
                first = int(self.images.sample_offset_per_shard[shard])
                samples = int(self.images.samples_per_shard[shard])
                last_quarter = samples - samples // 4
                yield from range(first, first + last_quarter)
                if self.last_taken_ahead is not None and shard < self.last_taken_ahead:
                    next_shard = next(self.turns, None)
                if next_shard is not None:
                    fetcher.submit(self.images.prepare_shard, next_shard)
                yield from range(first + last_quarter, first + samples)
                if next_shard is None:
                    next_shard = next(self.turns, None)


class LatentsWriter:
    """Writes latents, which come image shard by image shard, into a part of OUT for each of these.

    Args:
        shards: in whose order the latents come.
        output: where to.
        image_size: of the images, in pixels.
    """

    def __init__(self, shards: ShardsInTurn, output: Output, image_size: int):
        self.shards = shards
        self.output = output
        self.columns = LATENT_COLUMNS | {LATENTS: f'ndarray:float16:8,{image_size // 8},{image_size // 8}'}
        self.part = None  # of the shard that is being written, once it has a sample

    def write(self, index: int, moments: np.ndarray, caption: str) -> None:
        """The latents of sample `index`: moments float16 (8, H/8, W/8)."""
        shard = int(self.shards.images.spanner[index][0])
        while self.shards.taken[0] != shard:
            self.finish_part()
        if self.part is None:
            self.part = PartWriter(self.output, shard, self.columns)
        self.part.write({LATENTS: moments, 'caption': caption})

    def finish_part(self) -> None:
        """Bring the last latents of an image shard to OUT, and then say that its part is whole, if only of nothing."""
        shard = self.shards.taken.popleft()
        part = self.part or PartWriter(self.output, shard, self.columns)
        part.finish()
        self.part = None

    def finish(self) -> None:
        """Finish the parts of all shards that were asked for."""
        while self.shards.taken:
            self.finish_part()


def encode_samples(vae: AutoencoderKL, shards: ShardsInTurn, output: Output, args: argparse.Namespace,
                   progress: EncodingBar) -> dict:
    """Encode the samples of the `shards` into a part of OUT for each of them; returns what was counted."""
    device = next(vae.parameters()).device
    samples = Samples(shards.images)
    loader = DataLoader(samples, batch_sampler=BatchSampler(shards, args.batch_size, drop_last=False),
                        collate_fn=samples.collate, num_workers=args.num_workers, pin_memory=device.type == 'cuda')
    bad_samples = BadSamples(args.max_bad_samples)
    encoded = [0]  # images so far, at the start and after each batch
    clock = [time.perf_counter()]  # when that was
    writer = LatentsWriter(shards, output, args.image_size)
    for batch in loader:
        read = batch['read']  # the bad ones, too
        batch = bad_samples(batch)
        for sample in zip(batch['id'], moments_of(vae, batch, args), batch['caption'], strict=True):
            writer.write(*sample)
        encoded.append(encoded[-1] + len(batch['id']))
        clock.append(time.perf_counter())
        progress.advance(read)
    writer.finish()
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
    refuse_early_encoding(args)
    refuse_bad_shared_flags(args, args.batch_size)


def read_image_index(args: argparse.Namespace) -> dict:
    """The index.json of --remote. ValueError: it holds no images and captions."""
    index = read_index(args.remote)
    require_columns(args.remote, index)
    require_cache_for(args.remote, index, args.cache_limit)
    if 'latents' in index:
        raise ValueError(f'--remote {args.remote} holds latents already')
    return index


def begin(args: argparse.Namespace, output: Output, origin: dict, index: dict) -> list[int]:
    """Claim OUT for these latents of these images; the numbers of the shards that no earlier run has encoded.

    ValueError: OUT is of something else, or not the same folder on every node.
    """
    source = hashlib.sha256(json.dumps(index['shards'], sort_keys=True).encode()).hexdigest()
    contents = origin | {'encoder_precision': args.encoder_precision, 'source_sha256': source}
    num_shards = len(index['shards'])
    found = [None]
    if dist.get_global_rank() == 0:
        done = set()
        if claim(output, {'program': 'encode.py', **contents}):
            done = finished_parts(output, num_shards)
        found = [[shard for shard in range(num_shards) if shard not in done]]
    dist.broadcast_object_list(found)
    if not all(dist.all_gather_object(output.read(CLAIM) is not None)):
        raise ValueError(f'--out {args.out} is not the same folder on every node; use a shared one or a store')
    return found[0]


def crew_of_process_group() -> Crew:
    """This rank and the others, who share what is missing through the store that they have met by."""
    store = torch.distributed.distributed_c10d._get_default_store()
    run = [uuid.uuid4().hex]  # a process group can serve one run after the other
    dist.broadcast_object_list(run)
    return Crew(torch.distributed.PrefixStore(run[0], store), dist.get_global_rank(), dist.get_world_size())


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


def make_record(args: argparse.Namespace, ranks: list[dict], merged: Merged, flops_per_image: int) -> dict:
    """The record of an encoding: throughput over all ranks, and what is stored for an image."""
    seconds = max(rank['seconds'] for rank in ranks)
    record = circumstances('encode', args, FLAGS_IN_RECORD) | {
        'dataset': 'streaming',
        'status': 'complete',
        'images_per_sec': None,  # where all was there already
        'images_per_sec_per_device': None,
        'samples': sum(rank['samples'] for rank in ranks),
        'stored_samples': merged.samples,
        'bytes_per_image': merged.bytes / merged.samples,
        'bad_samples': len(set.union(*(rank['bad'] for rank in ranks))),
    }
    if seconds:
        images_per_sec = sum(rank['measured'] for rank in ranks) / seconds
        record['images_per_sec'] = images_per_sec
        record['images_per_sec_per_device'] = images_per_sec / len(ranks)
        record |= utilization(images_per_sec / len(ranks), flops_per_image, args.encoder_precision)
    else:
        record['status'] = UNMEASURED
    return record


def summary(record: dict, args: argparse.Namespace) -> str:
    """The record for people, and the command that trains on what was encoded."""
    model = ['--model_name', args.model_name, '--image_size', str(args.image_size)]
    if args.pretrained:
        model.append('--pretrained')
    speed = record['images_per_sec'] or 0
    return (f'encoded         {record["samples"]:,} images, {speed:,.4g} images/s; {record["stored_samples"]:,} are '
            f'stored, {record["bytes_per_image"]:,.0f} bytes each\n'
            f'next            {training_command(args.out, record["stored_samples"], model)}')


def encode(args: argparse.Namespace) -> dict:
    """Encode what is missing, and merge; on rank 0 the record, on others what they counted."""
    join_ranks(get_device(), args.dist_timeout)
    files = find_model(args.model_name, args.pretrained)
    origin = origin_of_latents(files, args.image_size)
    index = read_image_index(args)
    output = Output(args.out)
    crew = crew_of_process_group()

    def say():
        say_stopped('encode.py', crew, f'{AT_SIGTERM}; what is encoded stays in --out {args.out}, and the same '
                    'command, started again, goes on from there')
        output.discard()
    with sigterm_answered(say):
        count = SharedCount('encoded')  # before the ranks meet again, in begin
        missing = begin(args, output, origin, index)
        images = open_dataset(args.remote, args.local, image_size=args.image_size, index=index,
                              cache_limit=args.cache_limit, batch_size=1, shuffle=False)
        vae = build_encoder(args, files)
        with EncodingBar(count, int(images.samples_per_shard[missing].sum())) as progress:
            ranks = gather_patiently(encode_samples(vae, ShardsInTurn(images, missing, crew), output, args, progress))
            progress.advance(0)  # to what the other ranks have done since
        if crew.rank:
            return ranks[crew.rank]
        merged = merge_parts(output, images.num_shards, {'latents': origin}, processes=min(8, os.cpu_count() or 1))
    if not merged.samples:
        raise DataError('not one image could be encoded')
    record = make_record(args, ranks, merged, encoding_flops(vae.config, args.image_size))
    return keep(record, summary(record, args), args.results)


def main(argv: list[str] | None = None) -> dict:
    """Encode; returns the record."""
    end_with_launcher()
    parser = encode_parser(__doc__)
    args = parser.parse_args(argv)
    try:
        refuse_more_ranks_than_gpus()
        fill_in_shared_defaults(args, args.batch_size, best_precision(args))
        refuse_bad_encoding(args)
        return encode(args)
    except ValueError as error:
        parser.error(one_line(error))
    except Exception as error:
        parser.error(reason(error, f'--batch_size {args.batch_size}'))


if __name__ == '__main__':
    main()
