"""What SOURCE names is converted or left out with a reason, whatever links, names and rights lie there."""
import os
from datetime import timedelta
from pathlib import Path

import pytest

from inputs import stores
from parts import sources
from parts.names import File, split_name
from parts.sources import find_files, join_neighbours
from tests.local_s3 import local_s3
from tests.privileges import without_privileges
from tests.samples import sample_files, write_tar


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b'1')
    return folder


def names_of(found, folder: Path) -> list[str]:
    return [os.path.relpath(file.name, folder) for file in found.files]


def reasons_of(found, folder: Path) -> dict[str, str]:
    return {os.path.relpath(line['source'], folder): line['reason'] for line in found.left_out}


@pytest.mark.parametrize('name, expected', [
    ('a.jpg', ('a', '.jpg')), ('IMG_2020.01.02.JPG', ('IMG_2020.01.02', '.jpg')), ('a.seg.png', ('a.seg', '.png')),
    ('README', ('README', '')), ('.hidden', ('.hidden', '')), ('a.', ('a', '.')), ('..jpg', ('.', '.jpg'))])
def test_the_suffix_is_what_follows_the_last_dot(name, expected):
    assert split_name(name) == expected


def test_links_to_folders_are_followed_once_and_loops_end(tmp_path):
    disk = make(tmp_path / 'disk', 'x.tar', 'deep/y.tar')
    source = make(tmp_path / 'source', 'a/z.tar')
    (source / 'part1').symlink_to(disk)
    (source / 'part2').symlink_to(disk)
    (source / 'a/loop').symlink_to(source)
    (source / 'a/up').symlink_to(tmp_path)
    (disk / 'deep/loop').symlink_to(disk)
    (disk / 'itself').symlink_to('itself')
    found = find_files([str(source)])
    assert {Path(file.name).name for file in found.files} == {'x.tar', 'y.tar', 'z.tar'} and len(found.files) == 3
    assert found.counts == {'a second name of a folder': 2, 'a link to a folder that SOURCE lies in': 2, 'no file': 1}
    assert len(found.left_out) == 5


def test_a_file_with_two_names_is_converted_once_under_its_plain_name(tmp_path):
    make(tmp_path, 'b.tar', 'b.jpg', 'b.txt')
    (tmp_path / 'a.tar').symlink_to('b.tar')
    os.link(tmp_path / 'b.tar', tmp_path / 'c.tar')
    (tmp_path / 'a.jpg').symlink_to('b.jpg')
    (tmp_path / 'a.txt').symlink_to('b.txt')
    (tmp_path / 'gone.tar').symlink_to('nowhere.tar')
    found = find_files([str(tmp_path), str(tmp_path / 'a.tar'), f'{tmp_path}/./b.tar'])
    assert names_of(found, tmp_path) == ['b.jpg', 'b.tar']
    second = 'a second name of a file: '
    assert reasons_of(found, tmp_path) == {
        'a.tar': second + f'{tmp_path}/b.tar', 'c.tar': second + f'{tmp_path}/b.tar',
        'gone.tar': 'no file: a broken link', 'a.jpg': second + f'{tmp_path}/b.jpg'}


def test_an_image_with_another_caption_by_its_second_name_is_another_sample(tmp_path):
    make(tmp_path, 'a.jpg', 'a.txt', 'b.txt', 'c.txt')
    (tmp_path / 'b.jpg').symlink_to('a.jpg')
    os.link(tmp_path / 'a.jpg', tmp_path / 'c.jpg')
    assert names_of(find_files([str(tmp_path)]), tmp_path) == ['a.jpg', 'b.jpg', 'c.jpg']


def test_images_find_captions_of_their_key_in_any_case_of_the_suffix(tmp_path):
    make(tmp_path, 'IMG_2020.01.02.JPG', 'IMG_2020.01.02.txt', 'a.jfif', 'a.TXT', 'a.json', 'b.jpe')
    found = find_files([str(tmp_path)])
    assert {Path(file.name).name: file.captions for file in found.files} == {
        'IMG_2020.01.02.JPG': ('.txt',), 'a.jfif': ('.TXT', '.json'), 'b.jpe': ()}
    assert not found.left_out


