"""Measure this machine with two runs of benchmark.py and append their records to results.jsonl.

    python -m benchmarks.smoke      # the same as make smoke

On GPUs it trains Stable Diffusion 2 base with recipes/original.txt and then with recipes/fastest.txt, at a batch size
of 64 images per GPU. Without a GPU it trains the tiny model once, which shows that the installation works.
"""
import argparse
import json
import math
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sdbench.forecast.forecast import DoesNotFit, forecast
from sdbench.gpus import CARDS
from sdbench.process import begin, one_line_errors
from sdbench.setup import setup_of_record

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'results.jsonl'
IMAGES_PER_GPU = 64  # batch size
ORIGINAL_GIB = 30    # memory of the smallest GPU that runs both recipes unchanged: a microbatch of 4 takes 24 GiB
# Several GPUs with 24 GB have room for a microbatch of 1, and no room for the EMA weights.
SMALLEST = ['--device_train_microbatch_size', '1', '--no-use_ema']
TINY = ['--model_name', 'tiny', '--image_size', '64']
# This runs in another process, because a process that has asked CUDA for its devices holds GPU memory.
PROBE = """
import json, torch
gpus = torch.cuda.device_count()
properties = torch.cuda.get_device_properties(0) if gpus else None
print(json.dumps([gpus, properties.name if gpus else 'CPU', properties.total_memory / 2 ** 30 if gpus else 0]))
"""


@dataclass(frozen=True)
class Machine:
    """The machine that is measured.

    Attributes:
        gpus: GPU count; 0 on a CPU.
        device: name of the first GPU, or CPU.
        gib: memory of the first GPU in GiB.
        tiny: whether the tiny model is trained instead of Stable Diffusion 2.
    """
    gpus: int
    device: str
    gib: float
    tiny: bool

    def launch(self, *program: str) -> list[str]:
        """Return the command that runs a script, or `-m` and a module, on all GPUs.

        A single device needs no launcher, whose start would import every library a second time.
        """
        if self.gpus > 1:
            return [sys.executable, '-m', 'composer.cli.launcher', '-n', str(self.gpus), *program]
        return [sys.executable, *program]

    def batch_flags(self, images_per_gpu: int) -> list[str]:
        """Return the flags for a batch with this many images per GPU, or with 4 per device for the tiny model."""
        devices = max(1, self.gpus)
        if self.tiny:
            return [*TINY, '--batch_size', str(4 * devices)]
        return ['--batch_size', str(images_per_gpu * devices)]


def find_machine(tiny: bool) -> Machine:
    """Find the GPUs of this machine. Without a GPU the tiny model is trained in any case."""
    answer = subprocess.run([sys.executable, '-c', PROBE], check=True, capture_output=True, text=True).stdout
    gpus, device, gib = json.loads(answer.splitlines()[-1])
    return Machine(gpus, device, gib, tiny or gpus == 0)


def measurement(*flags: str) -> tuple[str, ...]:
    """Return the command that measures a training on synthetic data, with EMA unless the flags turn it off."""
    data = () if '--use_synth_latents' in flags else ('--use_synth_data',)
    return 'benchmark.py', *data, '--use_ema', *flags


def smoke_runs(machine: Machine) -> dict[str, tuple[str, ...]]:
    """Return the commands of the two recipes by name, or on a CPU the command of the defaults."""
    flags = machine.batch_flags(IMAGES_PER_GPU)
    if machine.gpus == 0:
        return {'defaults': measurement(*flags)}
    if machine.gib < ORIGINAL_GIB:
        flags += SMALLEST
    return {'original': measurement('@recipes/original.txt', *flags),
            'fastest': measurement('@recipes/fastest.txt', *flags)}


def smoke(machine: Machine) -> int:
    """Run the two recipes, print their speeds and the ratio, and return the exit status: 1 if a command failed."""
    speeds = {}
    all_worked = True
    for name, program in smoke_runs(machine).items():
        command = [*machine.launch(*program), '--results', str(RESULTS)]
        print(shlex.join(command), flush=True)
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            all_worked = False
            continue
        record = json.loads(RESULTS.read_text().splitlines()[-1])
        speeds[name] = record['images_per_sec']

        ratio = ratio_to_forecast(record)
        if ratio is not None:
            print(f'{ratio:.2f} times the forecast')
    if len(speeds) == 2:
        print(comparison(speeds, machine.gib))

    # Show what to do next: read the records as a page, and try other flags.
    page = RESULTS.with_suffix('.html')
    report = [sys.executable, 'report.py', str(RESULTS), '--html', str(page)]
    if subprocess.run(report, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0:
        print(f'As a page: {page}')
    print('To try other flags: source .venv/bin/activate, then repeat the command with them')
    return 0 if all_worked else 1


def ratio_to_forecast(record: dict) -> float | None:
    """Return the speed of a measured training divided by the forecast for its setup; None if there is no forecast."""
    if record['device'] not in CARDS:
        return None
    try:
        speed = forecast(setup_of_record(record), CARDS[record['device']]).images_per_sec
    except DoesNotFit:
        return None
    return None if math.isnan(speed) else record['images_per_sec'] / speed


def comparison(speeds: dict[str, float], gib: float) -> str:
    """Return the speeds of both recipes and their ratio as text, and how the recipes were changed for a small GPU."""
    original = speeds['original']
    fastest = speeds['fastest']
    text = (f'recipes/original.txt  {original:.4g} images/s\n'
            f'recipes/fastest.txt   {fastest:.4g} images/s, {fastest / original:.2f} times as fast')
    if gib < ORIGINAL_GIB:
        text += (f'\nboth with {" ".join(SMALLEST)}: a GPU here has {gib:.1f} GiB, and the microbatch of 4 in '
                 'recipes/original.txt takes 24')
    return text


def main(argv: list[str] | None = None) -> int:
    begin()  # prepares the environment, which the runs inherit
    parser = argparse.ArgumentParser('smoke.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tiny', action='store_true', help='train the tiny model on GPUs, too')
    args = parser.parse_args(argv)
    with one_line_errors('smoke.py'):
        return smoke(find_machine(args.tiny))


if __name__ == '__main__':
    sys.exit(main())
