"""Images/s of a conversion from tars: on this machine before parts were made by an engine, with it, and on Ray.

    python benchmarks/convert.py [ROUNDS]     # about four minutes a round

All convert the same tars of 256 px JPEGs, in turn, with as many processes as there are cores. The cluster is one of two
nodes with half of them each, on this machine; its start is not counted, but said. The ratios come last. The version
before is taken from this repository's history.
"""
import contextlib
import io
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
BEFORE = 'f7cfb2d'
NUM_TARS = 60
SAMPLES_A_TAR = 1500
PICTURES = 50  # that differ


def photographs() -> list[bytes]:
    """JPEGs of 256 pixels with the detail of photographs: noise at every scale, the coarser the stronger."""
    random = np.random.default_rng(0)
    encoded = []
    for _ in range(PICTURES):
        picture = np.zeros((256, 256, 3))
        for size in (4, 16, 64, 256):
            noise = Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8))
            picture += np.asarray(noise.resize((256, 256), Image.BICUBIC), float) / size ** 0.5
        picture = Image.fromarray(np.uint8((picture - picture.min()) * 255 / np.ptp(picture)))
        buffer = io.BytesIO()
        picture.save(buffer, 'JPEG', quality=88)
        encoded.append(buffer.getvalue())
    return encoded


def write_tars(folder: Path) -> None:
    """Tars as img2dataset writes them, and beside their folder another, of a tar of one image for each core."""
    pictures = photographs()
    folder.mkdir()
    ones = folder.with_name('ones')
    ones.mkdir()
    for number in range(os.cpu_count()):
        with tarfile.open(ones / f'{number:05}.tar', 'w') as tar:
            add_sample(tar, '0', pictures[0])
    for number in range(NUM_TARS):
        with tarfile.open(folder / f'{number:05}.tar', 'w') as tar:
            for sample in range(SAMPLES_A_TAR):
                add_sample(tar, f'{number:05}{sample:04}', pictures[sample % PICTURES])


def add_sample(tar: tarfile.TarFile, key: str, picture: bytes) -> None:
    """An image with its caption."""
    for suffix, data in (('jpg', picture), ('txt', b'a photo'), ('json', b'{}')):
        member = tarfile.TarInfo(f'{key}.{suffix}')
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


def images_per_sec(program: Path, tars: Path, out: Path, *flags: str) -> float:
    """Of a whole run, less the seconds that its workers take to start: those of a conversion of an image for each."""
    start = time.perf_counter()
    convert(program, tars.parent / 'ones', out.with_name(f'{out.name}-ones'), '--size_limit', '1kb', *flags)
    started = time.perf_counter()
    printed = convert(program, tars, out, *flags)
    seconds = time.perf_counter() - started - (started - start)
    [samples] = re.findall(r'converted +([\d,]+) samples', printed)
    assert int(samples.replace(',', '')) == NUM_TARS * SAMPLES_A_TAR
    return NUM_TARS * SAMPLES_A_TAR / seconds


def convert(program: Path, source: Path, out: Path, *flags: str) -> str:
    """Run the command; what it prints."""
    command = [sys.executable, str(program / 'convert.py'), str(source), str(out), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def ray_cluster() -> Iterator[str]:
    """The address of a cluster of two nodes, which share the cores of this machine."""
    os.environ['RAY_USAGE_STATS_ENABLED'] = '0'
    from ray.cluster_utils import Cluster
    start = time.perf_counter()
    cores = max(1, os.cpu_count() // 2)
    cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': cores, 'object_store_memory': 1 << 27,
                                                              'include_dashboard': False})
    cluster.add_node(num_cpus=cores, object_store_memory=1 << 27)
    print(f'the cluster took {time.perf_counter() - start:.1f} s to start')
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    speeds = []
    with tempfile.TemporaryDirectory() as folder, ray_cluster() as address:
        folder = Path(folder)
        archive = subprocess.run(['git', 'archive', BEFORE, 'convert.py', 'inputs', 'harness', 'models'], cwd=ROOT,
                                 capture_output=True)
        if archive.returncode:
            sys.exit(f'the version before, {BEFORE}, is not in the history of {ROOT}; fetch all of it')
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder / 'before', filter='data')
        write_tars(folder / 'tars')
        ways = (('before', folder / 'before', []), ('here', ROOT, []), ('ray', ROOT, ['--ray', address]))
        for number in range(rounds):
            speeds.append([])
            for name, program, flags in ways:
                out = folder / f'out-{name}-{number}'
                speeds[-1].append(images_per_sec(program, folder / 'tars', out, *flags))
                shutil.rmtree(out)
            print(', '.join(f'{way[0]} {speed:,.0f}' for way, speed in zip(ways, speeds[-1], strict=True)), flush=True)
    before, here, ray = (statistics.median(column) for column in zip(*speeds, strict=True))
    print(f'before {before:,.0f} images/s   here {here:,.0f} images/s   on Ray {ray:,.0f} images/s   on '
          f'{os.cpu_count()} cores')
    print(f'conversion ratio {here / before:.2f}, of Ray to here {ray / here:.2f}')


if __name__ == '__main__':
    main()
