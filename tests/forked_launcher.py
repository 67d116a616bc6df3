"""Composer's launcher, forked from a server, and its ranks, forked from it where it starts a new Python for each."""
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from composer.cli import launcher

from tests.forked_runs import script
from tests.runs import ROOT


def start(server, log: Path, argv: list) -> multiprocessing.Process:
    """`composer ARGV` in a session of its own, printing to `log`."""
    log.touch()
    process = server.Process(target=become_launcher, args=(log, list(map(str, argv))))
    process.start()
    return process


def become_launcher(log: Path, argv: list[str]) -> None:
    """In a process of its own: the launcher, with its exit status."""
    os.setsid()
    os.chdir(ROOT)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    torch.set_num_threads(1)
    multiprocessing.set_start_method('fork', force=True)  # for the workers of the ranks' loaders
    launcher.subprocess = SimpleNamespace(Popen=Rank, STDOUT=subprocess.STDOUT,
                                          CalledProcessError=subprocess.CalledProcessError)
    sys.argv = ['composer', *argv]
    sys.exit(launcher.main())


class Rank:
    """Of `subprocess.Popen` what the launcher uses."""

    def __init__(self, args: list[str], stdout=None, stderr=None, text: bool = True):
        self.args = args
        self.stdout = self.stderr = None
        self.process = multiprocessing.get_context('fork').Process(target=become_rank, args=(args, stdout, stderr))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode


def become_rank(command: list[str], stdout, stderr) -> None:
    """In a process of its own: what Python does with the words of `command`, which prints to these files."""
    python, *argv = command
    assert python == sys.executable
    for number, file in ((1, stdout), (2, stderr)):
        if file is not None:
            os.dup2(file.fileno(), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    script(argv)
