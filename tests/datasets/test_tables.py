"""Images get their captions from tables that name them, and every row without an image or a text has a reason."""
import json
import os
from collections import Counter
from pathlib import Path

import pytest

import convert
from sdbench.inputs.shards import read_index
from tests.runs import one_error_line
from tests.samples import captions_of, read_back, shaded, skipped, write_parquet


def photos(folder: Path, *names: str) -> Path:
    """Write images, each in a different shade."""
    for shade, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(shaded(shade))
    return folder


def captions(out: Path) -> list[str]:
    return [text for of_image in captions_of(out) for texts in of_image.values() for text in texts]


def listed(out: Path) -> list[tuple]:
    """Return the file, the key and the reason in each line of skipped.jsonl."""
    return sorted((os.path.basename(line['source']), line['key'], line['reason']) for line in skipped(out))


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
        folder = photos(tmp_path / 'in' / case, 'a.jpg', 'sub/b.jpg')
        name = 'metadata.jsonl' if case == 'lines of JSON' else 'Captions.CSV'
        (folder / name).write_text(content, newline='')
    assert convert.main([source, 'out']) == 0
    assert not (tmp_path / 'out/skipped.jsonl').exists()
    assert Counter(read_back(tmp_path / 'out')) == dict.fromkeys(
        [(shaded(0), 'one'), (shaded(1), 'two')], len(TABLES_FROM_USERS))


def test_a_table_may_be_outside_of_source_and_have_other_columns(tmp_path):
    folder = photos(tmp_path / 'in', 'a.jpg', 'sub/b.jpg')
    (tmp_path / 'captions.csv').write_text('id,picture,Picture,words\n1,in/a.jpg,x,one\n2,in/sub/b.jpg,x,two\n')
    (tmp_path / 'link').symlink_to(folder)
    flags = ['--captions', f'{tmp_path}/captions.csv', '--image_column', 'picture', '--caption_column', 'words']
    assert convert.main([f'{tmp_path}/link', 'out', *flags]) == 0
    assert captions(tmp_path / 'out') == ['one', 'two']


def test_cells_without_text_and_rows_without_an_image_are_skipped_with_their_line_number(tmp_path, capsys):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg', 'c.jpg', 'd.jpg', 'E.jpg', 'e.JPG', 'cafe\u0301.jpg',
                    '../elsewhere.jpg')
    (folder / 'b.txt').write_text('the table decides')
    rows = [['a.jpg', '["one", "two", null]'], ['b.jpg', '5'], ['c.jpg', 'NaN'], ['d.jpg', '"nan"'], ['e.jpg', '"x"'],
            ['../elsewhere.jpg', '"x"'], ['caf\u00e9.jpg', '"x"']]
    lines = [f'{{"file_name": "{image}", "text": {text}}}\n' for image, text in rows]
    (folder / 'metadata.jsonl').write_text('{"file_name": "without_text.jpg"}\n' + ''.join(lines) + '\n')
    assert convert.main([str(folder), 'out']) == 0
    assert captions(tmp_path / 'out') == ['one', 'two']
    assert (f' in 1 row of 1 table, such as {folder}/metadata.jsonl\n'
            'captions   2 of caption, for 1 sample\n') in capsys.readouterr().out
    none = 'no image for a row: SOURCE has no'
    assert [line for line in listed(tmp_path / 'out') if line[0] == 'metadata.jsonl'] == [
        ('metadata.jsonl', 1, f'{none} {folder}/without_text.jpg'),
        ('metadata.jsonl', 2, f'no caption: the row has None for {folder}/a.jpg'),
        ('metadata.jsonl', 3, f'no caption: the row has 5 for {folder}/b.jpg'),
        ('metadata.jsonl', 4, f'no caption: the row has nan for {folder}/c.jpg'),
        ('metadata.jsonl', 5, f"no caption: the row has 'nan' for {folder}/d.jpg"),
        ('metadata.jsonl', 6, f'{none} {folder}/e.jpg'), ('metadata.jsonl', 7, f'{none} {tmp_path}/elsewhere.jpg'),
        ('metadata.jsonl', 8, f'{none} {folder}/caf\u00e9.jpg')]


def test_a_table_in_any_folder_overrides_text_files_and_rows_without_a_match_are_skipped(tmp_path, capsys):
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
        ('captions.csv', 2, f'already captioned: {folder}/metadata.csv names {folder}/twice.jpg first'),
        ('lonely.jpg', 'lonely', 'no caption'),
        ('metadata.csv', 4, f'no image for a row: SOURCE has no {folder}/missing.jpg'),
        ('metadata.csv', 5, f"no caption: the row has '' for {folder}/empty.jpg")]
    assert f'in 5 rows of 3 tables, such as {folder}/' in capsys.readouterr().out


