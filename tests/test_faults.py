"""What goes wrong in a long run, and what is left of it: bad data, full disks, bad numbers, hostile files."""
import contextlib
import json
import multiprocessing
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from conftest import TINY, encoded, picture, write_shards
from streaming import MDSWriter

import benchmark
from benchmark import main
from data import StreamingLAIONDataset, build_loader
from ema import EMA
from harness.checkpoints import checkpoints, load_checkpoint
from harness.record import keep
from inputs.captions import build_tokenizer

ROOT = Path(__file__).parent.parent


def bomb() -> bytes:
    """A PNG of a few bytes that says it is 30,000 pixels wide and high."""
    header = struct.pack('>IIBBBBB', 30_000, 30_000, 8, 2, 0, 0, 0)
    chunks = [b'IHDR' + header, b'IDAT' + zlib.compress(b''), b'IEND']
    return b'\x89PNG\r\n\x1a\n' + b''.join(
        struct.pack('>I', len(chunk) - 4) + chunk + struct.pack('>I', zlib.crc32(chunk)) for chunk in chunks)


def good(index: int) -> dict:
    return {'jpg': encoded(picture(index)), 'caption': f'picture {index}'}


def error_line(capfd) -> str:
    """The one line of the program's own among the progress bar's."""
    [line] = [line for line in capfd.readouterr().err.splitlines() if 'error:' in line]
    return line


