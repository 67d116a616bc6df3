"""Time an EMA update and an EMA swap of a UNet, this repository's and Composer's, on a GPU if there is one.

    python -m benchmarks.ema_update           # Stable Diffusion 2 base; needs 15 GB
    python -m benchmarks.ema_update tiny      # another model, by its name or folder

The two implementations take turns in one process, and each time is the median of five runs.

docs/speed.md has the ratios from 2026-11-20, on two cores of an Intel Xeon with torch 2.7.0.
"""
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
from composer.algorithms.ema import ema as composer_ema
from diffusers import UNet2DConditionModel

from ema import EMA, ShadowModel, compute_ema
from sdbench.flags.train import SD2_BASE
from sdbench.models.loading import find_model


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # wait for the kernels that the call started
    return time.perf_counter() - start


def medians_in_turn(theirs: Callable[[], object], ours: Callable[[], object], runs: int = 5) -> list[float]:
    """Time two calls in turn; return the median seconds of each."""
    times = [(seconds(theirs), seconds(ours)) for _ in range(runs)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def compare(name: str, theirs: Callable[[], object], ours: Callable[[], object]) -> None:
    """Time two calls in turn, and print the ratio of their medians."""
    their_median, our_median = medians_in_turn(theirs, ours)
    print(f'{name} ratio {their_median / our_median:.1f}: Composer {their_median:.4f} s, here {our_median:.4f} s')


def peak_gib() -> float:
    """Return the largest memory that this process has used so far, on the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2 ** 30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20


def main() -> None:
    model_name = sys.argv[1] if len(sys.argv) > 1 else SD2_BASE
    with torch.device('cuda' if torch.cuda.is_available() else 'cpu'):
        unet = UNet2DConditionModel.from_config(find_model(model_name).configs['unet'])

    # Memory: updates and swaps here need no copy of the model. Composer's come later, because they need several.
    ema = EMA()
    ema.ema_model = ShadowModel(unet)
    before = peak_gib()
    for _ in range(10):
        compute_ema(unet, ema.ema_model, 0.999)
    ema.swap_weights(unet)
    ema.swap_weights(unet)
    print(f'memory ratio {peak_gib() / before:.4f}: peak after ten updates and two swaps, divided by the peak before')

    # Time
    composers = composer_ema.EMAParameters(unet)
    with torch.no_grad():
        compare('update', lambda: composer_ema.compute_ema(unet, composers, 0.999),
                lambda: compute_ema(unet, ema.ema_model, 0.999))
        compare('swap', lambda: composers.swap_params(unet), lambda: ema.swap_weights(unet))


if __name__ == '__main__':
    main()
