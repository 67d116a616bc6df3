"""Images get their captions from tables that name them, and every row without an image or a text has a reason."""
import json
from collections import Counter

import pytest

import convert
from sdbench.inputs.shards import read_index
from tests.runs import one_error_line
from tests.samples import captions_of, read_back, shaded, skipped, skipped_kinds, write_files, write_parquet


def photos(*names: str) -> dict[str, bytes]:
    """Return image files, each in a different shade."""
    return {name: shaded(shade) for shade, name in enumerate(names)}


def converted(*flags: str) -> list[str]:
    """Convert the folder `in`, and return all captions of its images in their order."""
    assert convert.main(['in', 'out', *flags]) == 0
    return [text for of_image in captions_of('out') for texts in of_image.values() for text in texts]


def rows_skipped(table: str) -> list[tuple]:
    """Return the number and the kind of reason of each row of a table that was skipped."""
    return [(row, kind) for name, row, kind in skipped_kinds('out') if name == table]


TABLES_FROM_USERS = {
    'spaces after commas': 'file_name, text\na.jpg, one\n sub/b.jpg, "two"\n',
    'a large cell': f'x,file_name,text\n{"0.1 " * 50_000},a.jpg,one\n,sub/b.jpg,two\n',
    'an index of pandas': ',file_name,text\n0,a.jpg,one\n1,sub/b.jpg,two\n',
    'lines of an old Mac': 'file_name,text\ra.jpg,one\rsub/b.jpg,two\r',
    'lines of Windows and a byte order mark': '\ufefffile_name,text\r\na.jpg,"one"\r\nsub/b.jpg,two\r\n',
    'other names of columns': 'filename,caption\na.jpg,"one"\n./sub/../sub/b.jpg,two\n',
    'lines of JSON': '{"file_name": "a.jpg", "text": "one"}\n{"file_name": "sub/b.jpg", "text": "two"}\n'}


@pytest.mark.parametrize('source', ['in', 'in/*/*'])
def test_tables_from_editors_spreadsheets_and_other_systems_are_read(tmp_path, source):
    for case, content in TABLES_FROM_USERS.items():
        name = 'metadata.jsonl' if case == 'lines of JSON' else 'Captions.CSV'
        write_files(f'in/{case}', photos('a.jpg', 'sub/b.jpg') | {name: content})
    assert convert.main([source, 'out']) == 0
    assert not (tmp_path / 'out/skipped.jsonl').exists()
    expected = [(shaded(0), 'one'), (shaded(1), 'two')] * len(TABLES_FROM_USERS)
    assert Counter(read_back('out')) == Counter(expected)


def test_the_table_of_the_flag_may_be_outside_of_source_have_other_columns_and_decides(tmp_path, capsys):
    write_files('in', photos('a.jpg', 'sub/b.jpg') | {'metadata.csv': 'picture,words\na.jpg,of the folder\n'})
    write_files('.', {'list.csv': 'id,picture,Picture,words\n1,in/a.jpg,x,one\n2,in/sub/b.jpg,x,two\n'})
    flags = ['--captions', 'list.csv', '--image_column', 'picture', '--caption_column', 'words']
    for _ in range(2):
        assert converted(*flags) == ['one', 'two']
    line = one_error_line(['in', 'out', *flags[2:]], capsys, convert.main)
    assert f'OUT out was begun with captions {tmp_path}/list.csv' in line


def test_cells_without_text_and_rows_without_an_image_are_skipped_with_their_line_number(capsys):
    rows = [['a.jpg', '["one", "two", null]'], ['b.jpg', '5'], ['c.jpg', 'NaN'], ['d.jpg', '"nan"'], ['e.jpg', '"x"'],
            ['../elsewhere.jpg', '"x"'], ['caf\u00e9.jpg', '"x"']]
    lines = [f'{{"file_name": "{image}", "text": {text}}}\n' for image, text in rows]
    table = '{"file_name": "without_text.jpg"}\n' + ''.join(lines) + '\n'
    images = photos('a.jpg', 'b.jpg', 'c.jpg', 'd.jpg', 'E.jpg', 'e.JPG', 'cafe\u0301.jpg', '../elsewhere.jpg')
    write_files('in', images | {'b.txt': 'the table decides', 'metadata.jsonl': table})
    assert converted() == ['one', 'two']
    printed = capsys.readouterr().out
    assert ' in 1 row of 1 table' in printed
    assert ' 2 of caption, for 1 sample\n' in printed
    kinds = ['no image for a row', *['no caption'] * 4, *['no image for a row'] * 3]
    assert rows_skipped('metadata.jsonl') == list(enumerate(kinds, start=1))


