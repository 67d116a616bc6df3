"""Measure on the GPUs of this machine speed, memory, exactness, a training's life, and how well they were forecast.

    python -m benchmarks.proof results/8xH100                # or make proof: half an hour on an H100
    python -m benchmarks.proof results/8xH100 --minutes 5    # only the first steps, which tell the most
    python -m benchmarks.proof --smoke                       # make smoke: two runs, appended to results.jsonl

Each step is a process of its own with a limit of time, and its result is appended to FOLDER/records.jsonl at once. The
same command goes on with the steps that have none; another commit or other libraries need another FOLDER. At the end
FOLDER/proof.html has a table of each part, and FOLDER is what to send in. Without a GPU, or with --tiny, the tiny model
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
from pathlib import Path

from benchmarks.proof.page import write_proof
from sdbench.errors import UserError
from sdbench.flags.train import SD2_BASE
from sdbench.gpus import CARDS
from sdbench.process import begin, one_line_errors
from sdbench.records.setup import forecast_command
from sdbench.records.summary import PLAN_COMMAND
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
LIMIT = 1200  # seconds after which a step is ended; the longest takes 200 on an H100
# Each switch of speed alone, with what follows from it, and the defaults that they are compared with
ONE_SWITCH = {
    'defaults': [],
    'channels last': ['--channels_last'],
    'half-precision norms': ['--half_precision_norms'],
    'compile': ['--compile', '--no-compile_blocks'],
    'compile blocks': ['--compile', '--compile_blocks'],
    "cuDNN's attention": ['--attention', 'cudnn'],
    "xformers' attention": ['--attention', 'xformers'],
    'cuDNN benchmark': ['--cudnn_benchmark'],
    'float32 encoders': ['--encoder_precision', 'fp32'],
    'plain optimizer': ['--no-fused_optimizer'],
}
Steps = dict[str, tuple[str, ...]]  # by name what runs: a script, on all devices, or `-m` and a module; and its flags


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


def speed(*flags: str) -> tuple[str, ...]:
    """Return a measurement with the average, unless the flags say otherwise, and without data."""
    source = () if '--use_synth_latents' in flags else ('--use_synth_data',)
    return 'benchmark.py', *source, '--use_ema', *flags


def check(work: str, *flags: str) -> tuple[str, ...]:
    """Return the call of a function of benchmarks/proof/steps.py."""
    return '-m', 'benchmarks.proof.steps', work, *flags


def smoke_steps(machine: Machine) -> Steps:
    """Return the steps of the two recipes on GPUs, with 64 images on each; of the tiny model's defaults on a CPU."""
    flags = machine.batch_flags(64)
    if machine.gpus == 0:
        return {'defaults': speed(*flags)}
    if machine.gib < LEAST_GIB:
        flags += SMALLEST
    return {'original': speed('@recipes/original.txt', *flags), 'fastest': speed('@recipes/fastest.txt', *flags)}


def speed_steps(machine: Machine) -> Steps:
    """Return the steps of both recipes at each microbatch, and of each switch of speed alone at one, on GPUs."""
    sizes = [4, 8, 16, 32]
    common = 8 if machine.gib < 60 else 16  # the microbatch at which switches are compared
    small = []
    if machine.gib < LEAST_GIB:
        sizes, common, small = [1, 2], 1, ['--no-use_ema']
    if machine.tiny:
        sizes, common = [1, 2], 4

    # each recipe at each microbatch
    flags = [*machine.batch_flags(32), *small, '--device_train_microbatch_size']
    many = [*machine.batch_flags(128), *small, '--device_train_microbatch_size', 'auto']
    eager = ['@recipes/fastest.txt', '--no-compile']
    steps = {'eager, largest': speed(*eager, *many),
             'latents, eager, largest': speed(*eager, *many, '--use_synth_latents')}
    for size in sizes:
        steps[f'eager, {size}'] = speed(*eager, *flags, str(size))
    for size in sizes[1:]:
        steps[f'original, {size}'] = speed('@recipes/original.txt', *flags, str(size))
    steps['original, largest'] = speed('@recipes/original.txt', *many)

    # each switch alone
    for name, switches in ONE_SWITCH.items():
        steps[name] = speed(*flags, str(common), *switches)
    if machine.gpus > 1:
        steps['bf16 exchange'] = speed(*flags, str(common), '--allreduce_precision', 'bf16')
    return steps


def all_steps(machine: Machine) -> Steps:
    """Return the steps of a proof, the most telling first."""
    # what must hold
    tiny = replace(machine, tiny=True).batch_flags(4)
    checks = {'exactness': check('exactness'), 'life': check('life', *tiny), 'NaN': check('not_a_number', *tiny)}
    if machine.gpus:
        sizes = ('--batch_size', str(512 * machine.gpus), '--device_train_microbatch_size', '512')
        checks['out of memory'] = check('out_of_memory', *sizes)
    common = '4' if machine.tiny or machine.gib < LEAST_GIB else '16'
    checks['loader'] = check('loader', *machine.batch_flags(32), '--device_train_microbatch_size', common)
    checks['average'] = check('average', 'tiny' if machine.tiny else SD2_BASE)

    # what is measured
    if machine.gpus:
        speeds = speed_steps(machine)
    else:
        flags = machine.batch_flags(4)
        speeds = {'latents': speed(*flags, '--use_synth_latents'),
                  'microbatch of 2': speed(*flags, '--device_train_microbatch_size', '2')}
    return {'identity': check('identity'), **smoke_steps(machine), **checks, **speeds}


