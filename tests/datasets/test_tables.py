"""Images have their captions from tables that name them, and what does not fit is listed."""
import os
from pathlib import Path

import pytest

import convert
from tests.runs import one_error_line
from tests.samples import read_back, shaded, skipped, write_parquet


def photos(folder: Path, *names: str) -> Path:
    """Write images of different shades, by their order."""
    for shade, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(shaded(shade))
    return folder


def captions(out: Path) -> list[str]:
    return [caption for _, caption in read_back(out)]


def listed(out: Path) -> list[tuple]:
    """Return file, key and reason of each line of what was left out."""
    return sorted((os.path.basename(line['source']), line['key'], line['reason']) for line in skipped(out))


METADATA = {'metadata.csv': '\ufefffile_name,text\na.jpg,"one, two"\nsub/b.jpg,three\n',
            'metadata.jsonl': '{"file_name": "a.jpg", "text": "one, two"}\n'
                              '{"file_name": "sub/b.jpg", "text": "three"}\n',
            'captions.csv': 'filename;caption\na.jpg;"one, two"\nsub/b.jpg;three\n'}


@pytest.mark.parametrize('name', METADATA)
@pytest.mark.parametrize('source', ['', '/*'])
def test_images_of_a_folder_and_its_subfolders_take_their_captions_from_metadata(tmp_path, name, source):
    folder = photos(tmp_path / 'in', 'a.jpg', 'sub/b.jpg')
    (folder / name).write_text(METADATA[name])
    assert convert.main([f'{folder}{source}', 'out']) == 0
    assert read_back(tmp_path / 'out') == [(shaded(0), 'one, two'), (shaded(1), 'three')]
    assert not (tmp_path / 'out/skipped.jsonl').exists()


def test_a_table_may_lie_elsewhere_and_have_other_columns(tmp_path):
    folder = photos(tmp_path / 'in', 'a.jpg', 'sub/b.jpg')
    (tmp_path / 'captions.csv').write_text('id,picture,words\n1,in/a.jpg,one\n2,in/sub/b.jpg,two\n')
    (tmp_path / 'link').symlink_to(folder)
    flags = ['--captions', f'{tmp_path}/captions.csv', '--image_column', 'picture', '--caption_column', 'words']
    assert convert.main([f'{tmp_path}/link', 'out', *flags]) == 0
    assert captions(tmp_path / 'out') == ['one', 'two']


def test_a_table_goes_before_the_text_files_wherever_it_lies_and_what_has_no_match_is_listed(tmp_path, capsys):
    folder = photos(tmp_path / 'in', 'both.jpg', 'both.png', 'empty.jpg', 'images/a.jpg', 'images/b.jpg', 'lonely.jpg',
                    'of_text.jpg', 'twice.jpg')
    for name in ('both', 'images/a', 'images/b', 'of_text'):
        (folder / f'{name}.txt').write_text(f'text file of {name}')
    tables = {'annotations/captions.csv': '../images/a.jpg,before the images\n',
              'labels/captions.csv': '../images/b.jpg,after the images\n',
              'metadata.csv': 'both.jpg,one of two\ntwice.jpg,first\nmissing.jpg,x\nempty.jpg,\ntwice.jpg,second\n',
              'captions.csv': 'twice.jpg,of a second table\n'}
    for name, rows in tables.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f'file_name,text\n{rows}')
    assert convert.main([str(folder), 'out']) == 0
    assert captions(tmp_path / 'out') == ['one of two', 'before the images', 'after the images', 'text file of of_text',
                                          'first', 'second']
    assert listed(tmp_path / 'out') == [
        ('both.png', None, 'more than one image: both.jpg, both.png'),
        ('captions.csv', 0, f'a caption of another table: {folder}/metadata.csv has one of twice.jpg'),
        ('empty.jpg', 'empty', 'empty caption'), ('lonely.jpg', 'lonely', 'no caption'),
        ('metadata.csv', 2, 'no image at the path of a row: there is no missing.jpg')]
    assert f'4 from column text of {folder}/metadata.csv' in capsys.readouterr().out


@pytest.mark.parametrize('name, flags', [('metadata.parquet', []),
                                         ('x.parquet', ['--captions', '{}', '--image_column', 'file_name'])])
