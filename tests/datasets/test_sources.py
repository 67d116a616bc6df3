"""Every file in SOURCE is converted or skipped with a reason, despite links, odd names and missing permissions."""
import json
import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdbench.datasets.readers import read_samples
from sdbench.datasets.sources import File, find_files, group_into_parts
from tests.samples import write_files


def make(folder: Path | str, *names: str) -> Path:
    return write_files(folder, dict.fromkeys(names, b'1'))


def names_of(found, folder: Path) -> list[str]:
    return [os.path.relpath(file.name, folder) for file in found.files]


def reasons_of(found, folder: Path) -> dict[str, str]:
    return {os.path.relpath(line['source'], folder): line['reason'] for line in found.skipped}


def test_links_are_followed_loops_end_and_a_folder_is_searched_once(tmp_path):
    disk = make(tmp_path / 'disk', 'x.tar', 'deep/y.tar')
    source = make(tmp_path / 'source', 'a.tar', 'a.jpg', 'a.txt', 'b.txt')
    (source / 'part1').symlink_to(disk)
    (source / 'part2').symlink_to(disk)
    (source / 'loop').symlink_to(source)
    (disk / 'itself').symlink_to('itself')
    (source / 'b.jpg').symlink_to('a.jpg')
    found = find_files([str(source), str(source / 'a.tar'), f'{source}/./a.tar', str(source / 'part1/deep')])
    assert names_of(found, source) == ['a.jpg', 'a.tar', 'b.jpg', 'part1/deep/y.tar', 'part1/x.tar']
    assert [file.captions for file in found.files if file.name.endswith('.jpg')] == [('.txt',), ('.txt',)]
    [(name, reason)] = reasons_of(found, source).items()
    assert (name, reason.partition(':')[0]) == ('part1/itself', 'cannot be opened')


def test_every_file_that_is_not_converted_has_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr('sdbench.datasets.names.formats', lambda: ())  # as without pillow-heif
    make(tmp_path, 'x.tar', 'x.parquet', 'x_stats.json', '0/a.mp4', '0.parquet', '0_stats.json', 'y.parquet',
         'y_stats.json', 'x.tar.gz', 'IMG.heic', 'README', 'list.CSV', 'photo.txt', 'two.jpg', 'two.png', 'two.txt',
         '.Trash/y.tar', 'closed/b.tar', 'closed.tar')
    os.mkfifo(tmp_path / 'pipe.tar')
    scandir, access = os.scandir, os.access

    def scan(folder):
        if str(folder).endswith('closed'):
            raise PermissionError(13, 'Permission denied', folder)
        return scandir(folder)
    monkeypatch.setattr('os.scandir', scan)
    monkeypatch.setattr('os.access', lambda path, mode: not path.endswith('closed.tar') and access(path, mode))
    found = find_files([str(tmp_path)])
    assert names_of(found, tmp_path) == ['x.tar', 'y.parquet']
    assert names_of(find_files([f'{tmp_path}/x.parquet']), tmp_path) == ['x.parquet']  # if SOURCE names it
    expected = {'y_stats.json': 'no image', '0/a.mp4': '.mp4', 'x.tar.gz': '.gz', 'list.CSV': '--captions',
                'IMG.heic': 'pip install pillow-heif', 'photo.txt': 'no image', 'README': 'without a suffix',
                'two.jpg': 'two.jpg, two.png', 'two.png': 'two.jpg, two.png', '.Trash': 'hidden', 'pipe.tar': 'a pipe',
                'closed': 'Permission denied', 'closed.tar': 'Permission denied'}
    reasons = reasons_of(found, tmp_path)
    assert reasons.keys() == expected.keys()
    for name, words in expected.items():
        assert words in reasons[name], name


NAMES = st.builds('{}{}{}'.format, st.sampled_from(['', 'sub/', '.hidden/']), st.sampled_from(['a', 'b.c', '._d']),
                  st.sampled_from(['.jpg', '.PNG', '.txt', '.JSON', '.caption', '.csv', '.tar', '_stats.json', '']))


@settings(deadline=None, max_examples=50)  # it waits for a disk
@given(st.sets(NAMES, min_size=1), st.sets(NAMES))
def test_each_file_is_converted_once_or_has_a_reason_and_no_image_gets_the_caption_of_another(names, of_table):
    with TemporaryDirectory() as folder:
        # A caption is the name of its file, and a row of the table the name of its image.
        files = {name: json.dumps({'caption': name}) if name.endswith('.JSON') else name for name in names}
        rows = [f'{name},{name}' for name in of_table]
        write_files(folder, files | {'captions.csv': '\n'.join(['file_name,text', *rows])})
        found = find_files([folder])
        for file in found.files:
            if not file.name.endswith('.tar'):
                [sample] = read_samples(file)
                key = os.path.relpath(file.name, folder).rpartition('.')[0]
                assert all(text.rpartition('.')[0] == key for texts in sample.captions.values() for text in texts)
                assert sample.captions or sample.reasons
        logged = reasons_of(found, folder)
        taken = Counter(names_of(found, folder))
        taken.update(os.path.relpath(file.name, folder).rpartition('.')[0] + suffix
                     for file in found.files for suffix in file.captions)
    for name in names:
        key = name.rpartition('.')[0]
        of_two_images = {f'{key}.jpg', f'{key}.PNG'} <= logged.keys()  # whose captions need no line of their own
        shard = name.removesuffix('_stats.json')
        of_img2dataset = shard != name and {shard, f'{shard}.tar'} & names
        overridden = {f'{key}.jpg', f'{key}.PNG'} & of_table  # the table decides, not the file beside the image
        is_logged = name in logged or os.path.dirname(name) in logged
        assert taken[name] + is_logged == 1 or of_two_images or of_img2dataset or overridden, name


