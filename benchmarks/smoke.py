"""A first measurement of what is here, which `make smoke` runs.

    python benchmarks/smoke.py

On GPUs: Stable Diffusion 2 base on all of them by recipes/original.txt, then by recipes/fastest.txt, and the ratio
of the two. Without a GPU: the tiny model on the CPU. Records are appended to results.jsonl.
"""
import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / 'results.jsonl'
IMAGES_PER_GPU = 64  # in a batch
RECIPES = ('original', 'fastest')
TINY = ['--model_name', 'tiny', '--image_size', '64', '--batch_size', '4']


def commands(gpus: int) -> dict[str, list[str]]:
    """The runs for so many GPUs, by name. One device needs no launcher, which would import everything twice."""
    launcher = [sys.executable]
    if gpus > 1:
        launcher = [sys.executable, '-m', 'composer.cli.launcher', '-n', str(gpus)]
    benchmark = [*launcher, 'benchmark.py', '--use_synth_data', '--use_ema', '--results', str(RESULTS)]
    if gpus == 0:
        return {'tiny': [*benchmark, *TINY]}
    batch = ['--batch_size', str(IMAGES_PER_GPU * gpus)]
    return {recipe: [*benchmark, f'@recipes/{recipe}.txt', *batch] for recipe in RECIPES}


def as_typed(command: list[str]) -> str:
    """A run's command as one types it in the environment."""
    if 'composer.cli.launcher' in command:
        return shlex.join(['composer', *command[3:]])
    return shlex.join(['python', *command[1:]])


def newest_record() -> dict:
    return json.loads(RESULTS.read_text().splitlines()[-1])


def comparison(speeds: dict[str, float]) -> str:
    """Both speeds in images/s and their ratio."""
    original, fastest = (speeds[recipe] for recipe in RECIPES)
    return (f'recipes/original.txt  {original:.4g} images/s\n'
            f'recipes/fastest.txt   {fastest:.4g} images/s, {fastest / original:.2f} times as fast')


def main() -> int:
    """Run them one after the other; the exit code of the first that failed, or 0."""
    import torch
    speeds = {}
    code = 0
    for name, command in commands(torch.cuda.device_count()).items():
        print(as_typed(command), flush=True)
        done = subprocess.run(command, cwd=ROOT)
        if done.returncode:
            code = code or done.returncode
        else:
            speeds[name] = newest_record()['images_per_sec']
    if len(speeds) > 1:
        print(comparison(speeds))
    print('To try a flag that is named above: source .venv/bin/activate, then repeat the command with that flag')
    return code


if __name__ == '__main__':
    sys.exit(main())