def failed(argv, results, capfd) -> str:
    """Run what must fail; its one line, which the record has too."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        main([*map(str, argv), '--results', str(results)])
    line, record = error_line(capfd), json.loads(results.read_text().splitlines()[-1])
    assert exit.value.code == 2 and record['status'] == 'failed' and line.endswith(record['error'])
    return line


@pytest.mark.parametrize('num_workers', [0, 2])
def test_others_stand_in_for_bad_samples_which_are_named_once_and_counted(tmp_path, results, capfd, num_workers):
    samples = [good(index) for index in range(40)]
    samples[3]['jpg'], samples[17]['jpg'], samples[18]['caption'] = b'no image', bomb(), ' \n'
    shards = write_shards(tmp_path / 'shards', samples)
    record = main(['--remote', shards, *TINY, '--max_duration', '3ep', '--measure_batches', '29', '--num_workers',
                   str(num_workers), '--max_bad_samples', '0.1', '--results', str(results)])
    assert (record['status'], record['bad_samples'], record['measured_batches']) == ('complete', 3, 29)
    errors = capfd.readouterr().err
    for index, reason in ((3, 'not a known format'), (17, 'decompression bomb'), (18, 'no caption')):
        assert errors.count(f'bad sample {index} is left out: ') == 1 and reason in errors


def test_the_stand_in_is_the_next_good_sample(tmp_path):
    samples = [good(index) for index in range(6)]
    samples[4]['jpg'] = samples[5]['jpg'] = b''
    dataset = StreamingLAIONDataset(write_shards(tmp_path / 'shards', samples), batch_size=1)
    found = dataset[4]
    assert found['caption'] == 'picture 0' and [index for index, _ in found['bad']] == [4, 5]


def test_too_many_bad_samples_end_the_run(tmp_path, results, capfd):
    samples = [good(index) | ({'jpg': b''} if index % 2 else {}) for index in range(40)]
    shards = write_shards(tmp_path / 'shards', samples)
    line = failed(['--remote', shards, *TINY, '--measure_batches', '9'], results, capfd)
    assert 'samples are bad, more than --max_bad_samples 0.01' in line
    assert main(['--remote', shards, *TINY, '--max_bad_samples', '1', '--results', str(results)])['bad_samples'] > 2


def write_hashed(folder: Path, number: int) -> Path:
    with MDSWriter(out=str(folder), columns={'jpg': 'bytes', 'caption': 'str'}, hashes=['xxh64'],
                   size_limit=1 << 14) as writer:
        for index in range(number):
            writer.write(good(index))
    return folder


@pytest.mark.parametrize('fault, words', [('cut', 'is cut short'), ('flipped', 'fails its xxh64 hash'),
                                          ('other', 'is not the one of index.json'), ('gone', 'could not be read')])
def test_faults_of_shards_are_told_apart(tmp_path, results, capfd, fault, words):
    shards = write_hashed(tmp_path / 'shards', 24)
    first = shards / 'shard.00000.mds'
    if fault == 'cut':
        os.truncate(first, first.stat().st_size - 10)
    elif fault == 'flipped':
        content = bytearray(first.read_bytes())
        content[-20] ^= 1
        first.write_bytes(content)
    elif fault == 'other':
        shutil.copy(write_hashed(tmp_path / 'other', 3) / 'shard.00000.mds', first)
    else:
        first.unlink()
    assert words in failed(['--remote', shards, *TINY, '--max_duration', '1ep'], results, capfd)


def folder_size(folder: Path) -> int:
    size = 0
    for path in folder.glob('*.mds'):
        with contextlib.suppress(FileNotFoundError):  # dropped since it was listed
            size += path.stat().st_size
    return size


def test_a_small_cache_serves_the_whole_dataset(tmp_path, results):
    shards, cache = write_shards(tmp_path / 'shards', [good(index) for index in range(200)], size_limit=4096), \
        tmp_path / 'cache'
    size = max(path.stat().st_size for path in Path(shards).glob('*.mds'))
    assert len(list(Path(shards).glob('*.mds'))) > 20
    limit, most = 8 * size, 0
    dataset = StreamingLAIONDataset(shards, str(cache), 64, batch_size=4, shuffle=True, cache_limit=limit)
    loader = build_loader(dataset, 4, 1, build_tokenizer()).dataloader
    captions = []
    for batch in loader:
        captions += batch['caption'].tolist()
        most = max(most, folder_size(cache))
    loader._iterator._shutdown_workers()
    assert len(set(map(tuple, captions))) == 200 and size < most <= limit
    record = main(['--remote', shards, '--local', str(tmp_path / 'cache2'), '--cache_limit', str(limit), *TINY,
                   '--max_duration', '2ep', '--results', str(results)])
    assert record['status'] == 'complete'


@pytest.mark.parametrize('flags, words', [
    (['--cache_limit', '1gb'], '--cache_limit 1gb has no cache to bound'),
    (['--cache_limit', 'much', '--local', '{}/cache'], '--cache_limit much is not a size'),
    (['--cache_limit', '5kb', '--local', '{}/cache'], 'holds fewer than 4 shards'),
    (['--max_bad_samples', '2'], '--max_bad_samples: 2 is not between 0 and 1'),
    (['--autoresume'], '--autoresume needs the --save_folder'),
    (['--num_workers', '100000000'], '--num_workers 100000000 may fill the shared memory')])
def test_a_flag_that_cannot_work_is_one_line(shards, tmp_path, capfd, flags, words):
    with pytest.raises(SystemExit):
        main(['--remote', shards, *TINY, *(flag.format(tmp_path) for flag in flags)])
    line = capfd.readouterr().err
    assert words in line and line.count('\n') == 1


class Weights(benchmark.Safeguard):
    """What the weights and their average are when each batch ends."""

    def batch_end(self, state, logger):
        [ema] = [algorithm for algorithm in state.algorithms if isinstance(algorithm, EMA)]
        self.seen = [*getattr(self, 'seen', ()),
                     [tensor.clone() for part in (dict(state.model.unet.named_parameters()), ema.ema_model.parameters)
                      for tensor in part.values()]]
        super().batch_end(state, logger)


@pytest.fixture
def loss_at_batch_2_is(monkeypatch):
    """The training's own loss, but for the third batch."""
    def put(value: float):
        calls, loss = [], benchmark.StableDiffusion.loss

        def broken(self, outputs, batch):
            calls.append(1)
            return loss(self, outputs, batch) * (value if len(calls) == 3 else 1)
        kept = []
        monkeypatch.setattr(benchmark.StableDiffusion, 'loss', broken)
        monkeypatch.setattr(benchmark, 'Safeguard', lambda *args: kept.append(Weights(*args)) or kept[-1])
        return kept
    return put


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_learned(results, capfd, loss_at_batch_2_is, value):
    kept = loss_at_batch_2_is(value)
    line = failed(['--use_synth_data', '--use_ema', *TINY], results, capfd)
    assert 'the run failed at batch 3: the loss of batch 3 is not finite, at microbatch size 4' in line
    assert len(kept[0].seen) == 2 and json.loads(results.read_text())['loss'] > 0


