"""Measure the GPUs of this machine and check what a training relies on: speed, memory, exactness, resumes, the loader.

    python -m benchmarks.proof results/8xH100                # or make proof; half an hour on an H100
    python -m benchmarks.proof results/8xH100 --minutes 5    # only the first steps, which tell the most

Each step is a command that must show something. Its output is kept in FOLDER/logs. Its result is appended to
FOLDER/records.jsonl as soon as it ends, so the same command continues with the steps that have no result yet. At the
end it prints all results, and report.py writes FOLDER/proof.html from the measurements. A FOLDER holds the results of
one machine with one commit and one set of libraries. Without a GPU, or with --tiny, the steps train the tiny model
instead of Stable Diffusion 2.
"""
import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.smoke import ORIGINAL_GIB, ROOT, Machine, find_machine, measurement, ratio_to_forecast, smoke_runs
from sdbench.errors import UserError
from sdbench.flags.train import SD2_BASE
from sdbench.process import begin, one_line_errors
from sdbench.records.versions import git_commit, package_versions

LIMIT = 1200  # seconds after which a step is killed; the longest one takes 200 on an H100
FAR = 1.25    # a speed this many times its forecast, or its forecast this many times the speed, needs an explanation
CHECK = ('-m', 'benchmarks.proof.checks')
# Flags of each speed switch, which is compared with the defaults
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


class Step(NamedTuple):
    """A command with the line that its output must show.

    Attributes:
        program: a script of this repository, or `-m` and a module, and its flags.
        shows: regular expression that a line of its output must match; the result quotes the last such line.
        fails: whether the command must end with an error instead of exit status 0.
    """
    program: tuple[str, ...]
    shows: str
    fails: bool = False

    @property
    def is_measurement(self) -> bool:
        """Tell whether the step measures a training, whose record belongs into the results."""
        return self.program[0] == 'benchmark.py' and not self.fails


def measuring(*flags: str) -> Step:
    """Return a step that measures a training on synthetic data."""
    return Step(measurement(*flags), r'^images/s ')


def refusing(reason: str, *flags: str) -> Step:
    """Return a step whose training must end with one line that says the reason."""
    program = ('benchmark.py', '--use_synth_data', *flags, '--results', os.devnull)
    return Step(program, f'^benchmark.py: error: .*{reason}', fails=True)


def all_steps(machine: Machine, results: str) -> dict[str, Step]:
    """Return the steps of a proof by name, the most informative ones first. `results` is the file for records."""
    steps = {'machine': Step((*CHECK, 'machine'), 'TFLOP/s')}
    steps |= {name: Step(program, r'^images/s ') for name, program in smoke_runs(machine).items()}

    # Checks. Most train the tiny model, because they are about the program and not about its size.
    tiny = replace(machine, tiny=True).batch_flags(4)
    steps['exactness'] = Step(('-m', 'benchmarks.proof.exactness'), '^thirty steps')
    steps['resume'] = Step((*CHECK, 'resume', *tiny), '^after a kill')
    steps['NaN'] = refusing('not finite', *tiny, '--learning_rate', '1e38')
    if machine.gpus:
        too_large = ['--batch_size', str(512 * machine.gpus), '--device_train_microbatch_size', '512']
        steps['out of memory'] = refusing('out of memory', *too_large, '--use_ema')
    microbatch = '4' if machine.tiny or machine.gib < ORIGINAL_GIB else '16'
    steps['loader'] = Step((*CHECK, 'loader', '--results', results, *machine.batch_flags(32),
                            '--device_train_microbatch_size', microbatch), '^loader alone')
    ema_update = ('-m', 'benchmarks.ema_update', 'tiny' if machine.tiny else SD2_BASE)
    steps['EMA update'] = Step(ema_update, r'^update ratio [1-9]')  # faster than Composer's update

    # Speeds
    if machine.gpus:
        return steps | speed_steps(machine)
    flags = machine.batch_flags(4)
    steps['latents'] = measuring(*flags, '--use_synth_latents')
    steps['microbatch of 2'] = measuring(*flags, '--device_train_microbatch_size', '2')
    return steps


def speed_steps(machine: Machine) -> dict[str, Step]:
    """Return the steps that measure both recipes at each microbatch, and each speed switch alone at one microbatch."""
    sizes = [4, 8, 16, 32]
    common = 8 if machine.gib < 60 else 16  # the microbatch for comparing switches
    small = []
    if machine.gib < ORIGINAL_GIB:
        sizes, common, small = [1, 2], 1, ['--no-use_ema']
    if machine.tiny:
        sizes, common = [1, 2], 4

    # Both recipes at each microbatch, the fastest without its compiler, which takes minutes for each microbatch
    flags = [*machine.batch_flags(32), *small, '--device_train_microbatch_size']
    large_batch = [*machine.batch_flags(128), *small, '--device_train_microbatch_size', 'auto']
    eager = ['@recipes/fastest.txt', '--no-compile']
    steps = {'eager, largest': measuring(*eager, *large_batch),
             'latents, eager, largest': measuring(*eager, *large_batch, '--use_synth_latents')}
    for size in sizes:
        steps[f'eager, {size}'] = measuring(*eager, *flags, str(size))
    for size in sizes[1:]:
        steps[f'original, {size}'] = measuring('@recipes/original.txt', *flags, str(size))
    steps['original, largest'] = measuring('@recipes/original.txt', *large_batch)

    # Each switch alone
    for name, switches in ONE_SWITCH.items():
        steps[name] = measuring(*flags, str(common), *switches)
    if machine.gpus > 1:
        steps['bf16 all-reduce'] = measuring(*flags, str(common), '--allreduce_precision', 'bf16')
    return steps


