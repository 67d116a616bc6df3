"""Whatever a tar holds, its whole samples are read, its damage is named, and reading it ends."""
import random
import resource
import tarfile
from datetime import timedelta
from pathlib import Path

import pytest

from inputs.errors import DataError
from parts.names import File
from parts.tars import MAX_OPEN, Damage, group_by_key, make_sample, read_samples
from tests.local_s3 import local_s3
from tests.privileges import without_privileges
from tests.samples import end_of_first_sample, sample_files, write_tar


def read_file(path: Path, captions: tuple[str, ...] = ()) -> list[tuple]:
    return list(read_samples(File(str(path), path.stat().st_size, captions)))


def test_a_tar_cut_at_any_block_keeps_its_whole_samples_and_is_named(tmp_path):
    files = {name: data for i in range(3) for name, data in list(sample_files(str(i), i).items())[:2]}
    whole = write_tar(tmp_path / 'whole.tar', files).read_bytes()
    with tarfile.open(tmp_path / 'whole.tar') as tar:
        members = tar.getmembers()
    ends = [member.offset_data + member.size for member in members[1::2]]  # of each sample's last byte
    end_mark = members[-1].offset_data + 512
    for length in [*range(1, end_mark + 1023, 256), *ends, *(end - 1 for end in ends), end_mark + 1023]:
        (tmp_path / 'cut.tar').write_bytes(whole[:length])
        *samples, (key, error) = read_file(tmp_path / 'cut.tar')
        complete = [key for key, fields in samples if set(fields) == {'.jpg', '.txt'}]
        assert complete == [str(i) for i, end in enumerate(ends) if end <= length], length
        assert key is None and isinstance(error, Exception), length
    (tmp_path / 'cut.tar').write_bytes(whole[:end_mark + 1024])
    assert len(read_file(tmp_path / 'cut.tar')) == 3


@pytest.mark.parametrize('type', [tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, b'?'])
def test_a_negative_size_does_not_go_round_for_ever(tmp_path, type):
    member = tarfile.TarInfo('loop.jpg')
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (-512).to_bytes(12, 'big', signed=True)  # the next header is this one again
    header[156:157] = type
    header[148:156] = b'%06o\0 ' % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    write_tar(tmp_path / 'x.tar', sample_files('good', 0))
    first = (tmp_path / 'x.tar').read_bytes()[:end_of_first_sample(tmp_path / 'x.tar')]
    (tmp_path / 'x.tar').write_bytes(first + bytes(header) + bytes(1024))
    *samples, (key, _) = read_file(tmp_path / 'x.tar')
    assert key is None and samples[0][0] == 'good'


def test_random_bytes_in_a_tar_never_raise(tmp_path):
    draw = random.Random(17)
    whole = write_tar(tmp_path / 'x.tar', {**sample_files('0', 0), **sample_files('1', 1)}).read_bytes()
    for _ in range(500):
        garbled = bytearray(whole)
        for _ in range(draw.randint(1, 30)):
            garbled[draw.randrange(len(whole))] = draw.randrange(256)
        (tmp_path / 'x.tar').write_bytes(garbled)
        for _, fields in read_file(tmp_path / 'x.tar'):
            try:
                make_sample(fields)
            except ValueError as reason:
                assert str(reason)


def keys_of(path: Path) -> dict:
    return {key: set(fields) if isinstance(fields, dict) else type(fields).__name__ for key, fields in read_file(path)}


def test_files_are_paired_by_what_stands_before_the_last_dot(tmp_path):
    write_tar(tmp_path / 'x.tar', dict.fromkeys([
        'IMG_2020.01.02.jpg', 'IMG_2020.01.02.txt', 'IMG_2020.01.03.JPG', 'IMG_2020.01.03.Txt',
        'a.jpg', 'a.seg.png', 'a.txt', 'b.cls', 'b.jpg', 'b.json'], b'1'))
    assert keys_of(tmp_path / 'x.tar') == {
        'IMG_2020.01.02': {'.jpg', '.txt'}, 'IMG_2020.01.03': {'.jpg', '.txt'}, 'a': {'.jpg', '.txt'},
        'a.seg': {'.png'}, 'b': {'.cls', '.jpg', '.json'}}


def test_names_that_begin_alike_do_not_gather_in_memory():
    taken = []

    def files():
        for depth in range(20):
            taken.append(depth)
            yield 'a' + '.b' * depth, '.jpg', b'1'
    samples = group_by_key(files())
    assert next(samples) == ('a', {'.jpg': b'1'}) and len(taken) == MAX_OPEN + 1
    assert len(list(samples)) == 19


