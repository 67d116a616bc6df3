"""Feed random and damaged input to the image decoder, the record reader and the converter, until one of them breaks.

    python benchmarks/fuzz.py --seconds 300 --seed 1     # needs tests/requirements.txt; tests/test_hostile.py checks
"""
import argparse
import contextlib
import io
import json
import logging
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


def main():
    from tests.test_hostile import CHECKS
    parser = argparse.ArgumentParser()
    parser.add_argument('--seconds', type=float, default=60)
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # Streaming warns of its temporary folders
    signal.signal(signal.SIGALRM, lambda *_: sys.exit('more than 20 s'))
    draw = random.Random(args.seed)
    end = time.monotonic() + args.seconds
    counts = Counter()
    memory = []  # resident MiB after each input
    while time.monotonic() < end:
        [name] = draw.choices(list(CHECKS), (20, 20, 1))  # the converter starts a process for each input
        make_input, check = CHECKS[name]
        data = make_input(draw)
        path = Path(f'broken.{name}')
        path.write_bytes(data)  # before, for what breaks this process
        signal.alarm(20)
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
