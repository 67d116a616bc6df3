"""What goes into convert.py comes out of Streaming's own reader, or is named; nothing unfinished looks finished."""
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from streaming import StreamingDataset

import convert
from benchmark import main
from inputs.verified_stream import own_shared_memory
from parts.output import open_output
from tests.forked_runs import run_program
from tests.local_s3 import local_s3
from tests.parts.commands import convert_program
from tests.runs import ROOT, TINY, files_of, wait_until
from tests.samples import encoded, end_of_first_sample, picture, sample_files, shaded, write_sample_tar, write_tar


def read_back(out: Path, **kwargs) -> list[tuple[bytes, str]]:
    with own_shared_memory():
        dataset = StreamingDataset(local=str(out), shuffle=False, batch_size=1, **kwargs)
    return [(dataset[i]['jpg'], dataset[i]['caption']) for i in range(len(dataset))]


def pairs(*shades: int, suffix: str = 'jpg') -> list[tuple[bytes, str]]:
    return [(sample_files('', shade, suffix)[f'.{suffix}'], f'caption {shade}') for shade in shades]


def skipped(out: Path) -> dict[str, str]:
    lines = map(json.loads, (out / 'skipped.jsonl').read_text().splitlines())
    return {line['key']: line['reason'].partition(':')[0] for line in lines}


def assert_one_line(capsys, *parts: str, program: str = 'benchmark.py'):
    *first_lines, error = capsys.readouterr().err.splitlines(keepends=True)
    assert all(line.startswith('converting ') for line in first_lines), first_lines  # as a run says that has begun
    assert error.count('\n') == 1 and error.startswith(f'{program}: error: ') and 'usage' not in error, error
    for part in parts:
        assert part in error


def assert_one_error_line(capsys, *parts: str):
    assert_one_line(capsys, *parts, program='convert.py')


def failing_status(*argv) -> int:
    with pytest.raises(SystemExit) as stop:
        convert.main([str(arg) for arg in argv])
    return stop.value.code


@pytest.fixture
def tars(tmp_path) -> Path:
    """Three tars of 3, 1 and 2 samples in all three formats."""
    write_tar(tmp_path / 'tars/00000.tar', {**sample_files('0', 0), **sample_files('1', 1), **sample_files('2', 2)})
    write_tar(tmp_path / 'tars/00001.tar', sample_files('3', 3, 'png'))
    write_tar(tmp_path / 'tars/00002.tar', {**sample_files('4', 4, 'webp'), **sample_files('5', 5, 'webp')})
    (tmp_path / 'tars/00000.parquet').write_bytes(b'img2dataset writes these too')
    return tmp_path / 'tars'


ALL_SAMPLES = pairs(0, 1, 2) + pairs(3, suffix='png') + pairs(4, 5, suffix='webp')


@pytest.mark.parametrize('size_limit, parts', [('64mb', 1), ('21kb', 2), ('1kb', 3)])  # the tars have 20, 10 and 10 KiB
def test_bytes_captions_and_order_survive_and_no_number_of_workers_changes_a_file(tars, tmp_path, size_limit, parts):
    made = []
    for num_workers in (1, 2, 8):
        out = tmp_path / f'a #odd? [name] {num_workers}'
        assert convert.main([str(tars), str(out), '--num_workers', str(num_workers), '--size_limit', size_limit]) == 0
        assert read_back(out) == ALL_SAMPLES
        made.append(files_of(out))
    assert made[0] == made[1] == made[2]
    assert len([name for name in made[0] if name.startswith('parts/')]) == parts
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*(f'a #odd? [name] {n}' for n in (1, 2, 8)),
                                                                       'tars'])