def test_a_glob_takes_the_files_that_it_matches_and_their_captions(tmp_path):
    make(tmp_path, 'a.jpg', 'a.txt', 'b.png', 'b.txt', 'folder/c.jpg')
    found = find_files(['*.jpg', f'{tmp_path}/fol*'])
    assert [(file.name, file.size, file.captions) for file in found.files] == [
        (f'{tmp_path}/a.jpg', 2, ('.txt',)), (f'{tmp_path}/folder/c.jpg', 1, ())]
    assert not found.skipped
    with pytest.raises(ValueError, match='gif does not exist'):
        find_files([f'{tmp_path}/*.gif'])


def test_adjacent_files_share_a_part_and_a_new_file_changes_only_the_parts_around_it():
    files = [File(f'{number:04}.jpg', 1 + number % 7) for number in range(2000)]
    parts = group_into_parts(files, 100)
    assert [file for part in parts for file in part] == files
    sizes = [sum(file.size for file in part) for part in parts]
    assert max(sizes) <= 100
    assert sum(sizes) / len(sizes) > 40
    files.insert(500, File('0499b.jpg', 3))
    assert len([part for part in group_into_parts(files, 100) if part not in parts]) < 10 < len(parts) / 5
    large = [File('a.tar', 300), File('b.tar', 200)]
    assert group_into_parts(large, 100) == [[file] for file in large]


def test_tars_in_a_store_are_found_and_all_other_files_have_a_reason(s3):
    unusable = ['tars//1.tar', 'tars/./1.tar', 'tars/../1.tar']
    deep = 'tars/deep/[1] #?%41.tar'
    for key in ('tars/0.tar', deep, 'tars/.tmp/2.tar', 'tars/3.jpg', 'tars.tar', 'tars/0.parquet', 'tars/0_stats.json',
                '.x[1]/3.tar', *unusable):
        s3.put(key, b'1')

    def names(*sources: str) -> list[str]:
        found = find_files([f's3://bucket/{source}' for source in sources]).files
        return [file.name.removeprefix('s3://bucket/') for file in found]
    assert names('tars/') == ['tars/0.tar', deep]
    assert names('tars/*/*.tar', 'tars.tar') == [deep, 'tars.tar']
    assert names('') == ['tars/0.tar', deep, 'tars.tar']
    assert names(deep) == [deep]
    assert names('tars/0.parquet') == ['tars/0.parquet']
    assert names('.x[1]') == names('.x*/*.tar') == ['.x[1]/3.tar']  # hidden files that SOURCE names
    assert names('tars/.tmp/') == names('tars/.t?p/*') == ['tars/.tmp/2.tar']
    assert {line['source'].removeprefix('s3://bucket/'): line['reason'].partition(':')[0]
            for line in find_files(['s3://bucket/tars']).skipped} == {
        'tars/.tmp/2.tar': 'hidden', 'tars/3.jpg': 'not a tar or Parquet', **dict.fromkeys(unusable, 'unusable key')}
    with pytest.raises(ValueError, match='SOURCE s3://bucket/nothing does not exist'):
        find_files(['s3://bucket/nothing'])
    s3.refusals = [(403, 'AccessDenied')] * 2
    with pytest.raises(OSError, match='SOURCE s3://bucket/tars cannot be read or written .403 AccessDenied'):
        find_files(['s3://bucket/tars'])


def test_a_changed_file_changes_its_part_even_at_the_same_size(tmp_path, s3):
    table = 'file_name,text\nb.jpg,'
    folder = write_files('in', {'x.tar': '1', 'a.jpg': '1', 'a.TXT': '1', 'b.jpg': '1', 'metadata.csv': f'{table}one'})
    s3.put('tars/0.tar', b'1')

    def identities() -> list[list]:
        return [file.identity() for file in find_files(['in', 's3://bucket/tars']).files]

    before = identities()
    assert identities() == before
    for name, content in (('x.tar', '2'), ('a.jpg', '2'), ('a.TXT', '2'), ('metadata.csv', f'{table}two'),
                          ('tars/0.tar', '2')):
        if name == 'tars/0.tar':
            s3.put(name, content.encode())
        else:
            write_files(folder, {name: content})
            os.utime(folder / name, (1, 1))  # as if in another second
        after = identities()
        assert sum(one != other for one, other in zip(before, after, strict=True)) == 1, name
        before = after
