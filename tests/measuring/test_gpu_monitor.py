"""What a GPU says of itself during the measured batches, by a fake of NVIDIA's library; nothing of it without a GPU."""
import json
import pickle
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from composer.core import Time, Timestamp

from measuring import gpu_monitor
from measuring.gpu_monitor import GIB, GpuMonitor, Readings, Running, gather_gpu_figures, gpu_figures
from measuring.measurement import Measurement
from tests.runs import wait_until

KEYS = {'gpu_power_watts_mean', 'gpu_power_watts_max', 'gpu_temperature_celsius_mean', 'gpu_temperature_celsius_max',
        'gpu_sm_clock_mhz_mean', 'gpu_sm_clock_mhz_max', 'joules_per_image', 'peak_memory_allocated_gib',
        'allocator_retries', 'allocator_ooms'}

class FakeNvml(ModuleType):
    """Two GPUs, of which this process sees the second alone. Each value in `watts` is one answer; None is an error."""

    class NVMLError(Exception):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    def __init__(self, watts: list[float | None]):
        super().__init__('pynvml')
        self.watts = list(watts)
        self.asked_by: set[int] = set()  # threads
        self.all_asked = threading.Event()

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        return ('first', 'second')[index]

    def nvmlDeviceGetPowerUsage(self, handle):
        assert handle == 'second'
        self.asked_by.add(threading.get_ident())
        if not self.watts:
            self.all_asked.set()
            raise self.NVMLError('over')
        watts = self.watts.pop(0)
        if watts is None:
            raise self.NVMLError('unknown error')
        return int(watts * 1000)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert (handle, sensor) == ('second', 0)  # the GPU's own
        return 61

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert (handle, kind) == ('second', 1)  # that of its multiprocessors
        return 1755


@pytest.fixture
def gpu(as_on_a_gpu, monkeypatch):
    """Gives this process a GPU and a fake of NVIDIA's library that answers `watts`; synchronising is an error."""
    stats = {'allocated_bytes.all.peak': 20 * GIB, 'num_alloc_retries': 3, 'num_ooms': 1}

    def set_up(watts: list[float | None]) -> tuple[FakeNvml, dict]:
        nvml = FakeNvml(watts)
        monkeypatch.setitem(sys.modules, 'pynvml', nvml)
        monkeypatch.setattr(torch.cuda, 'pynvml', nvml, raising=False)
        monkeypatch.setattr(torch.cuda, '_HAS_PYNVML', True)
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '1')  # torch's device 0, which NVML counts as 1
        monkeypatch.setattr(gpu_monitor, 'SECONDS_BETWEEN_SAMPLES', 0.001)
        monkeypatch.setattr(torch.cuda, 'memory_stats', lambda: dict(stats))
        monkeypatch.setattr(torch.cuda, 'synchronize', lambda *args: pytest.fail('synchronised'))
        return nvml, stats
    return set_up


def watched(nvml: FakeNvml) -> Readings:
    monitor = GpuMonitor()
    monitor.start()
    assert nvml.all_asked.wait(timeout=60)
    return monitor.stop()


def test_the_gpu_of_this_rank_is_asked_by_another_thread(gpu):
    nvml, _ = gpu([300, 400.5, 350])
    readings = watched(nvml)
    assert readings.of['power_watts'] == Running(3, 1050.5, 400.5)
    assert (readings.of['temperature_celsius'].mean, readings.of['sm_clock_mhz'].maximum) == (61, 1755)
    assert len(nvml.asked_by) == 1 and threading.get_ident() not in nvml.asked_by


def test_of_a_part_of_a_gpu_no_power_is_told_since_others_use_the_rest(gpu, as_on_a_gpu):
    gpu([300] * 1000)
    as_on_a_gpu(name='NVIDIA H100 80GB HBM3 MIG 3g.40gb')
    monitor = GpuMonitor()
    monitor.start()
    wait_until(lambda: monitor._running['temperature_celsius'].count > 1)
    readings = monitor.stop()
    assert readings.of['power_watts'].count == 0 and readings.of['temperature_celsius'].mean == 61


def test_an_error_in_the_middle_leaves_out_one_value(gpu):
    nvml, _ = gpu([300, None, 350])
    readings = watched(nvml)
    assert readings.of['power_watts'] == Running(2, 650, 350)
    assert readings.of['temperature_celsius'].count >= 3
    figures = gpu_figures([readings], 10, 1)
    assert (figures['gpu_power_watts_mean'], figures['gpu_power_watts_max']) == (325, 350)


def test_a_run_of_days_keeps_as_little_as_one_of_seconds(gpu):
    nvml, _ = gpu([300.0] * 1000)
    readings = watched(nvml)
    assert readings.of['power_watts'] == Running(1000, 1000 * 300, 300)
    assert len(pickle.dumps(readings)) < 1000


