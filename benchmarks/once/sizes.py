"""Measure what a dataset of many samples costs a training before the first is read, without any data.

    python -m benchmarks.once.sizes 10000000 100000000     # samples, the fewest first; 100 million need about 6 GB

Every process of a training opens the dataset: it holds its index, and for a moment more. The first process of each node
then shuffles the numbers of all samples, on one core. Both are Streaming's own work, and all that runs here. The shards
are listed in index.json, and need not be there.

docs/planning.md has the figures of one core of an AMD EPYC.
"""
import argparse
import json
import logging
import resource
import tempfile
import time
from pathlib import Path

from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

SAMPLES_A_SHARD = 2500
WORLD = World(num_nodes=32, ranks_per_node=8, workers_per_rank=8, worker=0)  # 256 GPUs
BATCH_SIZE = 8  # of a GPU, 2048 in all
GIB = 2 ** 30


def entry(number: int) -> dict:
    """Return the entry of a shard in index.json, as convert.py writes it."""
    return {'samples': SAMPLES_A_SHARD, 'raw_data': {'basename': f'{number:06}/shard.00000.mds', 'bytes': 60_000_000,
                                                     'hashes': {'xxh64': f'{number:016x}'}},
            'zip_data': None, 'version': 2, 'format': 'mds', 'compression': None, 'hashes': ['xxh64'],
            'size_limit': 1 << 26, 'column_names': ['caption', 'jpg'], 'column_encodings': ['str', 'bytes'],
            'column_sizes': [None, None]}


def resident_gib() -> float:
    """Return the memory that this process holds, in GiB."""
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * resource.getpagesize() / GIB


def peak_gib() -> float:
    """Return the most memory that this process has held, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def measure(num_samples: int) -> str:
    """Open and shuffle so many samples; return a line with the seconds and the memory that it took."""
    # opened, as every process does
    before = resident_gib()
    with tempfile.TemporaryDirectory() as folder:
        shards = [entry(number) for number in range(num_samples // SAMPLES_A_SHARD)]
        Path(folder, 'index.json').write_text(json.dumps({'version': 2, 'shards': shards}))
        del shards
        dataset = StreamingDataset(local=folder, shuffle=True, batch_size=BATCH_SIZE,
                                   num_canonical_nodes=WORLD.num_nodes, shuffle_block_size=1 << 18)
    kept, most = resident_gib() - before, peak_gib() - before

    # shuffled, as the first process of a node does
    dataset.initial_physical_nodes = WORLD.num_nodes
    start = time.perf_counter()
    generate_work('random', dataset, WORLD, 0, 0)
    seconds = time.perf_counter() - start
    return (f'{num_samples:,} samples: opened in {kept:.2f} GiB, {most:.2f} GiB for a moment; '
            f'shuffled in {seconds:.1f} s, {peak_gib() - before:.1f} GiB')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('samples', type=int, nargs='+')
    logging.disable(logging.WARNING)  # Streaming warns of its temporary folder
    for samples in parser.parse_args().samples:
        print(measure(samples), flush=True)
