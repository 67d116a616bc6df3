"""The measured speed excludes prefetched batches, checkpoints and the start of a run, and a GPU reports its power."""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from composer.core import Time, Timestamp
from composer.utils import dist

from benchmark import main
from sdbench import measuring
from sdbench.measuring import QUANTITIES, GpuMonitor, Measurement
from tests.forked_runs import run_ranks
from tests.runs import TINY

WORKERS = 8
EXCLUDED = {'checkpoint': 5.0, 'evaluation': 2.0, 'sampling': 3.0}  # seconds of simulated time each


class SimulatedLoader:
    """A loader with eight workers, each of which makes a batch in `seconds` of simulated time.

    It is the reference for a prefetch queue: whenever a batch is taken, a worker starts to make another one.
    """
    queue_length = 2 * WORKERS

    def __init__(self, clock, seconds: float):
        self.clock, self.seconds = clock, seconds
        self.waited = 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Drop the batches of the last epoch, and let the workers start again."""
        self.ready_at: list[float] = []  # time at which each requested batch is ready
        self.taken = 0
        for _ in range(self.queue_length):
            self._ask()

    def _ask(self) -> None:
        """Request a batch from the worker that has made the batch `WORKERS` before it."""
        start = self.clock.now
        if len(self.ready_at) >= WORKERS:
            start = max(start, self.ready_at[-WORKERS])
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


def simulated_run(monkeypatch, batch_seconds=1.0, batches=99, measure_batches=None, epoch=10**6, interrupted=False
                  ) -> dict:
    """Return the metrics of a simulated run with 4 images per batch, steps of 0.05 s, and a first step of 20 s.

    An interrupted run does what EXCLUDED names after every tenth batch.
    """
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(measuring.time, 'perf_counter', lambda: clock.now)
    loader = SimulatedLoader(clock, batch_seconds)
    state = SimpleNamespace(train_dataloader=loader, dataloader_len=epoch, max_duration=Time.from_batch(batches),
                            timestamp=Timestamp(), previous_timestamp=Timestamp(),
                            total_loss_dict={'loss/train/total': 0.5})
    measurement = Measurement(3, measure_batches)
    measurement.begin(state)
    for batch in range(batches):
        loader.take()
        clock.now += 0.05 if batch else 20
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(4)
        measurement.end_batch(state)
        if (batch + 1) % epoch == 0:
            state.timestamp = state.timestamp.to_next_epoch()
            loader.begin_epoch()
        if interrupted and (batch + 1) % 10 == 0:
            for kind, seconds in EXCLUDED.items():
                with measurement.excluded(kind):
                    clock.now += seconds
    return measurement.metrics(all_ranks=True)


@pytest.mark.parametrize('batch_seconds, true_speed', [
    (0.8, 4 * 8 / 0.8),  # half of the model's speed
    (0.48, 4 * 8 / 0.48),  # five sixths: the prefetched batches last longest
    (1.6, 4 * 8 / 1.6), (6.4, 4 * 8 / 6.4), (0.1, 4 / 0.05)])  # the last loader is faster than the model
def test_prefetched_batches_do_not_count_as_the_loaders_speed(monkeypatch, batch_seconds, true_speed):
    shown = simulated_run(monkeypatch, batch_seconds)
    assert shown['images_per_sec'] == pytest.approx(true_speed, rel=0.05)
    step_fraction = 0.05 * true_speed / 4
    assert shown['data_wait_fraction'] == pytest.approx(1 - step_fraction, abs=0.07)
    assert shown['turnover_batches'] == 16  # a full queue, and the window has five of them
    assert shown['measured_batches'] == 80


@pytest.mark.parametrize('batches, measure_batches, prefetched, measured', [
    (23, 20, 0, 20), (500, None, 16, 500 - 3 - 16)])  # a short run, and a long one that is measured to its end
def test_a_run_is_measured_whatever_its_length(monkeypatch, batches, measure_batches, prefetched, measured):
    shown = simulated_run(monkeypatch, batches=batches, measure_batches=measure_batches)
    assert (shown['turnover_batches'], shown['measured_batches']) == (prefetched, measured)
    assert shown['images_per_sec'] <= 8 * 4 * 1.1  # 8 processes make a batch of 4 images each in a second


def test_evaluations_sampling_and_checkpoints_are_excluded_and_counted_separately(monkeypatch):
    plain = simulated_run(monkeypatch, batch_seconds=0.01)
    excluded = simulated_run(monkeypatch, batch_seconds=0.01, interrupted=True)
    spent = {f'{kind}_seconds': 8 * seconds for kind, seconds in EXCLUDED.items()}
    assert {name: excluded[name] for name in spent} == pytest.approx(spent)
    for name in plain.keys() - spent.keys() - {'peak_memory_gib'}:  # memory belongs to the whole process
        assert excluded[name] == pytest.approx(plain[name]), name


def test_a_queue_that_fills_again_at_the_start_of_an_epoch_does_not_lower_the_speed(monkeypatch):
    within, at_the_start = (simulated_run(monkeypatch, 0.1, epoch=epoch)['images_per_sec'] for epoch in (10**6, 98))
    assert at_the_start == pytest.approx(within, rel=0.05)


def measure_two_ranks(folder: Path, rank: int) -> None:
    """Write the metrics of six batches. Rank 1 waits 1 s for data in each, and saves for 5 s during the second."""
    seconds, waited, saved = [([1, 6, 1, 2, 1, 3], 0, 0), ([1, 7, 2, 2, 2, 2], 1, 5)][rank]
    measurement = Measurement(0, None)
    for batch in range(6):
        measurement.seconds.extend([seconds[batch], waited, saved * (batch == 1), 0, 0])
    measurement.samples = 60
    dist.initialize_dist('cpu')
    (folder / f'{rank}.json').write_text(json.dumps(measurement.metrics(all_ranks=True)))


def test_drift_and_percentiles_are_of_the_slowest_rank_without_the_checkpoint_that_another_writes(server, tmp_path):
    """Without the checkpoint, the batches take 1 1 1 2 1 3 s and 1 2 2 2 2 2 s; the slowest of them 1 2 2 2 2 3 s."""
    log = tmp_path / 'log'
    ranks = [(tmp_path, rank) for rank in (0, 1)]
    assert run_ranks(server, [log, log], measure_two_ranks, ranks) == [0, 0], log.read_text()
    found, other = (json.loads((tmp_path / f'{rank}.json').read_text()) for rank in (0, 1))
    assert found == other
    assert found['images_per_sec'] == 60 / 11
    assert found['checkpoint_seconds'] == 5
    assert found['drift'] == pytest.approx(3 / 5 - 1)  # the last two batches take 5 s, the first two 3 s
    assert [found[f'batch_seconds_{name}'] for name in ('p10', 'median', 'p90')] == [1.5, 2, 2.5]
    assert found['data_wait_fraction'] == pytest.approx(6 / 11)


def test_a_whole_gpu_reports_its_power_and_a_mig_slice_does_not(as_on_a_gpu, monkeypatch):
    monkeypatch.setitem(QUANTITIES, 'gpu_power_watts', (lambda: 300_000, 1000))  # milliwatts
    monkeypatch.setitem(QUANTITIES, 'gpu_sm_clock_mhz', (lambda: 1755, 1))
    for name, watts in (('NVIDIA H100 80GB HBM3', [300]), ('NVIDIA H100 80GB HBM3 MIG 3g.40gb', [])):
        as_on_a_gpu(name=name)
        monitor = GpuMonitor()
        monitor.sample()
        assert monitor.samples == {'gpu_power_watts': watts, 'gpu_sm_clock_mhz': [1755]}


def test_metrics_are_combined_over_all_gpus_and_joules_need_the_power_of_each(monkeypatch):
    ranks = [{'gpu_power_watts_mean': watts, 'gpu_power_watts_max': watts, 'gpu_sm_clock_mhz_mean': megahertz,
              'gpu_sm_clock_mhz_max': megahertz, 'peak_memory_allocated_gib': gib, 'allocator_retries': retries}
             for watts, megahertz, gib, retries in ((350, 1700, 20.0, 1), (500, 1600, 22.0, 2))]
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
    assert '--measure_batches 20' in capfd.readouterr().out
