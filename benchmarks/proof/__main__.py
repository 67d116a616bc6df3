"""Measure this machine, and check what a training relies on: speed, memory, exactness, resumes and the loader.

    python -m benchmarks.proof --minutes 0                   # make smoke: only the first steps
    python -m benchmarks.proof results/8xH100                # make proof: all steps; half an hour on an H100
    python -m benchmarks.proof results/8xH100 --minutes 5    # no further step starts after five minutes

Each step is a command that must show something. The first steps train Stable Diffusion 2 on all GPUs with
recipes/original.txt and with recipes/fastest.txt, with a batch of 64 images per GPU. Without a GPU the steps train the
tiny model, which shows that the installation works.

A step's output is in FOLDER/logs, and its result is appended to FOLDER/results.jsonl when it ends, together with the
record of its training. The same command continues with the steps that have not succeeded yet on this machine with this
commit and these libraries. At the end it writes the page FOLDER/results.html.
"""
import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.proof.steps import ROOT, Machine, Step, all_steps, find_machine, first_steps, launch
from sdbench.files import parse_json
from sdbench.process import begin, one_line_errors
from sdbench.records.expected import expected_of
from sdbench.records.record import append_line
from sdbench.records.versions import git_commit, package_versions

LIMIT = 1200  # seconds after which a step is killed; the longest one takes 200 on an H100
FAR = 1.25    # a speed this many times its forecast, or its forecast this many times the speed, needs an explanation


def run_step(step: Step, machine: Machine, results: Path, log: Path) -> tuple[bool, str]:
    """Run a step. Return whether it succeeded, and the line that it showed or how it failed."""
    gpus = machine.gpus if step.program[0] == 'benchmark.py' else 1
    command = launch(gpus, *step.program)
    if step.is_measurement:
        command += ['--results', str(results)]
    print(f'{shlex.join(command)} > {shlex.quote(str(log))}', file=sys.stderr, flush=True)
    status = run(command, log)

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
    record = json.loads(results.read_text().splitlines()[-1])
    expected = expected_of(record)
    if expected.why_none:
        return True, result
    ratio = record['images_per_sec'] / expected.images_per_sec
    return 1 / FAR <= ratio <= FAR, f'{result}; {ratio:.2f} times the forecast'


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


def prove(folder: Path, machine: Machine, minutes: float) -> bool:
    """Run the first steps and, until `minutes` have passed, the others. Print their results, and write the page.

    Returns whether all steps that ran succeeded. Steps that have succeeded before are not repeated.
    """
    # Results from another machine, commit or version of a library stay in the file, but do not count.
    path = (folder / 'results.jsonl').resolve()
    logs = path.with_name('logs')
    logs.mkdir(parents=True, exist_ok=True)
    here = {'machine': f'{machine.gpus} x {machine.device}', 'commit': git_commit(), 'python': sys.version.split()[0],
            **package_versions()}
    results = {}
    path.touch()
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        record = parse_json(line, f'{path}:{number}')
        if record.get('stage') == 'proof' and record['here'] == here and record['holds']:
            results[record['step']] = record
            print(result_line(record))

    # Run one step after another. A result is written after its step, so an interrupted step runs again next time.
    start = time.monotonic()
    steps = all_steps(machine, str(path))
    missing = [name for name in steps if name not in results]
    while missing and (missing[0] in first_steps(machine) or time.monotonic() - start < 60 * minutes):
        name = missing.pop(0)
        began = time.monotonic()
        log = logs / f'{name}.txt'
        log.write_text('')  # without the output of an interrupted attempt
        holds, text = run_step(steps[name], machine, path, log)
        results[name] = {'stage': 'proof', 'step': name, 'holds': holds, 'result': text,
                         'seconds': round(time.monotonic() - began, 1), 'here': here}
        append_line(json.dumps(results[name]), str(path))
        print(result_line(results[name]), flush=True)

    # Say what the results mean, and where they are.
    first_results = [results[name]['result'] for name in first_steps(machine) if name in results]
    speeds = [re.match(r'images/s ([\d.,]+)', result) for result in first_results]
    if len(speeds) == 2 and all(speeds):
        original, fastest = (float(speed[1].replace(',', '')) for speed in speeds)
        print(f'recipes/fastest.txt is {fastest / original:.2f} times as fast as recipes/original.txt')
    failed = [name for name, result in results.items() if not result['holds']]
    if failed:
        print(f'Failed: {", ".join(failed)}')
    if missing and minutes:  # without any minutes, only the first steps are asked for
        print(f'Not run yet: {", ".join(missing)}')
    write_page(path)
    if machine.gpus:
        print(f'A plan of a whole training, corrected by these speeds: python plan.py {path}')
    print(f'Written: {path}, {logs}')
    return not failed


def write_page(results: Path) -> None:
    """Write the page of the results next to them."""
    page = results.with_suffix('.html')
    report = [sys.executable, 'report.py', str(results), '--html', str(page)]
    if subprocess.run(report, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0:
        print(f'As a page: {page}')


def result_line(result: dict) -> str:
    verdict = 'ok' if result['holds'] else 'FAILED'
    return f'{verdict:<6}  {result["step"]}, {result["seconds"]:.0f} s: {result["result"]}'


def main(argv: list[str] | None = None) -> int:
    begin()  # prepares the environment, which the steps inherit
    parser = argparse.ArgumentParser('python -m benchmarks.proof', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, metavar='FOLDER', nargs='?', default=ROOT,
                        help='folder for the records, the logs and the page (default: this repository)')
    parser.add_argument('--minutes', type=float, default=math.inf,
                        help='minutes after which no further step starts (default: all steps run)')
    args = parser.parse_args(argv)
    with one_line_errors('proof.py'):
        return 0 if prove(args.folder, find_machine(), args.minutes) else 1


if __name__ == '__main__':
    sys.exit(main())