def find_machine(tiny: bool) -> Machine:
    """Find the GPUs of this machine."""
    answer = subprocess.run([sys.executable, '-c', PROBE], check=True, capture_output=True, text=True).stdout
    gpus, device, gib = json.loads(answer.splitlines()[-1])
    return Machine(gpus, device, gib, tiny or gpus == 0)


def run_step(program: tuple[str, ...], machine: Machine) -> list[dict]:
    """Run a step; return its records, the last of which says why it failed or was ended.

    The forecast of a measurement follows it.
    """
    is_measurement = program[0] == 'benchmark.py'
    with tempfile.TemporaryDirectory() as name:
        out, log = Path(name, 'records.jsonl'), Path(name, 'log')
        if is_measurement:
            error = run([*machine.launch(*program), '--results', str(out)], log)
        else:
            error = run([sys.executable, *program, str(out)], log)

        # what it has left, and its own line of an error
        records = lines_of(out)
        if error:
            lines = log.read_text(errors='replace').splitlines()
            said = [line for line in lines if 'error:' in line.lower()]
            records.append({'stage': 'proof', 'status': 'failed', 'error': ': '.join([error, *said[-1:]])[:500],
                            'output': '\n'.join(lines)[-3000:]})
        elif is_measurement and records[0]['device'] in CARDS:
            error = run([sys.executable, *forecast_command(records[0], str(out))], log)
            records = lines_of(out)
            if error:
                records.append({'stage': 'proof', 'status': 'failed', 'error': f'the forecast of this run: {error}',
                                'output': log.read_text(errors='replace')[-3000:]})
    return records


def run(command: list[str], log: Path) -> str:
    """Run a command with a limit of time; return how it failed, or ''."""
    with open(log, 'w') as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return f'no end within {LIMIT} s'
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f'exit status {status}' if status else ''


def lines_of(path: Path) -> list[dict]:
    """Read the records of a file, a line each; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def prove(folder: Path, machine: Machine, minutes: float) -> None:
    """Run the steps without a record, as long as there are minutes to begin one, and write proof.html of all records.

    Raises UserError if the records are of another machine, commit or library: a page is of one of each.
    """
    # what an earlier call has appended
    start = time.monotonic()
    path = folder / 'records.jsonl'
    records = lines_of(path)
    here = {'machine': f'{machine.gpus} x {machine.device}', 'model': 'tiny' if machine.tiny else SD2_BASE,
            'commit': git_commit(), 'python': sys.version.split()[0], **package_versions()}
    for record in records:
        for what, now in here.items():
            before = record.get('here', {}).get(what)
            if before != now:
                raise UserError(f'FOLDER {folder} holds the proof of {what} {before}, and here is {what} {now}; '
                                'give a new one')

    # the steps that it has not, one after another, and the page after each
    folder.mkdir(parents=True, exist_ok=True)
    missing = all_steps(machine)
    for record in records:
        missing.pop(record['step'], None)
    command = shlex.join(['python', '-m', 'benchmarks.proof', *sys.argv[1:]])
    write_proof(folder, records, missing, command)
    while missing and time.monotonic() - start < 60 * minutes:
        name = next(iter(missing))
        began = time.monotonic()
        found = run_step(missing.pop(name), machine)
        about = {'step': name, 'step_seconds': round(time.monotonic() - began, 1), 'here': here}
        new = [about | record for record in found]
        with open(path, 'a') as file:
            print(*map(json.dumps, new), sep='\n', file=file)
        records += new
        write_proof(folder, records, missing, command)
        say(f'{name}: {new[-1].get("error") or "done"} in {about["step_seconds"]:.0f} s; {len(missing)} to go')
    say(f'{folder}/proof.html has what holds; send in the folder {folder}')


def smoke(machine: Machine) -> int:
    """Run the first steps of speed by benchmark.py itself, and print the ratio of two; return 1 if one failed, else 0.

    For a GPU that the forecast knows, the forecast for each run is appended to results.jsonl after its record, because
    a plan is corrected by both. A forecast that fails counts as a failure, too.
    """
    speeds = {}
    forecasts_failed = False
    steps = smoke_steps(machine)
    for name, program in steps.items():
        command = [*machine.launch(*program), '--results', str(RESULTS)]
        print(shlex.join(command), flush=True)
        if subprocess.run(command, cwd=ROOT).returncode == 0:
            record = json.loads(RESULTS.read_text().splitlines()[-1])
            speeds[name] = record['images_per_sec']
            if record['device'] in CARDS:
                forecast = subprocess.run([sys.executable, *forecast_command(record, str(RESULTS))], cwd=ROOT,
                                          stdout=subprocess.DEVNULL)
                forecasts_failed = forecasts_failed or forecast.returncode != 0
    if len(speeds) == 2:
        print(comparison(speeds, machine.gib))
    page = RESULTS.with_suffix('.html')
    if subprocess.run([sys.executable, 'report.py', str(RESULTS), '--html', str(page)], cwd=ROOT,
                      stdout=subprocess.DEVNULL).returncode == 0:
        print(f'As a page: {page}')
    print('To try other flags: source .venv/bin/activate, then repeat the command with them')
    if machine.gpus:
        print(f'A plan that these speeds correct: {PLAN_COMMAND.format(RESULTS.name)}')
    return 0 if len(speeds) == len(steps) and not forecasts_failed else 1


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
    parser.add_argument('--minutes', type=float, default=math.inf, help='begin no step later (default: run all)')
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
