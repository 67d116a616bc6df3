"""Nothing that a stranger puts into an image, a caption, a tar or a record ends in a traceback, a hang or a flood."""
import contextlib
import io
import os
import random
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies

import convert
from benchmarks import fuzz
from inputs.errors import DataError
from inputs.images import decode_image, resize
from inputs.stores import RETRIES
from parts.sources import File, find_files, is_beside_tar
from parts.tars import make_sample, read_samples
from tests.local_s3 import local_s3
from tests.privileges import without_privileges
from tests.samples import encoded, picture


def decode(data: bytes) -> str:
    try:
        decode_image(data)
    except ValueError as reason:
        assert str(reason).isprintable()
        return 'refused'
    decode_image(data, 8)  # what the converter took, the loader takes at any size
    return 'decoded'


def status_of(main, *argv) -> str:
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            status = main([str(arg) for arg in argv]) or 0
        except SystemExit as end:
            status = end.code
    *lines, last = errors.getvalue().split('\n')[:-1] or ['']
    said = ('convert.py: warning: ', 'converting ', 'listing ')
    assert status in (0, 1, 2) and all(line.startswith(said) for line in lines), (status, lines)
    assert bool(status) == last.startswith((f'{main.__module__}.py: error: ', 'convert.py: warning: ')), (status, last)
    return f'status {status}'


def convert_tar(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, 'two\nlines.tar').write_bytes(data)
        status = status_of(convert.main, f'{folder}/two\nlines.tar', f'{folder}/out', '--num_workers', 1)
        assert {*os.listdir(folder)} <= {'two\nlines.tar', 'out'}
        return status


def search_tree(data: bytes) -> str:
    """Every file of a tree is converted or left out with a reason, and reading what is converted ends well."""
    with tempfile.TemporaryDirectory() as top:
        source = fuzz.wild_tree(random.Random(data), Path(top))
        found = without_privileges(find_files, [str(source)])
        captions = {str(Path(file.name).with_suffix('')) + suffix for file in found.files for suffix in file.captions}
        accounted = {file.name for file in found.files} | captions | {line['source'] for line in found.left_out}
        for folder, subfolders, names in os.walk(source):
            subfolders[:] = [name for name in subfolders if os.path.join(folder, name) not in accounted
                             and not os.path.islink(os.path.join(folder, name))]  # which is searched, or listed
            for name in names:
                assert os.path.join(folder, name) in accounted or is_beside_tar(name, set(names)), name
        for file in found.files:
            read_all(file)
    return 'accounted'


def read_all(file: File) -> int:
    """The number of samples of a file; all else has a reason."""
    count = 0
    for _, fields in read_samples(file):
        try:
            make_sample(fields)
            count += 1
        except ValueError as reason:
            assert str(reason)
    return count


def read_store(data: bytes) -> str:
    """A store that refuses at random is read whole, or named in one line."""
    draw = random.Random(data)
    with pytest.MonkeyPatch.context() as monkeypatch, local_s3(monkeypatch) as store:
        timeout = timedelta(seconds=draw.choice((0.2, 20)))
        monkeypatch.setattr('inputs.stores.RETRIES', RETRIES | {'retry_timeout': timeout})
        content = fuzz.tar_of([f'{number}.jpg' for number in range(3)])
        for number in range(3):
            store.put(f'tars/{number}.tar', content)
        refusals = draw.choice(([(503, 'SlowDown')], [(503, 'SlowDown'), (403, 'AccessDenied'), (404, 'NoSuchKey')]))
        share = draw.choice((0.05, 0.3))
        monkeypatch.setattr(store, 'refuse', lambda: draw.choice(refusals) if draw.random() < share else None)
        store.cuts = [draw.randrange(len(content)) for _ in range(draw.randrange(3))]
        try:
            found = find_files(['s3://bucket/tars'])
            samples = [list(read_samples(file)) for file in found.files]
        except (ValueError, DataError) as error:
            assert '\n' not in str(error) and 's3://bucket/tars' in str(error) and 'Debug' not in str(error), error
            return 'named'
        assert [len(read) for read in samples] == [3, 3, 3]
    return 'read'


def command_line(data: bytes) -> str:
    """Any words after convert.py end in a dataset or in one line, and nothing that was there before is touched."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path('x.tar').write_bytes(fuzz.tar_of(['a.jpg', 'a.txt']))
        Path('photos').mkdir()
        Path('photos/note.txt').write_text('mine')
        before = {path: path.read_bytes() for path in Path('.').rglob('*') if path.is_file()}
        status = status_of(convert.main, *fuzz.wild_words(random.Random(data)))
        assert {path: path.read_bytes() for path in before} == before
        return status


def seed(draw: random.Random) -> bytes:
    return draw.randbytes(8)


CHECKS = {'decoder': (fuzz.damaged, decode), 'converter': (fuzz.wild_tar, convert_tar),
          'tree': (seed, search_tree), 'store': (seed, read_store), 'words': (seed, command_line)}


def many(name: str, count: int):
    return pytest.param(name, count, marks=pytest.mark.long)


@pytest.mark.parametrize('name, count', [
    ('decoder', 200), ('converter', 8), ('tree', 20), ('store', 2), many('decoder', 2500),
    many('converter', 40), many('tree', 100), many('store', 5)])
def test_any_input_is_taken_or_refused_in_one_line(name, count):
    make, check = CHECKS[name]
    inputs = strategies.integers(0, 1 << 64).map(lambda seed: make(random.Random(seed))) | strategies.binary()
    settings(derandomize=True, deadline=None, max_examples=count)(given(inputs)(lambda data: check(data) and None))()


@pytest.mark.parametrize('format, size', [('JPEG', 32), ('PNG', None), ('WEBP', 32)])
@pytest.mark.parametrize('exif', ('00', '4d4d002a', *('4d4d002a0000000800020101000500000001000000260112000300000001'
                                                      f'000{n}0000000000000000000300000002' for n in range(9))))
def test_odd_exif_is_read_or_passed_over_as_torchvision_does(format, size, exif):
    torchvisions, pillows = (decode_image(encoded(picture(3), *how, exif=b'Exif\0\0' + bytes.fromhex(exif)), side)
                             for how, side in (((), None), ((format,), size)))
    assert (resize(torchvisions, 32).float() - resize(pillows, 32).float()).abs().mean() < 3
