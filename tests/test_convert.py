"""Streaming's own reader returns every sample from SOURCE that is not reported, and unfinished work has no index."""
import os
import shlex
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

import convert
from benchmark import main
from sdbench.flags.commands import Convert
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.inputs.shards import read_index
from tests.forked_runs import run_program, script
from tests.runs import ROOT, TINY, files_of, one_error_line, times_of
from tests.samples import (
    encoded,
    files_of_samples,
    picture,
    read_back,
    sample_files,
    shaded,
    skipped_kinds,
    write_files,
    write_tar,
)


def pairs(*shades: int, suffix: str = 'jpg') -> list[tuple[bytes, str]]:
    return [(sample_files('', shade, suffix)[f'.{suffix}'], f'caption {shade}') for shade in shades]


@pytest.fixture
def tars(tmp_path) -> Path:
    """Three tars of 3, 1 and 2 samples in all three formats."""
    write_tar('tars/00000.tar', {**sample_files('0', 0), **sample_files('1', 1), **sample_files('2', 2)})
    write_tar('tars/00001.tar', sample_files('3', 3, 'png'))
    write_tar('tars/00002.tar', {**sample_files('4', 4, 'webp'), **sample_files('5', 5, 'webp')})
    write_files('tars', {'00000.parquet': 'img2dataset writes these too'})
    return tmp_path / 'tars'


ALL_SAMPLES = pairs(0, 1, 2) + pairs(3, suffix='png') + pairs(4, 5, suffix='webp')


@pytest.mark.parametrize('size_limit, parts', [('64mb', 1), ('21kb', 2), ('1kb', 3)])  # the tars have 20, 10 and 10 KiB
def test_bytes_captions_and_order_survive_with_any_number_of_workers(tars, tmp_path, size_limit, parts):
    made = []
    for num_workers in ('1', '8'):
        out = tmp_path / f'a #odd? [name] {num_workers}'
        assert convert.main([str(tars), str(out), '--num_workers', num_workers, '--size_limit', size_limit]) == 0
        assert read_back(out) == ALL_SAMPLES
        made.append(files_of(out))
    assert made[0] == made[1]
    assert sum(name.endswith('/index.json') for name in made[0]) == parts


def test_a_folder_of_images_takes_its_captions_from_the_files_beside_them():
    write_files('photos', {
        'a.v2.JPG': shaded(1), 'a.v2.TXT': b'\xef\xbb\xbfcaption 1\r\n',  # as a Windows editor saves it
        'deep/er/b.jpeg': shaded(2), 'deep/er/b.txt': '\n',  # empty, as some downloaders leave it
        'deep/er/b.json': '{"caption": "caption 2"}',
        'kohya.jpg': shaded(4), 'kohya.caption': 'caption 4\n'.encode('utf-16'),
        'IMG_5.JPG': shaded(5), 'IMG_5.txt': 'caption 5\n', 'lonely.webp': shaded(3, 'WEBP')})
    os.mkfifo('photos/pipe.jpg')  # opening it would block
    for _ in range(2):  # OUT lies in SOURCE, and is none of it
        assert convert.main(['photos', 'photos/mds']) == 0
    assert read_back('photos/mds') == pairs(5, 1, 2, 4)
    assert skipped_kinds('photos/mds') == [('lonely.webp', 'lonely', 'no caption'),
                                           ('pipe.jpg', None, 'not a regular file')]


def test_captions_are_cleaned_only_with_the_flag():
    write_tar('in/x.tar', {'a.jpg': shaded(1), 'a.txt': b'a &amp; b', 'b.jpg': shaded(2), 'b.txt': b'&nbsp;'})
    for flags, expected in (([], ['a &amp; b', '&nbsp;']), (['--clean_captions'], ['a & b'])):
        assert convert.main(['in', f'out{len(flags)}', *flags]) == 0
        assert [text for _, text in read_back(f'out{len(flags)}')] == expected
    assert skipped_kinds('out1') == [('x.tar', 'b', 'no caption')]


