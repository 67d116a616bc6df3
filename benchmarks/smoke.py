"""A first measurement of what is here, which `make smoke` runs.

    python benchmarks/smoke.py

On GPUs: Stable Diffusion 2 base on all of them by recipes/original.txt, then by recipes/fastest.txt, and the ratio
of the two. The original's microbatch of 4 takes 24 GiB; GPUs of less than 30 GiB run both recipes at a microbatch of 1,
without the average of the weights.
Without a GPU: the tiny model on the CPU. Records are appended to results.jsonl.
"""
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / 'results.jsonl'
IMAGES_PER_GPU = 64  # in a batch
LEAST_GIB = 30  # of a GPU that runs the recipes as they are
RECIPES = ('original', 'fastest')
TINY = ['--model_name', 'tiny', '--image_size', '64', '--batch_size', '4']
SMALLEST = ['--device_train_microbatch_size', '1', '--no-use_ema']  # several GPUs of 24 GB have no room for the average
PROBE = ('import torch; gpus = torch.cuda.device_count(); '
         'print(gpus, torch.cuda.get_device_properties(0).total_memory if gpus else 0)')


def commands(gpus: int, gib: float) -> dict[str, list[str]]:
    """The runs for so many GPUs of `gib` GiB, by name. One device needs no launcher, which would import all twice."""
    launcher = ['composer', '-n', str(gpus)] if gpus > 1 else ['python']
    benchmark = [*launcher, 'benchmark.py', '--use_synth_data', '--use_ema', '--results', str(RESULTS)]
    if gpus == 0:
        return {'tiny': [*benchmark, *TINY]}
    flags = ['--batch_size', str(IMAGES_PER_GPU * gpus)]
    if gib < LEAST_GIB:
        flags += SMALLEST
    return {recipe: [*benchmark, f'@recipes/{recipe}.txt', *flags] for recipe in RECIPES}


def comparison(speeds: dict[str, float], gib: float) -> str:
    """Both speeds in images/s and their ratio; of GPUs of less than LEAST_GIB, what the recipes were changed in."""
    original, fastest = (speeds[recipe] for recipe in RECIPES)
    text = (f'recipes/original.txt  {original:.4g} images/s\n'
            f'recipes/fastest.txt   {fastest:.4g} images/s, {fastest / original:.2f} times as fast')
    if gib < LEAST_GIB:
        text += (f'\nboth with {" ".join(SMALLEST)}: a GPU here has {gib:.1f} GiB, and the microbatch of 4 in '
                 'recipes/original.txt takes 24')
    return text


def gpus_here() -> tuple[int, float]:
    """How many, and the GiB of the first. Asked for in another process: one that has asked holds memory of the GPU."""
    answer = subprocess.run([sys.executable, '-c', PROBE], check=True, capture_output=True, text=True).stdout
    gpus, memory = answer.split()
    return int(gpus), int(memory) / 2 ** 30


def main() -> int:
    """Run them one after the other; the exit code of the first that failed, or 0."""
    os.environ['PATH'] = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'  # this environment's python and composer
    gpus, gib = gpus_here()
    speeds = {}
    code = 0
    for name, command in commands(gpus, gib).items():
        print(shlex.join(command), flush=True)
        done = subprocess.run(command, cwd=ROOT)
        if done.returncode:
            code = code or done.returncode
        else:
            speeds[name] = json.loads(RESULTS.read_text().splitlines()[-1])['images_per_sec']
    if len(speeds) > 1:
        print(comparison(speeds, gib))
    print('To try other flags: source .venv/bin/activate, then repeat the command with them')
    return code


if __name__ == '__main__':
    sys.exit(main())
