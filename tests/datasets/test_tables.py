"""Images have their captions from tables that name them, and what does not fit is listed."""
import json
import os
from pathlib import Path

import pytest

import convert
from sdbench.datasets.tables import Columns, Row, read_table
from tests.samples import shaded, write_parquet
from tests.test_convert import error_line, failing_status, read_back


def photos(folder: Path, *names: str) -> Path:
    """Images of different shades, by their order."""
    for shade, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(shaded(shade))
    return folder


def captions(out: Path) -> list[str]:
    return [caption for _, caption in read_back(out)]


def listed(out: Path) -> list[tuple]:
    """File, key and reason of each line of what was left out."""
    lines = map(json.loads, (out / 'skipped.jsonl').read_text().splitlines())
    return sorted((os.path.basename(line['source']), line['key'], line['reason']) for line in lines)


METADATA = {'metadata.csv': '\ufefffile_name,text\na.jpg,"one, two"\nsub/b.jpg,three\n',
            'metadata.jsonl': '{"file_name": "a.jpg", "text": "one, two"}\n'
                              '{"file_name": "sub/b.jpg", "text": "three"}\n',
            'captions.csv': 'filename;caption\na.jpg;"one, two"\nsub/b.jpg;three\n'}


@pytest.mark.parametrize('name', METADATA)
@pytest.mark.parametrize('source', ['', '/*'])
def test_images_of_a_folder_and_its_subfolders_take_their_captions_from_metadata(tmp_path, name, source):
    folder = photos(tmp_path / 'in', 'a.jpg', 'sub/b.jpg')
    (folder / name).write_text(METADATA[name])
    assert convert.main([f'{folder}{source}', str(tmp_path / 'out')]) == 0
    assert read_back(tmp_path / 'out') == [(shaded(0), 'one, two'), (shaded(1), 'three')]
    assert not (tmp_path / 'out/skipped.jsonl').exists()


def test_a_table_may_lie_elsewhere_and_have_other_columns(tmp_path):
    folder = photos(tmp_path / 'in', 'a.jpg', 'sub/b.jpg')
    (tmp_path / 'captions.csv').write_text('id,picture,words\n1,in/a.jpg,one\n2,in/sub/b.jpg,two\n')
    (tmp_path / 'link').symlink_to(folder)
    flags = ['--captions', f'{tmp_path}/captions.csv', '--image_column', 'picture', '--caption_column', 'words']
    assert convert.main([f'{tmp_path}/link', str(tmp_path / 'out'), *flags]) == 0
    assert captions(tmp_path / 'out') == ['one', 'two']


def test_the_table_goes_before_a_text_file_and_an_image_that_it_does_not_name_has_that(tmp_path):
    folder = photos(tmp_path, 'a.jpg', 'b.jpg', 'both.jpg', 'both.png')
    for name in ('a', 'b', 'both'):
        (folder / f'{name}.txt').write_text(f'beside {name}')
    (folder / 'metadata.csv').write_text('file_name,caption\na.jpg,of the table\nboth.jpg,of this one\n')
    assert convert.main([str(folder), str(tmp_path / 'out')]) == 0
    assert captions(tmp_path / 'out') == ['of the table', 'beside b', 'of this one']
    assert listed(tmp_path / 'out') == [('both.png', None, 'more than one image: both.jpg, both.png')]


def test_an_image_without_a_row_and_a_row_without_an_image_are_listed(tmp_path):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg', 'c.jpg')
    (folder / 'metadata.csv').write_text('file_name,text\na.jpg,one\nmissing.jpg,two\nc.jpg,\n')
    assert convert.main([str(folder), str(tmp_path / 'out')]) == 0
    assert captions(tmp_path / 'out') == ['one']
    assert listed(tmp_path / 'out') == [
        ('b.jpg', 'b', 'no caption'), ('c.jpg', 'c', 'empty caption'),
        ('metadata.csv', 1, 'no image at the path of a row: there is no missing.jpg')]