def test_on_nan_skip_leaves_the_step_out_and_counts_it(results, loss_at_batch_2_is):
    kept = loss_at_batch_2_is(float('nan'))
    record = main(['--use_synth_data', '--use_ema', *TINY, '--on_nan', 'skip',
                   '--max_duration', '5ba', '--results', str(results)])
    assert (record['status'], record['skipped_batches']) == ('complete', 1) and record['loss'] > 0
    weights = kept[0].seen
    half = len(weights[0]) // 2
    assert all(map(torch.equal, weights[1][:half], weights[2][:half]))
    assert not all(map(torch.equal, weights[2][:half], weights[3][:half]))
    assert all(tensor.isfinite().all() for tensor in weights[4])


def test_out_of_memory_says_the_microbatch_and_what_to_try(results, capfd, monkeypatch):
    monkeypatch.setattr(benchmark.StableDiffusion, 'encode', lambda self, batch: torch.empty(1 << 60))
    line = failed(['--use_synth_data', *TINY, '--device_train_microbatch_size', '2'], results, capfd)
    assert 'out of memory at --device_train_microbatch_size 2; use a smaller one' in line


def append_records(path: str, name: str):
    for index in range(20):
        keep({'name': name, 'index': index, 'text': name * 200_000}, '', path)


def test_runs_that_write_to_one_file_at_once_keep_every_record_whole(results, capfd):
    results.write_text('{"cut by a full di')
    context = multiprocessing.get_context('fork')
    writers = [context.Process(target=append_records, args=(str(results), name)) for name in 'abc']
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    cut, *lines = results.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert cut == '{"cut by a full di' and len(records) == 60
    assert {(record['name'], record['index']) for record in records} == {(n, i) for n in 'abc' for i in range(20)}