def test_what_is_no_sample_is_listed_with_its_reason(tmp_path):
    make(tmp_path, 'x.tar', 'x.tar.gz', 'x.tgz', 'photo.xyz', 'photo.txt', 'two.jpg', 'two.png', 'two.txt',
         'Case.jpg', 'case.txt', 'both.jpg', 'both.txt', 'both.TXT', 'README', 'pipe.heic')
    os.mkfifo(tmp_path / 'pipe.tar')
    found = find_files([str(tmp_path)])
    assert names_of(found, tmp_path) == ['Case.jpg', 'x.tar']
    reasons = reasons_of(found, tmp_path)
    assert reasons.pop('pipe.heic').endswith(': .heic needs a package (pip install pillow-heif)')
    assert reasons == {
        'x.tar.gz': 'an archive: .gz is packed; unpack it', 'x.tgz': 'an archive: .tgz is packed; unpack it',
        'photo.xyz': 'not an image, a caption or a tar: .xyz is not read', 'photo.txt': 'no image',
        'two.jpg': 'more than one image: two.jpg, two.png', 'two.png': 'more than one image: two.jpg, two.png',
        'case.txt': 'no image: Case.jpg is spelled in another case',
        'two.txt': 'more than one image: two.jpg, two.png',
        **dict.fromkeys(('both.jpg', 'both.txt', 'both.TXT'), 'more than one caption: both.TXT, both.txt'),
        'README': 'not an image, a caption or a tar: a file without a suffix is not read',
        'pipe.tar': 'no file: a pipe, a socket or a device'}


def test_hidden_files_and_companions_are_counted_and_the_list_stays_short(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'LISTED_OF_A_KIND', 2)
    make(tmp_path, 'x.tar', 'x.parquet', 'x_stats.json', '._x.jpg', '.Trash/y.tar', '1.xyz', '2.xyz', '3.xyz')
    found = find_files([str(tmp_path)])
    assert names_of(found, tmp_path) == ['x.tar']
    assert found.counts == {'hidden': 2, 'a companion of other files': 2, 'not an image, a caption or a tar': 3}
    assert sorted(line['reason'] for line in found.left_out)[-4:] == [
        'hidden: 2 files or folders', 'not an image, a caption or a tar: .xyz is not read',
        'not an image, a caption or a tar: .xyz is not read', 'not an image, a caption or a tar: 1 more']


def test_a_glob_takes_what_it_names_with_the_captions_beside(tmp_path):
    make(tmp_path, 'a.jpg', 'a.txt', 'b.png', 'b.txt', 'folder/c.jpg')
    found = find_files([f'{tmp_path}/*.jpg', f'{tmp_path}/fol*'])
    assert names_of(found, tmp_path) == ['a.jpg', 'folder/c.jpg'] and found.files[0].captions == ('.txt',)
    assert not found.left_out
    with pytest.raises(ValueError, match='does not exist'):
        find_files([f'{tmp_path}/*.gif'])


def test_a_folder_that_may_not_be_opened_is_listed(tmp_path):
    make(tmp_path, 'a.tar', 'closed/b.tar')
    (tmp_path / 'closed').chmod(0)
    found = without_privileges(find_files, [str(tmp_path)])
    assert names_of(found, tmp_path) == ['a.tar']
    assert reasons_of(found, tmp_path) == {'closed': 'cannot be opened: Permission denied'}
    with pytest.raises(ValueError, match='SOURCE .*/closed cannot be opened'):
        without_privileges(find_files, [f'{tmp_path}/closed'])


