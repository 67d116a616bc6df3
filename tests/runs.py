"""Run the benchmark in tests, and check what must hold for every record and every error."""
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
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounterWithBackend

from benchmark import main
from ema import EMA
from sdbench.complete import complete, index_of_data
from sdbench.flags.commands import Convert, Encode, Evaluate, Export, Report
from sdbench.flags.parser import parse
from sdbench.flags.plan import PlanSettings
from sdbench.flags.train import Run, Train
from sdbench.training.checkpoints import checkpoints_in, load_checkpoint
from tests.records.keys import KEYS

ROOT = Path(__file__).parent.parent

SMALLEST = str(ROOT / 'tests' / 'smallest')  # a model without weights, whose training steps take no time

TINY = ['--model_name', SMALLEST, '--image_size', '16', '--batch_size', '4', '--warmup_batches', '1',
        '--measure_batches', '3']

COMMANDS = {'benchmark.py': Train, 'convert.py': Convert, 'encode.py': Encode, 'evaluate.py': Evaluate,
            'export.py': Export, 'plan.py': PlanSettings, 'report.py': Report}


def settings_of(*argv) -> Run:
    """Return the settings of a run with these flags, on this machine."""
    settings = parse(Train, '', [str(argument) for argument in argv], 'benchmark.py')
    return complete(settings, index_of_data(settings))


def check_keys(record: dict, command: str) -> None:
    """Check that a record has all flags of its command, and that all other keys are documented."""
    kind = Run if command == 'benchmark.py' else COMMANDS[command]
    flags = {field.name for field in dataclasses.fields(kind)}
    assert flags <= record.keys()
    unexplained = record.keys() - flags - set(KEYS)
    assert not unexplained, f'docs/record.md has no row of {", ".join(unexplained)}'


def refusal(capfd, function: Callable, *arguments) -> str:
    """Call a function that must exit with a one-line error, and return the line. Nothing may be printed after it."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        function(*arguments)
    *said, line = capfd.readouterr().err.splitlines()
    assert exit.value.code in (1, 2), line
    assert ': error: ' in line
    assert not [other for other in said if re.search('error: |Traceback', other)], said
    return line


def failed(argv, results, capfd, callbacks=()) -> str:
    """Run a training that must fail, and return its one-line error. The record must have the same error."""
    line = refusal(capfd, main, [*map(str, argv), '--results', str(results)], callbacks)
    record = json.loads(results.read_text().splitlines()[-1])
    assert record['status'] == 'failed'
    assert line.endswith(record['error'])
    return line


def one_error_line(argv: list, capfd, program: Callable = main) -> str:
    """Run a command that must be refused, and return its one-line error."""
    return refusal(capfd, program, [str(argument) for argument in argv])


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a copy of the tensors as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class Weights(Callback):
    """Keep the UNet's weights and EMA weights after each batch, and set some gradients of some batches to `value`.

    `broken` are these batches, counted from 0. Their gradients are changed before the optimizer step.
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
    """Sends signals to this process in the batch after this many batches."""

    def __init__(self, *numbers: int, batch: int = 3):
        self.numbers = numbers
        self.batch = batch

    def after_loss(self, state, logger):
        if state.timestamp.batch.value == self.batch:
            for number in self.numbers:
                os.kill(os.getpid(), number)


def assert_equal(one, other) -> None:
    """Check that the contents of two checkpoints are equal, tensors bit by bit."""
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


def change_weights(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors in a safetensors file, in place."""
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {'format': 'pt'})


def final_state(folder: str | Path) -> dict:
    """Return the state in a folder's newest checkpoint."""
    return load_checkpoint(checkpoints_in(str(folder))[-1])['state']


def assert_same_training(one: str | Path, other: str | Path) -> None:
    """Check that the newest checkpoints in two folders have equal weights, optimizer state and EMA, bit by bit."""
    states = final_state(one), final_state(other)
    for part in ('model', 'optimizers', 'algorithms'):
        assert_equal(*(state[part] for state in states))


def record_graphs(patch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Let torch compile with a backend that runs graphs unchanged. Return the list of the graphs that it compiles."""
    compile_module = torch.nn.Module.compile
    backend = CompileCounterWithBackend('aot_eager')
    patch.setattr(torch.nn.Module, 'compile',
                  lambda module, **options: compile_module(module, **options | {'backend': backend}))
    return backend.graphs


def files_of(folder: Path) -> dict[str, bytes]:
    """Read all files in a folder and its subfolders. Return their contents by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}


def times_of(folder: Path) -> dict[Path, int]:
    """Return the modification time of each file in a folder and its subfolders, except lock files."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob('*') if path.is_file() and path.suffix != '.lock'}


def write_noting_programs(folder: Path, *names: str) -> None:
    """Write programs with these names that only note their arguments."""
    for name in names:
        program = folder / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\0" {name} "$@" >> {folder}/calls; echo >> {folder}/calls\n')
        program.chmod(0o755)


def calls_of(folder: Path, *names: str) -> list[list[str]]:
    """Return the arguments of each call of the programs with these names."""
    calls = []
    if (folder / 'calls').exists():
        for line in (folder / 'calls').read_text().splitlines():
            name, *arguments = line.split('\0')[:-1]
            if name in names:
                calls.append(arguments)
    return calls


def start(log: Path, *words) -> subprocess.Popen:
    """Start Python with these arguments in a new process group. It prints to `log`."""
    with open(log, 'w') as file:
        return subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, stdout=file, stderr=file,
                                start_new_session=True)


def workers_of(command: subprocess.Popen) -> list[int]:
    """Return the process ids of a command's workers, which its fork server has forked."""
    children = psutil.Process(command.pid).children()
    return [worker.pid for child in children for worker in child.children()]


def free_port() -> int:
    """Return a port on loopback that is free, and that the system does not assign to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)  # tests have the same seed
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(('127.0.0.1', port))
            return port


def wait_until(true: Callable[[], object], seconds: float = 300) -> None:
    """Wait until `true()` returns a true value, and fail after this many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
