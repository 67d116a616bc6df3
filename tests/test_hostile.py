"""Nothing that a stranger puts into an image, a tar or a folder ends in a traceback, or is lost in silence."""
import contextlib
import io
import json
import os
import random
import tarfile
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

import convert
from inputs.images import decode_image, resize
from parts.sources import find_files, is_beside_tar
from tests.privileges import without_privileges
from tests.samples import encoded, picture

CAPTIONS = ('a cat', ' \n', '\ufeff', '\0', '\u202eabc\x1b[2J', 'x' * 100_000, '🦜\u0301', '\ud800')
KEYS = ('a', 'b.c', 'b.c.d', '.hidden', '._a', 'x' * 200, 'two\nlines', '\udcff', ' ', '[*]?')
SUFFIXES = ('.jpg', '.JPG', '.jfif', '.png', '.heic', '.txt', '.json', '.tar', '.tar.gz', '.parquet', '_stats.json', '')


@cache
def images() -> list[bytes]:
    """Noise in every mode, in every format and with every option that they allow."""
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
    """`data` with some bytes changed, put in or taken out, or cut."""
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
    """A tar of three samples with hostile names, captions, sizes and types of member, damaged as well."""
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


def test_any_tar_is_converted_or_refused_in_one_line(tmp_path, capfd):
    for number in range(30):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / 'two\nlines.tar').write_bytes(wild_tar(random.Random(number)))
        try:
            status = convert.main([f'{folder}/two\nlines.tar', f'{folder}/out', '--num_workers', '1']) or 0
        except SystemExit as end:
            status = end.code
        *lines, last = capfd.readouterr().err.split('\n')[:-1] or ['']
        assert status in (0, 1, 2), (number, status)
        assert not any('error' in line or 'Traceback' in line for line in lines), (number, lines)
        assert bool(status) == last.startswith(('convert.py: error: ', 'convert.py: warning: ')), (number, last)
        assert {*os.listdir(folder)} <= {'two\nlines.tar', 'out'}


def wild_tree(draw: random.Random, top: Path) -> Path:
    """A folder `source` below `top`, of files and folders with odd names and rights, and links of all kinds."""
    source = top / 'source'
    folders = [source, top / 'elsewhere']
    for folder in folders:
        folder.mkdir(parents=True)
    for _ in range(draw.randrange(40)):
        path = draw.choice(folders) / (draw.choice(KEYS) + draw.choice(SUFFIXES))
        if path.exists() or path.is_symlink():
            continue
        kind = draw.choice(('file', 'file', 'file', 'folder', 'link', 'pipe', 'closed'))
        if kind == 'file':
            path.write_bytes(draw.choice((b'', b'a cat')))
        elif kind == 'link':
            path.symlink_to(draw.choice([*folders, *draw.choice(folders).iterdir(), Path('nowhere'), Path('..')]))
        elif kind == 'pipe':
            os.mkfifo(path)
        elif kind == 'folder':
            path.mkdir()
            folders.append(path)
        else:
            path.mkdir()
            (path / 'a.tar').write_bytes(b'')
            path.chmod(0)
    return source


def test_every_file_of_any_tree_is_converted_or_left_out_with_a_reason(tmp_path):
    for number in range(100):
        source = wild_tree(random.Random(number), tmp_path / str(number))
        found = without_privileges(find_files, [str(source)])
        captions = {str(Path(file.name).with_suffix('')) + suffix for file in found.files for suffix in file.captions}
        accounted = {file.name for file in found.files} | captions | {line['source'] for line in found.left_out}
        for folder, subfolders, names in os.walk(source):
            paths = {name: os.path.join(folder, name) for name in [*subfolders, *names]}
            subfolders[:] = [name for name in subfolders
                             if paths[name] not in accounted and not os.path.islink(paths[name])]
            for name in names:
                assert paths[name] in accounted or is_beside_tar(name, set(names)), (number, name)


@pytest.mark.parametrize('format, size', [('JPEG', 32), ('PNG', None), ('WEBP', 32)])
@pytest.mark.parametrize('exif', ('00', '4d4d002a', *('4d4d002a0000000800020101000500000001000000260112000300000001'
                                                      f'000{n}0000000000000000000300000002' for n in range(9))))
def test_odd_exif_is_read_or_passed_over_as_torchvision_does(format, size, exif):
    torchvisions, pillows = (decode_image(encoded(picture(3), *how, exif=b'Exif\0\0' + bytes.fromhex(exif)), side)
                             for how, side in (((), None), ((format,), size)))
    assert (resize(torchvisions, 32).float() - resize(pillows, 32).float()).abs().mean() < 3
