"""Each row of a Parquet file becomes a sample, as an image file does, or is skipped with a reason."""
import json
from pathlib import Path

import pyarrow.parquet
import pytest

import convert
from sdbench.datasets.readers import read_samples
from sdbench.datasets.sources import File
from sdbench.errors import DataError
from sdbench.inputs.shards import read_index
from tests.runs import one_error_line
from tests.samples import captions_of, encoded, picture, read_back, shaded, skipped, write_parquet

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


def converted(out: Path, *argv) -> list[tuple[bytes, str]]:
    """Convert, and return the samples; nothing may be skipped."""
    assert convert.main([str(argv[0]), str(out), *argv[1:], '--num_workers', '1']) == 0
    assert not (out / 'skipped.jsonl').exists()
    return read_back(out)


@pytest.mark.parametrize('columns, flags', [
    ({'caption': CAPTIONS, 'image': IMAGES}, []),
    ({'caption': CAPTIONS, 'jpg': IMAGES}, ['--image_column', 'jpg']),
    ({'prompt': CAPTIONS, 'image': IMAGES}, ['--caption_column', 'prompt'])])
def test_plain_bytes_and_other_columns_are_taken(tmp_path, columns, flags):
    path = write_parquet(tmp_path / 'x.parquet', columns)
    assert converted(tmp_path / 'out', path, *flags) == SAMPLES


SHORT_AND_LONG = {'image': [shaded(0), shaded(1)], 'short': ['a &amp; b', 'c'], 'long': [['d', LONG], None]}
PHOTOS = {'0.jpg': shaded(0), '1.jpg': shaded(1)}
ROWS = {'captions.csv': f'file_name,short,long\n0.jpg,a &amp; b,d\n1.jpg,c,\n0.jpg,,{LONG}\n'.encode()}
TEXTS = {'0.txt': b'a &amp; b', '0.json': json.dumps({'caption': LONG}).encode(), '1.txt': b'c', '1.caption': b'left'}


@pytest.mark.parametrize('names, files, longer', [
    (['short', 'long'], {}, ['d', LONG]), (['short', 'long'], PHOTOS | ROWS, ['d', LONG]),
    (['.txt', '.json'], PHOTOS | TEXTS, [LONG])])
def test_several_captions_make_one_sample_unless_a_flag_asks_for_one_each(tmp_path, capsys, names, files, longer):
    for name, content in files.items():
        (tmp_path / 'in').mkdir(exist_ok=True)
        (tmp_path / 'in' / name).write_bytes(content)
    if not files:
        write_parquet(tmp_path / 'in/x.parquet', SHORT_AND_LONG)
    for out, flags in (('images', []), ('captions', ['--sample_per_caption'])):
        assert convert.main(['in', out, '--clean_captions', *flags, '--caption_column', *names]) == 0
    printed = capsys.readouterr().out
    of_images, of_captions = [line for line in printed.splitlines() if line.startswith('next ')]
    assert of_captions == of_images.replace('images-sd15', 'captions-sd15').replace('remote images', 'remote captions')
    assert f'captions   2 of {names[0]}, {len(longer)} of {names[1]}, for 2 samples\n' in printed
    assert f'too long   1 of {2 + len(longer)} captions; the text encoder sees the first 77 tokens\n' in printed
    assert f'no caption called {names[1]}' in {line['reason'].split(':')[0] for line in skipped(tmp_path / 'images')}
    assert captions_of('images') == [{names[0]: ['a & b'], names[1]: longer}, {names[0]: ['c']}]
    assert read_index('images')['captions'] == {names[0]: 2, names[1]: len(longer)}
    each = [(shaded(0), text) for text in ['a & b', *longer]] + [(shaded(1), 'c')]
    assert read_back(tmp_path / 'captions') == each
    assert read_back(tmp_path / 'images') == [each[0], each[-1]]


