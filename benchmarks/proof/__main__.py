"""Measure on the GPUs of this machine speed, memory, exactness, a training's life, and how well they were forecast.

    python -m benchmarks.proof results/8xH100                # or make proof: half an hour on an H100
    python -m benchmarks.proof results/8xH100 --minutes 5    # only the first steps, which tell the most
    python -m benchmarks.proof --smoke                       # make smoke: two runs, appended to results.jsonl

Each step is a process of its own with a limit of time, and its result is appended to FOLDER/records.jsonl at once. The
same command goes on with the steps that have none; another commit or other libraries need another FOLDER. At the end
FOLDER/proof.md has a table of each part, and FOLDER is what to send in. Without a GPU, or with --tiny, the tiny model
takes the place of Stable Diffusion 2.
"""
import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.proof.page import write_page
from sdbench.errors import DataError
from sdbench.flags.train import SD2_BASE
from sdbench.gpus import CARDS
from sdbench.process import begin, one_line_errors
from sdbench.records.record import append_line
from sdbench.records.summary import PLAN_COMMAND, forecast_command
from sdbench.records.versions import git_commit, package_versions

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / 'results.jsonl'  # of make smoke
LEAST_GIB = 30  # of a GPU that runs the recipes as they are: the original's microbatch of 4 takes 24
SMALLEST = ['--device_train_microbatch_size', '1', '--no-use_ema']  # several GPUs of 24 GB have no room for the average
TINY = ['--model_name', 'tiny', '--image_size', '64']
# asked in another process, since one that has asked holds memory of the GPU
PROBE = """
import json, torch
gpus = torch.cuda.device_count()
properties = torch.cuda.get_device_properties(0) if gpus else None
print(json.dumps([gpus, properties.name if gpus else 'CPU', properties.total_memory / 2 ** 30 if gpus else 0]))
"""
PATIENCE = 10  # a step is ended after this many times as long as it takes on an H100


@dataclass(frozen=True)
class Machine:
    """Where the steps run.

    Attributes:
        gpus: how many; 0: a CPU.
        device: name of the first GPU, or CPU.
        gib: memory of the first GPU.
        tiny: the tiny model takes the place of Stable Diffusion 2.
    """
    gpus: int
    device: str
    gib: float
    tiny: bool

    def launch(self, *program: str) -> list[str]:
        """Return the command that runs a script, or `-m` and a module, on all devices.

        One device needs no launcher, which would import all twice.
        """
        if self.gpus > 1:
            return [sys.executable, '-m', 'composer.cli.launcher', '-n', str(self.gpus), *program]
        return [sys.executable, *program]

    def batch_flags(self, device_batch_size: int) -> list[str]:
        """Return the flags of the model and of a batch of so many images on each device; of the tiny model it is 4."""
        devices = max(1, self.gpus)
        if self.tiny:
            return [*TINY, '--batch_size', str(4 * devices)]
        return ['--batch_size', str(device_batch_size * devices)]


@dataclass(frozen=True)
class Step:
    """One process of the proof.

    Attributes:
        name: in the records.
        seconds: how long it takes on an H100, about.
        program: what runs: a script, or `-m` and a module, and its flags. A script runs on all devices.
        expectation: of its speed, written down before it was measured.
    """
    name: str
    seconds: int
    program: tuple[str, ...]
    expectation: str = ''


def speed(name: str, seconds: int, expectation: str, *flags: str) -> Step:
    """Return a measurement with the average, unless the flags say otherwise, and without data."""
    source = () if '--use_synth_latents' in flags else ('--use_synth_data',)
    return Step(name, seconds, ('benchmark.py', *source, '--use_ema', *flags), expectation)


def check(name: str, seconds: int, work: str, *flags: str) -> Step:
    """Return a step that runs a function of benchmarks/proof/steps.py."""
    return Step(name, seconds, ('-m', 'benchmarks.proof.steps', work, *flags))


