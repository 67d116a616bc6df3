"""Print what each flag of recipes/fastest.txt is worth by the forecast, on 8 H100 with EMA.

    python -m benchmarks.recipe [--use_synth_latents]     # a minute of a CPU, no GPU

Each figure is the speed of the recipe over its speed without that flag, both at the largest microbatch that fits.
"""
import sys

from benchmark import build_model
from sdbench.flags.complete import complete
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.forecast.trace import Estimate
from sdbench.gpus import CARDS

RECIPE = ['@recipes/fastest.txt', '--dry_run', '8', '--use_ema']
CARD = CARDS['NVIDIA H100 80GB HBM3']


def forecast(argv: list[str]) -> Estimate:
    """Count a step of a run with these flags."""
    settings = complete(parse(Train, '', argv, 'benchmark.py'), None)
    return Estimate.of(settings, build_model)


def speed_of(each: Estimate) -> float:
    """Return images/s of all GPUs at the largest microbatch."""
    return each.speed_on(CARD, each.largest_microbatch(CARD.gib))


def main() -> None:
    argv = RECIPE + sys.argv[1:]
    recipe = forecast(argv)
    speed = speed_of(recipe)
    print(f'{speed:.0f} images/s at a microbatch of {recipe.largest_microbatch(CARD.gib)}', flush=True)
    for flag in ('compile', 'channels_last', 'half_precision_norms', 'fused_optimizer'):
        print(f'--{flag} {speed / speed_of(forecast([*argv, f"--no-{flag}"])):.3f}', flush=True)


if __name__ == '__main__':
    main()
