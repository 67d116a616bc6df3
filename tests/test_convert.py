"""Streaming's own reader returns every sample from SOURCE that is not reported, and unfinished work has no index."""
import os
import shlex
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
from sdbench.inputs.shards import are_two_sides, read_index
from tests.forked_runs import run_program, script
from tests.runs import ROOT, TINY, files_of, one_error_line, times_of
from tests.samples import encoded, picture, read_back, sample_files, shaded, skipped, write_sample_tar, write_tar


def pairs(*shades: int, suffix: str = 'jpg') -> list[tuple[bytes, str]]:
    return [(sample_files('', shade, suffix)[f'.{suffix}'], f'caption {shade}') for shade in shades]


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
def test_bytes_captions_and_order_survive_with_any_number_of_workers(tars, tmp_path, size_limit, parts):
    made = []
    for num_workers in (1, 8):
        out = tmp_path / f'a #odd? [name] {num_workers}'
        assert convert.main([str(tars), str(out), '--num_workers', str(num_workers), '--size_limit', size_limit]) == 0
        assert read_back(out) == ALL_SAMPLES
        made.append(files_of(out))
    assert made[0] == made[1]
    assert sum(name.endswith('/index.json') for name in made[0]) == parts


def test_a_folder_of_images_takes_its_captions_from_the_files_beside_them(tmp_path):
    photos = tmp_path / 'photos'
    (photos / 'deep/er').mkdir(parents=True)
    (photos / 'a.v2.JPG').write_bytes(shaded(1))
    (photos / 'a.v2.TXT').write_bytes(b'\xef\xbb\xbfcaption 1\r\n')  # as a Windows editor saves it
    (photos / 'deep/er/b.jpeg').write_bytes(shaded(2))
    (photos / 'deep/er/b.txt').write_text('\n')  # empty, as some downloaders leave it
    (photos / 'deep/er/b.json').write_text('{"caption": "caption 2"}')
    (photos / 'kohya.jpg').write_bytes(shaded(4))
    (photos / 'kohya.caption').write_text('caption 4\n', 'utf-16')
    (photos / 'IMG_5.JPG').write_bytes(shaded(5))
    (photos / 'IMG_5.txt').write_text('caption 5\n')
    (photos / 'lonely.webp').write_bytes(shaded(3, 'WEBP'))
    os.mkfifo(photos / 'pipe.jpg')  # opening it would block
    for _ in range(2):  # OUT lies in SOURCE, and is none of it
        assert convert.main(['photos', 'photos/mds']) == 0
    assert read_back(photos / 'mds') == pairs(5, 1, 2, 4)
    assert [(line['source'], line['reason'].partition(':')[0]) for line in skipped(photos / 'mds')] == [
        (f'{photos}/pipe.jpg', 'not a regular file'), (f'{photos}/lonely.webp', 'no caption')]


def test_a_flag_cleans_captions_as_open_clip_does(tmp_path):
    broken = 'a café’s &quot;salt &amp;amp; pepper&quot;'
    write_tar(tmp_path / 'in/x.tar', {'a.jpg': shaded(1), 'a.txt': broken.encode().decode('latin-1').encode(),
                                      'b.jpg': shaded(2), 'b.txt': b'&nbsp;'})
    for out, flags in (('cleaned', ['--clean_captions']), ('as-they-are', [])):
        assert convert.main(['in', out, *flags]) == 0
    [(_, cleaned)] = read_back(tmp_path / 'cleaned')
    [(_, kept), _] = read_back(tmp_path / 'as-they-are')
    assert cleaned == 'a café\'s "salt & pepper"'
    assert [line['reason'] for line in skipped(tmp_path / 'cleaned')] == ['no caption']
    assert kept.encode('latin-1').decode() == broken


