"""What goes into convert.py comes out of Streaming's own reader, or is named; nothing unfinished looks finished."""
import http.server
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
from collections import Counter
from pathlib import Path
from urllib.parse import urlparse

import pytest
from streaming import StreamingDataset

import convert
from benchmark import main
from inputs.streaming_patches import clean_shared_memory, starting_alone
from tests.runs import ROOT, TINY, wait_until
from tests.samples import end_of_first_sample, sample_files, shaded, write_sample_tar, write_tar


def read_back(out: Path, **kwargs) -> list[tuple[bytes, str]]:
    clean_shared_memory()
    with starting_alone():
        dataset = StreamingDataset(local=str(out), shuffle=False, batch_size=1, **kwargs)
    return [(dataset[i]['jpg'], dataset[i]['caption']) for i in range(len(dataset))]


def pairs(*shades: int, suffix: str = 'jpg') -> list[tuple[bytes, str]]:
    return [(sample_files('', shade, suffix)[f'.{suffix}'], f'caption {shade}') for shade in shades]


def skipped(out: Path) -> dict[str, str]:
    lines = map(json.loads, (out / 'skipped.jsonl').read_text().splitlines())
    return {line['key']: line['reason'].partition(':')[0] for line in lines}


def assert_one_error_line(capsys, *parts: str):
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and error.startswith('convert.py: error: ') and 'usage' not in error
    for part in parts:
        assert part in error


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


@pytest.mark.parametrize('num_workers', [1, 2, 8])
def test_bytes_captions_and_order_survive_whatever_the_number_of_workers(tars, tmp_path, num_workers):
    out = tmp_path / 'a #odd? [name]'
    assert convert.main([str(tars), str(out), '--num_workers', str(num_workers)]) == 0
    assert read_back(out) == ALL_SAMPLES
    assert len([path for path in out.iterdir() if path.is_dir()]) == min(num_workers, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, 'tars']


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
    assert skipped(tmp_path / 'out') == {'lonely': 'no caption'}


def test_hashes_are_written_and_find_a_flipped_byte(tars, tmp_path):
    convert.main([str(tars), str(tmp_path / 'out'), '--num_workers', '1'])
    assert read_back(tmp_path / 'cache', remote=str(tmp_path / 'out'), validate_hash='xxh64') == ALL_SAMPLES
    shard = tmp_path / 'out/00000/shard.00000.mds'
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
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and '00000.tar' in warnings[0] and '00003.tar' in warnings[1]
    sources = [json.loads(line)['source'] for line in (tmp_path / 'out/skipped.jsonl').read_text().splitlines()]
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
                                         'huge': 'too large', None: 'cut short or damaged'}
    assert [path for path in sorted(tmp_path.rglob('*')) if tmp_path / 'out' not in (path, *path.parents)] == before


def test_bad_arguments_are_one_line_and_status_2(tars, tmp_path, capsys):
    assert failing_status(tmp_path / 'missing', tmp_path / 'out') == 2
    assert_one_error_line(capsys, str(tmp_path / 'missing'), 'does not exist')
    assert failing_status(tars, tars) == 2
    assert_one_error_line(capsys, f'OUT {tars}', 'already holds something')
    assert failing_status(tars, tars / '00000.tar') == 2
    assert_one_error_line(capsys, 'already holds something')
    assert failing_status(tars, tmp_path / 'out', '--num_workers', 0) == 2
    assert_one_error_line(capsys, '--num_workers 0')
    assert failing_status(tars, 'nowhere://bucket/out') == 2
    assert_one_error_line(capsys, 'OUT nowhere://bucket/out')
    assert failing_status(tars) == 2
    assert_one_error_line(capsys, 'OUT')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['tars']


def test_an_out_that_cannot_be_written_is_one_line_and_status_1(tars, capsys):
    assert failing_status(tars, tars / '00000.tar/below/a/file') == 1
    assert_one_error_line(capsys, 'OUT', '00000.tar/below/a/file', 'cannot be written')


def test_nothing_to_convert_is_one_line_and_leaves_nothing(tmp_path, capsys):
    (tmp_path / 'empty').mkdir()
    assert failing_status(tmp_path / 'empty', tmp_path / 'out') == 1
    assert_one_error_line(capsys, 'nothing to convert', str(tmp_path / 'empty'))
    write_tar(tmp_path / 'in/x.tar', {'a.jpg': b'noise', 'a.txt': b'a', 'b.jpg': shaded(1)})
    assert failing_status(tmp_path / 'in', tmp_path / 'out') == 1
    assert_one_error_line(capsys, 'nothing could be converted', '1 image does not decode', '1 no caption')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['empty', 'in']


