"""Nothing that a stranger puts into an image or a tar ends in a traceback, or is lost in silence."""
import contextlib
import io
import json
import os
import random
import re
import tarfile
from functools import cache

from PIL import Image

import convert
from sdbench.inputs.images import decode_image
from tests.samples import read_back, sample_files, shaded, write_tar

CAPTIONS = ('a cat', ' \n', '\ufeff', '\0', '\u202eabc\x1b[2J', 'x' * 100_000, '🦜\u0301', '\ud800')


@cache
def images() -> list[bytes]:
    """Return noise in every mode, in every format and with every option that they allow."""
    noise = Image.frombytes('RGB', (33, 20), random.Random(0).randbytes(1980))
    found = set()
    for mode in ('1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'CMYK', 'I', 'I;16'):
        for format in ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'AVIF', 'MPO', 'TIFF'):
            for options in ({}, {'save_all': True, 'append_images': [noise]}, {'progressive': True}):
                with contextlib.suppress(Exception), io.BytesIO() as buffer:  # not every format has every mode
                    noise.convert(mode).save(buffer, format, **options)
                    found.add(buffer.getvalue())
    return sorted(found)


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Return `data` with some bytes changed, put in or taken out, or cut."""
    for _ in range(draw.choice((0, 1, 2, 9))):
        at = draw.randrange(min(len(data), 200) + 1)
        new = draw.choice((b'', b'\xff', b'\0' * 4, b'\xff' * 4, draw.randbytes(draw.randrange(9)), data[-99:]))
        data = data[:at] + new + data[at + draw.choice((0, len(new), 9)):]
    if draw.random() < 0.1:
        data = data[:draw.randrange(len(data) + 1)]
    return data


def test_any_image_is_decoded_at_every_size_or_refused_with_a_reason():
    for number in range(1000):
        draw = random.Random(number)
        data = damaged(draw, draw.choice(images()))
        try:
            decode_image(data)
        except ValueError as reason:
            assert str(reason).isprintable()
        else:
            decode_image(data, 8)  # what the converter took, the loader takes at any size


def wild_tar(draw: random.Random) -> bytes:
    """Return a tar of three samples with hostile names, captions, sizes and types of member, damaged as well."""
    parts = []
    for key in draw.choices(('a', 'b', '../../c', '/d', '\udcff', 'x' * 5000, '', 'e/.f'), k=3):
        caption = draw.choice(CAPTIONS)
        texts = (('.txt', caption.encode(errors='surrogatepass')), ('.json', json.dumps({'caption': caption}).encode()))
        for suffix, data in (('.jpg', damaged(draw, draw.choice(images()))), draw.choice(texts)):
            member = tarfile.TarInfo(key + suffix)
            member.size = draw.choice((*[len(data)] * 40, -512, 0, 1 << 50))
            member.type = draw.choice([b'0'] * 60 + [b'1', b'2', b'3', b'5', b'6', b'S', b'L', b'K', b'x', b'g', b'?'])
            parts += [member.tobuf(tarfile.GNU_FORMAT, errors='surrogateescape'), data, bytes(-len(data) % 512)]
    return damaged(draw, b''.join(parts) + bytes(1024))


def test_any_tar_is_converted_or_named_in_one_line_and_a_good_one_is_converted_beside_it(tmp_path, capfd):
    write_tar(tmp_path / 'in/good.tar', sample_files('good', 0))
    for number in range(60):
        (tmp_path / f'in/two\nlines {number}.tar').write_bytes(wild_tar(random.Random(number)))
    assert convert.main(['in', 'out', '--num_workers', '1']) == 1
    beginning, *warnings, end = capfd.readouterr().err.split('\n')
    assert (beginning, end) == ('converting 61 files in 1 of 1 part', '')
    warning = re.compile(f'convert.py: warning: {tmp_path}/in/two lines [0-9]+.tar is cut short or damaged: ')
    for line in warnings:
        assert warning.match(line), line
    assert (shaded(0), 'caption 0') in read_back(tmp_path / 'out')
    assert {*os.listdir()} == {'in', 'out'}