def test_tars_of_a_store_are_found_and_the_rest_is_listed(monkeypatch):
    monkeypatch.setattr(stores, 'RETRY_TIMEOUT', timedelta(milliseconds=50))
    with local_s3(monkeypatch) as store:
        for key in ('tars/', 'tars/0.tar', 'tars/deep/[1] #?%41.tar', 'tars/0.parquet', 'tars/.tmp/2.tar', 'tars/3.jpg',
                    'tars/x.tar.gz', 'tars.tar'):
            store.put(key, b'1' if key.endswith('r') else b'')
        found = find_files(['s3://bucket/tars/'])
        assert found.files == [File('s3://bucket/tars/0.tar', 1), File('s3://bucket/tars/deep/[1] #?%41.tar', 1)]
        assert found.counts == {'a mark of a folder': 1, 'a companion of other files': 1, 'hidden': 1, 'no tar': 1,
                                'an archive': 1}
        assert [file.name for file in find_files(['s3://bucket/tars/*/*.tar', 's3://bucket/tars.tar']).files] == [
            's3://bucket/tars/deep/[1] #?%41.tar', 's3://bucket/tars.tar']
        for source, words in (('s3://bucket/nothing', 'does not exist'), ('s3://nobody/tars', 'no such bucket')):
            with pytest.raises(ValueError, match=f'SOURCE {source}.*{words}'):
                find_files([source])
        for status, words in ((503, 'is out of reach'), (403, 'access is denied')):
            store.refusals = [(status, 'Word')] * 100
            with pytest.raises(ValueError, match=f'SOURCE s3://bucket/tars/.*{words}'):
                find_files([f's3://bucket/tars/{"*" * (status == 403)}'])


def test_neighbours_are_joined_up_to_the_size_of_a_part():
    files = [File(str(size), size) for size in (3, 3, 9, 1, 2)]
    assert [[file.size for file in part] for part in join_neighbours(files, 6)] == [[3, 3], [9], [1, 2]]


def test_sources_of_tars_of_one_name_stay_apart(tmp_path):
    for folder in 'ab':
        write_tar(tmp_path / folder / '0.tar', sample_files('x', 1))
    assert names_of(find_files([str(tmp_path)]), tmp_path) == ['a/0.tar', 'b/0.tar']


def test_what_is_being_made_inside_source_is_passed_over(tmp_path, monkeypatch):
    make(tmp_path, 'x.tar', 'out/000000/shard.00000.mds', 'out/parts/000000.json', 'out/y.tar',
         'out-held-out/claim.json')
    (tmp_path / 'link').symlink_to(tmp_path / 'out')
    for source in (str(tmp_path), f'{tmp_path}/*'):
        found = find_files([source], [f'{tmp_path}/./out', f'{tmp_path}/out-held-out'])
        assert names_of(found, tmp_path) == ['x.tar'] and not found.left_out
    with local_s3(monkeypatch) as store:
        for key in ('tars/x.tar', 'tars/out/claim.json', 'tars/outer.tar'):
            store.put(key, b'1')
        found = find_files(['s3://bucket/tars'], ['s3://bucket/tars/out'])
        assert [file.name for file in found.files] == ['s3://bucket/tars/outer.tar', 's3://bucket/tars/x.tar']
        assert not found.left_out


def test_what_our_commands_have_made_inside_source_is_one_line_each_and_a_strangers_claim_is_none(tmp_path,
                                                                                                     monkeypatch):
    ours = b'{"program": "convert.py"}'
    names = ('x.tar', 'mds/000000/shard.00000.mds', 'mds/index.json', 'judged/pictures/1.png', 'insurance/y.tar')
    make(tmp_path, *names)
    (tmp_path / 'mds/claim.json').write_bytes(ours)
    (tmp_path / 'judged/claim.json').write_text('{"program": "evaluate.py"}')
    (tmp_path / 'insurance/claim.json').write_text('{"program": "of a lawyer"}')
    made = 'made by a command of this program'
    for source in (str(tmp_path), f'{tmp_path}/*'):
        found = find_files([source], [f'{tmp_path}/out'])
        assert names_of(found, tmp_path) == ['insurance/y.tar', 'x.tar']
        assert reasons_of(found, tmp_path) == {'mds': f'{made}: convert.py', 'judged': f'{made}: evaluate.py',
                                               'insurance/claim.json': 'no image'}
    with local_s3(monkeypatch) as store:
        for name in names:
            store.put(f'tars/{name}', b'1')
        store.put('tars/mds/claim.json', ours)
        store.put('tars/insurance/claim.json', b'{')
        found = find_files(['s3://bucket/tars'])
        assert [file.name for file in found.files] == ['s3://bucket/tars/insurance/y.tar', 's3://bucket/tars/x.tar']
        assert {'source': 's3://bucket/tars/mds/', 'key': None, 'reason': f'{made}: convert.py'} in found.left_out
        assert not [line for line in found.left_out if 'shard' in line['source']]