def reasons_of(path: Path) -> dict[str, str]:
    reasons = {}
    for key, fields in read_file(path):
        try:
            make_sample(fields)
        except ValueError as reason:
            reasons[key] = str(reason)
    return reasons


def test_what_is_no_sample_in_a_tar_has_a_reason(tmp_path):
    def link(name: str) -> tuple:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, '/etc/passwd'
        return member, None
    image = sample_files('x', 1)['x.jpg']
    write_tar(tmp_path / 'x.tar', [
        ('inner.tar', b'1'), ('a.heic', b'1'), ('a.txt', b'a'), ('README', b'1'), ('b.mp4', b'1'), ('._c.jpg', b'1'),
        ('.Trash/d.jpg', b'1'), ('./good.jpg', image), ('./good.txt', b'a'), ('l.jpg', image), link('l.txt')])
    assert reasons_of(tmp_path / 'x.tar') == {
        'inner': 'no image: .tar is packed; unpack it',
        'a': 'no image: .heic needs a package (pip install pillow-heif)',
        'README': 'no image: a file without a suffix is not read', 'b': 'no image: .mp4 is not read',
        'l': 'no caption: a link in a tar is not followed',
        '._c.jpg': 'hidden: 2 files of this tar, the first is ._c.jpg'}
    write_tar(tmp_path / 'empty.tar', {})
    assert reasons_of(tmp_path / 'empty.tar') == {'': 'no files in this tar'}


def test_an_image_is_read_with_its_captions(tmp_path):
    for name in ('a.b.JPG', 'a.b.TXT', 'a.b.json'):
        (tmp_path / name).write_bytes(name.encode())
    assert read_file(tmp_path / 'a.b.JPG', ('.TXT', '.json')) == [
        ('a.b', {'.jpg': b'a.b.JPG', '.txt': b'a.b.TXT', '.json': b'a.b.json'})]


def test_an_error_of_the_moment_is_no_damage_and_ends_the_run(tmp_path):
    path = write_tar(tmp_path / 'x.tar', sample_files('x', 1))
    file = File(str(path), 1)
    (tmp_path / 'faulty.tar').symlink_to('/proc/self/mem')  # whose first bytes cannot be read: EIO
    with pytest.raises(DataError, match=r'faulty.tar cannot be read \(OSError: \[Errno 5\] Input/output error'):
        list(read_samples(File(f'{tmp_path}/faulty.tar', 1)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(DataError, match='x.tar cannot be read .*Too many open files'):
            list(read_samples(file))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    path.chmod(0)
    with pytest.raises(DataError, match='x.tar cannot be read .*Permission denied'):
        without_privileges(lambda: list(read_samples(file)))


def test_a_file_that_was_removed_is_damage_and_a_disk_that_is_away_is_not(tmp_path):
    folder = tmp_path / 'disk'
    (folder / 'others').mkdir(parents=True)
    [(key, damage)] = read_samples(File(f'{folder}/x.tar', 1))
    assert key is None and isinstance(damage, Damage) and 'No such file' in str(damage)
    (folder / 'others').rmdir()
    with pytest.raises(DataError, match='x.tar cannot be read'):
        list(read_samples(File(f'{folder}/x.tar', 1)))


def test_a_tar_of_a_store_is_read_and_what_is_wrong_with_it_alone_is_damage(tmp_path, monkeypatch):
    monkeypatch.setattr('inputs.stores.RETRY_TIMEOUT', timedelta(milliseconds=50))
    content = write_tar(tmp_path / 'x.tar', sample_files('x', 1)).read_bytes()
    with local_s3(monkeypatch) as store:
        store.put('x.tar', content)
        assert [key for key, _ in read_samples(File('s3://bucket/x.tar', len(content)))] == ['x']
        for name, size, words in (('gone.tar', 9, 'is not there'), ('x.tar', 9, 'was replaced')):
            [(key, damage)] = read_samples(File(f's3://bucket/{name}', size))
            assert key is None and isinstance(damage, Damage) and words in str(damage)
        store.refusals = [(403, 'AccessDenied')]
        with pytest.raises(DataError, match='s3://bucket/x.tar: access is denied'):
            list(read_samples(File('s3://bucket/x.tar', len(content))))