def smoke_steps(machine: Machine) -> list[Step]:
    """Return the steps of the two recipes on GPUs, with 64 images on each; of the tiny model's defaults on a CPU."""
    flags = machine.batch_flags(64)
    if machine.gpus == 0:
        return [speed('defaults', 20, '', *flags)]
    if machine.gib < LEAST_GIB:
        flags += SMALLEST
    return [speed('original', 90, 'that of the published 16 images/s on an A100', '@recipes/original.txt', *flags),
            speed('fastest', 200, '20 to 60 % over the defaults', '@recipes/fastest.txt', *flags)]


def speed_steps(machine: Machine) -> list[Step]:
    """Return the steps of both recipes at each microbatch, and of each switch of speed alone at one, on GPUs."""
    sizes = [4, 8, 16, 32]
    common = 8 if machine.gib < 60 else 16  # the microbatch at which switches are compared
    small = []
    if machine.gib < LEAST_GIB:
        sizes, common, small = [1, 2], 1, ['--no-use_ema']
    if machine.tiny:
        sizes, common = [1, 2], 4

    # each recipe at each microbatch
    flags = [*machine.batch_flags(32), *small]
    many = [*machine.batch_flags(128), *small, '--device_train_microbatch_size', 'auto']
    at = '--device_train_microbatch_size'
    eager = ['@recipes/fastest.txt', '--no-compile']

    steps = [speed('eager, largest', 70, 'most of what the compiler gives, without its minutes', *eager, *many),
             speed('latents, eager, largest', 60, '1.3 to 1.5 times as fast as the same on images', *eager, *many,
                   '--use_synth_latents')]
    for size in sizes:
        steps.append(speed(f'eager, {size}', 40, 'by the forecast', *eager, *flags, at, str(size)))
    for size in sizes[1:]:
        steps.append(speed(f'original, {size}', 55, 'by the forecast', '@recipes/original.txt', *flags, at, str(size)))
    steps.append(speed('original, largest', 150, 'by the forecast', '@recipes/original.txt', *many))

    # each switch alone
    flags += [at, str(common)]
    for name, seconds, expectation, switches in (
            ('defaults', 40, 'what the following are compared with', []),
            ('channels first', 40, "-10 to +10 %: torch 2.7's group norm answers in channels first",
             ['--no-channels_last']),
            ('half-precision norms', 40, '5 to 15 %', ['--half_precision_norms']),
            ('compile', 130, '15 to 30 %', ['--compile', '--no-compile_blocks']),
            ('compile blocks', 90, 'that of compile within 5 %, a shorter start', ['--compile', '--compile_blocks']),
            ("cuDNN's attention", 40, '2 to 5 %', ['--attention', 'cudnn']),
            ("xformers' attention", 40, '2 to 5 %, where FlashAttention 3 is built', ['--attention', 'xformers']),
            ('cuDNN benchmark', 45, '1 to 5 %', ['--cudnn_benchmark']),
            ('float32 encoders', 40, '-3 to -8 %', ['--encoder_precision', 'fp32']),
            ('plain optimizer', 40, '0 to -1 %', ['--no-fused_optimizer']),
            ('bf16 exchange', 40, '0 to 1 % within a node', ['--allreduce_precision', 'bf16'])):
        if name != 'bf16 exchange' or machine.gpus > 1:
            steps.append(speed(name, seconds, expectation, *flags, *switches))
    return steps


def all_steps(machine: Machine) -> list[Step]:
    """Return the steps of a proof, the most telling first."""
    # what must hold
    tiny = replace(machine, tiny=True).batch_flags(4)
    checks = [check('exactness', 90, 'exactness'), check('life', 120, 'life', *tiny),
              check('NaN', 25, 'not_a_number', *tiny)]
    if machine.gpus:
        sizes = ('--batch_size', str(512 * machine.gpus), '--device_train_microbatch_size', '512')
        checks.append(check('out of memory', 40, 'out_of_memory', *sizes))
    common = '4' if machine.tiny or machine.gib < LEAST_GIB else '16'
    loader_flags = [*machine.batch_flags(32), '--device_train_microbatch_size', common]
    checks += [check('loader', 110, 'loader', *loader_flags),
               check('average', 25, 'average', 'tiny' if machine.tiny else SD2_BASE)]

    # what is measured
    if machine.gpus:
        speeds = speed_steps(machine)
    else:
        flags = machine.batch_flags(4)
        speeds = [speed('latents', 20, '', *flags, '--use_synth_latents'),
                  speed('microbatch of 2', 20, '', *flags, '--device_train_microbatch_size', '2')]
    return [check('identity', 25, 'identity'), *smoke_steps(machine), *checks, *speeds]


