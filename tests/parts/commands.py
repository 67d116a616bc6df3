"""Commands as processes of tests: they end with their own exit status, and print where they are told."""
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import convert
from parts.local_workers import LocalWorkers
from tests import process_server


def convert_program(argv: list[str]) -> None:
    """convert.py, with its exit status."""
    sys.exit(convert.main(argv))


def start_logged(server, program: Callable[[list[str]], object], log: Path, argv: list[str]) -> BaseProcess:
    """A program in a process of its own, in the environment of this one, which prints to `log`.

    Its workers are forked from the server as well.
    """
    arguments = (process_server.address(), program, log, argv, dict(os.environ))
    process = server.Process(target=become_logged, args=arguments)
    process.start()
    return process


def become_logged(server_address: str, program: Callable[[list[str]], object], log: Path, argv: list[str],
                  environment: dict[str, str]) -> None:
    os.environ.update(environment)
    process_server.join(server_address)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    note_workers(file_of_workers(log))
    program(argv)


def file_of_workers(log: Path) -> Path:
    return log.with_name(f'{log.name}-workers')


def note_workers(file: Path) -> None:
    """From here on write the number of each worker that this process starts to `file`."""
    start = LocalWorkers.start

    def noted_start(self: LocalWorkers) -> tuple:
        worker = start(self)
        process, *_ = worker
        with open(file, 'a') as numbers:
            print(process.pid, file=numbers)
        return worker
    LocalWorkers.start = noted_start


def workers_of(log: Path) -> list[int]:
    """The numbers of the processes that the command that prints to `log` has started as its workers."""
    file = file_of_workers(log)
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []
