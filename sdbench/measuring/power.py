"""Power, clock and allocator of each rank's GPU while a run is measured: what explains its drift."""
import contextlib
import time
from statistics import mean

import torch
from composer.utils import dist

from sdbench.gpus import GIB

SECONDS_BETWEEN_SAMPLES = 1.0
# what torch asks NVIDIA's library for, and how many of its units are one of ours
QUANTITIES = {'gpu_power_watts': (torch.cuda.power_draw, 1000), 'gpu_sm_clock_mhz': (torch.cuda.clock_rate, 1)}


class GpuMonitor:
    """Asks this rank's GPU for its power and clock at the end of a measured batch, at most once a second.

    Then its clock is still that of the batch. Nothing is known where there is no GPU, no driver that answers, or no
    package nvidia-ml-py.
    """

    def __init__(self):
        self.samples: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES}
        self._next_sample = 0.0  # when it is due, by the clock

    def batch_end(self) -> None:
        """Ask the GPU, since a measured batch has ended, unless that was done in the last second."""
        now = time.monotonic()
        if not torch.cuda.is_available() or now < self._next_sample:
            return
        self._next_sample = now + SECONDS_BETWEEN_SAMPLES
        for quantity, (ask, unit) in QUANTITIES.items():
            if quantity == 'gpu_power_watts' and 'MIG' in torch.cuda.get_device_name():
                continue  # it is that of the whole GPU, which others use as well
            with contextlib.suppress(Exception):  # whatever NVIDIA's library says: the training does not end with it
                self.samples[quantity].append(ask() / unit)

    def figures(self) -> dict[str, float | None]:
        """Return the figures of this rank; each is None where nothing is known."""
        # the mean explains a speed, the highest a card that throttles
        found = {}
        for quantity, samples in self.samples.items():
            found[f'{quantity}_mean'] = mean(samples) if samples else None
            found[f'{quantity}_max'] = max(samples, default=None)

        # a retry frees the whole cache in the middle of a batch: with any of them the speed is not that of the GPU
        found |= {'peak_memory_allocated_gib': None, 'allocator_retries': None}
        if torch.cuda.is_available():
            allocator = torch.cuda.memory_stats()
            found['peak_memory_allocated_gib'] = allocator['allocated_bytes.all.peak'] / GIB
            found['allocator_retries'] = allocator['num_alloc_retries']
        return found


def gather_gpu_figures(monitor: GpuMonitor, images_per_sec: float | None, all_ranks: bool = True
                       ) -> dict[str, float | None]:
    """Return the record's figures of all ranks' GPUs, or of this rank's where the others may be gone.

    sdbench/records/keys.py says what each means; it is None where nothing is known.
    """
    # each figure, over the ranks that know it
    ranks = [monitor.figures()]
    if all_ranks:
        ranks = dist.all_gather_object(ranks[0])
    together = {}
    for key in ranks[0]:
        values = [rank[key] for rank in ranks if rank[key] is not None]
        combine = max
        if key.endswith('_mean'):
            combine = mean
        elif key == 'allocator_retries':
            combine = sum
        together[key] = combine(values) if values else None

    # the energy of an image, where all know their power
    power = [rank['gpu_power_watts_mean'] for rank in ranks if rank['gpu_power_watts_mean'] is not None]
    together['joules_per_image'] = None
    if images_per_sec and len(power) == dist.get_world_size():
        together['joules_per_image'] = sum(power) / images_per_sec
    return together
