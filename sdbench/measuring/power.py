"""Measure power, clock and allocator retries of each rank's GPU during a run, which can explain a drift in speed."""
import contextlib
import time
from statistics import mean

import torch
from composer.utils import dist

from sdbench.gpus import GIB

SECONDS_BETWEEN_SAMPLES = 1.0
# For each metric, a function that asks NVIDIA's library, and how many of its units are one of ours.
QUANTITIES = {'gpu_power_watts': (torch.cuda.power_draw, 1000), 'gpu_sm_clock_mhz': (torch.cuda.clock_rate, 1)}
FIGURES = {  # how the ranks that know a metric combine it; a maximum of samples shows a card that throttles
    'gpu_power_watts_mean': mean, 'gpu_power_watts_max': max, 'gpu_sm_clock_mhz_mean': mean,
    'gpu_sm_clock_mhz_max': max, 'peak_memory_allocated_gib': max, 'allocator_retries': sum}


class GpuMonitor:
    """Samples the power and the clock of this rank's GPU at the end of a measured batch, at most once per second.

    At that moment the GPU still runs at the clock of the batch. There are no samples without a GPU, a driver that
    answers, or the package nvidia-ml-py.
    """

    def __init__(self):
        self.samples: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES}
        self._next_sample = 0.0  # earliest time of the next sample

    def sample(self) -> None:
        """Take a sample, unless the last one is less than a second old."""
        now = time.monotonic()
        if not torch.cuda.is_available() or now < self._next_sample:
            return
        self._next_sample = now + SECONDS_BETWEEN_SAMPLES
        for quantity, (ask, unit) in QUANTITIES.items():
            if quantity == 'gpu_power_watts' and 'MIG' in torch.cuda.get_device_name():
                continue  # a MIG slice reports the power of the whole GPU, which others use as well
            with contextlib.suppress(Exception):  # an error of NVIDIA's library must not end the training
                self.samples[quantity].append(ask() / unit)

    def figures(self) -> dict[str, float]:
        """Return the metrics of this rank that are known."""
        found = {}
        for quantity, samples in self.samples.items():
            if samples:
                found |= {f'{quantity}_mean': mean(samples), f'{quantity}_max': max(samples)}
        # A retry of the allocator frees the whole cache in the middle of a batch, so a speed with retries is too low.
        if torch.cuda.is_available():
            allocator = torch.cuda.memory_stats()
            found['peak_memory_allocated_gib'] = allocator['allocated_bytes.all.peak'] / GIB
            found['allocator_retries'] = allocator['num_alloc_retries']
        return found


def gather_gpu_figures(monitor: GpuMonitor, images_per_sec: float | None, all_ranks: bool = True
                       ) -> dict[str, float | None]:
    """Return the GPU metrics of a record, over all ranks, or of this rank only if the others may be gone.

    docs/record.md explains each key. A metric is None if no rank knows it.
    """
    ranks = dist.all_gather_object(monitor.figures()) if all_ranks else [monitor.figures()]
    together = {}
    for key, combine in FIGURES.items():
        values = [rank[key] for rank in ranks if key in rank]
        together[key] = combine(values) if values else None

    # The energy per image needs the power of every rank.
    power = [rank['gpu_power_watts_mean'] for rank in ranks if 'gpu_power_watts_mean' in rank]
    together['joules_per_image'] = None
    if images_per_sec and len(power) == dist.get_world_size():
        together['joules_per_image'] = sum(power) / images_per_sec
    return together
