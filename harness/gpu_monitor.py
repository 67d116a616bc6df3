"""Power, temperature, clock and allocator of each rank's GPU while a run is measured: what explains its drift."""
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType

import torch
from composer.utils import dist

GIB = 2 ** 30
SECONDS_BETWEEN_SAMPLES = 1.0
MOST_SAMPLES = 3600  # then every second one goes, and they are taken half as often


@dataclass(frozen=True)
class Sample:
    """What a GPU says of itself at one moment; None where it does not say."""
    power_watts: float | None
    temperature_celsius: float | None
    sm_clock_mhz: float | None


@dataclass
class Readings:
    """What one rank saw of its GPU; without a GPU nothing."""
    samples: list[Sample] = field(default_factory=list)
    peak_memory_allocated_gib: float | None = None
    allocator_retries: int | None = None  # of allocations that succeeded only after the cache was freed
    allocator_ooms: int | None = None     # allocations that failed all the same


class GpuMonitor:
    """Samples this rank's GPU each second between `start` and `stop`, in a thread that nothing waits for.

    Neither touches a CUDA stream. Where there is no GPU, no driver that answers, or no package nvidia-ml-py, there are
    no samples. Make it before the run: importing the package takes a moment.
    """

    def __init__(self):
        self.readings = Readings()
        self.paused = False  # while the run does what is in no figure, such as saving
        self._nvml = find_nvml()
        self._samples: list[Sample] = []  # the thread's
        self._stopped = threading.Event()
        self._allocator_before: dict | None = None  # None: not started, or there is no GPU

    def start(self) -> None:
        if not torch.cuda.is_available():
            return
        self._allocator_before = torch.cuda.memory_stats()
        if self._nvml:
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            threading.Thread(target=self._sample_until_stopped, args=(uuid,), daemon=True).start()

    def stop(self) -> Readings:
        """What was seen since the start; called again, the same."""
        if self._allocator_before is not None and not self._stopped.is_set():
            self._stopped.set()
            allocator = torch.cuda.memory_stats()
            self.readings = Readings(
                samples=list(self._samples),
                peak_memory_allocated_gib=allocator.get('allocated_bytes.all.peak', 0) / GIB,
                allocator_retries=self._grown('num_alloc_retries', allocator),
                allocator_ooms=self._grown('num_ooms', allocator))
        return self.readings

    def _grown(self, counter: str, allocator: dict) -> int:
        """By how much a counter of the allocator has grown since the start."""
        return allocator.get(counter, 0) - self._allocator_before.get(counter, 0)

    def _sample_until_stopped(self, uuid: str) -> None:
        """The thread: ends at `stop`, or at once where NVIDIA's library is not there or does not know the GPU."""
        try:
            self._nvml.nvmlInit()
            gpu = self._nvml.nvmlDeviceGetHandleByUUID(f'GPU-{uuid}')  # CUDA_VISIBLE_DEVICES changes its index
        except self._nvml.NVMLError:
            return
        interval = SECONDS_BETWEEN_SAMPLES
        while not self._stopped.is_set():
            if not self.paused:
                self._samples.append(take_sample(self._nvml, gpu))
            if len(self._samples) >= MOST_SAMPLES:
                self._samples = self._samples[::2]
                interval *= 2
            self._stopped.wait(interval)


def find_nvml() -> ModuleType | None:
    """NVIDIA's own package nvidia-ml-py, or None where there is no GPU or no package."""
    if not torch.cuda.is_available():
        return None
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def take_sample(nvml: ModuleType, gpu) -> Sample:
    """One sample of the GPU with the handle `gpu`."""
    def asked(question, *arguments) -> int | None:
        try:
            return question(gpu, *arguments)
        except nvml.NVMLError:  # not supported, or for a moment not to be had
            return None

    milliwatts = asked(nvml.nvmlDeviceGetPowerUsage)
    return Sample(
        power_watts=None if milliwatts is None else milliwatts / 1000,
        temperature_celsius=asked(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        sm_clock_mhz=asked(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM))


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
    for quantity in ('power_watts', 'temperature_celsius', 'sm_clock_mhz'):
        values = known(getattr(sample, quantity) for rank in ranks for sample in rank.samples)
        figures[f'gpu_{quantity}_mean'] = mean(values)
        figures[f'gpu_{quantity}_max'] = max(values, default=None)
    power = known(mean(known(sample.power_watts for sample in rank.samples)) for rank in ranks)  # of each GPU
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


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