def test_an_out_accepts_only_the_flags_for_captions_that_it_was_begun_with(tmp_path, capsys):
    folder = photos(tmp_path / 'in', 'a.jpg')
    (folder / 'metadata.csv').write_text('file_name,text\na.jpg,the table of the flag decides\n')
    for name in ('one', 'two'):
        (tmp_path / f'{name}.csv').write_text(f'file_name,text\nin/a.jpg,{name}\n')
    argv = [str(folder), 'out', '--captions']
    assert [convert.main([*argv, 'one.csv']) for _ in range(2)] == [0, 0]
    for flags, words in (([*argv, 'two.csv'], f'captions {tmp_path}/one.csv'), (argv[:2], f'captions {tmp_path}/one'),
                         ([*argv, 'one.csv', '--caption_column', 'text'], 'caption_column None')):
        assert f'OUT out was begun with {words}' in one_error_line(flags, capsys, convert.main)
    assert captions(tmp_path / 'out') == ['one']


@pytest.mark.parametrize('flags, expected', [
    (['.txt', '.caption'], [{'caption': ['table']}, {'.txt': ['file']}]),
    (['short', 'long'], [{'short': ['1'], 'long': ['2']}, {'caption': ['file']}]),
    (['short', '.txt'], [{'short': ['1']}, {'.txt': ['file']}])])
def test_captions_from_tables_and_files_get_names_that_weights_can_select(tmp_path, flags, expected):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg')
    (folder / 'captions.csv').write_text('file_name,text,short,long\na.jpg,table,1,2\n')
    (folder / 'b.txt').write_text('file')
    assert convert.main([str(folder), 'out', '--caption_column', *flags]) == 0
    counts = Counter()
    for captions_of_image, of_names in zip(captions_of(tmp_path / 'out'), expected, strict=True):
        assert captions_of_image == of_names
        counts.update({name: len(texts) for name, texts in of_names.items()})
    assert read_index(str(tmp_path / 'out'))['captions'] == counts


@pytest.mark.parametrize('name, flags', [('metadata.parquet', []),
                                         ('x.parquet', ['--captions', '{}', '--image_column', 'file_name'])])
def test_a_parquet_table_of_captions_is_read_once_and_not_as_images(tmp_path, capsys, name, flags):
    folder = photos(tmp_path / 'in', 'a.jpg')
    (folder / 'a.txt').write_text('of a file')
    table = write_parquet(folder / name, {'file_name': ['a.jpg', 'c.jpg', None], 'text': ['one', 'three', 'none']})
    argv = [str(folder), 'out', *(flag.format(table) for flag in flags)]
    for _ in range(2):
        assert convert.main(argv) == 0
        assert captions(tmp_path / 'out') == ['one']
        printed = capsys.readouterr().out
        assert 'skipped    1 no path in a row, 1 no image for a row; listed in' in printed
    assert printed.startswith('done already: OUT out holds 1 sample of this SOURCE\n')


UNREADABLE = [
    ('metadata.csv', b'file_name,text\na.jpg,"one\nb.jpg,two\n', 'cannot be read after row 0 (unexpected end of data)'),
    ('captions.csv', b'file_name,text\na.jpg,"one\nb.jpg,"two"\n', "cannot be read after row 0 (',' expected after"),
    ('metadata.csv', b'file_name,text\ncaf\xe9.jpg,one\n', 'it must be a CSV in UTF-8 with commas'),
    ('metadata.jsonl', b'{"file_name": "a.jpg", "text": "one"}\n{\n', 'cannot be read after row 0 (line 2: Expecting'),
    ('metadata.jsonl', b'["a.jpg", "one"]\n', 'with one JSON object per line'),
    ('metadata.parquet', b'PAR1', 'it must be a Parquet file'),
    ('captions.json', b'{"1.jpg": "a cat"}', 'it must be in the layout of COCO, with the keys images and annotations'),
    ('captions.csv', b'file_name;text\na.jpg;one\n',
     'has the columns file_name;text; exactly one of them must be called file_name or filename (see --image_column); '
     'rename the file if it is something else'),
    *(('captions.csv', f'file_name,{columns}\na.jpg,one,two\n'.encode(),
       'exactly one of them must be called text or caption (see --caption_column)')
      for columns in ('x,', 'text,caption', 'text,text'))]


