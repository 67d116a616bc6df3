"""Images/s of a conversion from tars, against the version before it worked in parts, which kept nothing when stopped.

    python benchmarks/convert.py [ROUNDS]     # about a minute a round

Both convert the same tars of 256 px JPEGs, in turn, with as many processes as there are cores; the ratio comes last.
The version before is taken from this repository's history.
"""
import io
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
BEFORE = 'cd03fcc'
NUM_TARS = 8
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
    """Tars as img2dataset writes them."""
    pictures = photographs()
    folder.mkdir()
    for number in range(NUM_TARS):
        with tarfile.open(folder / f'{number:05}.tar', 'w') as tar:
            for sample in range(SAMPLES_A_TAR):
                for suffix, data in (('jpg', pictures[sample % PICTURES]), ('txt', b'a photo'), ('json', b'{}')):
                    member = tarfile.TarInfo(f'{number:05}{sample:04}.{suffix}')
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def images_per_sec(program: Path, tars: Path, out: Path) -> float:
    """Of a whole run, less the seconds that the program takes to start."""
    command = [sys.executable, str(program / 'convert.py'), str(tars), str(out)]
    start = time.perf_counter()
    subprocess.run([*command, '--num_workers', '0'], capture_output=True)  # is refused, once all is imported
    started = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started - (started - start)
    [samples] = re.findall(r'converted +([\d,]+) samples', run.stdout)
    assert int(samples.replace(',', '')) == NUM_TARS * SAMPLES_A_TAR
    return NUM_TARS * SAMPLES_A_TAR / seconds


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        archive = subprocess.run(['git', 'archive', BEFORE, 'convert.py', 'inputs'], cwd=ROOT, capture_output=True)
        if archive.returncode:
            sys.exit(f'the version before, {BEFORE}, is not in the history of {ROOT}; fetch all of it')
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder / 'before', filter='data')
        write_tars(folder / 'tars')
        speeds = []
        for number in range(rounds):
            speeds.append([images_per_sec(program, folder / 'tars', folder / f'out-{name}-{number}')
                           for name, program in (('before', folder / 'before'), ('here', ROOT))])
    before, here = (statistics.median(column) for column in zip(*speeds, strict=True))
    print(f'before {before:,.0f} images/s   here {here:,.0f} images/s   on {os.cpu_count()} cores')
    print(f'conversion ratio {here / before:.2f}')


if __name__ == '__main__':
    main()