def test_a_bad_row_is_skipped_with_its_number(tmp_path):
    latin = pyarrow.array([b'a', 'é'.encode('latin-1')], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(2, *latin.buffers()[1:])
    images = [struct(shaded(1)), struct(shaded(2)), struct(b'noise'), None, struct(None), struct(shaded(3)),
              struct(shaded(4)), struct(None, '05.png')]
    captions = pyarrow.concat_arrays([texts, pyarrow.array(['b', 'c', 'd', None, ' ', 'e'])])
    path = write_parquet(tmp_path / 'x.parquet', {'image': images, 'text': captions})
    out = tmp_path / 'out'
    assert convert.main([str(path), str(out)]) == 0
    assert read_back(out) == [(shaded(1), 'a')]
    instead = 'instead of its bytes (--captions reads tables of paths, and img2dataset makes tars of addresses)'
    assert {line['key']: line['reason'] for line in skipped(out)} == {
        1: 'no caption: it is not UTF-8', 2: 'image does not decode: not a known format',
        3: f'no image: the row has None {instead}', 4: f'no image: the row has None {instead}',
        5: 'no caption: the row has None', 6: "no caption: the row has ' '",
        7: f"no image: the row has '05.png' {instead}"}


def test_a_list_of_images_in_a_row_is_reported_without_its_bytes(tmp_path, capsys):
    path = write_parquet(tmp_path / 'x.parquet', {'image': [[shaded(1), shaded(2)]], 'text': ['two']})
    assert 'no image: the row has a list instead of its bytes' in one_error_line([path, 'out'], capsys, convert.main)


def test_a_truncated_or_corrupt_file_is_damaged_and_its_good_rows_are_kept(tmp_path, capsys):
    path = hub_file(tmp_path / 'in/x.parquet', rows_of_group=10)
    content = path.read_bytes()
    (tmp_path / 'in/cut.parquet').write_bytes(content[:-1000])
    page = pyarrow.parquet.read_metadata(path).row_group(1).column(1).data_page_offset
    (tmp_path / 'in/garbled.parquet').write_bytes(content[:page] + bytes(30) + content[page + 30:])
    (tmp_path / 'in/empty.parquet').touch()
    out = tmp_path / 'out'
    assert convert.main(['in', str(out)]) == 1
    errors = capsys.readouterr().err
    for name in ('cut', 'garbled', 'empty'):
        assert f'{tmp_path}/in/{name}.parquet is cut short or damaged' in errors
    captions = [caption for _, caption in read_back(out)]
    assert captions[-40:] == CAPTIONS
    of_garbled = captions[:-40]
    assert of_garbled[:10] == CAPTIONS[:10]
    assert not set(of_garbled) & set(CAPTIONS[10:20])


def test_a_file_without_rows_or_whose_columns_are_not_known_is_skipped_with_the_reason(tmp_path, capsys):
    lacks = 'unknown columns: {} has the columns {}; exactly one of them must be called {}'
    for name, columns, words in (('url', ['url', 'text'], 'image (see --image_column)'),
                                 ('two', ['image', 'text', 'caption'], 'text or caption (see --caption_column)')):
        path = write_parquet(tmp_path / name / 'x.parquet', dict.fromkeys(columns, CAPTIONS))
        line = one_error_line([path, tmp_path / 'out'], capsys, convert.main)
        assert f'; the first is {path}: {lacks.format(path, ", ".join(columns), words)}' in line
    hub_file(tmp_path / 'in/x.parquet')
    nothing = pyarrow.array([], 'binary')
    write_parquet(tmp_path / 'in/z.parquet', {'image': nothing, 'text': nothing})
    assert convert.main(['in', 'url', 'out']) == 0
    assert [caption for _, caption in read_back(tmp_path / 'out')] == CAPTIONS
    assert [line['reason'].partition(':')[0] for line in skipped(tmp_path / 'out')] == ['no row', 'unknown columns']


def test_parquet_in_a_store_is_read_and_a_failing_store_does_not_count_as_damage(tmp_path, s3):
    content = hub_file(tmp_path / 'x.parquet', rows_of_group=5).read_bytes()
    s3.put('data/x.parquet', content)
    assert converted(tmp_path / 'out', 's3://bucket/data', '--size_limit', '40kb') == SAMPLES
    s3.refusals = [(403, 'AccessDenied')] * 100
    with pytest.raises(DataError, match='x.parquet cannot be read or written .403 AccessDenied'):
        next(read_samples(File('s3://bucket/data/x.parquet', len(content))))
