"""What a node pays at the start of an epoch: Streaming's own partition and shuffle, without any data.

    python benchmarks/epoch_start.py 10000000 100000000     # samples; 100 million need about 6 GB

The node's first rank computes them for all, on one core; the seconds and bytes a sample come last.
"""
import resource
import sys
import time

import numpy as np
from streaming.base.partition import get_partitions
from streaming.base.shuffle import get_shuffle

SAMPLES_A_SHARD = 3000  # 64 MiB of 20 KB images
# 256 GPUs, a global batch of 2048
NODES = 32
RANKS = 8  # of a node
WORKERS = 8  # of a rank
BATCH_SIZE = 8  # of a rank
SEED = 17


def epoch(num_samples: int) -> np.ndarray:
    """Sample ids by node, rank, worker and batch, as StreamingDataset makes them with shuffle=True."""
    ids = get_partitions('relaxed', num_samples, NODES, NODES, RANKS, WORKERS, BATCH_SIZE, 0, NODES)
    block = max(4_000_000 // NODES, 1 << 18)
    shard_sizes = np.full(num_samples // SAMPLES_A_SHARD, SAMPLES_A_SHARD)
    shard_sizes = np.append(shard_sizes, num_samples - shard_sizes.sum())
    shuffle = get_shuffle('py1e', shard_sizes, NODES, SEED, 0, block)
    return np.where(ids != -1, shuffle[ids], -1)


def main() -> None:
    for num_samples in map(int, sys.argv[1:] or ['10000000']):
        start = time.perf_counter()
        ids = epoch(num_samples)
        seconds = time.perf_counter() - start
        assert len(np.unique(ids[ids >= 0])) == num_samples
        gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20
        print(f'{num_samples:,} samples: {seconds:.1f} s, {gib:.1f} GiB at the peak, '
              f'{seconds / num_samples * 1e6:.2f} s and {gib / num_samples * 1e6 * 1024:.0f} MiB a million')


if __name__ == '__main__':
    main()