def start(patch: str, decode: str, *argv) -> subprocess.Popen:
    """convert.main in a process of its own, with lines run before it and a body for decode_image."""
    code = (f'import os, signal, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport convert, inputs.tars\n'
            f'def decode(data, image_size=None):\n{textwrap.indent(decode, "    ")}\n'
            f'inputs.tars.decode_image = decode\n{patch}\n'
            f'sys.exit(convert.main({[str(arg) for arg in argv]!r}))')
    return subprocess.Popen([sys.executable, '-c', code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            start_new_session=True)


@pytest.mark.parametrize('moment', ['decoding', 'merging', 'merged'])
def test_a_killed_run_leaves_nothing_that_looks_whole_and_the_next_one_succeeds(tars, tmp_path, capsys, moment):
    kill, out, marker = 'os.kill(os.getpid(), signal.SIGKILL)', tmp_path / 'out', tmp_path / 'decoding'
    patch = {'decoding': '', 'merging': f'convert.merge_index = lambda *args, **kwargs: {kill}',
             'merged': f'convert.os.rename = lambda *args: {kill}'}[moment]
    decode = f'open({str(marker)!r}, "w").close(); time.sleep(60)' if moment == 'decoding' else 'pass'
    run = start(patch, decode, tars, out, '--num_workers', 2)
    if moment == 'decoding':
        wait_until(marker.exists)
        run.kill()
    run.communicate(timeout=60)  # returns only when the workers, who hold the same pipes, have ended too
    assert run.returncode == -signal.SIGKILL
    assert not out.exists() and len(list(tmp_path.glob('out.partial-*'))) == 1
    assert convert.main([str(tars), str(out)]) == 0
    assert 'left by a run that did not finish' in capsys.readouterr().out
    assert read_back(out) == ALL_SAMPLES and not list(tmp_path.glob('out.partial-*'))


@pytest.mark.parametrize('decode, status, line', [
    ('os.kill(os.getpid(), signal.SIGKILL)', 1, 'a worker was killed'),
    ('raise OSError(28, "No space left on device")', 1, 'No space left on device'),
    ('os.kill(os.getppid(), 0); open(os.environ["MARKER"], "w").close(); time.sleep(60)', 130, 'interrupted'),
])
def test_a_killed_worker_a_full_disk_and_ctrl_c_are_one_line_each(tars, tmp_path, monkeypatch, decode, status, line):
    monkeypatch.setenv('MARKER', str(tmp_path / 'marker'))
    run = start('', decode, tars, tmp_path / 'out', '--num_workers', 2)
    if status == 130:
        wait_until((tmp_path / 'marker').exists)
        os.killpg(run.pid, signal.SIGINT)  # the terminal sends it to every process
    _, error = run.communicate(timeout=60)
    assert (run.returncode, error.count('\n')) == (status, 1), error
    assert error.startswith('convert.py: error: ') and line in error
    assert not list(tmp_path.glob('out*'))


class S3(http.server.BaseHTTPRequestHandler):
    """As much of an object store as Streaming uses; keeps the order of the uploads."""
    objects: dict[str, bytes] = {}

    def answer(self, status: int, body: bytes = b''):
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        self.send_header('ETag', '"0"')
        self.send_header('Last-Modified', 'Thu, 01 Jan 1970 00:00:00 GMT')
        self.end_headers()
        self.wfile.write(b'' if self.command == 'HEAD' else body)

    def do_GET(self):
        path = urlparse(self.path).path
        found = path == '/bucket' or path in self.objects
        self.answer(200 if found else 404, self.objects.get(path, b''))

    do_HEAD = do_GET

    def do_PUT(self):
        self.objects.pop(self.path, None)
        self.objects[self.path] = self.rfile.read(int(self.headers['Content-Length']))
        self.answer(200)

    def log_message(self, *args):
        pass


def test_a_remote_gets_its_index_last_and_is_refused_once_it_has_one(tars, tmp_path, monkeypatch, capsys):
    S3.objects = {'/bucket/mds/00000/index.json': b'left by a killed run', '/bucket/mds/00007/index.json': b'this too'}
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), S3)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = dict(S3_ENDPOINT_URL=f'http://127.0.0.1:{server.server_port}', AWS_ACCESS_KEY_ID='a',
                       AWS_SECRET_ACCESS_KEY='b', AWS_DEFAULT_REGION='us-east-1',
                       AWS_REQUEST_CHECKSUM_CALCULATION='when_required')
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tars / '00003.tar').write_bytes(b'no tar')
    code = 'import sys, convert; sys.exit(convert.main(sys.argv[1:]))'  # the fork server has the old environment
    run = subprocess.run([sys.executable, '-c', code, tars, 's3://bucket/mds/', '--num_workers', '2'], text=True,
                         capture_output=True, timeout=120, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert run.returncode == 1 and '00003.tar' in run.stderr, run.stderr
    assert list(S3.objects)[-1] == '/bucket/mds/index.json' and '/bucket/mds/skipped.jsonl' in S3.objects
    assert read_back(tmp_path / 'cache', remote='s3://bucket/mds', validate_hash='xxh64') == ALL_SAMPLES
    assert failing_status(tars, 's3://bucket/mds') == 2
    assert_one_error_line(capsys, 'OUT s3://bucket/mds', 'index.json')
    assert failing_status(tars, 's3://no-such-bucket/mds') == 2
    assert_one_error_line(capsys, 'OUT s3://no-such-bucket/mds', 'cannot be reached')
    server.shutdown()


def test_shards_go_to_s3_and_are_trained_on_from_there(s3, samples, tmp_path, results):
    tar = write_sample_tar(tmp_path / '00000.tar', samples)
    assert convert.main([tar, 's3://bucket/photos', '--num_workers', '1']) == 0
    record = main(['--remote', 's3://bucket/photos', *TINY, '--local', str(tmp_path / 'cache'), '--results',
                   str(results)])
    assert record['dataset'] == 'streaming' and record['measured_batches'] == 3
    assert list((tmp_path / 'cache').rglob('*.mds'))