def on_small_disk(megabytes: int, where: str, argv: list, out: Path) -> tuple[str, str]:
    """Run the benchmark with a file system of that size at `where`, and copy it to `out` afterwards."""
    script = (f'mount -t tmpfs -o size={megabytes}m tmpfs {where} && cd {ROOT} && "$@"; code=$?; '
              f'cp -r {where} {out}; exit $code')
    may_mount = ['unshare', '--mount', 'sh', '-c', f'mount -t tmpfs tmpfs {where}']
    if subprocess.run(may_mount, capture_output=True).returncode:
        pytest.skip('needs a small file system, and this user may not mount one')
    run = subprocess.run(['unshare', '--mount', 'sh', '-c', script, 'sh', sys.executable, 'benchmark.py',
                          *map(str, argv)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2, run.stderr
    [line] = [line for line in run.stderr.splitlines() if 'error:' in line]
    assert 'Traceback' not in run.stderr
    return line, run.stdout


def test_a_disk_that_fills_leaves_the_last_good_checkpoint(tmp_path, results):
    (tmp_path / 'disk').mkdir()
    line, _ = on_small_disk(40, tmp_path / 'disk', ['--use_synth_data', '--use_ema', *TINY, '--save_interval', '1ba',
                            '--save_folder', tmp_path / 'disk' / 'kept', '--results', results], tmp_path / 'out')
    assert 'a disk is full' in line and json.loads(results.read_text())['status'] == 'failed'
    first, second = checkpoints(str(tmp_path / 'out' / 'kept'))
    assert load_checkpoint(first)['state']['timestamp']['Timestamp']['batch'] == 1
    record = main(['--use_synth_data', '--use_ema', *TINY, '--save_folder', str(tmp_path / 'out' / 'kept'),
                   '--autoresume', '--results', str(results)])  # with room again
    assert record['first_batch'] == 1 and record['status'] == 'complete'


def test_a_full_disk_at_the_cache_and_at_the_results_is_one_line(tmp_path, results):
    (tmp_path / 'disk').mkdir()
    shards = write_shards(tmp_path / 'shards', [{'jpg': encoded(picture(index, 512, 512), 'PNG'), 'caption': 'x'}
                                                for index in range(40)], size_limit=1 << 20)
    line, _ = on_small_disk(2, tmp_path / 'disk', ['--remote', shards, '--local', tmp_path / 'disk' / 'cache', *TINY,
                            '--max_duration', '1ep', '--results', results], tmp_path / 'out1')
    assert 'No space left' in line and '--cache_limit' in line and json.loads(results.read_text())['error'] in line
    fill = tmp_path / 'disk' / 'results'
    line, output = on_small_disk(1, tmp_path / 'disk', ['--use_synth_data', *TINY, '--save_folder',
                                 tmp_path / 'disk' / 'checkpoints', '--results', fill], tmp_path / 'out2')
    assert f'--results {fill} could not be written: No space left' in line
    assert json.loads(output.splitlines()[-1])['status'] == 'failed'


def test_too_little_shared_memory_is_said_before_the_run(tmp_path, shards):
    line, output = on_small_disk(1, '/dev/shm', ['--remote', shards, *TINY, '--image_size', '256', '--num_workers', '2',
                                                 '--results', tmp_path / 'results'], tmp_path / 'out')
    assert '--num_workers 2 may fill the shared memory' in line and not output


class Hostile:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


def test_nothing_in_a_dataset_runs_code_or_writes_outside_its_cache(tmp_path, capfd):
    trace = tmp_path / 'ran'
    columns = {'jpg': 'bytes', 'caption': 'str', 'extra': 'pkl'}
    hostile = write_shards(tmp_path / 'hostile', [good(i) | {'extra': Hostile(trace)} for i in range(8)], columns)
    trace.unlink(missing_ok=True)
    outside = Path(write_shards(tmp_path / 'outside', [good(i) for i in range(8)]))
    index = json.loads((outside / 'index.json').read_text())
    index['shards'][0]['raw_data']['basename'] = '../escaped.mds'
    (outside / 'index.json').write_text(json.dumps(index))
    for remote, words in ((hostile, 'of type pkl, which can run code'), (outside, 'outside its folder')):
        with pytest.raises(SystemExit):
            main(['--remote', str(remote), '--local', str(tmp_path / 'cache'), *TINY])
        line = capfd.readouterr().err
        assert words in line and line.count('\n') == 1
    assert not trace.exists() and not (tmp_path / 'escaped.mds').exists()


@pytest.mark.parametrize('protocol', [2, 4])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, capfd, protocol):
    folder, trace = tmp_path / 'checkpoints', tmp_path / 'ran'
    folder.mkdir()
    torch.save({'state': Hostile(trace)}, folder / 'ep0-ba1-rank0.pt', pickle_protocol=protocol)
    with pytest.raises(SystemExit):
        main(['--use_synth_data', *TINY, '--save_folder', str(folder), '--autoresume'])
    line = capfd.readouterr().err
    assert 'would run code when loaded' in line and line.count('\n') == 1
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(folder / 'ep0-ba1-rank0.pt')
    assert not trace.exists()


def test_code_in_a_model_folder_is_not_run(tmp_path, model_folder, results, capfd):
    folder, trace = tmp_path / 'model', tmp_path / 'ran'
    shutil.copytree(model_folder, folder)
    for part in ('unet', 'vae', 'text_encoder', 'tokenizer'):
        (folder / part / 'hostile.py').write_text(f'open({str(trace)!r}, "w")\nclass Hostile: pass\n')
        for file in (folder / part).glob('*config.json'):
            names = dict.fromkeys(['AutoModel', 'AutoConfig', 'AutoTokenizer'], 'hostile.Hostile')
            file.write_text(json.dumps(json.loads(file.read_text()) | {'auto_map': names}))
    shards = write_shards(tmp_path / 'shards', [good(index) for index in range(8)])
    with contextlib.suppress(SystemExit):
        main(['--remote', shards, *TINY, '--model_name', str(folder), '--pretrained', '--tokenizer', str(folder),
              '--results', str(results)])
    assert not trace.exists()


def test_no_secret_of_the_environment_is_written_down(tmp_path, shards):
    secrets = {'WANDB_API_KEY': 'f' * 40, 'AWS_ACCESS_KEY_ID': 'AKIASECRETSECRET', 'AWS_SECRET_ACCESS_KEY': 'w0nder'}
    run = subprocess.run([sys.executable, ROOT / 'benchmark.py', '--remote', shards, *TINY, '--wandb_name', 'x',
                          '--tensorboard', 'board', '--save_folder', 'checkpoints', '--results', 'results.jsonl'],
                         cwd=tmp_path, env={**os.environ, **secrets, 'WANDB_MODE': 'offline'}, capture_output=True)
    assert run.returncode == 0, run.stderr
    written = [run.stdout, run.stderr, *(path.read_bytes() for path in tmp_path.rglob('*') if path.is_file())]
    assert len(written) > 6 and (tmp_path / 'wandb').is_dir()
    for secret in secrets.values():
        assert not any(secret.encode() in content for content in written)
