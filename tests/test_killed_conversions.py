"""Conversions whose ranks are killed at any moment: gone on with, they make what an undisturbed one makes."""
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import convert
from inputs import parts
from tests.local_s3 import LocalS3, local_s3
from tests.runs import free_port
from tests.samples import sample_files, write_tar

NUM_PARTS = 7
MOMENTS = {1: 130, 2: 80}  # by ranks: about as many as a whole run has on its first rank


@pytest.fixture(scope='module')
def tars(tmp_path_factory) -> Path:
    """Tars of two samples each, and one that is cut."""
    folder = tmp_path_factory.mktemp('killed') / 'tars'
    for number in range(NUM_PARTS):
        files = {**sample_files(f'{number}a', 2 * number), **sample_files(f'{number}b', 2 * number + 1)}
        write_tar(folder / f'{number}.tar', files)
    whole = (folder / '3.tar').read_bytes()
    (folder / '3.tar').write_bytes(whole[:5000])
    return folder


def rank_process(rank: int, ranks: int, port: int, argv: list[str], trace: Path, kill_at: int | None) -> None:
    """A rank of a conversion, which kills itself at a moment: before or after any step of it or of its workers."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                      MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    log = os.open(trace / 'log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout = sys.stderr = os.fdopen(log, 'w', buffering=1)  # not where pytest has put them
    moment = multiprocessing.RawValue('i', 0)
    main_process = os.getpid()

    def step():
        moment.value += 1
        if moment.value == kill_at:
            os.kill(main_process, signal.SIGKILL)
            os._exit(1)

    def watched(function):
        def with_steps(*args, **kwargs):
            step()
            result = function(*args, **kwargs)
            step()
            return result
        return with_steps

    for owner, name in ((parts.Output, 'keep'), (parts.Output, 'publish'), (parts.Output, 'read'),
                        (parts.PartWriter, 'write'), (parts.PartWriter, 'finish'), (parts, 'read_some_parts'),
                        (convert, 'merge_parts'), (convert, 'begin')):
        setattr(owner, name, watched(getattr(owner, name)))
    real_convert_part = convert.convert_part

    def convert_part(slot, number, files):
        with open(trace / 'started', 'a') as file:
            print(number, file=file)
        real_convert_part(slot, number, files)
    convert_part.__module__, convert_part.__qualname__ = 'convert', 'convert_part'  # so that a pool can pickle it
    convert.convert_part = convert_part
    try:
        status = convert.main(argv)
    except SystemExit as error:
        status = error.code
    os._exit(status)


def run(ranks: int, argv: list[str], trace: Path, kill: tuple[int, int] | None = None) -> list[int]:
    """All ranks, as a launcher runs them: one that dies ends the others. Returns their exit codes."""
    context = multiprocessing.get_context('fork')
    port = free_port()
    processes = []
    for rank in range(ranks):
        kill_at = kill[1] if kill and kill[0] == rank else None
        processes.append(context.Process(target=rank_process, args=(rank, ranks, port, argv, trace, kill_at)))
        processes[-1].start()
    end = time.monotonic() + 30
    while any(process.exitcode is None for process in processes):
        assert time.monotonic() < end, (trace / 'log').read_text()
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
        time.sleep(0.01)
    return [process.exitcode for process in processes]


def contents(out: str, store: LocalS3 | None) -> dict[str, bytes]:
    """All that OUT holds."""
    if store:
        prefix = out.removeprefix('s3://bucket/') + '/'
        return {key.removeprefix(prefix): content for key, content in store.objects.items() if key.startswith(prefix)}
    return {str(path.relative_to(out)): path.read_bytes() for path in Path(out).rglob('*') if path.is_file()}


def finished(files: dict[str, bytes]) -> set[int]:
    return {int(Path(name).stem) for name in files if name.startswith('parts/') and name.endswith('.json')}


@pytest.mark.parametrize('place, trials', [('folder', 6), ('s3', 2)])
def test_a_conversion_killed_again_and_again_equals_one_that_never_was(tars, tmp_path, monkeypatch, place, trials):
    draw = random.Random(17)
    with local_s3(monkeypatch) as server:
        store = server if place == 's3' else None
        root = 's3://bucket' if store else str(tmp_path)
        common = ['--size_limit', '1kb', '--num_workers', '2']
        assert convert.main([str(tars), f'{root}/undisturbed', *common]) == 1  # 3.tar is cut
        expected = contents(f'{root}/undisturbed', store)
        assert finished(expected) == set(range(NUM_PARTS)) and 'index.json' in expected
        kills = Counter()
        for trial in range(trials):
            out, trace = f'{root}/out{trial}', tmp_path / f'trace{trial}'
            trace.mkdir()
            ranks = 1 + trial % 2
            for last in (False, False, True):
                done = finished(contents(out, store))
                (trace / 'started').write_text('')
                kill = None if last else (draw.randrange(ranks), draw.randrange(1, MOMENTS[ranks]))
                codes = run(ranks, [str(tars), out, *common], trace, kill)
                started = [int(line) for line in (trace / 'started').read_text().split()]
                assert len(started) == len(set(started)) and not done & set(started), (codes, done, started)
                found = contents(out, store)
                if -signal.SIGKILL in codes:
                    kills[ranks, 'index.json' in found] += 1
                elif 'index.json' in found:
                    break
                ranks = draw.choice((1, 2))
            assert contents(out, store) == expected, (trace / 'log').read_text()
        assert sum(kills.values()) >= trials // 2, kills


def test_the_line_of_a_lost_rank_says_how_to_go_on(tars, tmp_path):
    for lost, moment in ((0, 20), (1, 2)):  # rank 1 may come too late for any part
        trace = tmp_path / f'trace{lost}'
        trace.mkdir()
        codes = run(2, [str(tars), f'{tmp_path}/out{lost}', '--size_limit', '1kb'], trace, (lost, moment))
        assert codes[lost] == -signal.SIGKILL and codes[1 - lost] != 0
        [line] = (trace / 'log').read_text().splitlines()
        assert line.startswith('convert.py: error: ') and f'what is done stays in OUT {tmp_path}/out{lost}' in line