def test_one_tar_a_glob_and_several_sources_are_sources_too(tars, tmp_path):
    assert convert.main([str(tars / '00001.tar'), str(tmp_path / 'one')]) == 0
    assert read_back(tmp_path / 'one') == pairs(3, suffix='png')
    assert convert.main([str(tars / '0000[02]*'), str(tmp_path / 'glob')]) == 0
    assert read_back(tmp_path / 'glob') == pairs(0, 1, 2) + pairs(4, 5, suffix='webp')
    assert convert.main([str(tars / '00002.tar'), str(tars / '00001.tar'), str(tars), str(tmp_path / 'several')]) == 0
    assert read_back(tmp_path / 'several') == ALL_SAMPLES


@pytest.mark.parametrize('num_workers', [1, 2])
def test_a_folder_of_images_takes_its_captions_from_the_files_beside_them(tmp_path, num_workers):
    photos = tmp_path / 'photos'
    (photos / 'deep/er').mkdir(parents=True)
    (photos / 'a.v2.JPG').write_bytes(shaded(1))
    (photos / 'a.v2.txt').write_bytes(b'\xef\xbb\xbfcaption 1\r\n')  # as a Windows editor saves it
    (photos / 'deep/er/b.jpeg').write_bytes(shaded(2))
    (photos / 'deep/er/b.json').write_text('{"caption": "caption 2"}')
    (photos / 'lonely.webp').write_bytes(shaded(3, 'WEBP'))
    (photos / 'README.md').write_text('not an image')
    for name in ('pipe.jpg', 'pipe.tar'):
        os.mkfifo(photos / name)  # would block whoever opens it
    assert convert.main([str(photos), str(tmp_path / 'out'), '--num_workers', str(num_workers)]) == 0
    assert read_back(tmp_path / 'out') == pairs(1, 2)
    lines = map(json.loads, (tmp_path / 'out/skipped.jsonl').read_text().splitlines())
    assert {Path(line['source']).name: line['reason'].partition(':')[0] for line in lines} == {
        'lonely.webp': 'no caption', 'README.md': 'not an image, a caption or a tar', 'pipe.jpg': 'no file',
        'pipe.tar': 'no file'}


def test_hashes_are_written_and_find_a_flipped_byte(tars, tmp_path):
    convert.main([str(tars), str(tmp_path / 'out'), '--num_workers', '1'])
    assert read_back(tmp_path / 'cache', remote=str(tmp_path / 'out'), validate_hash='xxh64') == ALL_SAMPLES
    shard = tmp_path / 'out/000000/shard.00000.mds'
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match='Checksum failure'):
        read_back(tmp_path / 'cache2', remote=str(tmp_path / 'out'), validate_hash='xxh64')


