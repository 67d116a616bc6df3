"""Run commands and ranks in processes that are forked from a process that has imported the program."""
import ctypes
import io
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from composer import Callback

import benchmark
from tests.runs import TINY, free_port

RUN = ['--use_ema', *TINY[:-2], '--max_duration', '12ba', '--autoresume']


def become_rank(rank: int, ranks: int, nodes: int, port: int, log: Path, function: Callable, arguments: tuple) -> None:
    """Turn this new process into a rank: set a launcher's variables, print to `log`, and call the function."""
    local_ranks = ranks // nodes
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % local_ranks), NODE_RANK=str(rank // local_ranks),
                      WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(local_ranks), MASTER_ADDR='127.0.0.1',
                      MASTER_PORT=str(port), OMP_NUM_THREADS='1')
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    multiprocessing.set_start_method('fork', force=True)  # for workers of a loader
    torch.set_num_threads(1)
    function(*arguments)


def become_program(folder: Path, disk: tuple[int, str] | None, environment: dict[str, str], function: Callable,
                   argv: list[str]) -> None:
    """Turn this new process into a command that runs in `folder` and prints into the files `out` and `err`.

    The arguments are those of `run_program`, but `environment` is all variables. The files on the disk are copied to
    `folder / 'disk'` at the end.
    """
    for name, number in (('out', 1), ('err', 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(environment)
    tempfile.tempdir = None  # the fork server has looked it up with another environment
    os.chdir(folder)
    multiprocessing.set_start_method('fork', force=True)  # for workers of a loader
    if disk:
        mount_small_disk(*disk)
        del forkserver._forkserver.ensure_running  # start a new fork server, because the old one does not see the disk
    try:
        function(argv)
    finally:
        if disk:
            shutil.copytree(disk[1], folder / 'disk', ignore=shutil.ignore_patterns('pymp-*'))  # sockets of processes


def mount_small_disk(megabytes: int, where: str) -> None:
    """Mount a file system of this size at `where` that only this process and its children see."""
    clone_newns = 0x20000
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newns):
        raise OSError(ctypes.get_errno(), 'unshare')
    for arguments in (['--make-rprivate', '/'], ['-t', 'tmpfs', '-o', f'size={megabytes}m', 'tmpfs', where]):
        subprocess.run(['mount', *arguments], check=True)


def skip_unless_mounts_are_allowed(where: str) -> None:
    """Skip the test if this user may not mount a file system."""
    may_mount = ['unshare', '--mount', 'sh', '-c', f'mount -t tmpfs tmpfs {where}']
    if subprocess.run(may_mount, capture_output=True).returncode:
        pytest.skip('needs to mount a file system, which this user may not do')


def run_program(server, folder: Path, function: Callable, argv: list, disk: tuple[int, str] | None = None,
                **environment: str) -> tuple[int, str, str]:
    """Call `function(argv)` in a new process that runs in `folder`. Return its exit code, stdout and stderr.

    `disk` is the size in megabytes and the path of a file system that only the process sees. `environment` is added to
    the variables of this process.
    """
    if disk:
        os.makedirs(disk[1], exist_ok=True)
        skip_unless_mounts_are_allowed(disk[1])
    folder.mkdir(exist_ok=True)
    arguments = (folder, disk, {**os.environ, **environment}, function, list(map(str, argv)))
    process = server.Process(target=become_program, args=arguments)
    process.start()
    process.join(1800)
    code = process.exitcode
    process.kill()  # if it still runs, pytest would wait for it at the end
    assert code is not None, (folder / 'err').read_text()
    return code, (folder / 'out').read_text(), (folder / 'err').read_text()


def script(argv: list[str]) -> None:
    """Run a script as `python ARGV` does."""
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    runpy.run_path(os.path.abspath(argv[0]), run_name='__main__')


def on_small_disk(server, megabytes: int, where: str, argv: list, folder: Path) -> str:
    """Run the benchmark with a file system of this size at `where`. Return its one-line error."""
    code, _, errors = run_program(server, folder, benchmark.main, argv, (megabytes, str(where)))
    assert code in (1, 2) and 'Traceback' not in errors, errors
    [line] = [line for line in errors.splitlines() if 'error:' in line]
    return line


def run_ranks(server, logs: list[Path], function: Callable, arguments: list[tuple], nodes: int = 1) -> list[int]:
    """Call `function` on several ranks, and kill all ranks when one fails. Return their exit codes.

    `logs` and `arguments` have an item for each rank. The ranks seem to run on this number of nodes.
    """
    port = free_port()
    ranks = len(arguments)
    for log in logs:
        log.touch()  # a rank can be killed before it opens its log
    processes = []
    for rank in range(ranks):
        about_rank = (rank, ranks, nodes, port, logs[rank], function, arguments[rank])
        processes.append(server.Process(target=become_rank, args=about_rank))
        processes[rank].start()
    end = time.monotonic() + 600
    while any(process.exitcode is None for process in processes):
        is_late = time.monotonic() > end
        if is_late or any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
        assert not is_late, [log.read_text() for log in set(logs)]
        time.sleep(0.02)
    return [process.exitcode for process in processes]


def mortal_run(rank: int, argv: list[str], kill: tuple | None) -> None:
    """Train, and kill the process at this moment of this batch: ('start' or 'update' or 'write' or 'link', batch)."""
    moment, batch_to_die = kill or (None, None)

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    class Killer(Callback):
        def batch_start(self, state, logger):
            if (moment, batch_to_die) == ('start', state.timestamp.batch.value):
                die()

        def after_train_batch(self, state, logger):
            if (moment, batch_to_die) == ('update', state.timestamp.batch.value):
                die()

        def batch_end(self, state, logger):
            if state.timestamp.batch.value == batch_to_die and rank == 0:
                if moment == 'write':
                    torch.save = save_half
                elif moment == 'link':
                    os.symlink = die

    save = torch.save

    def save_half(state, file, **options):
        if not hasattr(file, 'name'):  # torch also pickles tensors with this function
            return save(state, file, **options)
        whole = io.BytesIO()
        save(state, whole)
        file.write(whole.getvalue()[:whole.tell() // 2])
        file.flush()
        die()

    benchmark.main(argv, [Killer()])


def run(server, ranks: int, argv: list, folder: Path, kill=None) -> list[int]:
    """Train on several ranks, and kill all ranks when one fails. Return their exit codes."""
    folder.mkdir(exist_ok=True)
    argv = [*map(str, argv), '--save_folder', str(folder / 'checkpoints'), '--results', str(folder / 'results.jsonl')]
    return run_ranks(server, [folder / 'log'] * ranks, mortal_run, [(rank, argv, kill) for rank in range(ranks)])