def test_an_image_with_several_captions_is_several_samples_of_the_table_that_names_it_first(tmp_path, capsys):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg')
    (folder / 'metadata.csv').write_text('file_name,text\na.jpg,one\nb.jpg,two\na.jpg,three\n')
    (folder / 'captions.csv').write_text('file_name,text\nb.jpg,other\n')
    assert convert.main([str(folder), str(tmp_path / 'out')]) == 0
    assert read_back(tmp_path / 'out') == [(shaded(0), 'one'), (shaded(0), 'three'), (shaded(1), 'two')]
    assert listed(tmp_path / 'out') == [
        ('captions.csv', 0, f'a caption of another table: {folder}/metadata.csv has one of b.jpg')]
    assert f'captions   3 from column text of {folder}/metadata.csv\n' in capsys.readouterr().out


@pytest.mark.parametrize('flags', [(), ('--captions', '--image_column')])
def test_a_row_of_a_table_in_parquet_is_converted_once_and_when_its_image_is_there(tmp_path, capsys, flags):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg', 'c.jpg')
    (folder / 'c.jpg').rename(tmp_path / 'c.jpg')
    (folder / 'a.txt').write_text('of a file')
    name, column = ('x.parquet', 'image') if flags else ('metadata.parquet', 'file_name')
    write_parquet(folder / name, {column: ['a.jpg', 'c.jpg', None], 'text': ['one', 'three', 'none']})
    argv = [str(folder), str(tmp_path / 'out')]
    for flag, value in zip(flags, (f'{folder}/{name}', column), strict=False):
        argv += [flag, value]
    for _ in range(2):
        assert convert.main(argv) == 0
        assert captions(tmp_path / 'out') == ['one']
        printed = capsys.readouterr().out
        assert 'skipped    1 no image in a row, 1 no image at the path of a row, 1 no caption; listed in' in printed
    assert printed.startswith(f'done already: OUT {tmp_path}/out holds 1 sample of this SOURCE\n')
    (tmp_path / 'c.jpg').rename(folder / 'c.jpg')
    assert convert.main(argv) == 0
    assert captions(tmp_path / 'out') == ['one', 'three']


@pytest.mark.parametrize('content, words', [
    ('name;text\na.jpg;one\n', 'no file_name or filename for --image_column among its columns name, text'),
    ('file_name,text,text\na.jpg,1,2\n', 'several columns of one name: 2 are called text'),
    ('file_name,a,b\na.jpg,1,2\n', 'no text or caption for --caption_column among its columns file_name, a, b')])
def test_a_table_without_the_columns_says_so_and_images_have_the_captions_beside_them(tmp_path, capsys, content, words):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg')
    (folder / 'b.txt').write_text('two')
    table = folder / 'metadata.csv'
    table.write_text(content)
    assert convert.main([str(folder), str(tmp_path / 'out')]) == 0
    assert captions(tmp_path / 'out') == ['two']
    assert listed(tmp_path / 'out')[1] == ('metadata.csv', None, f'no table of captions: {words}')
    capsys.readouterr()
    assert failing_status(folder, tmp_path / 'other', '--captions', table) == 2
    assert f'--captions {table} is no table of captions: {words}' in error_line(capsys)


@pytest.mark.parametrize('column', ['aesthetic_score', 'label'])
def test_the_only_other_column_has_the_captions_only_where_a_flag_names_it(tmp_path, capsys, column):
    folder = photos(tmp_path / 'in', 'a.jpg')
    (folder / 'a.txt').write_text('a cat')
    (folder / 'metadata.csv').write_text(f'file_name,{column}\na.jpg,7\n')
    for number, (flags, caption) in enumerate(((('--captions', f'{folder}/metadata.csv'), '7'),
                                               (('--caption_column', column), '7'), ((), 'a cat'))):
        capsys.readouterr()
        out = tmp_path / f'out {number}'
        assert convert.main([str(folder), str(out), *flags]) == 0
        assert captions(out) == [caption]
        source = f'captions   1 from column {column} of {folder}/metadata.csv\n'
        assert (source in capsys.readouterr().out) == (caption == '7')