def find_machine(tiny: bool) -> Machine:
    """Find the GPUs of this machine."""
    answer = subprocess.run([sys.executable, '-c', PROBE], check=True, capture_output=True, text=True).stdout
    gpus, device, gib = json.loads(answer.splitlines()[-1])
    return Machine(gpus, device, gib, tiny or gpus == 0)


@cache
def program() -> dict[str, str | None]:
    """Return the commit of this program and the versions of its libraries: all records of a FOLDER have the same."""
    return {'commit': git_commit(), 'python': sys.version.split()[0], **package_versions()}


def run_step(step: Step, machine: Machine, limit: float) -> tuple[list[dict], bool]:
    """Run a step; return its records, and whether it ended by itself within `limit` seconds.

    The forecast of a measurement follows it. The last record of a step that failed, or was ended, says why.
    """
    with tempfile.TemporaryDirectory() as name:
        out, log = Path(name, 'records.jsonl'), Path(name, 'log')
        start = time.monotonic()
        if step.program[0] == 'benchmark.py':
            command = [*machine.launch(*step.program), '--results', str(out)]
        else:
            command = [sys.executable, *step.program, str(out)]
        error, ended_by_itself = run(command, log, limit)
        records = lines_of(out)

        # what it has left, and its own line of an error
        if error:
            lines = log.read_text(errors='replace').splitlines()
            said = [line for line in lines if 'error:' in line.lower()]
            records.append({'stage': 'proof', 'status': 'failed', 'error': ': '.join([error, *said[-1:]])[:500],
                            'output': '\n'.join(lines)[-3000:]})
        elif step.program[0] == 'benchmark.py' and records[0]['device'] in CARDS:
            run([sys.executable, *forecast_command(records[0], str(out))], log, PATIENCE * 60)
            records = lines_of(out)
        about = {'step': step.name, 'step_seconds': round(time.monotonic() - start, 1),
                 'expectation': step.expectation, 'machine': [machine.gpus, machine.device, machine.tiny],
                 'program': program()}
    return [about | record for record in records], ended_by_itself


def run(command: list[str], log: Path, limit: float) -> tuple[str, bool]:
    """Run a command with a limit of seconds; return how it failed, or '', and whether it ended by itself."""
    with open(log, 'w') as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f'no end within {limit:.0f} s', False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f'exit status {status}' if status else '', True