def run_step(step: Step, machine: Machine, results: Path, log: Path) -> tuple[bool, str]:
    """Run a step. Return whether it succeeded, and the line that it showed or how it failed."""
    if step.is_measurement:
        status = run([*machine.launch(*step.program), '--results', str(results)], log)
    elif step.fails:
        status = run(machine.launch(*step.program), log)
    else:
        status = run([sys.executable, *step.program], log)

    # If the step did not end as it must, return its last error.
    lines = log.read_text(errors='replace').splitlines()
    shown = [line for line in lines if re.search(step.shows, line)]
    if status is None:
        return False, f'no end within {LIMIT} s'
    if not shown or (status != 0) != step.fails:
        errors = [line for line in lines if 'error:' in line.lower()]
        return False, ': '.join([f'exit status {status}', *[*errors, *shown][-1:]])
    result = ' '.join(shown[-1].split())
    if not step.is_measurement:
        return True, result

    # Compare a measurement with the forecast for its setup.
    ratio = ratio_to_forecast(read_lines(results)[-1])
    if ratio is None:
        return True, result
    return machine.tiny or 1 / FAR <= ratio <= FAR, f'{result}; {ratio:.2f} times the forecast'


def run(command: list[str], log: Path) -> int | None:
    """Run a command, append its output to `log`, and return its exit status. After LIMIT it is killed: None."""
    with open(log, 'a') as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks and workers, too
                process.wait()


def read_lines(path: Path) -> list[dict]:
    """Return the JSON objects in a file, one per line; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def prove(folder: Path, machine: Machine, minutes: float) -> None:
    """Run the steps that have no result yet, start none after `minutes`, print all results and write proof.html.

    Raises UserError if the results in `folder` are from another machine, commit or version of a library.
    """
    path = (folder / 'records.jsonl').resolve()
    results = {record['step']: record for record in read_lines(path) if record['stage'] == 'proof'}
    here = {'machine': f'{machine.gpus} x {machine.device}', 'model': 'tiny' if machine.tiny else SD2_BASE,
            'commit': git_commit(), 'python': sys.version.split()[0], **package_versions()}
    for result in results.values():
        for what, now in here.items():
            before = result['here'].get(what)
            if before != now:
                raise UserError(f'FOLDER {folder} has results with {what} {before}, but this is {what} {now}; give a '
                                'new FOLDER')

    # Run one step after another. A result is written after its step, so an interrupted step runs again next time.
    start = time.monotonic()
    logs = folder / 'logs'
    logs.mkdir(parents=True, exist_ok=True)
    steps = all_steps(machine, str(path))
    missing = [name for name in steps if name not in results]
    while missing and time.monotonic() - start < 60 * minutes:
        name = missing.pop(0)
        began = time.monotonic()
        log = logs / f'{name}.txt'
        log.write_text('')  # without the output of an interrupted attempt
        holds, text = run_step(steps[name], machine, path, log)
        results[name] = {'stage': 'proof', 'step': name, 'holds': holds, 'result': text,
                         'seconds': round(time.monotonic() - began, 1), 'here': here}
        with open(path, 'a') as file:
            print(json.dumps(results[name]), file=file)
        print(result_line(results[name]), f'({len(missing)} to go)', file=sys.stderr, flush=True)

    # Print the failed steps last, because the end of the output is seen first.
    for result in sorted(results.values(), key=lambda result: not result['holds']):
        print(result_line(result))
    if missing:
        print(f'Not run yet: {", ".join(missing)}')
    if any(record['stage'] != 'proof' for record in read_lines(path)):
        report = [sys.executable, 'report.py', str(path), '--html', str(path.with_name('proof.html'))]
        subprocess.run(report, cwd=ROOT, stdout=subprocess.DEVNULL)
    print(f'To send in the results, make a pull request with the folder {folder}')


def result_line(result: dict) -> str:
    """Return the result of a step as a line of text."""
    verdict = 'ok' if result['holds'] else 'FAILED'
    return f'{verdict:<6}  {result["step"]}, {result["seconds"]:.0f} s: {result["result"]}'


def main(argv: list[str] | None = None) -> int:
    begin()  # prepares the environment, which the steps inherit
    parser = argparse.ArgumentParser('proof.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, metavar='FOLDER', help='folder for the records, the logs and the page')
    parser.add_argument('--minutes', type=float, default=math.inf,
                        help='minutes after which no further step starts (default: all steps run)')
    parser.add_argument('--tiny', action='store_true', help='train the tiny model on GPUs, too')
    args = parser.parse_args(argv)
    with one_line_errors('proof.py'):
        prove(args.folder, find_machine(args.tiny), args.minutes)
        return 0


if __name__ == '__main__':
    sys.exit(main())