def test_skipped_samples_are_counted_by_reason_and_listed(tmp_path, capsys):
    good, image = sample_files('good', 0), shaded(1)
    link = tarfile.TarInfo('link.txt')
    link.type, link.linkname = tarfile.SYMTYPE, '/etc/passwd'
    write_tar(tmp_path / 'in/x.tar', {
        **good, 'noise.jpg': b'not an image', 'noise.txt': b'a', 'cut.jpg': image[:len(image) // 2], 'cut.txt': b'a',
        'nothing.jpg': b'', 'nothing.txt': b'a', 'blank.jpg': image, 'blank.txt': b' \n', 'bare.jpg': image,
        'latin.jpg': image, 'latin.txt': 'café'.encode('latin-1'), 'wide.jpg': image,
        'wide.txt': 'a'.encode('utf-16-le'), 'words.txt': b'no picture',
        'two.jpg': image, 'two.png': shaded(1, 'PNG'), 'two.txt': b'which?', 'null.jpg': image,
        'null.json': b'{"caption": null}', 'bomb.jpg': image, 'bomb.json': b'[' * 1_000_000,
        'thin.png': encoded(picture(0, 4000, 1), 'PNG'), 'thin.txt': b'a line',
        'surrogate.jpg': image, 'surrogate.json': b'{"caption": "\\ud800"}',
        'link.jpg': image, link: None, 'inner.tar': b'1', 'README': b'1', 'film.mp4': b'1', '._a.jpg': image,
        'good.psd': b'1', 'torn.jpg': image, 'torn.json': b'{"caption": "a',
        './json.jpg': shaded(7), './json.json': '{"caption": "caption 7 ü"}'.encode()})
    write_tar(tmp_path / 'in/empty.tar', {})
    assert convert.main(['in', 'out']) == 0
    assert read_back(tmp_path / 'out') == [*pairs(0), (shaded(7), 'caption 7 ü')]
    other = 'not an image or a caption: '
    expected = {'noise': 'image does not decode', 'cut': 'image does not decode', 'nothing': 'image does not decode',
                'blank': 'no caption', 'bare': 'no caption', 'latin': 'caption is not UTF-8',
                'wide': 'caption has a NUL', 'words': 'no image', 'two': 'more than one image',
                'null': 'no caption', 'bomb': 'no caption', 'surrogate': 'caption is not UTF-8',
                'thin': 'image is narrower than 8 pixels',
                'link': 'no caption: a link, a pipe, a device or a sparse file in a tar',
                'inner.tar': f'{other}.tar is not read', 'README': f'{other}a file without a suffix is not read',
                'film.mp4': f'{other}.mp4 is not read', 'good.psd': f'{other}.psd is not read', '._a.jpg': 'hidden',
                'torn': 'no caption: its .json is not valid JSON',
                '': 'no image: nothing is in this tar'}
    listed = {line['key']: line['reason'] for line in skipped(tmp_path / 'out')}
    assert listed.keys() == expected.keys()
    for key, reason in expected.items():
        assert listed[key].startswith(reason)
    printed = capsys.readouterr().out
    assert 'converted  2 samples' in printed
    for kind, number in Counter(reason.partition(':')[0] for reason in expected.values()).items():
        assert f'{number} {kind}' in printed


def test_an_out_into_which_nothing_was_converted_accepts_other_flags(tmp_path, capsys):
    write_tar(tmp_path / 'in/x.tar', {'a.jpg': b'noise', 'a.txt': b'a', 'b.jpg': shaded(1)})
    argv = ['in', 'out']
    line = one_error_line(argv, capsys, convert.main)
    assert 'nothing could be converted' in line
    assert '1 image does not decode, 1 no caption; listed in' in line
    assert len(skipped(tmp_path / 'out')) == 2
    assert not (tmp_path / 'out/index.json').exists()
    write_tar(tmp_path / 'in/x.tar', sample_files('0', 0))
    assert convert.main([*argv, '--size_limit', '1kb']) == 0
    assert read_back(tmp_path / 'out') == pairs(0)
    assert skipped(tmp_path / 'out') == []


def test_the_same_command_does_nothing_and_other_flags_are_refused(tars, tmp_path, capsys):
    out = tmp_path / 'out'
    assert convert.main([str(tars), str(out)]) == 0
    before = times_of(tmp_path)
    capsys.readouterr()
    assert convert.main([str(tars), str(out)]) == 0
    said = f'done already: OUT {out} holds {len(ALL_SAMPLES)} samples of this SOURCE\n'
    printed = capsys.readouterr().out
    assert printed.startswith(said)
    _, program, *flags = shlex.split(printed.splitlines()[-1])  # the command for a machine without a GPU
    training = parse(Train, '', flags, program)
    assert (training.model_name, training.image_size, training.load_weights) == ('tiny', 64, None)
    for argv, words in (([tars, out, '--size_limit', '1kb'], 'size_limit 67108864, and this command has 1024; give'),
                        ([tmp_path, out], f"source ['{tars}'], and this command has ['{tmp_path}']")):
        assert f'OUT {out} was begun with {words}' in one_error_line(argv, capsys, convert.main)
    assert times_of(tmp_path) == before


def test_the_same_command_converts_new_and_repaired_files_and_removes_nothing(tars, tmp_path, capsys):
    out = tmp_path / 'out'
    argv = [str(tars), str(out), '--size_limit', '1kb']  # a part for each tar
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
    assert 'converting 2 files in 2 of 3 parts\n' in printed.err
    assert 'unused     2 folders in OUT from before SOURCE changed' in printed.out
    assert read_back(out) == pairs(0, 1, 2) + pairs(4, 5, suffix='webp') + pairs(6)
    parts = {path: time for path, time in before.items() if path.parent != out}
    assert {path: times_of(out)[path] for path in parts} == parts  # even the parts that are no longer used


def test_crops_and_enlargements_are_counted_over_all_parts_and_runs(tmp_path, capsys):
    sizes = [(512, 512), (768, 512), (769, 512), (512, 2000), (511, 511), (2000, 64)]
    argv = ['tars', 'out', '--size_limit', '1kb', '--num_workers', '2']
    for number, size in enumerate(sizes):
        write_sample_tar(tmp_path / f'tars/{number}.tar', [{'jpg': encoded(Image.new('RGB', size)), 'caption': 'x'}])
        if number == 2:  # convert only the first three
            assert convert.main(argv) == 0
            assert '1 of 3 images lose' in capsys.readouterr().out
    for _ in range(2):  # converts the others, and then nothing
        assert convert.main(argv) == 0
        assert ('squares    3 of 6 images lose more than a third of a side to the centre square; 2 are smaller than '
                '512 pixels\n') in capsys.readouterr().out


def test_only_the_image_and_the_seed_decide_what_is_held_out(tmp_path, capsys):
    images = [encoded(picture(index, 16, 16)) for index in range(200)]
    for number in range(4):
        write_sample_tar(tmp_path / f'tars/{number}.tar', [{'jpg': image, 'caption': 'x'} for image in
                                                           images[50 * number:50 * number + 50] + images[:1]])

    def sides(out: str, *flags) -> tuple[set[bytes], set[bytes]]:
        assert convert.main(['tars', str(tmp_path / out), '--held_out', '0.2', *flags]) == 0
        return tuple({image for image, _ in read_back(Path(f'{tmp_path / out}{end}'))} for end in ('', '-held-out'))
    kept, held_out = sides('one', '--num_workers', '1')
    assert kept | held_out == set(images)
    assert not kept & held_out
    assert 20 <= len(held_out) <= 60
    assert 'held out   ' in (printed := capsys.readouterr().out)
    assert f'--eval_remote {tmp_path}/one-held-out' in printed
    assert sides('parts', '--size_limit', '50kb') == (kept, held_out)
    assert sides('seed', '--seed', '18') != (kept, held_out)
    draw = read_index(f'{tmp_path}/one-held-out')['draw']
    for name, is_other_side in (('one', True), ('parts', False), ('one-held-out', False), ('seed', False)):
        assert are_two_sides(draw, read_index(str(tmp_path / name))['draw']) == is_other_side, name
    (tmp_path / 'tars/0.tar').unlink()
    write_sample_tar(tmp_path / 'tars/9.tar', [{'jpg': encoded(picture(900 + index)), 'caption': 'x'} for index in
                                               range(50)])
    assert sides('other')[1] & set(images[50:]) == held_out & set(images[50:])
    for tar in sorted((tmp_path / 'tars').iterdir()):
        tar.unlink()
    write_sample_tar(tmp_path / 'tars/5.tar', [{'jpg': image, 'caption': 'x'} for image in kept])
    assert convert.main(['tars', 'other', '--held_out', '0.2']) == 0
    assert not read_index(f'{tmp_path}/other-held-out')['shards']  # of images that are gone none is held out any more


@pytest.mark.parametrize('out, held_out', [('a/b/', 'a/b-held-out'), ('../x', '../x-held-out'), ('.', '{}-held-out'),
                                           ('s3://bucket/', 's3://bucket-held-out')])
def test_held_out_samples_go_next_to_out_and_are_named_as_it_is(tmp_path, out, held_out):
    settings = parse(Convert, '', ['in', out, '--held_out', '0.1'])
    assert convert.addresses_of_outputs(settings) == [out, held_out.format(tmp_path)]


@pytest.mark.long
def test_a_full_disk_is_reported_in_one_line(server, tmp_path, capsys):
    pictures = {f'{index}.{suffix}': content for index in range(30) for suffix, content in
                (('png', encoded(picture(index, 256, 256), 'PNG')), ('txt', b'a'))}
    write_tar(tmp_path / 'in/x.tar', pictures)
    disk = tmp_path / 'disk'
    argv = [ROOT / 'convert.py', tmp_path / 'in', disk / 'out', '--size_limit', '256kb']
    code, _, error = run_program(server, tmp_path / 'run', script, argv, (1, str(disk)))
    beginning, error = error.split('\n', 1)
    assert beginning == 'converting 1 file in 1 of 1 part'
    assert (code, error.count('\n')) == (1, 1), error
    assert f'{disk}/out' in error
    assert 'No space left on device' in error
    assert 'start the same command again to continue' in error
    assert not list((tmp_path / 'run/disk').rglob('index.json'))


def test_a_store_gets_its_index_last_and_a_training_reads_it(s3, samples, tmp_path, capsys):
    write_sample_tar(tmp_path / 'in/0.tar', samples)
    (tmp_path / 'in/1.tar').write_bytes(b'no tar')
    assert convert.main(['in', 's3://bucket/mds/', '--num_workers', '2', '--size_limit', '40kb']) == 1
    assert '1.tar is cut short' in capsys.readouterr().err
    assert list(s3.objects)[-1] == 'mds/index.json'
    assert 'mds/skipped.jsonl' in s3.objects
    read = read_back(tmp_path / 'cache', remote='s3://bucket/mds', validate_hash='xxh64')
    assert read == [(sample['jpg'], sample['caption']) for sample in samples]
    record = main(['--remote', 's3://bucket/mds', *TINY, '--local', 'copies'])
    assert record['dataset'] == 'streaming'
    assert record['measured_batches'] == 3


def test_tars_in_a_store_are_read_despite_broken_connections_and_refusals(s3, tmp_path, capsys):
    photos = [encoded(picture(number, 512, 512), quality=100) for number in range(40)]
    files = {f'{number}.jpg': photo for number, photo in enumerate(photos)}
    files |= {f'{number}.txt': b'a' for number in range(40)}  # all captions behind all images
    tar = write_tar(tmp_path / 'x.tar', files).read_bytes()
    s3.put('tars/0.tar', tar)
    s3.put('tars/1.tar', tar[:100_000])
    s3.cuts = [300_000, 400_000, 1000, 10]
    s3.refusals = [(503, 'SlowDown'), (500, 'InternalError')]
    assert convert.main(['s3://bucket/tars/', 'out', '--num_workers', '1']) == 1
    assert not s3.cuts
    assert not s3.refusals
    assert read_back(tmp_path / 'out')[:40] == [(photo, 'a') for photo in photos]
    assert 's3://bucket/tars/1.tar is cut short' in capsys.readouterr().err