def test_a_table_in_any_folder_overrides_text_files_and_rows_without_a_match_are_skipped(tmp_path, capsys):
    images = photos('both.jpg', 'both.png', 'empty.jpg', 'images/a.jpg', 'images/b.jpg', 'lonely.jpg', 'of_text.jpg',
                    'twice.jpg')
    texts = {f'{name}.txt': f'text file of {name}' for name in ('both', 'images/a', 'images/b', 'of_text')}
    tables = {'annotations/captions.csv': '../images/a.jpg,before the images\n',
              'labels/captions.csv': '../images/b.jpg,after the images\n',
              'metadata.csv': 'both.jpg,one of two\ntwice.jpg,first\nmissing.jpg,x\nempty.jpg,\ntwice.jpg,second\n',
              'captions.csv': 'twice.jpg,of a second table\n'}
    write_files('in', images | texts | {name: f'file_name,text\n{rows}' for name, rows in tables.items()})
    assert converted() == ['one of two', 'before the images', 'after the images', 'text file of of_text', 'first',
                           'second']
    assert skipped_kinds('out') == [
        ('both.png', None, 'more than one image'), ('captions.csv', 2, 'already captioned'),
        ('lonely.jpg', 'lonely', 'no caption'), ('metadata.csv', 4, 'no image for a row'),
        ('metadata.csv', 5, 'no caption')]
    assert f'SOURCE has no {tmp_path}/in/missing.jpg' in skipped('out')[3][2]
    assert 'in 5 rows of 3 tables' in capsys.readouterr().out


@pytest.mark.parametrize('flags, expected', [
    (['.txt', '.caption'], [{'caption': ['table']}, {'.txt': ['file']}]),
    (['short', 'long'], [{'short': ['1'], 'long': ['2']}, {'caption': ['file']}]),
    (['short', '.txt'], [{'short': ['1']}, {'.txt': ['file']}])])
def test_captions_from_tables_and_files_get_names_that_weights_can_select(flags, expected):
    table = {'captions.csv': 'file_name,text,short,long\na.jpg,table,1,2\n'}
    write_files('in', photos('a.jpg', 'b.jpg') | table | {'b.txt': 'file'})
    assert convert.main(['in', 'out', '--caption_column', *flags]) == 0
    assert captions_of('out') == expected
    assert read_index('out')['captions'] == Counter(name for of_names in expected for name in of_names)


@pytest.mark.parametrize('name, flags', [('metadata.parquet', []),
                                         ('x.parquet', ['--captions', '{}', '--image_column', 'file_name'])])
def test_a_parquet_table_of_captions_is_read_once_and_not_as_images(capsys, name, flags):
    write_files('in', photos('a.jpg') | {'a.txt': 'of a file'})
    table = write_parquet(f'in/{name}', {'file_name': ['a.jpg', 'c.jpg', None], 'text': ['one', 'three', 'none']})
    for _ in range(2):
        assert converted(*(flag.format(table) for flag in flags)) == ['one']
        printed = capsys.readouterr().out
        assert '1 no path in a row, 1 no image for a row' in printed
    assert printed.startswith('done already')


