"""What each rank of a training holds of a dataset before the first sample is read: its index, readers and Spanner.

    python benchmarks/rank_memory.py                    # 40,000 shards of 2,500 samples: 100 million; needs 2 GB

Each line is the memory of this process after a step, and the peak within it; the last column is the same for the
864,268 shards and 2.9 billion samples of LAION, in proportion to shards or samples. A node of 8 GPUs has 8 such ranks.
"""
import argparse
import json
import resource
from pathlib import Path

import numpy as np
from streaming.base.format import reader_from_json
from streaming.base.spanner import Spanner

LAION_SHARDS = 864_268
LAION_SAMPLES = 2_900_000_000
GIB = 1 << 30


def entry(number: int, samples: int) -> dict:
    """The entry of a shard in index.json, as convert.py writes it."""
    return {'samples': samples, 'raw_data': {'basename': f'{number:06}/shard.00000.mds', 'bytes': 60_000_000,
                                             'hashes': {'xxh64': f'{number:016x}'}},
            'zip_data': None, 'version': 2, 'format': 'mds', 'compression': None, 'hashes': ['xxh64'],
            'size_limit': 1 << 26, 'column_names': ['caption', 'jpg'], 'column_encodings': ['str', 'bytes'],
            'column_sizes': [None, None]}


def resident_gib() -> float:
    """Memory that this process holds."""
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * resource.getpagesize() / GIB


def peak_gib() -> float:
    """The most that it has held since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--shards', type=int, default=40_000)
    parser.add_argument('--samples', type=int, default=100_000_000)
    args = parser.parse_args()
    start = resident_gib()
    text = json.dumps({'version': 2, 'shards': [entry(number, args.samples // args.shards)
                                                for number in range(args.shards)]})
    before = resident_gib()
    index = json.loads(text)
    parsed = resident_gib() - before
    readers = [reader_from_json('/nowhere', '', shard) for shard in index['shards']]
    opened = resident_gib() - before - parsed
    spanner = Spanner(np.array([reader.samples for reader in readers]))
    spans = resident_gib() - before - parsed - opened
    transient = peak_gib() - resident_gib()
    assert spanner[args.samples - 1][0] == args.shards - 1
    of_shards = LAION_SHARDS / args.shards
    of_samples = LAION_SAMPLES / args.samples
    print(f'{args.shards:,} shards, {args.samples:,} samples{"GiB":>16}{"LAION, GiB":>14}')
    for name, gib, times in (('index.json as text', len(text) / GIB, of_shards), ('index, parsed', parsed, of_shards),
                             ('readers', opened, of_shards), ('Spanner, kept', spans, of_samples),
                             ('Spanner, while it is made', transient, of_samples)):
        print(f'{name:<40}{gib:>11.3f}{gib * times:>14.2f}')
    kept = (parsed + opened) * of_shards + spans * of_samples
    peak = kept + transient * of_samples
    print(f'a node of 8 ranks: {8 * kept:,.0f} GiB kept, {8 * peak:,.0f} GiB at once when all begin together '
          f'(this process began with {start:.2f} GiB)')


if __name__ == '__main__':
    main()