@pytest.mark.parametrize('name, content, words', UNREADABLE)
@pytest.mark.parametrize('flags', [[], ['--captions', '{}']])
def test_a_table_that_cannot_be_read_to_its_end_or_lacks_a_column_is_refused(
        tmp_path, capsys, name, content, words, flags):
    folder = photos(tmp_path / 'in', 'a.jpg', 'b.jpg')
    (folder / 'b.txt').write_text('a text file')
    table = folder / name
    table.write_bytes(content)
    if name != 'captions.json' or flags:
        line = one_error_line([folder, tmp_path / 'out', *(flag.format(table) for flag in flags)], capsys, convert.main)
        assert f'the table of captions {table} ' in line
        assert words in line
        assert not (tmp_path / 'out').exists()


def test_a_csv_cell_may_be_a_json_list_and_other_lists_and_rows_of_another_length_are_skipped(tmp_path):
    folder = photos(tmp_path / 'in', *(f'{name}.jpg' for name in 'abcdefgh'))
    rows = ['file_name,text', 'a.jpg,"[""one"", ""two""]"', 'b.jpg,"[\'three\' \'four\']"', 'c.jpg,[sic] five',
            'd.jpg,a cat, asleep', 'e.jpg', '', 'f.jpg,"a cat, awake"', ',x', 'g.jpg,[]', 'h.jpg,"[ ""six"",',
            'null ]"']
    (folder / 'metadata.csv').write_text('\n'.join(rows))
    assert convert.main([str(folder), 'out']) == 0
    assert captions(tmp_path / 'out') == ['one', 'two', '[sic] five', 'a cat, awake', 'six']
    reason = 'row with a wrong number of cells: put quotes around a cell that contains a comma'
    assert [line for line in listed(tmp_path / 'out') if line[0] == 'metadata.csv'] == [
        ('metadata.csv', 3, 'no caption: the row has a list that is not JSON, "[\'three\' \'four\']" '
         f'for {folder}/b.jpg'),
        ('metadata.csv', 5, reason), ('metadata.csv', 6, reason),
        ('metadata.csv', 9, 'no path in a row: column file_name is empty or not text'),
        ('metadata.csv', 10, f'no caption: the row has [] for {folder}/g.jpg'),
        ('metadata.csv', 12, f'no caption: the row has None for {folder}/h.jpg')]


def test_a_table_linked_into_two_folders_is_read_in_both_and_one_without_images_is_refused(tmp_path, capsys):
    folder = photos(tmp_path / 'in', 'a/x.jpg', 'b/x.jpg')
    (folder / 'a/captions.csv').write_text('file_name,text\nx.jpg,one\n')
    (folder / 'b/captions.csv').symlink_to(folder / 'a/captions.csv')
    assert convert.main([str(folder), 'out']) == 0
    assert captions(tmp_path / 'out') == ['one', 'one']
    (tmp_path / 'list.csv').write_text('file_name,text\nx.jpg,one\n')
    line = one_error_line([folder, 'other', '--captions', 'list.csv'], capsys, convert.main)
    assert '--captions list.csv: none of its rows has a caption for an image of SOURCE' in line


def test_cocos_captions_are_matched_with_the_images_in_any_folder(tmp_path):
    folder = photos(tmp_path / 'in', 'val2017/1.jpg', 'val2017/2.jpg', 'x/3.jpg', 'y/3.jpg', 'z/4.jpg')
    names = ['1.jpg', '2.jpg', '3.jpg', 'z/4.jpg']
    images = [{'id': 10 * number, 'file_name': name} for number, name in enumerate(names)]
    entries = [(0, 'one'), (10, 'two'), (0, 'three'), (20, 'which?'), (99, 'of no image'), (30, 'four')]
    annotations = [{'image_id': image, 'id': 5, 'caption': caption} for image, caption in entries]
    table = tmp_path / 'captions_val2017.json'
    table.write_text(json.dumps({'info': {}, 'images': images, 'annotations': annotations}))
    assert convert.main([str(folder), 'out', '--split', 'all', '--captions', str(table)]) == 0
    assert captions(tmp_path / 'out') == ['one', 'three', 'two', 'four']
    assert [line for line in listed(tmp_path / 'out') if line[0] == table.name] == [
        (table.name, 3, 'no image for a row: SOURCE has 2 images called 3.jpg'),
        (table.name, 4, 'no path in a row: column file_name is empty or not text')]