def test_of_two_columns_that_may_hold_the_captions_a_flag_names_one(tmp_path, capsys):
    folder = photos(tmp_path / 'in', 'a.jpg')
    (folder / 'metadata.csv').write_text('file_name,caption,text\na.jpg,one,two\n')
    assert failing_status(folder, tmp_path / 'out') == 2
    assert f'{folder}/metadata.csv has the columns caption and text; name one of them with --caption_column' in (
        error_line(capsys))
    assert convert.main([str(folder), str(tmp_path / 'out'), '--caption_column', 'caption']) == 0
    assert captions(tmp_path / 'out') == ['one']


@pytest.mark.parametrize('where', ['annotations', 'labels'])  # before images/ and behind it
def test_a_table_decides_wherever_it_lies(tmp_path, where):
    folder = photos(tmp_path / 'in', 'images/x.jpg')
    (folder / 'images/x.txt').write_text('old')
    (folder / where).mkdir()
    (folder / where / 'captions.csv').write_text('file_name,text\n../images/x.jpg,new\n')
    assert convert.main([str(folder), str(tmp_path / 'out')]) == 0
    assert captions(tmp_path / 'out') == ['new']


def test_a_row_has_as_many_cells_as_the_header_or_is_listed(tmp_path):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg', 'c.jpg')
    (folder / 'metadata.csv').write_text('\nfile_name,text\na.jpg,a cat, asleep\nb.jpg\n\nc.jpg,"a cat, awake"\n,x\n')
    assert convert.main([str(folder), str(tmp_path / 'out')]) == 0
    assert captions(tmp_path / 'out') == ['a cat, awake']
    reason = "no row as long as the header: it has {} cells instead of 2; a cell with ',' in it stands in quotes"
    assert [line for line in listed(tmp_path / 'out') if line[0] == 'metadata.csv'] == [
        ('metadata.csv', 0, reason.format(3)), ('metadata.csv', 1, reason.format(1)),
        ('metadata.csv', 3, 'no image in a row: it has no path in column file_name')]


@pytest.mark.parametrize('content, words', [
    ('file_name,text\na.jpg,"one\nb.jpg,two\n', 'cannot be read up to line 3 (unexpected end of data)'),
    ('file_name,text\na.jpg,"one" two\n', 'cannot be read up to line 2'),
    ('file_name,text\ncaf\xe9.jpg,one\n'.encode('latin-1'), 'is not UTF-8; save it as that')])
@pytest.mark.parametrize('flags', [(), ('--captions',)])
def test_a_table_of_captions_that_cannot_be_read_to_its_end_is_refused(tmp_path, capsys, content, words, flags):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg')
    (folder / 'b.txt').write_text('beside')
    content = content if isinstance(content, bytes) else content.encode()
    table = folder / 'metadata.csv'
    table.write_bytes(content)
    assert failing_status(folder, tmp_path / 'out', *(value for flag in flags for value in (flag, table))) == 2
    assert f'the table {table} {words}' in error_line(capsys)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('line', ['[1]', '{', '3'])
def test_a_line_that_is_no_object_is_named_by_its_number(tmp_path, line):
    table = tmp_path / 'x.jsonl'
    table.write_text(f'{{"file_name": "a.jpg", "text": "one"}}\n{line}\n')
    with pytest.raises(ValueError, match='^row 1 of the table .* cannot be read'):
        read_table(str(table), Columns())


def test_a_caption_that_is_no_text_is_an_empty_one(tmp_path):
    values = [None, 3, ['one', 'two']]
    lines = [json.dumps({'file_name': 'a.jpg', 'text': value}) for value in values]
    (tmp_path / 'x.jsonl').write_text('\n'.join(lines))
    assert read_table(str(tmp_path / 'x.jsonl'), Columns()).rows == [Row(number, 'a.jpg', '') for number in range(3)]
