"""Each row of a Parquet file becomes a sample, as an image file does, or is skipped with a reason."""
import json
from pathlib import Path

import pyarrow.parquet
import pytest

import convert
from sdbench.inputs.shards import read_index
from tests.runs import one_error_line
from tests.samples import (
    captions_of,
    encoded,
    picture,
    read_back,
    shaded,
    skipped,
    skipped_kinds,
    write_files,
    write_parquet,
)

IMAGES = [encoded(picture(number, 32, 32), 'PNG') for number in range(40)]
CAPTIONS = [f'picture {number}' for number in range(40)]
LONG = 'word ' * 75 + 'end'  # 76 tokens, and two around them
SAMPLES = list(zip(IMAGES, CAPTIONS, strict=True))


def struct(image: bytes | None, path: str | None = None) -> dict:
    """Return a cell of the column `image` as datasets on the hub have it."""
    return {'bytes': image, 'path': path}


def hub_file(path: Path, rows_of_group: int = 100) -> Path:
    images = [struct(image, 'x.png') for image in IMAGES]
    return write_parquet(path, {'id': list(range(40)), 'image': images, 'text': CAPTIONS}, rows_of_group)


@pytest.mark.parametrize('columns, flags', [
    ({'caption': CAPTIONS, 'image': IMAGES}, []),
    ({'caption': CAPTIONS, 'jpg': IMAGES}, ['--image_column', 'jpg']),
    ({'prompt': CAPTIONS, 'image': IMAGES}, ['--caption_column', 'prompt'])])
def test_plain_bytes_and_other_columns_are_taken(columns, flags):
    write_parquet('x.parquet', columns)
    assert convert.main(['x.parquet', 'out', *flags]) == 0
    assert read_back('out') == SAMPLES


SHORT_AND_LONG = {'image': [shaded(0), shaded(1)], 'short': ['a &amp; b', 'c'], 'long': [['d', LONG], None]}
PHOTOS = {'0.jpg': shaded(0), '1.jpg': shaded(1)}
ROWS = {'captions.csv': f'file_name,short,long\n0.jpg,a &amp; b,d\n1.jpg,c,\n0.jpg,,{LONG}\n'}
TEXTS = {'0.txt': 'a &amp; b', '0.json': json.dumps({'caption': LONG}), '1.txt': 'c', '1.caption': 'left'}


@pytest.mark.parametrize('names, files, longer', [
    (['short', 'long'], {}, ['d', LONG]), (['short', 'long'], PHOTOS | ROWS, ['d', LONG]),
    (['.txt', '.json'], PHOTOS | TEXTS, [LONG])])
def test_several_captions_make_one_sample_unless_a_flag_asks_for_one_each(capsys, names, files, longer):
    write_files('in', files)
    if not files:
        write_parquet('in/x.parquet', SHORT_AND_LONG)
    for out, flags in (('images', []), ('captions', ['--sample_per_caption'])):
        assert convert.main(['in', out, '--clean_captions', *flags, '--caption_column', *names]) == 0
    printed = capsys.readouterr().out
    assert f'2 of {names[0]}, {len(longer)} of {names[1]}, for 2 samples\n' in printed
    assert f'too long   1 of {2 + len(longer)} captions' in printed
    assert f'no caption called {names[1]}' in {kind for _, _, kind in skipped_kinds('images')}
    assert captions_of('images') == [{names[0]: ['a & b'], names[1]: longer}, {names[0]: ['c']}]
    assert read_index('images')['captions'] == {names[0]: 2, names[1]: len(longer)}
    each = [(shaded(0), text) for text in ['a & b', *longer]] + [(shaded(1), 'c')]
    assert read_back('captions') == each
    assert read_back('images') == [each[0], each[-1]]


def test_a_bad_row_is_skipped_with_its_number():
    latin = pyarrow.array([b'a', 'é'.encode('latin-1')], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(2, *latin.buffers()[1:])
    images = [struct(shaded(1)), struct(shaded(2)), struct(b'noise'), None, struct(None), struct(shaded(3)),
              struct(shaded(4)), struct(None, '05.png')]
    captions = pyarrow.concat_arrays([texts, pyarrow.array(['b', 'c', 'd', None, ' ', 'e'])])
    write_parquet('x.parquet', {'image': images, 'text': captions})
    assert convert.main(['x.parquet', 'out']) == 0
    assert read_back('out') == [(shaded(1), 'a')]
    kinds = ['no caption', 'image does not decode', 'no image', 'no image', 'no caption', 'no caption', 'no image']
    assert skipped_kinds('out') == [('x.parquet', row, kind) for row, kind in enumerate(kinds, start=1)]
    assert "'05.png' instead of its bytes" in skipped('out')[-1][2]  # a path on the machine that made the file


def test_a_truncated_or_corrupt_file_is_damaged_and_its_good_rows_are_kept(tmp_path, capsys):
    path = hub_file(tmp_path / 'in/x.parquet', rows_of_group=10)
    content = path.read_bytes()
    page = pyarrow.parquet.read_metadata(path).row_group(1).column(1).data_page_offset
    garbled = content[:page] + bytes(30) + content[page + 30:]
    write_files('in', {'cut.parquet': content[:-1000], 'garbled.parquet': garbled, 'empty.parquet': b''})
    assert convert.main(['in', 'out']) == 1
    errors = capsys.readouterr().err
    for name in ('cut', 'garbled', 'empty'):
        assert f'{tmp_path}/in/{name}.parquet is cut short or damaged' in errors
    captions = [caption for _, caption in read_back('out')]
    assert captions[-40:] == CAPTIONS
    of_garbled = captions[:-40]
    assert of_garbled[:10] == CAPTIONS[:10]
    assert not set(of_garbled) & set(CAPTIONS[10:20])


@pytest.mark.parametrize('columns, reason', [
    ({'url': ['a'], 'text': ['b']}, 'has the columns url, text; exactly one of them must be called image'),
    ({'image': IMAGES[:1], 'text': ['a'], 'caption': ['b']}, 'must be called text or caption (see --caption_column)'),
    ({'image': [IMAGES[:2]], 'text': ['two']}, 'the row has a list instead of its bytes'),
    ({'image': pyarrow.array([], 'binary'), 'text': pyarrow.array([], 'string')}, 'no row')])
def test_a_file_without_usable_rows_is_skipped_with_the_reason(tmp_path, capsys, columns, reason):
    path = write_parquet(tmp_path / 'in/y.parquet', columns)
    line = one_error_line([path, 'out'], capsys, convert.main)
    assert f'; the first is {path}: ' in line
    assert reason in line
    hub_file(tmp_path / 'in/x.parquet')
    assert convert.main(['in', 'out']) == 0
    assert read_back('out') == SAMPLES
    assert reason in skipped('out')[0][2]