def test_nothing_is_sampled_after_the_end(gpu):
    nvml, _ = gpu([300] * 3)
    before = set(threading.enumerate())
    readings = watched(nvml)
    number = readings.of['temperature_celsius'].count
    wait_until(lambda: before.issuperset(threading.enumerate()))
    assert readings.of['temperature_celsius'].count == number


def test_of_a_gpu_that_the_library_does_not_know_only_the_allocator_is_known(gpu, monkeypatch):
    gpu([300])
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', 'MIG-00000000-dead-beef-0000-000000000000')  # a slice of one
    monkeypatch.setattr(torch.cuda, '_raw_device_uuid_nvml', lambda: ['GPU-6f2a0e11-0000-1111-2222-333344445555'])
    monitor = GpuMonitor()
    monitor.start()
    assert monitor.stop().of == Readings().of
    assert monitor.stop().peak_memory_allocated_gib == 20


def test_without_the_package_only_the_allocator_is_known(gpu, monkeypatch):
    gpu([300])
    monkeypatch.setitem(sys.modules, 'pynvml', None)  # importing it fails
    monitor = GpuMonitor()
    monitor.start()
    readings = monitor.stop()
    assert readings.of == Readings().of and readings.allocator_retries == 0


def test_the_allocators_counts_are_of_the_measured_batches_alone(gpu):
    _, stats = gpu([300])
    monitor = GpuMonitor()
    monitor.start()
    stats['num_alloc_retries'] += 4
    stats['num_ooms'] += 1
    readings = monitor.stop()
    stats['num_alloc_retries'] += 10  # batches that are not measured
    assert monitor.stop() == readings
    assert (readings.allocator_retries, readings.allocator_ooms) == (4, 1)


def test_the_monitor_runs_from_the_end_of_the_warm_up_to_the_last_measured_batch():
    events = []
    measurement = Measurement(warmup_batches=2, measure_batches=3)
    measurement.gpu = SimpleNamespace(start=lambda: events.append(('start', measurement.batches)),
                                      stop=lambda: events.append(('stop', measurement.batches)))
    loader = SimpleNamespace(seconds_waited=lambda: 0.0, ready_batches=0, queue_length=0)
    state = SimpleNamespace(train_dataloader=loader, dataloader_len=7, timestamp=Timestamp(), total_loss_dict={},
                            max_duration=Time.from_batch(7))
    measurement.fit_start(state, None)
    for _ in range(7):
        measurement.before_dataloader(state, None)
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(4)
        measurement.batch_end(state, None)
    assert events[:2] == [('start', 2), ('stop', 5)] and {event for event, _ in events[2:]} <= {'stop'}


def readings_of(watts: list[float], celsius: list[float], megahertz: list[float], *others) -> Readings:
    of = Readings().of
    for running, values in zip(of.values(), (watts, celsius, megahertz), strict=True):
        for value in values:
            running.add(value)
    return Readings(of, *others)


def test_figures_are_over_all_gpus():
    ranks = [readings_of([300, 400], [60, 64], [1700, 1800], 20.0, 1, 0),
             readings_of([500], [70], [1600], 22.0, 2, 1)]
    assert gpu_figures(ranks, images_per_sec=17, num_devices=2) == {
        'gpu_power_watts_mean': 400, 'gpu_power_watts_max': 500,
        'gpu_temperature_celsius_mean': pytest.approx(194 / 3), 'gpu_temperature_celsius_max': 70,
        'gpu_sm_clock_mhz_mean': 1700, 'gpu_sm_clock_mhz_max': 1800,
        'joules_per_image': pytest.approx((350 + 500) / 17),  # 850 W make 17 images in a second
        'peak_memory_allocated_gib': 22.0, 'allocator_retries': 3, 'allocator_ooms': 1,
    }


def test_joules_are_not_told_where_a_gpus_power_is_not_known():
    ranks = [readings_of([300], [60], [1700]), readings_of([], [60], [1700])]
    assert gpu_figures(ranks, 10, 2)['joules_per_image'] is None
    assert gpu_figures(ranks[:1], 10, 2)['joules_per_image'] is None  # the other rank is gone
    assert gpu_figures(ranks[:1], None, 1)['joules_per_image'] is None  # nothing was measured
    assert gpu_figures(ranks[:1], 10, 1)['joules_per_image'] == 30


def test_the_ranks_are_asked_only_while_they_are_there(monkeypatch):
    other = readings_of([500], [70], [1600], 22.0, 2, 1)
    monkeypatch.setattr(gpu_monitor.dist, 'all_gather_object', lambda mine: [mine, other])
    monkeypatch.setattr(gpu_monitor.dist, 'get_world_size', lambda: 2)
    assert gather_gpu_figures(GpuMonitor(), 10)['gpu_power_watts_max'] == 500
    assert gather_gpu_figures(GpuMonitor(), 10, all_ranks=False)['gpu_power_watts_max'] is None


def test_a_record_without_a_gpu_says_null(plain_run):
    record = json.loads((plain_run.folder / 'results.jsonl').read_text())
    assert KEYS <= set(record) and all(record[key] is None for key in KEYS)
