"""What a node pays at the start of an epoch: Streaming's own sampling, partition and shuffle, without any data.

    python benchmarks/epoch_start.py 10000000 100000000     # samples; 100 million need about 6 GB
    python benchmarks/epoch_start.py 2900000000 --epoch_size 100000000

The node's first rank computes them for all, on one core. An epoch of --epoch_size samples takes whole shards, others in
each epoch, as StreamingDataset(epoch_size=..., sampling_granularity=SAMPLES_A_SHARD) does.

docs/planning.md has the figures of one core of an AMD EPYC.
"""
import argparse
import resource
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
from streaming import StreamingDataset
from streaming.base.batching import generate_work

SAMPLES_A_SHARD = 3000  # 64 MiB of 20 KB images
# 256 GPUs, a global batch of 2048
WORLD = SimpleNamespace(num_nodes=32, ranks_per_node=8, workers_per_rank=8)
BATCH_SIZE = 8  # of a rank
SEED = 17


def described(num_samples: int, epoch_size: int) -> SimpleNamespace:
    """What Streaming asks of a StreamingDataset with shuffle=True and its other defaults, without its shards."""
    sizes = np.full(num_samples // SAMPLES_A_SHARD, SAMPLES_A_SHARD)
    sizes = np.append(sizes, num_samples - sizes.sum())
    dataset = SimpleNamespace(
        num_streams=1, shard_offset_per_stream=np.zeros(1, int), shards_per_stream=np.array([len(sizes)]),
        samples_per_shard=sizes, sample_offset_per_shard=sizes.cumsum() - sizes, epoch_size=epoch_size,
        streams=[SimpleNamespace(choose=epoch_size)], sampling_method='balanced', epoch_seed_change=True,
        sampling_granularity=1 if epoch_size == num_samples else SAMPLES_A_SHARD, batch_size=BATCH_SIZE,
        partition_algo='relaxed', num_canonical_nodes=WORLD.num_nodes, initial_physical_nodes=WORLD.num_nodes,
        shuffle=True, shuffle_algo='py1e', shuffle_seed=SEED,
        shuffle_block_size=max(4_000_000 // WORLD.num_nodes, 1 << 18))
    dataset.resample_streams = partial(StreamingDataset.resample_streams, dataset)
    return dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('samples', nargs='*', type=int, default=[10_000_000], help='of the dataset')
    parser.add_argument('--epoch_size', type=int, help='samples of an epoch (default: all)')
    args = parser.parse_args()
    for num_samples in args.samples:
        epoch_size = args.epoch_size or num_samples
        start = time.perf_counter()
        ids = generate_work('random', described(num_samples, epoch_size), WORLD, 0, 0)
        seconds = time.perf_counter() - start
        gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20
        ids = ids[ids >= 0]
        repeated = len(ids) - len(np.unique(ids))  # so that all ranks have as many
        assert len(ids) - repeated == epoch_size and repeated < WORLD.num_nodes * WORLD.ranks_per_node * BATCH_SIZE
        print(f'{epoch_size:,} of {num_samples:,} samples: {seconds:.1f} s, {gib:.1f} GiB at the peak, '
              f'{seconds / epoch_size * 1e6:.2f} s and {gib / epoch_size * 1e6 * 1024:.0f} MiB a million', flush=True)


if __name__ == '__main__':
    main()
