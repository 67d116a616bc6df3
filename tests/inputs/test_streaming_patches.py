"""What Streaming would do otherwise: hang, end early and quietly, or take the shared memory of another run."""
import contextlib
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmark import main
from data import StreamingLAIONDataset, build_loader
from inputs import shared_memory
from inputs.captions import build_tokenizer
from inputs.errors import DataError
from tests.forked_runs import RUN, run, start_in_folder, traced
from tests.local_s3 import s3_process
from tests.runs import TINY
from tests.samples import encoded, good, picture, write_shards


def test_an_epoch_ends_with_the_reason_when_both_background_threads_fail(shards, tmp_path, monkeypatch):
    def unreachable(self, shard_id, blocking=True):
        barrier.wait(10)  # both threads are here before one of them fails
        raise OSError('no route')
    barrier, failures = threading.Barrier(2), []
    monkeypatch.setattr(StreamingLAIONDataset, 'prepare_shard', unreachable)

    def read():
        try:
            list(StreamingLAIONDataset(shards, str(tmp_path / 'cache'), batch_size=4))
        except DataError as error:
            failures.append(str(error))
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    assert not reader.is_alive() and failures == ['a shard could not be read (OSError: no route)']


def test_a_shard_that_one_reader_could_not_have_fails_for_those_who_wait_for_it_too(shards, tmp_path):
    shutil.copytree(shards, tmp_path / 'remote')
    dataset = StreamingLAIONDataset(str(tmp_path / 'remote'), str(tmp_path / 'cache'), batch_size=1)
    for shard in (tmp_path / 'remote').glob('*.mds'):
        shard.unlink()
    failures = []

    def read():
        try:
            dataset.prepare_shard(0)  # waits for as long as another reader fetches it
        except Exception as error:
            failures.append(error)
    for number_of_failures in (1, 2):
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(10)
        assert len(failures) == number_of_failures


def test_a_sample_after_a_failure_says_what_failed(shards, tmp_path):
    shutil.copytree(shards, tmp_path / 'remote')
    dataset = StreamingLAIONDataset(str(tmp_path / 'remote'), str(tmp_path / 'cache'), batch_size=1)
    for shard in (tmp_path / 'remote').glob('*.mds'):
        shard.unlink()
    with pytest.raises(DataError, match=r'remote/shard\.0000\d\.mds, could not be read \(FileNotFoundError'):
        list(dataset)
    for read in (list, lambda dataset: dataset.sample(0)):
        with pytest.raises(DataError, match='could not be read'):
            read(dataset)


def test_an_epoch_too_large_for_the_shared_memory_is_a_sentence(shards, monkeypatch):
    dataset = StreamingLAIONDataset(shards, batch_size=1)
    monkeypatch.setattr(shared_memory, 'free_bytes', lambda: 24 * 8 - 1)
    words = 'the order of the 24 samples of an epoch takes 192 bytes .* /dev/shm has 191 free; .*--shm-size'
    with pytest.raises(DataError, match=words):
        list(dataset)
    with pytest.raises(ValueError, match=words):
        build_loader(dataset, 1, 0, build_tokenizer())
    monkeypatch.setattr(shared_memory, 'free_bytes', lambda: 24 * 8)
    build_loader(dataset, 1, 0, build_tokenizer())


def folder_size(folder: Path) -> int:
    size = 0
    for path in folder.rglob('*.mds'):
        with contextlib.suppress(FileNotFoundError):  # dropped since it was listed
            size += path.stat().st_size
    return size


def test_a_small_cache_serves_the_whole_dataset(tmp_path, results):
    shards, cache = write_shards(tmp_path / 'shards', [good(index) for index in range(120)], size_limit=4096), \
        tmp_path / 'cache'
    size = max(path.stat().st_size for path in Path(shards).glob('*.mds'))
    assert len(list(Path(shards).glob('*.mds'))) > 20
    limit, most = 8 * size, 0
    dataset = StreamingLAIONDataset(shards, str(cache), image_size=64, batch_size=4, shuffle=True, cache_limit=limit)
    loader = build_loader(dataset, 4, 1, build_tokenizer()).dataloader
    captions = []
    for batch in loader:
        captions += batch['caption'].tolist()
        most = max(most, folder_size(cache))
    assert len(set(map(tuple, captions))) == 120 and size < most <= limit
    record = main(['--remote', shards, '--local', str(tmp_path / 'cache2'), '--cache_limit', str(limit), *TINY,
                   '--loader_only', '--measure_batches', '36', '--results', str(results)])
    assert record['status'] == 'complete'


@pytest.mark.long
def test_a_server_that_goes_away_ends_the_run_with_one_line_and_a_record(server, tmp_path, results, monkeypatch):
    shards = write_shards(tmp_path / 'shards', [{'jpg': encoded(picture(i)), 'caption': str(i)} for i in range(400)],
                          size_limit=4000)
    folder = tmp_path / 'run'
    folder.mkdir()
    with s3_process(monkeypatch) as store:
        for file in Path(shards).iterdir():
            store.client.upload_file(str(file), 'bucket', f'many/{file.name}')
        argv = ['--remote', 's3://bucket/many', *TINY, '--max_duration', '2ep', '--local', tmp_path / 'cache',
                '--results', results]
        run = start_in_folder(server, folder, main, argv, **os.environ)
        while len(list(tmp_path.glob('cache/*/*/*.mds'))) < 20:
            assert run.exitcode is None, (folder / 'err').read_text()
            time.sleep(0.02)
    run.join(600)
    [line] = [line for line in (folder / 'err').read_text().splitlines() if 'error' in line.lower()]
    assert line.startswith('benchmark.py: error: the run failed at batch')
    assert 'a shard, s3://bucket/many/' in line and 'could not be read' in line
    record = json.loads(results.read_text())
    assert run.exitcode == 1 and record['status'] == 'failed' and record['error'] in line


@pytest.mark.long
def test_two_runs_stream_on_one_host_at_once_beside_what_a_killed_run_left(server, tmp_path, shards):
    argv, folders = [*RUN, '--save_interval', '3ba', '--remote', shards], [tmp_path / name for name in 'abc']
    for folder in folders:
        folder.mkdir()
    killed, *both = folders
    run(server, 1, argv, killed, ('start', 7))  # leaves its shared memory
    with ThreadPoolExecutor() as pool:
        codes = list(pool.map(lambda folder: run(server, 1, argv, folder), both))
    assert codes == [[0], [0]], [(folder / 'log').read_text() for folder in both]
    assert traced(both[0], 1) == traced(both[1], 1) and len(traced(both[0], 1)[0]) == 12
