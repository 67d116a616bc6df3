"""Time convert.py, with as many processes as there are cores, against a plain loop of tarfile and MDSWriter.

    python -m benchmarks.conversion [ROUNDS]     # about a minute a round

Both convert the same tars of 256 px JPEGs, in turn, and decode each image to see that it is whole. The loop is one
process, which lists nothing that is left out and starts over when it is stopped. The start of convert.py counts. The
ratio comes last.
"""
import io
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from streaming import MDSWriter

from benchmarks.photographs import photograph
from sdbench.inputs.shards import MDS_COLUMNS

ROOT = Path(__file__).parent.parent
NUM_TARS = 20
SAMPLES_A_TAR = 1500
PICTURES = 50  # that differ


def write_tars(folder: Path) -> None:
    """Write tars as img2dataset does."""
    random = np.random.default_rng(0)
    pictures = [photograph(random) for _ in range(PICTURES)]
    folder.mkdir()
    for number in range(NUM_TARS):
        with tarfile.open(folder / f'{number:05}.tar', 'w') as tar:
            for sample in range(SAMPLES_A_TAR):
                for suffix, data in (('jpg', pictures[sample % PICTURES]), ('json', b'{}'), ('txt', b'a photo')):
                    member = tarfile.TarInfo(f'{number:05}{sample:04}.{suffix}')
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def plain_loop(tars: Path, out: Path) -> None:
    """Convert as one would write it first."""
    with MDSWriter(out=str(out), columns=MDS_COLUMNS, hashes=['xxh64']) as writer:
        for path in sorted(tars.iterdir()):
            sample = {}
            with tarfile.open(path) as tar:
                for member in tar:
                    sample[member.name.rpartition('.')[2]] = tar.extractfile(member).read()
                    if member.name.endswith('.txt'):
                        Image.open(io.BytesIO(sample['jpg'])).load()
                        writer.write({'jpg': sample['jpg'], 'caption': sample['txt'].decode()})


def convert(tars: Path, out: Path) -> None:
    """Run convert.py."""
    command = [sys.executable, str(ROOT / 'convert.py'), str(tars), str(out), '--num_workers', str(os.cpu_count())]
    subprocess.run(command, check=True, capture_output=True)


def images_per_sec(way: Callable[[Path, Path], None], folder: Path) -> float:
    """Time one way of converting; return images a second."""
    start = time.perf_counter()
    way(folder / 'tars', folder / 'out')
    seconds = time.perf_counter() - start
    shutil.rmtree(folder / 'out')
    return NUM_TARS * SAMPLES_A_TAR / seconds


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tars(folder / 'tars')
        speeds = [(images_per_sec(plain_loop, folder), images_per_sec(convert, folder)) for _ in range(rounds)]
    plain, ours = (statistics.median(column) for column in zip(*speeds, strict=True))
    print(f'a plain loop {plain:,.0f} images/s   convert.py {ours:,.0f} images/s on {os.cpu_count()} cores')
    print(f'conversion ratio {ours / plain:.2f}')


if __name__ == '__main__':
    main()
