"""Power, temperature, clock and allocator of each rank's GPU while a run is measured: what explains its drift."""
import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from composer.utils import dist

GIB = 2 ** 30
SECONDS_BETWEEN_SAMPLES = 1.0
# what torch asks NVIDIA's library for, and how many of its units are one of ours
QUANTITIES = {'power_watts': (torch.cuda.power_draw, 1000), 'temperature_celsius': (torch.cuda.temperature, 1),
              'sm_clock_mhz': (torch.cuda.clock_rate, 1)}


@dataclass
class Running:
    """The mean and the maximum of values that come one after the other; None where none came."""
    count: int = 0
    total: float = 0.0
    maximum: float | None = None

    def add(self, value: float) -> None:
        self.take_in(Running(1, value, value))

    def take_in(self, other: 'Running') -> None:
        """As if the values of `other` had come here, too."""
        self.count += other.count
        self.total += other.total
        self.maximum = max(known([self.maximum, other.maximum]), default=None)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Readings:
    """What one rank saw of its GPU; without a GPU nothing."""
    of: dict[str, Running] = field(default_factory=lambda: {quantity: Running() for quantity in QUANTITIES})
    peak_memory_allocated_gib: float | None = None
    allocator_retries: int | None = None  # of allocations that succeeded only after the cache was freed
    allocator_ooms: int | None = None     # allocations that failed all the same


class GpuMonitor:
    """Asks this rank's GPU each second between `start` and `stop`, in a thread that nothing waits for.

    Neither touches a CUDA stream. Where there is no GPU, no driver that answers, or no package nvidia-ml-py, nothing is
    known.
    """

    def __init__(self):
        self.readings = Readings()
        self._is_paused = False  # while the run does what is in no figure, such as saving
        self._running = Readings().of  # the thread's
        self._stopped = threading.Event()
        self._allocator_before: dict | None = None  # None: not started, or there is no GPU

    def start(self) -> None:
        if not torch.cuda.is_available():
            return
        self._allocator_before = torch.cuda.memory_stats()
        device = torch.cuda.current_device()  # of this thread: another has one of its own
        threading.Thread(target=self._ask_until_stopped, args=(device,), daemon=True).start()

    @property
    def paused(self) -> bool:
        return self._is_paused

    def pause(self) -> None:
        """Leave out what is read from here on."""
        self._is_paused = True

    def resume(self) -> None:
        """Take in again what is read."""
        self._is_paused = False

    def stop(self) -> Readings:
        """What was seen since the start; called again, the same."""
        if self._allocator_before is not None and not self._stopped.is_set():
            self._stopped.set()
            allocator = torch.cuda.memory_stats()
            self.readings = Readings(
                of=copy.deepcopy(self._running),
                peak_memory_allocated_gib=allocator.get('allocated_bytes.all.peak', 0) / GIB,
                allocator_retries=self._grown('num_alloc_retries', allocator),
                allocator_ooms=self._grown('num_ooms', allocator))
        return self.readings

    def _grown(self, counter: str, allocator: dict) -> int:
        """By how much a counter of the allocator has grown since the start."""
        return allocator.get(counter, 0) - self._allocator_before.get(counter, 0)

    def _ask_until_stopped(self, device: int) -> None:
        """The thread: ends at `stop`, or at once without NVIDIA's package."""
        try:
            from pynvml import NVMLError
        except ImportError:
            return
        quantities = dict(QUANTITIES)
        if 'MIG' in torch.cuda.get_device_name(device):
            del quantities['power_watts']  # that of the whole GPU, which others use as well
        while not self._stopped.is_set():
            for quantity, (ask, unit) in quantities.items():
                try:
                    value = ask(device) / unit
                except (NVMLError, RuntimeError):  # not supported, or for a moment not to be had; torch's for no driver
                    continue
                if not self._is_paused:
                    self._running[quantity].add(value)
            self._stopped.wait(SECONDS_BETWEEN_SAMPLES)


def gather_gpu_figures(monitor: GpuMonitor, images_per_sec: float | None, all_ranks: bool = True) -> dict:
    """The record's figures of the GPUs of all ranks, or of this rank's where the others may be gone."""
    ranks = [monitor.stop()]
    if all_ranks:
        ranks = dist.all_gather_object(ranks[0])
    return gpu_figures(ranks, images_per_sec, dist.get_world_size())


def gpu_figures(ranks: list[Readings], images_per_sec: float | None, num_devices: int) -> dict[str, float | None]:
    """Figures over all ranks' readings; None where nothing is known.

    | key                                | meaning                                                               |
    |------------------------------------|-----------------------------------------------------------------------|
    | gpu_power_watts_mean, _max         | of one GPU                                                            |
    | gpu_temperature_celsius_mean, _max | of one GPU                                                            |
    | gpu_sm_clock_mhz_mean, _max        | of its multiprocessors: power or heat slows them                      |
    | joules_per_image                   | of all GPUs: the sum of their mean power by the images in a second    |
    | peak_memory_allocated_gib          | most that tensors took on one GPU; the allocator reserves more        |
    | allocator_retries                  | on all GPUs: times that the allocator freed its cache to find memory  |
    | allocator_ooms                     | on all GPUs: times that it did not find it even so                    |
    """
    figures = {}
    for quantity in QUANTITIES:
        together = Running()
        for rank in ranks:
            together.take_in(rank.of[quantity])
        figures[f'gpu_{quantity}_mean'] = together.mean
        figures[f'gpu_{quantity}_max'] = together.maximum
    power = known(rank.of['power_watts'].mean for rank in ranks)
    figures['joules_per_image'] = None
    if images_per_sec and len(power) == num_devices:
        figures['joules_per_image'] = sum(power) / images_per_sec
    figures['peak_memory_allocated_gib'] = max(known(rank.peak_memory_allocated_gib for rank in ranks), default=None)
    for counter in ('allocator_retries', 'allocator_ooms'):
        counts = known(getattr(rank, counter) for rank in ranks)
        figures[counter] = sum(counts) if counts else None
    return figures


def known(values: Iterable) -> list:
    return [value for value in values if value is not None]
