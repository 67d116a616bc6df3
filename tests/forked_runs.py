"""Runs whose ranks are forked from a process that has imported the program already, and die where they are told."""
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch

from tests.runs import ROOT, free_port


RUN = ['--use_ema', '--model_name', 'tiny', '--image_size', '64', '--batch_size', '4', '--warmup_batches', '1',
       '--max_duration', '12ba', '--autoresume']


def preloaded_server():
    """A context of multiprocessing that forks processes from one that has imported the program already."""
    os.environ['PYTHONPATH'] = str(ROOT)
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['tests.preloaded'])
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
