"""Whatever a tar holds, its whole samples are read, its damage is named, and reading it ends."""
import random
import tarfile
from pathlib import Path

import pytest

from parts.names import File
from parts.tars import make_sample, read_samples
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