def lines_of(path: Path) -> list[dict]:
    """Read the records of a file, a line each; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_records(path: Path, machine: Machine) -> list[dict]:
    """Return what an earlier call has appended: a page is of one machine, one commit and one set of libraries.

    Raises ValueError if that was of others.
    """
    records = lines_of(path)
    here = [machine.gpus, machine.device, machine.tiny]
    for record in records:
        if record['machine'] != here:
            gpus, device, _ = record['machine']
            raise ValueError(f'FOLDER {path.parent} holds the proof of another machine or model ({gpus} x {device}); '
                             'give a new one')
        for what, now in program().items():
            before = record.get('program', {}).get(what)
            if before != now:
                raise ValueError(f'FOLDER {path.parent} holds the proof of {what} {before}, and here is {what} {now}; '
                                 'give a new one')
    return records


def prove(folder: Path, machine: Machine, minutes: float | None) -> None:
    """Run the steps that have no record, and write proof.md of all records."""
    # the steps that have no record
    start = time.monotonic()
    path = folder / 'records.jsonl'
    records = read_records(path, machine)
    folder.mkdir(parents=True, exist_ok=True)
    done = {record['step'] for record in records}
    missing = [step for step in all_steps(machine) if step.name not in done]
    say(f'{len(missing)} steps, on an H100 about {sum(step.seconds for step in missing) / 60:.0f} minutes')

    # one after another, and the page of all, also where it ends early
    try:
        while missing:
            step = missing[0]
            patience = PATIENCE * step.seconds
            left = math.inf if minutes is None else 60 * minutes - (time.monotonic() - start)
            if left < step.seconds:
                break
            new, ended_by_itself = run_step(step, machine, min(patience, left))
            if not ended_by_itself and left < patience:  # for want of minutes: it is still to be run
                say(f'{step.name}: ended for want of minutes; the same command repeats it')
                break
            with open(path, 'a') as file:
                print(*map(json.dumps, new), sep='\n', file=file)
            records += new
            missing.pop(0)
            say(f'{step.name}: {new[-1].get("error") or "done"} in {new[-1]["step_seconds"]:.0f} s')
    finally:
        write_page(folder, records, [step.name for step in missing])
        say(f'{folder}/proof.md has what holds; send in the folder {folder}')


def smoke(machine: Machine) -> int:
    """Run the first steps of speed by benchmark.py itself, and print the ratio of two; return 1 if one failed, else 0.

    Each run hands over its record, which is appended to results.jsonl: other runs write there as well. On GPUs that are
    known the forecast of the run follows, so that the two correct a plan.
    """
    speeds = {}
    steps = smoke_steps(machine)
    for step in steps:
        command = machine.launch(*step.program)
        print(shlex.join(command), flush=True)
        done = subprocess.run([*command, '--results', '-'], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for line in done.stdout.splitlines():
            if not line.startswith('{'):
                print(line)
                continue
            record = json.loads(line)
            try:
                append_line(line, str(RESULTS))
            except DataError:
                print(line, flush=True)
                raise
            print(f'{"record":<15} appended to {RESULTS.name}', flush=True)
            if done.returncode == 0:
                speeds[step.name] = record['images_per_sec']
                if record['device'] in CARDS:
                    program = forecast_command(record, str(RESULTS))
                    subprocess.run([sys.executable, *program], cwd=ROOT, stdout=subprocess.DEVNULL)
    if len(speeds) == 2:
        print(comparison(speeds, machine.gib))
    print('To try other flags: source .venv/bin/activate, then repeat the command with them')
    if machine.gpus:
        print(f'A plan that these speeds correct: {PLAN_COMMAND.format(RESULTS.name)}')
    return 0 if len(speeds) == len(steps) else 1


def comparison(speeds: dict[str, float], gib: float) -> str:
    """Return both speeds and their ratio as text; of GPUs of less than LEAST_GIB, also what the recipes changed in."""
    original, fastest = speeds['original'], speeds['fastest']
    text = (f'recipes/original.txt  {original:.4g} images/s\n'
            f'recipes/fastest.txt   {fastest:.4g} images/s, {fastest / original:.2f} times as fast')
    if gib < LEAST_GIB:
        text += (f'\nboth with {" ".join(SMALLEST)}: a GPU here has {gib:.1f} GiB, and the microbatch of 4 in '
                 'recipes/original.txt takes 24')
    return text


def say(text: str) -> None:
    """Print to the log of the proof."""
    print(f'proof.py: {text}', file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    begin()  # the environment of a command, which the steps inherit
    parser = argparse.ArgumentParser('proof.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, nargs='?', help='of the records and the page')
    parser.add_argument('--minutes', type=float, help='leave out the last steps, which would take longer')
    parser.add_argument('--tiny', action='store_true', help='take the tiny model on GPUs too')
    parser.add_argument('--smoke', action='store_true', help='only the two recipes, appended to results.jsonl')
    args = parser.parse_args(argv)
    if (args.folder is None) != args.smoke:
        parser.error('give a FOLDER or --smoke')
    with one_line_errors('proof.py'):
        machine = find_machine(args.tiny)
        if args.smoke:
            return smoke(machine)
        prove(args.folder, machine, args.minutes)
        return 0


if __name__ == '__main__':
    sys.exit(main())