TWO_COLUMNS = 'file_name,{}\na.jpg,one,two\n'
UNREADABLE = [
    ('metadata.csv', 'file_name,text\na.jpg,"one\nb.jpg,two\n', 'cannot be read after row 0 (unexpected end of data)'),
    ('captions.csv', 'file_name,text\na.jpg,"one\nb.jpg,"two"\n', 'cannot be read after row 0'),
    ('metadata.csv', b'file_name,text\ncaf\xe9.jpg,one\n', 'CSV in UTF-8 with commas'),
    ('metadata.jsonl', '{"file_name": "a.jpg", "text": "one"}\n{\n', 'cannot be read after row 0 (line 2'),
    ('metadata.jsonl', '["a.jpg", "one"]\n', 'one JSON object per line'),
    ('metadata.parquet', 'PAR1', 'must be a Parquet file'),
    ('captions.json', '{"1.jpg": "a cat"}', 'the keys images and annotations'),
    ('captions.csv', 'file_name;text\na.jpg;one\n',
     'has the columns file_name;text; exactly one of them must be called file_name or filename (see --image_column)'),
    *(('captions.csv', TWO_COLUMNS.format(columns), 'must be called text or caption (see --caption_column)')
      for columns in ('x,', 'text,caption', 'text,text'))]


@pytest.mark.parametrize('name, content, words', UNREADABLE)
def test_a_table_that_cannot_be_read_to_its_end_or_lacks_a_column_is_refused(tmp_path, capsys, name, content, words):
    write_files('in', photos('a.jpg', 'b.jpg') | {'b.txt': 'a text file', name: content})
    for flags in ([], ['--captions', f'in/{name}']):
        if name != 'captions.json' or flags:  # a file of this name is only a table if the flag says so
            line = one_error_line(['in', 'out', *flags], capsys, convert.main)
            assert f'the table of captions {tmp_path}/in/{name} ' in line
            assert words in line
            assert not (tmp_path / 'out').exists()


def test_a_csv_cell_may_be_a_json_list_and_other_lists_and_rows_of_another_length_are_skipped():
    rows = ['file_name,text', 'a.jpg,"[""one"", ""two""]"', 'b.jpg,"[\'three\' \'four\']"', 'c.jpg,[sic] five',
            'd.jpg,a cat, asleep', 'e.jpg', '', 'f.jpg,"a cat, awake"', ',x', 'g.jpg,[]', 'h.jpg,"[ ""six"",',
            'null ]"']
    write_files('in', photos(*(f'{name}.jpg' for name in 'abcdefgh')) | {'metadata.csv': '\n'.join(rows)})
    assert converted() == ['one', 'two', '[sic] five', 'a cat, awake', 'six']
    wrong = 'row with a wrong number of cells'
    assert rows_skipped('metadata.csv') == [(3, 'no caption'), (5, wrong), (6, wrong), (9, 'no path in a row'),
                                            (10, 'no caption'), (12, 'no caption')]


def test_a_table_linked_into_two_folders_is_read_in_both_and_one_without_images_is_refused(tmp_path, capsys):
    table = 'file_name,text\nx.jpg,one\n'
    write_files('in', photos('a/x.jpg', 'b/x.jpg') | {'a/captions.csv': table, '../list.csv': table})
    (tmp_path / 'in/b/captions.csv').symlink_to('../a/captions.csv')
    assert converted() == ['one', 'one']
    line = one_error_line(['in', 'other', '--captions', 'list.csv'], capsys, convert.main)
    assert '--captions list.csv: none of its rows' in line


def test_cocos_captions_are_matched_with_the_images_in_any_folder():
    names = ['1.jpg', '2.jpg', '3.jpg', 'z/4.jpg']
    images = [{'id': 10 * number, 'file_name': name} for number, name in enumerate(names)]
    entries = [(0, 'one'), (10, 'two'), (0, 'three'), (20, 'which?'), (99, 'of no image'), (30, 'four')]
    annotations = [{'image_id': image, 'id': 5, 'caption': caption} for image, caption in entries]
    table = json.dumps({'info': {}, 'images': images, 'annotations': annotations})
    photographs = photos('val2017/1.jpg', 'val2017/2.jpg', 'x/3.jpg', 'y/3.jpg', 'z/4.jpg')
    write_files('in', photographs | {'../captions_val2017.json': table})
    assert converted('--split', 'all', '--captions', 'captions_val2017.json') == ['one', 'three', 'two', 'four']
    assert rows_skipped('captions_val2017.json') == [(3, 'no image for a row'), (4, 'no path in a row')]
