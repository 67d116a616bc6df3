"""All whole samples in a tar are read and its damage is reported, whatever it contains."""
import random
import tarfile
from pathlib import Path

import pytest

import convert
from sdbench.datasets.output import DAMAGED
from sdbench.datasets.readers import Sample, read_samples
from sdbench.datasets.sources import File
from sdbench.errors import DataError
from tests.samples import read_back, sample_files, write_files, write_parquet, write_tar


def read_file(path: Path | str) -> list[Sample]:
    return list(read_samples(File(str(path), Path(path).stat().st_size)))


def files_of(*numbers: int) -> dict[str, bytes]:
    """Return the files of samples with these numbers as keys."""
    return {name: data for number in numbers for name, data in sample_files(str(number), number).items()}


@pytest.mark.parametrize('suffixes', [('.jpg', '.txt'), ('.jpg', '.json', '.txt')])
def test_a_tar_cut_at_any_block_keeps_its_whole_samples_and_is_reported(tmp_path, suffixes):
    files = {f'{i}{suffix}': sample_files(str(i), i)[f'{i}{suffix}'] for i in range(3) for suffix in suffixes}
    whole = write_tar(tmp_path / 'whole.tar', files).read_bytes()
    with tarfile.open(tmp_path / 'whole.tar') as tar:
        members = tar.getmembers()
    last = members[len(suffixes) - 1::len(suffixes)]
    ends = [member.offset_data + member.size for member in last]  # of each sample's last byte
    end_mark = members[-1].offset_data + 512
    for length in [*range(1, end_mark + 1023, 256), *ends, *(end - 1 for end in ends), end_mark + 1023]:
        (tmp_path / 'cut.tar').write_bytes(whole[:length])
        *samples, damage = read_file(tmp_path / 'cut.tar')
        complete = [sample.key for sample in samples if not sample.reasons]
        assert complete == [str(i) for i, end in enumerate(ends) if end <= length], length
        assert damage.key is None, length
        assert damage.reasons[0].startswith(DAMAGED), length
    (tmp_path / 'cut.tar').write_bytes(whole[:end_mark + 1024])
    assert len(read_file(tmp_path / 'cut.tar')) == 3


def test_files_are_paired_over_the_whole_tar_whatever_their_order():
    files = files_of(*range(50))
    names = random.Random(1).sample(list(files), len(files))
    write_tar('x.tar', {name: files[name] for name in names})
    samples = read_file('x.tar')
    assert [sample.key for sample in samples] == list(dict.fromkeys(name.rpartition('.')[0] for name in names))
    for sample in samples:
        assert sample.image == files[f'{sample.key}.jpg']
        assert sample.captions == {'caption': [files[f'{sample.key}.txt'].decode()]}


@pytest.mark.parametrize('names, expected', [
    (['IMG_2020.01.02.jpg', 'IMG_2020.01.02.txt', 'IMG_2020.01.03.JPG', 'IMG_2020.01.03.txt'],
     {'IMG_2020.01.02': [], 'IMG_2020.01.03': []}),
    (['a.jpg', 'a.seg.png', 'a.txt', 'b.jpg', 'b.caption'], {'a': [], 'a.seg': ['no caption'], 'b': []}),
    (['./a.jpg', 'a.txt'], {'a': []}),
    (['A.JPG', 'a.jpg', 'a.TXT'], {'A': ['no caption'], 'a': []}),
    (['a.jpg', 'a.txt', 'b.jpg', './a.jpg', 'b.txt'], {'a': ['no image: the tar has several files called a.jpg'],
                                                       'b': []})])
def test_files_are_paired_by_their_name_before_the_last_dot_and_a_repeated_name_is_unusable(names, expected):
    write_tar('x.tar', [(name, name.encode()) for name in names])
    assert {sample.key: sample.reasons for sample in read_file('x.tar')} == expected


def test_a_failing_disk_or_store_ends_the_run_and_does_not_count_as_damage(tmp_path, s3):
    (tmp_path / 'faulty.tar').symlink_to('/proc/self/mem')  # whose first bytes cannot be read: EIO
    with pytest.raises(DataError, match=r'faulty.tar cannot be read \(OSError: \[Errno 5\] Input/output error'):
        list(read_samples(File(f'{tmp_path}/faulty.tar', 1)))
    with pytest.raises(DataError, match='gone.tar cannot be read .*No such file'):
        list(read_samples(File(f'{tmp_path}/gone.tar', 1)))
    content = write_parquet('x.parquet', {'image': [b'1'], 'text': ['a']}).read_bytes()
    s3.put('x.parquet', content)
    file = File('s3://bucket/x.parquet', len(content))
    assert [(sample.image, sample.captions) for sample in read_samples(file)] == [(b'1', {'caption': ['a']})]
    s3.refusals = [(403, 'AccessDenied')] * 100
    with pytest.raises(DataError, match='x.parquet cannot be read or written .403 AccessDenied'):
        list(read_samples(file))


def test_all_tars_in_a_file_are_read_and_anything_else_after_a_tar_is_damage():
    first, second, third = (write_tar('x.tar', files_of(*numbers)).read_bytes() for numbers in ([0, 1], [2], [3, 4]))
    fill = bytes((1 << 20) - 10240)  # of the last record
    hole = bytes(3 << 20)  # of an interrupted download
    for tail, keys in ((second + third, ['2', '3', '4']), (fill, []), (b'something else' * 100, [None]),
                       (bytes(100_000) + b'x', [None]), (hole, [None])):
        write_files('.', {'row.tar': first + tail})
        samples = read_file('row.tar')
        assert [sample.key for sample in samples] == ['0', '1', *keys]
        assert [sample.key for sample in samples if sample.reasons] == [key for key in keys if key is None]


def test_a_tar_with_impossible_sizes_or_names_is_reported_in_one_line_and_a_good_one_is_converted(tmp_path, capfd):
    write_tar('in/good.tar', sample_files('good', 0))
    for name, size in (('x.jpg', -512), ('x.jpg', 1 << 50), ('\udcff\n' + 'x' * 5000, 1)):
        member = tarfile.TarInfo(name)
        member.size = size
        header = member.tobuf(tarfile.GNU_FORMAT, errors='surrogateescape')
        write_files('in', {f'two\nlines {len(name)} {size}.tar': header + bytes(512)})
    assert convert.main(['in', 'out']) == 1
    _, *warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 3
    for line in warnings:
        assert f'{tmp_path}/in/two lines ' in line
        assert ' is cut short or damaged: ' in line
    assert read_back('out') == [(sample_files('', 0)['.jpg'], 'caption 0')]


@pytest.mark.parametrize('error', [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_an_image_that_does_not_fit_into_memory_does_not_count_as_bad(monkeypatch, error):
    def fail(*args):
        raise error
    monkeypatch.setattr('torchvision.io.decode_jpeg', fail)
    with pytest.raises(MemoryError):
        Sample('x', sample_files('x', 1)['x.jpg'], {'caption': ['a']}).is_usable()