def test_what_is_skipped_is_counted_by_reason_and_listed(tmp_path, capsys):
    good, image = sample_files('good', 0), shaded(1)
    write_tar(tmp_path / 'x.tar', {
        **good, 'noise.jpg': b'not an image', 'noise.txt': b'a', 'cut.jpg': image[:len(image) // 2], 'cut.txt': b'a',
        'nothing.jpg': b'', 'nothing.txt': b'a', 'blank.jpg': image, 'blank.txt': b' \n', 'bare.jpg': image,
        'latin.jpg': image, 'latin.txt': 'café'.encode('latin-1'), 'words.txt': b'no picture',
        'two.jpg': image, 'two.png': shaded(1, 'PNG'), 'two.txt': b'which?', 'null.jpg': image,
        'null.json': b'{"caption": null}', 'bomb.jpg': image, 'bomb.json': b'[' * 1_000_000,
        'surrogate.jpg': image, 'surrogate.json': b'{"caption": "\\ud800"}', 'novel.jpg': image,
        'novel.txt': b'a' * (5 << 20), 'json.jpg': shaded(7), 'json.json': '{"caption": "caption 7 ü"}'.encode()})
    assert convert.main([str(tmp_path / 'x.tar'), str(tmp_path / 'out')]) == 0
    assert read_back(tmp_path / 'out') == [*pairs(0), (shaded(7), 'caption 7 ü')]
    expected = {'noise': 'image does not decode', 'cut': 'image does not decode', 'nothing': 'image does not decode',
                'blank': 'empty caption', 'bare': 'no caption', 'latin': 'caption is not UTF-8', 'words': 'no image',
                'two': 'more than one image', 'null': 'no caption', 'bomb': 'no caption',
                'surrogate': 'caption is not UTF-8', 'novel': 'too large'}
    assert skipped(tmp_path / 'out') == expected
    printed = capsys.readouterr().out
    assert 'converted  2 samples' in printed
    for reason, number in Counter(expected.values()).items():
        assert f'{number} {reason}' in printed


def test_wild_captions_come_back_as_they_were(tmp_path):
    captions = ['漢字 🦜 ñ', 'x' * 1_000_000, 'nul \0 bell \a escape \x1b[31m', '  spaces stay  ', 'two\nlines']
    write_tar(tmp_path / 'x.tar', {name: data for i, caption in enumerate(captions)
                                   for name, data in ((f'{i}.jpg', shaded(i)), (f'{i}.txt', caption.encode()))})
    assert convert.main([str(tmp_path / 'x.tar'), str(tmp_path / 'out')]) == 0
    assert [caption for _, caption in read_back(tmp_path / 'out')] == captions


@pytest.mark.parametrize('end', ['inside a file', 'between two files', 'at a garbled header'])
def test_a_damaged_tar_leaves_a_dataset_of_the_rest_and_exit_status_1(tars, tmp_path, capsys, end):
    whole, first = (tars / '00000.tar').read_bytes(), end_of_first_sample(tars / '00000.tar')
    cut = {'inside a file': whole[:first + 1000], 'between two files': whole[:first],
           'at a garbled header': whole[:first] + b'?' * 512 + whole[first + 512:]}[end]
    (tars / '00000.tar').write_bytes(cut)
    (tars / '00003.tar').write_bytes(b'<html>404</html>' * 100)
    assert convert.main([str(tars), str(tmp_path / 'out')]) == 1
    assert read_back(tmp_path / 'out') == pairs(0) + ALL_SAMPLES[3:]
    beginning, *warnings = capsys.readouterr().err.splitlines()
    assert beginning == 'converting 4 files in 1 part'
    assert len(warnings) == 2 and '00000.tar' in warnings[0] and '00003.tar' in warnings[1]
    lines = map(json.loads, (tmp_path / 'out/skipped.jsonl').read_text().splitlines())
    sources = [line['source'] for line in lines if line['reason'].startswith(('cut short', 'image does not'))]
    assert sources[0] == str(tars / '00000.tar') and sources[-1] == str(tars / '00003.tar')


def test_hostile_members_write_nothing_and_end_nothing(tmp_path):
    def special(name: str, **attributes) -> tuple[tarfile.TarInfo, None]:
        member = tarfile.TarInfo(name)
        for attribute, value in attributes.items():
            setattr(member, attribute, value)
        return member, None

    outside = tmp_path / 'outside.jpg'
    write_tar(tmp_path / 'in/hostile.tar', [
        *sample_files(str(tmp_path / 'absolute'), 1).items(), *sample_files('../../parent', 2).items(),
        special('link.jpg', type=tarfile.SYMTYPE, linkname='/etc/passwd'), ('link.txt', b'a'),
        special('hard.jpg', type=tarfile.LNKTYPE, linkname=str(outside)), ('hard.txt', b'a'),
        special('null.jpg', type=tarfile.CHRTYPE, devmajor=1, devminor=5), ('null.txt', b'a'),
        special('pipe.jpg', type=tarfile.FIFOTYPE), special('folder.jpg', type=tarfile.DIRTYPE),
        *sample_files('twice', 3).items(), *sample_files('twice', 4).items(), ('._twice.jpg', b'AppleDouble'),
        special('huge.jpg', size=1 << 50)])
    before = sorted(tmp_path.rglob('*'))
    assert convert.main([str(tmp_path / 'in'), str(tmp_path / 'out')]) == 1
    assert read_back(tmp_path / 'out') == pairs(1, 2, 3, 4)
    assert skipped(tmp_path / 'out') == {'link': 'no image', 'hard': 'no image', 'null': 'no image',
                                         'pipe': 'no image', 'huge': 'too large', None: 'cut short or damaged'}
    assert [path for path in sorted(tmp_path.rglob('*')) if tmp_path / 'out' not in (path, *path.parents)] == before


def test_bad_arguments_are_one_line_and_status_2(tars, tmp_path, capsys):
    assert failing_status(tmp_path / 'missing', tmp_path / 'out') == 2
    assert_one_error_line(capsys, str(tmp_path / 'missing'), 'does not exist')
    assert failing_status(tars, tmp_path / 'out', '--num_workers', 0) == 2
    assert_one_error_line(capsys, '--num_workers', '0 is not a whole number above 0')
    assert failing_status(tars, 'nowhere://bucket/out') == 2
    assert_one_error_line(capsys, 'OUT nowhere://bucket/out')
    for size in ('1e400mb', 'infgb', '5', '4gb', 'mb'):
        assert failing_status(tars, tmp_path / 'out', '--size_limit', size) == 2
        assert_one_error_line(capsys, '--size_limit', size)
    assert failing_status(tars) == 2
    assert_one_error_line(capsys, 'OUT')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['tars']


def test_nothing_to_convert_is_one_line_and_leaves_out_to_the_next_run(tmp_path, capsys):
    (tmp_path / 'empty').mkdir()
    assert failing_status(tmp_path / 'empty', tmp_path / 'out') == 1
    assert_one_error_line(capsys, 'nothing to convert', str(tmp_path / 'empty'))
    write_tar(tmp_path / 'in/x.tar', {'a.jpg': b'noise', 'a.txt': b'a', 'b.jpg': shaded(1)})
    out = tmp_path / 'out'
    assert failing_status(tmp_path / 'in', out) == 1
    assert_one_error_line(capsys, 'nothing could be converted', '1 image does not decode', '1 no caption',
                          f'listed in {out}/skipped.jsonl')
    assert sorted(path.name for path in out.iterdir()) == ['claim.json', 'skipped.jsonl']
    assert len((out / 'skipped.jsonl').read_text().splitlines()) == 2
    write_tar(tmp_path / 'in/x.tar', {'b.jpg': shaded(1), 'b.txt': b'b'})  # put right
    assert convert.main([str(tmp_path / 'in'), str(out)]) == 0
    assert (out / 'index.json').exists() and not (out / 'skipped.jsonl').exists()


@pytest.mark.parametrize('out', ['.', 'gone/..', 'thesis/..', 'link', '{here}'])
def test_a_folder_of_somebodys_files_is_refused_and_stays_as_it_is(tmp_path, monkeypatch, capsys, out):
    write_tar(tmp_path / 'in/x.tar', {'a.jpg': b'noise', 'a.txt': b'a'})  # nothing of it can be converted
    home = tmp_path / 'home'
    for name in ('thesis/chapter.tex', '000000/shard.00000.mds', 'parts/000000.json', 'skipped.jsonl', 'notes.txt'):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    (home / 'link').symlink_to(home)
    before = {path: path.lstat().st_mtime_ns for path in home.rglob('*')}
    monkeypatch.chdir(home)
    assert failing_status(tmp_path / 'in', out.format(here=home)) == 2
    assert_one_error_line(capsys, 'already holds something')
    assert {path: path.lstat().st_mtime_ns for path in home.rglob('*')} == before


def test_files_that_come_into_out_meanwhile_stay_when_nothing_could_be_converted(tmp_path, monkeypatch, capsys):
    write_tar(tmp_path / 'in/x.tar', {'a.jpg': b'noise', 'a.txt': b'a'})
    out = tmp_path / 'out'
    convert_missing = convert.convert_missing

    def convert_while_somebody_writes(*args):
        convert_missing(*args)
        for name in ('notes.txt', 'parts/mine', '000000'):
            (out / name).write_text('mine')
    monkeypatch.setattr(convert, 'convert_missing', convert_while_somebody_writes)
    assert failing_status(tmp_path / 'in', out) == 1
    assert [(out / name).read_text() for name in ('notes.txt', 'parts/mine', '000000')] == ['mine'] * 3
    capsys.readouterr()
    assert failing_status(tmp_path / 'in', out) == 2
    assert_one_error_line(capsys, f'OUT {out} already holds something')
    assert [(out / name).read_text() for name in ('notes.txt', 'parts/mine', '000000')] == ['mine'] * 3


def test_a_run_on_an_out_that_another_works_in_is_one_line(tars, tmp_path, capsys):
    with open_output(str(tmp_path / 'out'), 'OUT').in_use():
        assert failing_status(tars, tmp_path / 'out') == 2
    assert_one_error_line(capsys, f'OUT {tmp_path}/out is in use by another run')


def test_a_damaged_list_of_damaged_files_is_named(tars, tmp_path, capsys):
    out = tmp_path / 'out'
    (out / 'parts').mkdir(parents=True)
    (out / 'claim.json').write_text('{"program": "convert.py"}')
    (out / 'damaged.json').write_text('[{')
    assert failing_status(tars, out) == 2
    assert_one_error_line(capsys, f'damaged.json of OUT {out} is damaged; give a new folder')


def test_what_was_damaged_is_converted_anew_and_the_rest_is_not(tars, tmp_path, capsys):
    out = tmp_path / 'out'
    whole = (tars / '00000.tar').read_bytes()
    (tars / '00000.tar').write_bytes(whole[:end_of_first_sample(tars / '00000.tar') + 1000])
    argv = [str(tars), str(out), '--size_limit', '1kb']
    assert convert.main(argv) == 1
    assert read_back(out) == pairs(0) + ALL_SAMPLES[3:]
    others = {path: path.stat().st_mtime_ns for path in [*out.glob('00000[12]/*'), *out.glob('parts/00000[12].json')]}
    assert len(others) == 4
    (tars / '00000.tar').write_bytes(whole)  # fetched again, and of another size
    assert convert.main(argv) == 0
    printed = capsys.readouterr()
    assert 'converting anew what was damaged: 1 part\n' in printed.out
    assert printed.err.endswith('converting 1 file in 1 of 3 parts\n')
    assert read_back(out) == ALL_SAMPLES
    assert {path: path.stat().st_mtime_ns for path in others} == others

    # and the same command once more does nothing; other flags are another dataset
    before = {path: path.stat().st_mtime_ns for path in out.rglob('*')}
    assert convert.main(argv) == 0
    assert capsys.readouterr().out.startswith(f'done already: OUT {out} holds {len(ALL_SAMPLES)} samples of')
    assert {path: path.stat().st_mtime_ns for path in out.rglob('*')} == before
    assert failing_status(*argv[:2]) == 2
    assert_one_error_line(capsys, f'OUT {out} already holds a dataset, which was made with --size_limit 1024, not with')
    (tars / '00001.tar').unlink()
    assert failing_status(*argv) == 2
    assert_one_error_line(capsys, 'which was made from 3 files of', 'and SOURCE has 2 files of', 'changed since')


def test_a_damaged_tar_that_is_mended_before_the_run_has_ended_is_converted_anew(tars, tmp_path, monkeypatch, capsys):
    out = tmp_path / 'out'
    whole = (tars / '00000.tar').read_bytes()
    (tars / '00000.tar').write_bytes(whole[:5000])
    argv = [str(tars), str(out), '--size_limit', '1kb']

    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(convert, 'merge_parts', interrupted)
    assert failing_status(*argv) == 130
    monkeypatch.undo()
    (tars / '00000.tar').write_bytes(whole)
    assert convert.main(argv) == 0
    assert read_back(out) == ALL_SAMPLES


@pytest.mark.long
def test_a_full_disk_is_one_line_and_the_next_run_goes_on(server, tmp_path, capsys):
    pictures = {f'{index}.{suffix}': content for index in range(30) for suffix, content in
                (('png', encoded(picture(index, 256, 256), 'PNG')), ('txt', b'a'))}
    write_tar(tmp_path / 'in/x.tar', pictures)
    disk = tmp_path / 'disk'
    disk.mkdir()
    code, _, error = run_program(server, tmp_path / 'run', convert_program,
                                 [tmp_path / 'in', disk / 'out', '--size_limit', '256kb'], (1, str(disk)))
    beginning, error = error.split('\n', 1)
    assert beginning == 'converting 1 file in 1 part'
    assert (code, error.count('\n')) == (1, 1), error
    assert f'OUT {disk}/out cannot be written' in error and 'No space left on device' in error
    assert 'the same command, started again, goes on' in error
    assert not list((tmp_path / 'run/disk').rglob('index.json'))


@pytest.mark.long
@pytest.mark.parametrize('number, status, line', [
    (signal.SIGINT, 130, 'interrupted'), (signal.SIGTERM, 143, 'ended by SIGTERM')])
def test_a_signal_ends_a_run_in_one_line_and_the_next_run_goes_on(tmp_path, monkeypatch, capsys, number, status, line):
    out = tmp_path / 'out'
    with local_s3(monkeypatch) as store:
        for index in range(9):
            store.put(f'tars/{index}.tar', write_tar(tmp_path / 'x.tar', sample_files('x', index)).read_bytes())
        argv = ['s3://bucket/tars', str(out), '--size_limit', '1kb', '--num_workers', '2']
        store.delay = 0.3
        program = ('import signal, runpy, sys; signal.signal(signal.SIGINT, signal.default_int_handler); '
                   'sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name="__main__")')
        command = subprocess.Popen([sys.executable, '-c', program, 'convert.py', *argv], cwd=ROOT, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_until((out / 'parts/000001.json').exists)
        command.send_signal(number)
        _, error = command.communicate(timeout=300)
        store.delay = 0
        beginning, error = error.split('\n', 1)
        assert beginning == 'converting 9 files in 9 parts'
        assert command.returncode == status and error.count('\n') == 1, error
        assert error.startswith(f'convert.py: error: {line}') and str(out) in error
        with pytest.raises(SystemExit):
            main(['--remote', str(out), *TINY])
        assert_one_line(capsys, f'--remote {out} is not finished', 'start convert.py again')
        assert convert.main(argv) == 0
        assert read_back(out) == pairs(*range(9))


def test_an_out_of_other_files_or_another_size_limit_is_not_gone_on_with(tars, tmp_path, capsys, monkeypatch):
    out = tmp_path / 'out'

    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(convert, 'merge_parts', interrupted)
    assert failing_status(tars, out) == 130
    monkeypatch.undo()
    capsys.readouterr()
    assert failing_status(tars, out, '--size_limit', '1mb') == 2
    assert_one_error_line(capsys, f'OUT {out} was begun with --size_limit 67108864, not with --size_limit 1048576')
    with open(tars / '00001.tar', 'ab') as tar:
        tar.write(bytes(512))
    assert failing_status(tars, out) == 2
    assert_one_error_line(capsys, 'was begun from 3 files of 40,960 bytes', 'and SOURCE has 3 files of 41,472')
    (tars / '00001.tar').unlink()
    assert failing_status(tars, out) == 2
    assert_one_error_line(capsys, 'and SOURCE has 2 files of 30,720 bytes')


def test_a_remote_gets_its_index_last_and_is_refused_once_it_has_one(tars, tmp_path, monkeypatch, capsys):
    with local_s3(monkeypatch) as store:
        (tars / '00003.tar').write_bytes(b'no tar')
        assert convert.main([str(tars), 's3://bucket/mds/', '--num_workers', '2', '--size_limit', '1kb']) == 1
        assert '00003.tar' in capsys.readouterr().err
        assert store.order[-1] == 'mds/index.json' and 'mds/skipped.jsonl' in store.objects
        assert read_back(tmp_path / 'cache', remote='s3://bucket/mds', validate_hash='xxh64') == ALL_SAMPLES
        assert failing_status(tars, 's3://bucket/mds') == 2
        assert_one_error_line(capsys, 'OUT s3://bucket/mds already holds', 'made with --size_limit 1024')
        assert failing_status(tars, 's3://no-such-bucket/mds') == 2
        assert_one_error_line(capsys, 'OUT s3://no-such-bucket/mds', 'no such bucket')
        store.remove('mds/index.json')
        with pytest.raises(SystemExit):
            main(['--remote', 's3://bucket/mds', *TINY])
        assert_one_line(capsys, '--remote s3://bucket/mds is not finished')


def test_tars_of_a_store_are_read_over_connections_that_break(tmp_path, monkeypatch, capsys):
    photos = {f'{i}.jpg': encoded(picture(i, 512, 512), quality=100) for i in range(40)}
    files = {name: data for i in range(40) for name, data in ((f'{i}.jpg', photos[f'{i}.jpg']), (f'{i}.txt', b'a'))}
    with local_s3(monkeypatch) as store:
        for name, members in (('tars/0.tar', files), ('tars/deep/1.tar', sample_files('x', 1)), ('tars.tar', {}),
                              ('tars/readme.txt', {})):
            store.put(name, write_tar(tmp_path / 'x.tar', members).read_bytes())
        store.put('tars/2.tar', store.objects['tars/0.tar'][:100_000])
        assert len(store.objects['tars/0.tar']) > 3 << 20
        store.cuts = [300_000, 400_000, 1000, 10]
        assert convert.main(['s3://bucket/tars/', str(tmp_path / 'out'), '--num_workers', '1']) == 1
        assert not store.cuts and store.counts['list'] == 1
        expected = [(data, 'a') for data in photos.values()]
        assert read_back(tmp_path / 'out')[:40] == expected and read_back(tmp_path / 'out')[-1:] == pairs(1)
        assert 's3://bucket/tars/2.tar is cut short' in capsys.readouterr().err
        assert convert.main(['s3://bucket/tars/*/1.tar', str(tmp_path / 'glob')]) == 0
        assert read_back(tmp_path / 'glob') == pairs(1)
        for source, words in (('s3://bucket/nothing', 'does not exist'), ('s3://nobody/tars', 'no such bucket'),
                              ('oci://bucket/tars', 'S3-compatible')):
            assert failing_status(source, tmp_path / 'other') == 2
            assert_one_error_line(capsys, f'SOURCE {source}', words)


def test_one_tar_of_a_store_that_is_gone_is_damaged_and_the_others_are_converted(tmp_path, monkeypatch, capsys):
    with local_s3(monkeypatch) as store:
        for number in range(3):
            store.put(f'tars/{number}.tar', write_tar(tmp_path / 'x.tar', sample_files('x', number)).read_bytes())

        def page_and_loss(query, page=store.page):
            found = page(query)
            store.remove('tars/1.tar')
            return found
        monkeypatch.setattr(store, 'page', page_and_loss)
        argv = ['s3://bucket/tars', str(tmp_path / 'out'), '--num_workers', '1', '--size_limit', '1kb']
        assert convert.main(argv) == 1
        assert 's3://bucket/tars/1.tar is cut short or damaged' in capsys.readouterr().err
        assert read_back(tmp_path / 'out') == pairs(0, 2)


def test_shards_go_to_s3_and_are_trained_on_from_there(s3, samples, tmp_path, results):
    tar = write_sample_tar(tmp_path / '00000.tar', samples)
    assert convert.main([tar, 's3://bucket/photos', '--num_workers', '1']) == 0
    record = main(['--remote', 's3://bucket/photos', *TINY, '--local', str(tmp_path / 'cache'), '--results',
                   str(results)])
    assert record['dataset'] == 'streaming' and record['measured_batches'] == 3
    assert list((tmp_path / 'cache').rglob('*.mds'))
