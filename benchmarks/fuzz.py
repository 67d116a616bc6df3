"""Feed random and damaged input to the decoder, the record reader and the converter, until one of them breaks.

Beside images, records and tars these are trees of folders with links and odd names, a store that refuses and breaks off
at random, and command lines.

    python benchmarks/fuzz.py --seconds 300 --seed 1     # needs tests/requirements.txt; tests/test_hostile.py checks
"""
import argparse
import contextlib
import io
import json
import logging
import os
import random
import signal
import sys
import tarfile
import time
from collections import Counter
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from PIL import Image

LONG = 'x' * 100_000
WEIGHTS = {'converter': 1, 'words': 1, 'store': 1}  # these start processes or servers for each input; others are quick
CAPTIONS = ('a cat', ' \n', '\ufeff', '\0', '\u202eabc\x1b[2J', LONG, '🦜\u0301', '\ud800')


@cache
def images() -> list[bytes]:
    """Noise in every mode, in some sizes, in every format and with every option that they allow."""
    noise = Image.frombytes('RGB', (33, 20), random.Random(0).randbytes(1980))
    exif = Image.Exif()
    exif.update({0x0112: 6, 0x010e: 'words', 0x011a: 1.5, 0x0102: (8, 8, 8)})
    pictures = [noise.convert(mode) for mode in ('1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'CMYK', 'I', 'I;16')]
    pictures += [noise.resize(size) for size in ((1, 1), (1, 99), (150, 140))]
    found = set()
    for picture in pictures:
        for format in ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'AVIF', 'MPO', 'TIFF', 'EPS'):
            for options in ({}, {'save_all': True, 'append_images': [noise]}, {'progressive': True, 'exif': exif}):
                with contextlib.suppress(Exception), io.BytesIO() as buffer:  # not every format has every mode
                    picture.save(buffer, format, **options)
                    found.add(buffer.getvalue())
    return sorted(found)


def damaged(draw: random.Random, data: bytes = b'') -> bytes:
    """`data`, or an image, with some bytes changed, put in or taken out, more of them near the start; or cut."""
    data = data or draw.choice(images())
    for _ in range(draw.choice((0, 0, 1, 2, 9))):
        at = draw.randrange(min(len(data), draw.choice((200, 1 << 20))) + 1)
        new = draw.choice((b'', b'\0', b'\xff', b'\0' * 4, b'\xff' * 4, draw.randbytes(draw.randrange(9)), data[-99:]))
        replaced = draw.choice((0, len(new), len(new), len(new), 9))  # bytes; mostly none move
        data = data[:at] + new + data[at + replaced:]
    if draw.random() < 0.1:
        data = data[:draw.randrange(len(data) + 1)]
    return data


def wild_tar(draw: random.Random) -> bytes:
    """A tar of three samples with hostile names, captions, sizes and types of member, damaged as well."""
    parts = []
    for key in draw.choices(('a', 'b', '../../c', '/d', '\udcff', 'x' * 5000, '', 'e/.f'), k=3):
        caption = draw.choice(CAPTIONS)
        texts = (('.txt', caption.encode(errors='surrogatepass')), ('.json', json.dumps({'caption': caption}).encode()))
        for suffix, data in (('.jpg', damaged(draw)), draw.choice(texts)):
            member = tarfile.TarInfo(key + suffix)
            member.size = draw.choice((*[len(data)] * 40, -512, 0, 1 << 50))
            member.type = draw.choice([b'0'] * 60 + [b'1', b'2', b'3', b'5', b'6', b'S', b'L', b'K', b'x', b'g', b'?'])
            parts += [member.tobuf(tarfile.GNU_FORMAT, errors='surrogateescape'), data, bytes(-len(data) % 512)]
    return damaged(draw, b''.join(parts) + bytes(1024))


def tar_of(names: list[str]) -> bytes:
    """A tar with these members, images and captions that nothing is wrong with."""
    image = io.BytesIO()
    Image.new('RGB', (16, 16)).save(image, 'JPEG')
    parts = []
    for name in names:
        member = tarfile.TarInfo(name)
        data = b'a cat' if name.endswith('.txt') else image.getvalue()
        member.size = len(data)
        parts += [member.tobuf(), data, bytes(-len(data) % 512)]
    return b''.join(parts) + bytes(1024)


def wild_tree(draw: random.Random, top: Path) -> Path:
    """A folder `source` below `top`, of files and folders with odd names and rights, and links of all kinds."""
    source = top / 'source'
    folders = [source, top / 'elsewhere']
    for folder in folders:
        folder.mkdir()
    keys = ('a', 'A', 'b.c', 'b.c.d', 'IMG.2020.01', '.hidden', '._a', 'x' * 200, 'two\nlines', '\udcff', ' ', '[*]?')
    suffixes = ('.jpg', '.JPG', '.jpeg', '.jfif', '.png', '.heic', '.txt', '.TXT', '.json', '.tar', '.tar.gz', '.zip',
                '.parquet', '_stats.json', '', '.', '.mp4')
    for _ in range(draw.randrange(40)):
        path = draw.choice(folders) / (draw.choice(keys) + draw.choice(suffixes))
        others = [*folders, *draw.choice(folders).iterdir(), Path('nowhere'), Path(path.name), Path('..')]
        if path.exists() or path.is_symlink():
            continue
        kind = draw.choice(('file', 'file', 'file', 'folder', 'link', 'hard link', 'pipe', 'closed'))
        if kind == 'file':
            path.write_bytes(draw.choice((b'', tar_of(['a.jpg', 'a.txt']), b'a cat')))
        elif kind == 'folder':
            path.mkdir()
            folders.append(path)
        elif kind == 'link':
            path.symlink_to(draw.choice(others))
        elif kind == 'hard link':
            other = draw.choice(others)
            if other.is_file():
                path.hardlink_to(other)
        elif kind == 'pipe':
            os.mkfifo(path)
        else:
            path.mkdir()
            (path / 'a.tar').write_bytes(b'')
            path.chmod(0)
    return source


def wild_words(draw: random.Random) -> list[str]:
    """A command line of convert.py: places, flags and values, few of which make sense together."""
    places = ('x.tar', 'photos', 'gone', 'out', 'photos/out', 'x.tar/out', 'oci://b/a', 's3://', 's3:///a', 'dbfs:/a',
              '*.tar', '[', 'two\nlines', '\0', 'x' * 300)
    flags = ('--num_workers', '--size_limit', '--dist_timeout', '--nothing', '-h', '--num')
    values = ('1', '2', '0', '-1', '1kb', '64mb', '1e400mb', 'infgb', '9' * 20, 'nan', '', 'x')
    words = [draw.choice(places) for _ in range(draw.randrange(4))]
    for _ in range(draw.randrange(3)):
        words += [draw.choice(flags), draw.choice(values)]
    if draw.random() < 0.5:
        words += ['x.tar', 'out']
    return words


def main():
    from tests.test_hostile import CHECKS
    parser = argparse.ArgumentParser()
    parser.add_argument('--seconds', type=float, default=60)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--only', nargs='+', help='names of checks: decoder, records, converter, tree, store, words')
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # Streaming warns of its temporary folders
    signal.signal(signal.SIGALRM, lambda *_: sys.exit('more than 60 s'))
    draw = random.Random(args.seed)
    end = time.monotonic() + args.seconds
    names = args.only or list(CHECKS)
    counts = Counter()
    memory = []  # resident MiB after each input
    while time.monotonic() < end:
        [name] = draw.choices(names, [WEIGHTS.get(name, 20) for name in names])
        make_input, check = CHECKS[name]
        data = make_input(draw)
        path = Path(f'broken.{name}')
        path.write_bytes(data)  # before, for what breaks this process
        signal.alarm(60)
        try:
            counts[name, check(data)] += 1
        except (Exception, SystemExit) as error:
            sys.exit(f'{error!r}\nreplay: python -c "from tests.test_hostile import CHECKS; '
                     f"CHECKS['{name}'][1](open('{path}', 'rb').read())\"")
        path.unlink()
        memory.append(int(Path('/proc/self/statm').read_text().split()[1]) * 4 >> 10)
    for (name, outcome), count in sorted(counts.items()):
        print(f'{name:<10} {outcome:<10} {count:>9,}')
    print(f'{memory[len(memory) // 10]:,} MiB after a tenth of {len(memory):,} inputs, {memory[-1]:,} MiB after all')


if __name__ == '__main__':
    main()
