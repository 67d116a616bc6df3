"""What Streaming would do otherwise: hang, end early and quietly, or take the shared memory of another run."""
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from composer.utils import dist, get_device
from streaming.base.shared import prefix

from benchmark import main
from data import StreamingLAIONDataset, build_loader
from harness.ranks import join_ranks
from inputs import streaming_patches
from inputs.captions import build_tokenizer
from inputs.errors import DataError
from inputs.streaming_patches import starting_alone
from tests.forked_runs import RUN, run, run_ranks, traced
from tests.runs import ROOT, TINY
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


def test_a_run_chooses_its_shared_memory_when_no_other_does(shards):
    reader = threading.Thread(target=StreamingLAIONDataset, args=(shards,), kwargs={'batch_size': 1}, daemon=True)
    with starting_alone():
        reader.start()
        reader.join(1)
        assert reader.is_alive()
    reader.join(30)
    assert not reader.is_alive()


def hold_dataset(shards: str, connection) -> None:
    """Say when a dataset is there, and keep it until told to go."""
    dataset = StreamingLAIONDataset(shards, batch_size=1)
    connection.send(len(dataset))
    connection.recv()


def test_a_run_that_starts_leaves_the_shared_memory_of_another_alone(server, shards, monkeypatch):
    ours, theirs = server.Pipe()
    other = server.Process(target=hold_dataset, args=(shards, theirs), daemon=True)
    other.start()
    assert ours.recv() == 24
    cleaned = []
    monkeypatch.setattr(streaming_patches, 'clean_stale_shared_memory', lambda: cleaned.append('all'))
    StreamingLAIONDataset(shards, batch_size=1)
    assert not cleaned
    ours.send('go')
    other.join(60)
    assert other.exitcode == 0


def open_while_another_run_starts(shards: str) -> None:
    """On rank 1, look for a number after another run has taken one more."""
    join_ranks(get_device(), 60)
    if dist.get_local_rank() == 1:
        find = prefix._check_and_find
        prefix._check_and_find = lambda *args: find(*args) + 1
    assert StreamingLAIONDataset(shards, batch_size=1).num_samples == 24


def test_ranks_take_one_number_though_another_run_starts_meanwhile(server, shards, tmp_path):
    log = tmp_path / 'log'
    codes = run_ranks(server, [log, log], open_while_another_run_starts, [(shards,)] * 2)
    assert codes == [0, 0], log.read_text()


def test_what_killed_runs_left_is_removed_wherever_it_is(monkeypatch):
    """Streaming itself stops to look at the first number that has no shared memory, which any earlier run leaves."""
    left = [*(SharedMemory(f'{number:06}_{name}', create=True, size=4)
              for number in (800_003, 800_007) for name in ('locals', 'epoch_data'))]
    others = SharedMemory('800003_of_another_program', create=True, size=4)
    lock_file = Path(tempfile.gettempdir(), '800007_barrier_filelock')
    lock_file.touch()
    monkeypatch.setattr(streaming_patches.fcntl, 'lockf', lambda *args: None)  # no other run streams
    monkeypatch.setattr(streaming_patches, 'STALE_NUMBERS', '80000[0-9]')  # those of other tests are in use
    monkeypatch.setattr(streaming_patches, 'clean_stale_shared_memory', lambda: None)
    try:
        streaming_patches.clean_shared_memory()
        assert [path.name for path in Path('/dev/shm').glob('80000*')] == ['800003_of_another_program']
        assert not lock_file.exists()
    finally:
        for memory in (*left, others):
            memory.close()
            with contextlib.suppress(FileNotFoundError):
                memory.unlink()


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
    dataset = StreamingLAIONDataset(shards, str(cache), image_size=64, batch_size=4, shuffle=True, cache_limit=limit)
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


def test_a_server_that_goes_away_ends_the_run_with_one_line_and_a_record(s3, tmp_path, results):
    shards = write_shards(tmp_path / 'shards', [{'jpg': encoded(picture(i)), 'caption': str(i)} for i in range(400)],
                          size_limit=4000)
    for file in Path(shards).iterdir():
        s3.client.upload_file(str(file), 'bucket', f'many/{file.name}')
    run = subprocess.Popen([sys.executable, 'benchmark.py', '--remote', 's3://bucket/many', *TINY, '--max_duration',
                            '2ep', '--local', str(tmp_path / 'cache'), '--results', str(results)], cwd=ROOT, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while len(list(tmp_path.glob('cache/*.mds'))) < 20:
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    s3.kill()
    _, errors = run.communicate(timeout=120)
    [line] = [line for line in errors.splitlines() if 'error' in line.lower()]
    assert line.startswith('benchmark.py: error: the run failed at batch') and 'a shard could not be read' in line
    record = json.loads(results.read_text())
    assert run.returncode == 2 and record['status'] == 'failed' and record['error'] in line


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