IMAGE = shaded(1)
UNUSABLE = [  # the kind of the reason, and the files of a sample
    ('image does not decode', {'jpg': b'not an image', 'txt': b'a'}),
    ('image does not decode', {'jpg': IMAGE[:len(IMAGE) // 2], 'txt': b'a'}),
    ('image does not decode', {'png': shaded(1, 'PNG')[:50], 'txt': b'a'}),
    ('image does not decode', {'jpg': b'', 'txt': b'a'}),
    ('image is narrower than 8 pixels', {'png': encoded(picture(0, 4000, 1), 'PNG'), 'txt': b'a line'}),
    ('no image', {'txt': b'no picture'}),
    ('more than one image', {'jpg': IMAGE, 'png': shaded(1, 'PNG'), 'txt': b'which?'}),
    ('no caption', {'jpg': IMAGE}),
    ('no caption', {'jpg': IMAGE, 'txt': b' \n'}),
    ('no caption', {'jpg': IMAGE, 'json': b'{"caption": null}'}),
    ('no caption', {'jpg': IMAGE, 'json': b'{"caption": "a'}),
    ('no caption', {'jpg': IMAGE, 'json': b'[' * 1_000_000}),
    ('caption is not UTF-8', {'jpg': IMAGE, 'txt': 'café'.encode('latin-1')}),
    ('caption is not UTF-8', {'jpg': IMAGE, 'json': b'{"caption": "\\ud800"}'}),
    ('caption has a NUL', {'jpg': IMAGE, 'txt': 'a'.encode('utf-16-le')})]


def test_skipped_samples_are_counted_by_reason_and_listed(capsys):
    link = tarfile.TarInfo('link.txt')
    link.type, link.linkname = tarfile.SYMTYPE, '/etc/passwd'
    files = {**sample_files('good', 0), './json.jpg': shaded(7), './json.json': '{"caption": "caption 7 ü"}'.encode(),
             'link.jpg': IMAGE, link: None, '._a.jpg': IMAGE, 'inner.tar': b'1', 'README': b'1'}
    kinds = {'link': 'no caption', '._a.jpg': 'hidden', '': 'no image', 'inner.tar': 'not an image or a caption',
             'README': 'not an image or a caption'}
    for number, (kind, unusable) in enumerate(UNUSABLE):
        kinds[str(number)] = kind
        files |= {f'{number}.{suffix}': content for suffix, content in unusable.items()}
    write_tar('in/x.tar', files)
    write_tar('in/empty.tar', {})
    assert convert.main(['in', 'out']) == 0
    assert read_back('out') == [*pairs(0), (shaded(7), 'caption 7 ü')]
    assert {key: kind for _, key, kind in skipped_kinds('out')} == kinds
    printed = capsys.readouterr().out
    assert ' 2 samples' in printed
    for kind, number in Counter(kinds.values()).items():
        assert f'{number} {kind}' in printed


def test_an_out_into_which_nothing_was_converted_accepts_other_flags(tmp_path, capsys):
    write_tar('in/x.tar', {'a.jpg': b'noise', 'a.txt': b'a', 'b.jpg': shaded(1)})
    line = one_error_line(['in', 'out'], capsys, convert.main)
    assert '1 image does not decode, 1 no caption' in line
    assert len(skipped_kinds('out')) == 2
    assert not (tmp_path / 'out/index.json').exists()
    write_tar('in/x.tar', sample_files('0', 0))
    assert convert.main(['in', 'out', '--size_limit', '1kb']) == 0
    assert read_back('out') == pairs(0)
    assert skipped_kinds('out') == []


def test_the_same_command_does_nothing_and_other_flags_are_refused(tars, tmp_path, capsys):
    assert convert.main(['tars', 'out']) == 0
    before = times_of(tmp_path)
    capsys.readouterr()
    assert convert.main(['tars', 'out']) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f'done already: OUT out holds {len(ALL_SAMPLES)} samples')
    _, program, *flags = shlex.split(printed.splitlines()[-1])  # the command for a machine without a GPU
    training = parse(Train, '', flags, program)
    assert (training.model_name, training.image_size, training.load_weights) == ('tiny', 64, None)
    for argv, words in ((['tars', 'out', '--size_limit', '1kb'], 'size_limit 67108864, and this command has 1024'),
                        (['.', 'out'], f"source ['{tars}'], and this command has ['{tmp_path}']")):
        assert f'OUT out was begun with {words}' in one_error_line(argv, capsys, convert.main)
    assert times_of(tmp_path) == before


def test_the_same_command_converts_new_and_repaired_files_and_removes_nothing(tars, tmp_path, capsys):
    out = tmp_path / 'out'
    argv = ['tars', 'out', '--size_limit', '1kb']  # a part for each tar
    whole = (tars / '00000.tar').read_bytes()
    (tars / '00000.tar').write_bytes(whole[:4600])  # within its second sample
    assert convert.main(argv) == 1
    assert read_back(out) == pairs(0) + ALL_SAMPLES[3:]
    before = times_of(out)
    capsys.readouterr()
    assert convert.main(argv) == 1  # it is still damaged: nothing is made again, and it is named
    printed = capsys.readouterr()
    assert printed.out.startswith('done already')
    assert '00000.tar is cut short or damaged' in printed.err

    (tars / '00000.tar').write_bytes(whole)  # fetched again
    write_tar(tars / '00003.tar', sample_files('6', 6))
    (tars / '00001.tar').unlink()
    assert convert.main(argv) == 0
    printed = capsys.readouterr()
    assert '2 files in 2 of 3 parts\n' in printed.err
    assert '2 folders in OUT from before SOURCE changed' in printed.out
    assert read_back(out) == pairs(0, 1, 2) + pairs(4, 5, suffix='webp') + pairs(6)
    parts = {path: time for path, time in before.items() if path.parent != out}
    assert {path: times_of(out)[path] for path in parts} == parts  # even the parts that are no longer used


def test_crops_and_enlargements_are_counted_over_all_parts_and_runs(capsys):
    sizes = [(512, 512), (768, 512), (769, 512), (512, 2000), (511, 511), (2000, 64)]
    argv = ['tars', 'out', '--size_limit', '1kb', '--num_workers', '2']
    for number, size in enumerate(sizes):
        write_tar(f'tars/{number}.tar', {'0.jpg': encoded(Image.new('RGB', size)), '0.txt': b'x'})
        if number == 2:  # convert only the first three
            assert convert.main(argv) == 0
            assert '1 of 3 images lose' in capsys.readouterr().out
    for _ in range(2):  # converts the others, and then nothing
        assert convert.main(argv) == 0
        printed = capsys.readouterr().out
        assert '3 of 6 images lose' in printed
        assert '2 are smaller than 512 pixels\n' in printed


def test_only_the_image_and_the_seed_decide_what_is_held_out(capsys):
    def write(number: int, images: list[bytes]) -> None:
        write_tar(f'tars/{number}.tar', files_of_samples([{'jpg': image, 'caption': 'x'} for image in images]))

    def sides(out: str, *flags: str) -> tuple[set[bytes], set[bytes]]:
        assert convert.main(['tars', out, '--held_out', '0.2', *flags]) == 0
        return tuple({image for image, _ in read_back(folder)} for folder in (out, f'{out}-held-out'))

    # The sides have no image in common, also if an image occurs several times.
    images = [encoded(picture(index, 16, 16)) for index in range(200)]
    for number in range(4):
        write(number, images[50 * number:50 * number + 50] + images[:1])
    kept, held_out = sides('one', '--num_workers', '1')
    assert kept | held_out == set(images)
    assert not kept & held_out
    assert 20 <= len(held_out) <= 60
    assert '--eval_remote one-held-out' in capsys.readouterr().out

    # Other parts make the same sides, and another seed other sides.
    assert sides('parts', '--size_limit', '50kb') == (kept, held_out)
    assert sides('seed', '--seed', '18') != (kept, held_out)

    # Other files in SOURCE do not matter. An image that was removed from SOURCE is no longer held out.
    os.remove('tars/0.tar')
    write(9, [encoded(picture(900 + index)) for index in range(50)])
    assert sides('other')[1] & set(images[50:]) == held_out & set(images[50:])
    shutil.rmtree('tars')
    write(5, list(kept))
    assert convert.main(['tars', 'other', '--held_out', '0.2']) == 0
    assert not read_index('other-held-out')['shards']


@pytest.mark.parametrize('out, held_out', [('a/b/', 'a/b-held-out'), ('../x', '../x-held-out'), ('.', '{}-held-out'),
                                           ('s3://bucket/', 's3://bucket-held-out')])
def test_held_out_samples_go_next_to_out_and_are_named_as_it_is(tmp_path, out, held_out):
    settings = parse(Convert, '', ['in', out, '--held_out', '0.1'])
    assert convert.addresses_of_outputs(settings) == [out, held_out.format(tmp_path)]


@pytest.mark.long
def test_a_full_disk_is_reported_in_one_line(server, tmp_path):
    samples = [{'jpg': encoded(picture(index, 256, 256), 'PNG'), 'caption': 'a'} for index in range(30)]
    write_tar('in/x.tar', files_of_samples(samples))
    disk = tmp_path / 'disk'
    argv = [ROOT / 'convert.py', tmp_path / 'in', disk / 'out', '--size_limit', '256kb']
    code, _, errors = run_program(server, tmp_path / 'run', script, argv, (1, str(disk)))
    _, error = errors.splitlines()  # the first line says what is converted
    assert code == 1
    for words in (f'{disk}/out', 'No space left on device', 'start the same command again to continue'):
        assert words in error
    assert not list((tmp_path / 'run/disk').rglob('index.json'))


def test_a_store_gets_its_index_last_and_a_training_reads_it(s3, samples, capsys):
    write_tar('in/0.tar', files_of_samples(samples))
    write_files('in', {'1.tar': 'no tar'})
    assert convert.main(['in', 's3://bucket/mds/', '--num_workers', '2', '--size_limit', '40kb']) == 1
    assert '1.tar is cut short' in capsys.readouterr().err
    assert list(s3.objects)[-1] == 'mds/index.json'
    assert 'mds/skipped.jsonl' in s3.objects
    read = read_back('cache', remote='s3://bucket/mds', validate_hash='xxh64')
    assert read == [(sample['jpg'], sample['caption']) for sample in samples]
    record = main(['--remote', 's3://bucket/mds', *TINY, '--local', 'copies'])
    assert (record['dataset'], record['measured_batches']) == ('streaming', 3)


def test_tars_in_a_store_are_read_despite_broken_connections_and_refusals(s3, capsys):
    photos = [encoded(picture(number, 512, 512), quality=100) for number in range(40)]
    files = {f'{number}.jpg': photo for number, photo in enumerate(photos)}
    files |= {f'{number}.txt': b'a' for number in range(40)}  # all captions behind all images
    tar = write_tar('x.tar', files).read_bytes()
    s3.put('tars/0.tar', tar)
    s3.put('tars/1.tar', tar[:100_000])
    s3.cuts = [300_000, 400_000, 1000, 10]
    s3.refusals = [(503, 'SlowDown'), (500, 'InternalError')]
    assert convert.main(['s3://bucket/tars/', 'out', '--num_workers', '1']) == 1
    assert not s3.cuts
    assert not s3.refusals
    assert read_back('out')[:40] == [(photo, 'a') for photo in photos]
    assert 's3://bucket/tars/1.tar is cut short' in capsys.readouterr().err
