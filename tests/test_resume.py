"""A run that is killed, at whatever moment, goes on as if nothing had happened."""
import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_ranks import free_port

from harness.checkpoints import checkpoints, load_checkpoint

RUN = ['--use_ema', '--model_name', 'tiny', '--image_size', '64', '--batch_size', '4', '--warmup_batches', '1',
       '--max_duration', '12ba', '--autoresume']
# (moment, batch): at a batch's start, within the write of its checkpoint, or between the two steps in which Composer
# lets latest-rank0.pt point to it. Checkpoints are at batches 3, 6 (an epoch's end), 9 and 12.
KILLS = {'3ba': [('start', 2), ('write', 3), ('start', 4), ('link', 6), ('start', 7), ('write', 9), ('update', 8),
                 ('start', 11)],
         '1ep': [('start', 4), ('start', 7), ('update', 11)]}


@pytest.fixture(scope='module')
def server():
    """Forks processes that have imported the program already."""
    os.environ['PYTHONPATH'] = f'{Path(__file__).parent.parent}:{Path(__file__).parent}'
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['benchmark', 'test_resume'])
    return context


def rank_process(rank: int, ranks: int, port: int, argv: list[str], trace: Path, kill: tuple | None):
    """One rank of a run; it writes what it trains on and its losses to `trace`, and kills itself where it is told."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                      NODE_RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), OMP_NUM_THREADS='1')
    log = os.open(trace.with_name('log'), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    multiprocessing.set_start_method('fork', force=True)  # for the loader's workers
    import benchmark
    moment, batch_to_die = kill or (None, None)

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    class Witness(benchmark.Safeguard):
        def batch_start(self, state, logger):
            super().batch_start(state, logger)
            self.captions = state.batch['caption'].tolist()
            self.number = state.timestamp.batch.value
            if (moment, batch_to_die) == ('start', self.number):
                die()

        def after_train_batch(self, state, logger):
            super().after_train_batch(state, logger)
            if (moment, batch_to_die) == ('update', self.number):
                die()

        def batch_end(self, state, logger):
            with open(f'{trace}{rank}', 'a') as file:
                loss = state.total_loss_dict['loss/train/total']
                print(json.dumps([self.number, loss.hex(), self.captions]), file=file)
            if state.timestamp.batch.value == batch_to_die and rank == 0:
                if moment == 'write':
                    torch.save = save_half
                elif moment == 'link':
                    os.symlink = die
            super().batch_end(state, logger)

    save = torch.save

    def save_half(state, file, **options):
        if not hasattr(file, 'name'):  # torch pickles tensors with it, too
            return save(state, file, **options)
        path = f'{file.name}.whole'
        save(state, path)
        file.write(Path(path).read_bytes()[:os.path.getsize(path) // 2])
        file.flush()
        os.remove(path)
        die()

    benchmark.Safeguard = Witness
    torch.set_num_threads(1)
    benchmark.main(argv)


def run(server, ranks: int, argv: list, folder: Path, kill=None) -> list[int]:
    """Start all ranks, let the whole run die with the first that does; returns their exit codes."""
    port, trace = free_port(), folder / 'rank'
    argv = [*map(str, argv), '--save_folder', str(folder / 'checkpoints'), '--results', str(folder / 'results.jsonl')]
    processes = [server.Process(target=rank_process, args=(rank, ranks, port, argv, trace, kill))
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    end = time.monotonic() + 120
    while any(process.exitcode is None for process in processes):
        assert time.monotonic() < end, (folder / 'log').read_text()
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.02)
    return [process.exitcode for process in processes]


def traced(folder: Path, ranks: int) -> list[dict[int, set]]:
    """What each rank saw and lost, by batch; more than one thing in a set if it was not the same each time."""
    found = [{} for _ in range(ranks)]
    for rank, batches in enumerate(found):
        for line in (folder / f'rank{rank}').read_text().splitlines():
            number, *seen = json.loads(line)
            batches.setdefault(number, set()).add(json.dumps(seen))
    return found


def final_state(folder: Path) -> dict:
    return load_checkpoint(checkpoints(folder / 'checkpoints')[-1])['state']


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize('data, interval, ranks', [
    ('synthetic', '3ba', 1), ('synthetic', '3ba', 2), ('streamed', '3ba', 1), ('streamed', '3ba', 2),
    ('streamed', '1ep', 1)])
def test_a_run_killed_again_and_again_equals_one_that_never_was(server, tmp_path, shards, data, interval, ranks):
    argv = [*RUN, '--save_interval', interval, *(['--use_synth_data'] if data == 'synthetic' else ['--remote', shards])]
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    whole.mkdir(), killed.mkdir()
    assert run(server, ranks, argv, whole) == [0] * ranks, (whole / 'log').read_text()
    for kill in KILLS[interval]:
        codes = run(server, ranks, argv, killed, kill)
        assert -signal.SIGKILL in codes, (kill, codes, (killed / 'log').read_text())
    assert run(server, ranks, argv, killed) == [0] * ranks, (killed / 'log').read_text()
    expected = traced(whole, ranks)
    assert traced(killed, ranks) == expected and all(sorted(rank) == list(range(12)) for rank in expected)
    for part in ('model', 'optimizers', 'algorithms'):
        assert_equal(final_state(killed)[part], final_state(whole)[part])
    if data == 'streamed':
        seen = [caption for rank in expected for number in range(6) for line in rank[number]
                for caption in json.loads(line)[1]]
        assert len(seen) == 24 == len(set(map(tuple, seen)))


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
