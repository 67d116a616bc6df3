"""The measured speed excludes prefetched batches, checkpoints and the start of a run, and a GPU reports its power."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
from composer.core import Time, Timestamp
from composer.utils import dist

from benchmark import main
from sdbench import measuring
from sdbench.measuring import QUANTITIES, GpuMonitor, Measurement
from tests.runs import TINY


class SimulatedLoader:
    """A loader with several workers, each of which makes a batch in `seconds` of simulated time.

    It is the reference for a prefetch queue: whenever a batch is taken, a worker starts to make another one.
    """

    def __init__(self, clock, workers: int, seconds: float):
        self.clock, self.seconds, self.workers = clock, seconds, workers
        self.queue_length = 2 * workers
        self.waited = 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Drop the batches of the last epoch, and let the workers start again."""
        self.ready_at: list[float] = []  # time at which each requested batch is ready
        self.taken = 0
        for _ in range(self.queue_length):
            self._ask()

    def _ask(self) -> None:
        """Request a batch from the worker that has made the batch `workers` before it."""
        start = self.clock.now
        if len(self.ready_at) >= self.workers:
            start = max(start, self.ready_at[-self.workers])
        self.ready_at.append(start + self.seconds)

    def take(self) -> None:
        wait = max(0.0, self.ready_at[self.taken] - self.clock.now)
        self.waited += wait
        self.clock.now += wait
        self.taken += 1
        self._ask()

    def seconds_waited(self) -> float:
        waited, self.waited = self.waited, 0.0
        return waited

    @property
    def queued_batches(self) -> int:
        return sum(time <= self.clock.now for time in self.ready_at[self.taken:])


