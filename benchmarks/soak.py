"""Does a long run grow in memory? Resident memory of 2,000 batches, a tenth of the way in and at the end.

    python benchmarks/soak.py

Trains the tiny model with EMA on shards of photographs-like JPEGs, some of them bad, epoch after epoch, with loader
workers; prints the resident memory of all processes at batch 200 and at the end, and their ratio last.
"""
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from streaming import MDSWriter

sys.path.insert(0, str(Path(__file__).parent.parent))

import benchmark
from inputs.shards import MDS_COLUMNS

BATCHES = 2000


class Soak(benchmark.Safeguard):
    """Notes the resident memory, in MiB, of this process and its workers at two batches."""
    resident: list[float] = []

    def batch_end(self, state, logger):
        super().batch_end(state, logger)
        if state.timestamp.batch.value in (BATCHES // 10, BATCHES):
            process = psutil.Process()
            pages = [p.memory_info().rss for p in (process, *process.children(recursive=True))]
            self.resident.append(sum(pages) / 2**20)


def write_shards(folder: str, samples: int = 400) -> None:
    with MDSWriter(out=folder, columns=MDS_COLUMNS, hashes=['xxh64'], size_limit=1 << 17) as writer:
        for index in range(samples):
            coarse = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
            with tempfile.TemporaryFile() as file:
                Image.fromarray(coarse).resize((96, 64)).save(file, 'JPEG')
                file.seek(0)
                writer.write({'jpg': file.read() if index % 100 else b'bad', 'caption': f'picture {index} ' * 9})


def main() -> None:
    benchmark.Safeguard = Soak
    with tempfile.TemporaryDirectory() as folder:
        write_shards(f'{folder}/shards')
        benchmark.main(['--remote', f'{folder}/shards', '--local', f'{folder}/cache', '--use_ema', '--model_name',
                        'tiny', '--image_size', '64', '--batch_size', '4', '--num_workers', '2', '--max_bad_samples',
                        '0.1', '--max_duration', f'{BATCHES}ba', '--measure_batches', str(BATCHES), '--results',
                        f'{folder}/results.jsonl'])
    early, late = Soak.resident
    print(f'resident {early:.0f} MiB at batch {BATCHES // 10}, {late:.0f} MiB at batch {BATCHES}')
    print(f'memory ratio {late / early:.3f}')


if __name__ == '__main__':
    main()