def test_a_table_in_parquet_is_read_once_and_is_no_source_of_images(tmp_path, capsys, name, flags):
    folder = photos(tmp_path / 'in', 'a.jpg')
    (folder / 'a.txt').write_text('of a file')
    table = write_parquet(folder / name, {'file_name': ['a.jpg', 'c.jpg', None], 'text': ['one', 'three', 'none']})
    argv = [str(folder), 'out', *(flag.format(table) for flag in flags)]
    for _ in range(2):
        assert convert.main(argv) == 0
        assert captions(tmp_path / 'out') == ['one']
        printed = capsys.readouterr().out
        assert 'skipped    1 no image in a row, 1 no image at the path of a row; listed in' in printed
    assert printed.startswith('done already: OUT out holds 1 sample of this SOURCE\n')


@pytest.mark.parametrize('content, words', [
    ('name;text\na.jpg;one\n', 'no file_name or filename for --image_column among its columns name, text'),
    ('file_name,text,text\na.jpg,1,2\n', 'several columns of one name: 2 are called text'),
    ('file_name,a,b\na.jpg,1,2\n', 'no text or caption for --caption_column among its columns file_name, a, b')])
def test_a_table_without_the_columns_says_so_and_images_keep_their_text_files(tmp_path, capsys, content, words):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg')
    (folder / 'b.txt').write_text('two')
    table = folder / 'metadata.csv'
    table.write_text(content)
    assert convert.main([str(folder), 'out']) == 0
    assert captions(tmp_path / 'out') == ['two']
    assert listed(tmp_path / 'out')[1] == ('metadata.csv', None, f'no table of captions: {words}')
    line = one_error_line([folder, tmp_path / 'other', '--captions', table], capsys, convert.main)
    assert f'--captions {table} is no table of captions: {words}' in line


@pytest.mark.parametrize('flags, caption', [(['--captions', '{}'], '7'), (['--caption_column', 'label'], '7'),
                                            ([], 'a cat')])
def test_the_only_other_column_has_the_captions_only_where_a_flag_names_it(tmp_path, capsys, flags, caption):
    folder = photos(tmp_path / 'in', 'a.jpg')
    (folder / 'a.txt').write_text('a cat')
    table = folder / 'metadata.csv'
    table.write_text('file_name,label\na.jpg,7\n')
    assert convert.main([str(folder), 'out', *(flag.format(table) for flag in flags)]) == 0
    assert captions(tmp_path / 'out') == [caption]
    assert (f'captions   1 from column label of {table}\n' in capsys.readouterr().out) == (caption == '7')


def test_a_row_has_as_many_cells_as_the_header_or_is_listed(tmp_path):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg', 'c.jpg')
    (folder / 'metadata.csv').write_text('\nfile_name,text\na.jpg,a cat, asleep\nb.jpg\n\nc.jpg,"a cat, awake"\n,x\n')
    assert convert.main([str(folder), 'out']) == 0
    assert captions(tmp_path / 'out') == ['a cat, awake']
    reason = "no row as long as the header: it has {} cells instead of 2; a cell with ',' in it stands in quotes"
    assert [line for line in listed(tmp_path / 'out') if line[0] == 'metadata.csv'] == [
        ('metadata.csv', 0, reason.format(3)), ('metadata.csv', 1, reason.format(1)),
        ('metadata.csv', 3, 'no image in a row: it has no path in column file_name')]


@pytest.mark.parametrize('name, content, words', [
    ('metadata.csv', b'file_name,text\na.jpg,"one\nb.jpg,two\n',
     'the table {} cannot be read up to line 3 (unexpected end of data)'),
    ('metadata.csv', b'file_name,text\ncaf\xe9.jpg,one\n', 'the table {} is not UTF-8; save it as that'),
    ('metadata.jsonl', b'{"file_name": "a.jpg", "text": "one"}\n{\n', 'row 1 of the table {} cannot be read')])
@pytest.mark.parametrize('flags', [[], ['--captions', '{}']])
def test_a_table_that_cannot_be_read_to_its_end_is_refused(tmp_path, capsys, name, content, words, flags):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg')
    (folder / 'b.txt').write_text('a text file')
    table = folder / name
    table.write_bytes(content)
    argv = [folder, tmp_path / 'out', *(flag.format(table) for flag in flags)]
    assert words.format(table) in one_error_line(argv, capsys, convert.main)
    assert not (tmp_path / 'out').exists()
