"""Runs of the benchmark as tests start them, and what must hold of every record and every error."""
import contextlib
import dataclasses
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest
import torch
from composer import Callback
from torch._dynamo.testing import CompileCounterWithBackend

from benchmark import main
from ema import EMA
from sdbench.complete import complete, index_of_data
from sdbench.flags.commands import Convert, Encode, Evaluate, Export, Report
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.training.checkpoints import checkpoints_in, load_checkpoint
from tests.records.keys import KEYS

ROOT = Path(__file__).parent.parent

SMALLEST = str(ROOT / 'tests' / 'smallest')  # a model without weights, in which a step takes no time

TINY = ['--model_name', SMALLEST, '--image_size', '16', '--batch_size', '4', '--warmup_batches', '1',
        '--measure_batches', '3']

COMMANDS = {'benchmark.py': Train, 'convert.py': Convert, 'encode.py': Encode, 'evaluate.py': Evaluate,
            'export.py': Export, 'report.py': Report}  # and their flags

def settings_of(*argv) -> Train:
    """Return the settings of a run with these flags, on this machine."""
    settings = parse(Train, '', [str(argument) for argument in argv], 'benchmark.py')
    return complete(settings, index_of_data(settings))


def check_keys(record: dict, command: str) -> None:
    """Check that a record has all flags of its command, and else only keys whose meaning is said."""
    flags = {field.name for field in dataclasses.fields(COMMANDS[command])}
    assert flags <= record.keys()
    unexplained = record.keys() - flags - set(KEYS)
    assert not unexplained, f'"The record" in docs/measuring.md has no row of {", ".join(unexplained)}'


def refusal(capfd, function: Callable, *arguments) -> str:
    """Call what must end in an error of the program's own, and return its one line, behind which there is nothing."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        function(*arguments)
    *said, line = capfd.readouterr().err.splitlines()
    assert exit.value.code in (1, 2), line
    assert ': error: ' in line
    assert not [other for other in said if re.search('error: |Traceback', other)], said
    return line


def failed(argv, results, capfd, callbacks=()) -> str:
    """Train what must fail; return its one line, which the record has too."""
    line = refusal(capfd, main, [*map(str, argv), '--results', str(results)], callbacks)
    record = json.loads(results.read_text().splitlines()[-1])
    assert record['status'] == 'failed'
    assert line.endswith(record['error'])
    return line


def one_error_line(argv: list, capfd, program: Callable = main) -> str:
    """Run a command that must be refused, and return its one line."""
    return refusal(capfd, program, [str(argument) for argument in argv])


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a copy of the tensors as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class Weights(Callback):
    """The UNet's weights and their averages when each batch ends; gradients of some batches are spoilt.

    Args:
        broken: the batches whose gradients are spoilt before the optimizer sees them, counted from 0.
        value: that some of them get.
    """

    def __init__(self, *broken: int, value: float = float('nan')):
        self.broken = broken
        self.value = value
        self.weights: list[torch.Tensor] = []
        self.averages: list[torch.Tensor] = []

    def after_backward(self, state, logger):
        if state.timestamp.batch.value in self.broken:
            next(state.model.unet.parameters()).grad[:2] = self.value

    def batch_end(self, state, logger):
        self.weights.append(flat(state.model.unet.parameters()))
        for algorithm in state.algorithms:
            if isinstance(algorithm, EMA):
                self.averages.append(flat(algorithm.ema_model.named_parameters_dict.values()))


class Signalled(Callback):
    """Sends signals to this process in its fourth batch."""

    def __init__(self, *numbers: int):
        self.numbers = numbers

    def after_loss(self, state, logger):
        if state.timestamp.batch.value == 3:
            for number in self.numbers:
                os.kill(os.getpid(), number)


def assert_equal(one, other) -> None:
    """Check that what two checkpoints hold is the same, tensors to the last bit."""
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


def final_state(folder: str | Path) -> dict:
    """Return the state in the newest checkpoint of a folder."""
    return load_checkpoint(checkpoints_in(str(folder))[-1])['state']


def assert_same_training(one: str | Path, other: str | Path) -> None:
    """Check that weights, optimizer and average of the newest checkpoints in two folders are the same to the last bit.
    """
    states = final_state(one), final_state(other)
    for part in ('model', 'optimizers', 'algorithms'):
        assert_equal(*(state[part] for state in states))


def record_graphs(patch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Have torch compile with a backend that runs graphs as they are; return the list of those that it is given."""
    compile_module = torch.nn.Module.compile
    backend = CompileCounterWithBackend('aot_eager')
    patch.setattr(torch.nn.Module, 'compile',
                  lambda module, **options: compile_module(module, **options | {'backend': backend}))
    return backend.graphs


def files_of(folder: Path) -> dict[str, bytes]:
    """Read all files below a folder, by their names from there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}


def times_of(folder: Path) -> dict[Path, int]:
    """Return when each file below a folder was written, but for locks."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob('*') if path.is_file() and path.suffix != '.lock'}


def write_noting_programs(folder: Path, *names: str) -> None:
    """Write programs of these names that do no more than note how they are called."""
    for name in names:
        program = folder / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\0" {name} "$@" >> {folder}/calls; echo >> {folder}/calls\n')
        program.chmod(0o755)


def calls_of(folder: Path, *names: str) -> list[list[str]]:
    """Return the arguments of each call of the programs of these names."""
    calls = []
    if (folder / 'calls').exists():
        for line in (folder / 'calls').read_text().splitlines():
            name, *arguments = line.split('\0')[:-1]
            if name in names:
                calls.append(arguments)
    return calls


def start(log: Path, *words) -> subprocess.Popen:
    """Start Python with these words of a command line, in the folder of the programs; it prints to `log`.

    It is the first process of a group of its own.
    """
    with open(log, 'w') as file:
        return subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, stdout=file, stderr=file,
                                start_new_session=True)


def workers_of(command: subprocess.Popen) -> list[int]:
    """Return the numbers of the processes that work for a command: those that its server of processes has forked."""
    children = psutil.Process(command.pid).children()
    return [worker.pid for child in children for worker in child.children()]


def free_port() -> int:
    """Return a port of loopback that nothing listens on, and that the system gives to no connection meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)  # not that of a test that has the same seed
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(('127.0.0.1', port))
            return port


def wait_until(true: Callable[[], object], seconds: float = 300) -> None:
    """Wait until `true()` is; fail after that many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
