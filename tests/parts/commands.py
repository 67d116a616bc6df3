"""Commands as processes of tests, and the processes that work for them."""
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


def start(log: Path, *words) -> subprocess.Popen:
    """What Python does with these words of a command line, in the folder of the programs; it prints to `log`."""
    with open(log, 'w') as file:
        return subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, stdout=file, stderr=file)


def workers_of(command: subprocess.Popen) -> list[int]:
    """The numbers of the processes that work for a command: those that its own server of processes has forked."""
    children = psutil.Process(command.pid).children()
    return [worker.pid for child in children for worker in child.children()]
