"""Commands as processes of tests: they end with their own exit status, print where they are told, and note the
processes that work for them."""
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import convert
from parts.work import LocalWorkers
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
    note_workers(log.with_name(f'{log.name}-workers'))
    program(argv)


def note_workers(file: Path) -> None:
    """From here on keep the numbers of the processes that work for this one in `file`."""
    call = LocalWorkers.call

    def noted_call(self: LocalWorkers, parts: list):
        answer = call(self, parts)
        file.write_text(' '.join(str(pid) for pool in self.pools.values() for pid in pool._processes))
        return answer
    LocalWorkers.call = noted_call


def workers_of(log: Path) -> list[int]:
    """The numbers of the processes that work for the command that prints to `log`."""
    file = log.with_name(f'{log.name}-workers')
    return [int(number) for number in file.read_text().split()] if file.exists() else []