def simulated_run(monkeypatch, workers=8, batch_seconds=1.0, step_seconds=0.05, first_step=20.0, batches=99,
                  measure_batches=None, warmup=3, checkpoint_every=None, checkpoint_seconds=5.0, epoch=10**6,
                  evaluate=0.0, sample=0.0) -> dict:
    """Return the metrics of a simulated run with 4 images per batch."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(measuring.time, 'perf_counter', lambda: clock.now)
    monkeypatch.setattr(measuring, 'peak_memory_gib', lambda: 1.0)
    loader = SimulatedLoader(clock, workers, batch_seconds)
    state = SimpleNamespace(train_dataloader=loader, dataloader_len=epoch, max_duration=Time.from_batch(batches),
                            timestamp=Timestamp(), previous_timestamp=Timestamp(),
                            total_loss_dict={'loss/train/total': 0.5})
    measurement = Measurement(warmup, measure_batches)
    measurement.begin(state)
    for batch in range(batches):
        loader.take()
        clock.now += first_step if batch == 0 else step_seconds
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(4)
        measurement.end_batch(state)
        if (batch + 1) % epoch == 0:
            state.timestamp = state.timestamp.to_next_epoch()
            loader.begin_epoch()
        if checkpoint_every and (batch + 1) % checkpoint_every == 0:
            for kind, seconds in (('evaluation', evaluate), ('sampling', sample), ('checkpoint', checkpoint_seconds)):
                with measurement.excluded(kind):
                    clock.now += seconds
    return measurement.metrics(all_ranks=True) | {'prefetched': measurement.prefetched_batches}


@pytest.mark.parametrize('batch_seconds, true_speed', [
    (0.8, 4 * 8 / 0.8),  # half of the model's speed
    (0.48, 4 * 8 / 0.48),  # five sixths: the prefetched batches last longest
    (1.6, 4 * 8 / 1.6), (6.4, 4 * 8 / 6.4), (0.1, 4 / 0.05)])  # the last loader is faster than the model
def test_prefetched_batches_do_not_count_as_the_loaders_speed(monkeypatch, batch_seconds, true_speed):
    shown = simulated_run(monkeypatch, batch_seconds=batch_seconds)
    assert shown['images_per_sec'] == pytest.approx(true_speed, rel=0.05)
    step_fraction = 0.05 * true_speed / 4  # a step takes 0.05 s
    assert shown['data_wait_fraction'] == pytest.approx(1 - step_fraction, abs=0.07)
    assert shown['prefetched'] == 16  # a full queue, and the window has five of them
    assert shown['measured_batches'] == 80


@pytest.mark.parametrize('batches, measure_batches, prefetched, measured', [
    (23, 20, 0, 20), (500, None, 16, 500 - 3 - 16)])  # a short run, and a long one that is measured to its end
def test_a_run_is_measured_whatever_its_length(monkeypatch, batches, measure_batches, prefetched, measured):
    shown = simulated_run(monkeypatch, batches=batches, measure_batches=measure_batches)
    assert (shown['prefetched'], shown['measured_batches']) == (prefetched, measured)
    assert shown['images_per_sec'] <= 8 * 4 * 1.1  # 8 processes make a batch of 4 images each in a second


def test_evaluations_sampling_and_checkpoints_are_excluded_and_counted_separately(monkeypatch):
    plain = simulated_run(monkeypatch, batch_seconds=0.01)
    excluded = simulated_run(monkeypatch, batch_seconds=0.01, checkpoint_every=10, evaluate=2.0, sample=3.0)
    spent = {'checkpoint_seconds': 5 * 8, 'evaluation_seconds': 2 * 8, 'sampling_seconds': 3 * 8}
    assert {name: excluded[name] for name in spent} == pytest.approx(spent)
    for name in plain.keys() - spent.keys() - {'peak_memory_gib'}:  # memory belongs to the whole process
        assert excluded[name] == pytest.approx(plain[name]), name


def test_a_queue_that_fills_again_at_the_start_of_an_epoch_does_not_lower_the_speed(monkeypatch):
    within = simulated_run(monkeypatch, batch_seconds=0.1, batches=99)
    at_the_start = simulated_run(monkeypatch, batch_seconds=0.1, batches=99, epoch=98)
    assert at_the_start['images_per_sec'] == pytest.approx(within['images_per_sec'], rel=0.05)


def test_drift_and_percentiles_are_of_the_slowest_rank_without_the_checkpoint_that_another_writes(monkeypatch):
    measurement = Measurement(0, None)
    for seconds in (1, 6, 1, 2, 1, 3):
        measurement.seconds.extend([seconds, 0, 0, 0, 0])  # nothing is excluded on this rank
    measurement.samples = 60
    other = (11, 6.0, 1.0, 40.0)  # batches of 1 2 2 2 2 2 s, 1 s of each spent waiting; 40 GiB
    excluded = [0, 5, 0, 0, 0, 0]  # s: the other rank saves during batch 2
    gathered = iter([lambda mine: [mine, other], lambda mine: [mine]])  # speeds, and the GPUs
    monkeypatch.setattr(dist, 'all_gather_object', lambda mine: next(gathered)(mine))
    highest = iter([excluded, [1, 2, 2, 2, 2, 3], [5, 0, 0]])  # excluded, batches, excluded by kind
    monkeypatch.setattr(measuring, 'highest_of_ranks', lambda values, all_ranks: np.array(next(highest)))
    found = measurement.metrics(all_ranks=True)  # slowest: 1 2 2 2 2 3
    assert found['images_per_sec'] == 60 / 11
    assert found['checkpoint_seconds'] == 5
    assert found['drift'] == pytest.approx(3 / 5 - 1)  # the last two batches take 5 s, the first two 3 s
    assert [found[f'batch_seconds_{name}'] for name in ('p10', 'median', 'p90')] == [1.5, 2, 2.5]
    assert found['data_wait_fraction'] == pytest.approx(6 / 11)
    assert found['peak_memory_gib'] == 40


def test_a_whole_gpu_reports_its_power_and_a_mig_slice_does_not(as_on_a_gpu, monkeypatch):
    monkeypatch.setitem(QUANTITIES, 'gpu_power_watts', (lambda: 300_000, 1000))  # milliwatts
    monkeypatch.setitem(QUANTITIES, 'gpu_sm_clock_mhz', (lambda: 1755, 1))
    for name, watts in (('NVIDIA H100 80GB HBM3', [300]), ('NVIDIA H100 80GB HBM3 MIG 3g.40gb', [])):
        as_on_a_gpu(name=name)
        monitor = GpuMonitor()
        monitor.sample()
        assert monitor.samples == {'gpu_power_watts': watts, 'gpu_sm_clock_mhz': [1755]}


def test_metrics_are_combined_over_all_gpus_and_joules_need_the_power_of_each(monkeypatch):
    def of_rank(watts: float, megahertz: float, gib: float, retries: int) -> dict:
        return {'gpu_power_watts_mean': watts, 'gpu_power_watts_max': watts, 'gpu_sm_clock_mhz_mean': megahertz,
                'gpu_sm_clock_mhz_max': megahertz, 'peak_memory_allocated_gib': gib, 'allocator_retries': retries}

    ranks = [of_rank(350, 1700, 20.0, 1), of_rank(500, 1600, 22.0, 2)]
    monkeypatch.setattr(dist, 'all_gather_object', lambda mine: ranks)
    monkeypatch.setattr(dist, 'get_world_size', lambda: 2)
    assert GpuMonitor().metrics(17, all_ranks=True) == {
        'gpu_power_watts_mean': 425, 'gpu_power_watts_max': 500,
        'gpu_sm_clock_mhz_mean': 1650, 'gpu_sm_clock_mhz_max': 1700,
        'joules_per_image': 850 / 17,  # 850 W make 17 images in a second
        'peak_memory_allocated_gib': 22.0, 'allocator_retries': 3}
    del ranks[1]['gpu_power_watts_mean']
    assert GpuMonitor().metrics(17, all_ranks=True)['joules_per_image'] is None


def test_loader_only_measures_the_same_loader_as_a_training(results, shards, capfd):
    record = main(['--remote', shards, *TINY, '--loader_only', '--measure_batches', '19', '--num_workers', '2'])
    assert json.loads(results.read_text()) == record
    assert (record['stage'], record['measured_batches']) == ('loader', 19)  # an epoch has 6
    assert record['loader_images_per_sec'] > 0
    assert 'images_per_sec' not in record
    assert 'caution         only 19 measured batches: use --measure_batches 20' in capfd.readouterr().out
