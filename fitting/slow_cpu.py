"""A training that would take a CPU hours for each batch is said to be one before its first batch."""
import os
import sys

import torch
from composer.utils import dist

from settings.train import TINY_COMMAND, Train

TFLOPS_OF_A_CORE = 0.1  # about what a core of a server reaches in float32, on the large convolutions of these models
SECONDS_TO_WAIT = 60


def warn_of_a_slow_cpu(settings: Train, flops_per_image: int) -> None:
    """On rank 0, where there is no GPU: say how long a batch takes if that is over a minute, and what takes seconds."""
    if torch.cuda.is_available() or dist.get_global_rank() > 0:
        return
    cores = len(os.sched_getaffinity(0))
    tflop = flops_per_image * settings.batch_size / 1e12
    seconds = tflop / (TFLOPS_OF_A_CORE * cores)
    if seconds > SECONDS_TO_WAIT:
        print(f'warning: there is no GPU. A batch is {tflop:,.0f} TFLOP of arithmetic, and each of {cores} cores of a '
              f'CPU does about {TFLOPS_OF_A_CORE} a second: about {seconds / 60:,.0f} minutes a batch. The tiny '
              f'model takes seconds: {TINY_COMMAND}', file=sys.stderr, flush=True)
