"""The clock of a run, and the figures that come from it."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
from composer.core import Time, Timestamp

from benchmark import main
from sdbench.measuring import clock as measuring
from sdbench.measuring.clock import Measurement, whole_epochs
from tests.runs import TINY


def test_the_clock_leaves_out_the_warm_up_and_counts_the_wait(monkeypatch):
    clock = iter([0, 10, 15, 20])  # fit; the end of each batch
    waits = iter([8, 2, 1])
    monkeypatch.setattr(measuring.time, 'perf_counter', lambda: next(clock))
    loader = SimpleNamespace(seconds_waited=lambda: next(waits), ready_batches=0, queue_length=0)
    measurement = Measurement(warmup_batches=1, measure_batches=2)
    measurement.fit_start(SimpleNamespace(train_dataloader=loader, timestamp=Timestamp(),
                                          max_duration=Time.from_batch(3)), None)
    for batch in (1, 2, 3):
        measurement.before_dataloader(None, None)
        measurement.batch_end(SimpleNamespace(
            timestamp=Timestamp(batch=batch, sample=4 * batch), total_loss_dict={'loss/train/total': 0.5},
            previous_timestamp=Timestamp(batch=batch - 1, sample=4 * batch - 4), train_dataloader=loader,
            dataloader_len=3), None)
    window = measurement.window
    assert window.batch_seconds == [5, 5]
    assert window.wait_seconds == [2, 1]
    assert window.samples == 8
    figures = measuring.figures(window)
    assert figures['images_per_sec'] == 0.8
    assert figures['data_wait_fraction'] == pytest.approx(0.3)


def test_drift_and_percentiles_are_of_the_slowest_rank(monkeypatch):
    window = measuring.Window([1, 1, 1, 2, 1, 3], [0.0] * 6, [0.0] * 6, samples=60)
    other = (11, 6.0, 1.0, 40.0, {7})  # batches of 1 2 2 2 2 2 s, 1 s of each spent waiting; 40 GiB; a bad sample
    monkeypatch.setattr(measuring.dist, 'all_gather_object', lambda mine: [mine, other])
    highest = iter([[0] * 6, [1, 2, 2, 2, 2, 3], [0] * 3])  # of both ranks: excluded, batches, excluded by name
    monkeypatch.setattr(measuring, 'highest_of_ranks', lambda values, all_ranks: np.array(next(highest)))
    monkeypatch.setattr(measuring.dist, 'get_world_size', lambda: 2)
    figures = measuring.figures(window, bad_samples={5, 7})  # slowest: 1 2 2 2 2 3
    assert figures['images_per_sec'] == 60 / 11
    assert figures['images_per_sec_per_device'] == 30 / 11
    assert figures['drift'] == pytest.approx(3 / 5 - 1)  # the last two batches take 5 s, the first two 3 s
    assert [figures[f'batch_seconds_{name}'] for name in ('p10', 'median', 'p90')] == [1.5, 2, 2.5]
    assert figures['data_wait_fraction'] == pytest.approx(6 / 11)
    assert figures['peak_memory_gib'] == 40
    assert figures['bad_samples'] == 2


@pytest.mark.parametrize('epoch, batch_in_epoch, whole', [(0, 0, 0), (71, 1, 71), (71, 2, 72), (72, 0, 72)])
def test_an_epoch_is_whole_at_its_last_batch_before_composer_counts_it(epoch, batch_in_epoch, whole):
    timestamp = Timestamp(epoch=epoch, batch=2 * epoch + batch_in_epoch, batch_in_epoch=batch_in_epoch)
    evaluation_batches = Time.from_batch(1)  # those of the loader in use, where the run stopped in an evaluation
    assert whole_epochs(SimpleNamespace(timestamp=timestamp, train_dataloader=range(2),
                                        dataloader_len=evaluation_batches)) == whole


@pytest.mark.parametrize('num_workers, batches', [(0, 20), (2, 19)])
def test_the_loader_alone_is_measured_through_the_same_loader(results, shards, num_workers, batches, capfd):
    record = main(['--remote', shards, *TINY, '--loader_only', '--measure_batches', str(batches), '--num_workers',
                   str(num_workers), '--results', str(results)])
    assert json.loads(results.read_text()) == record
    assert record['stage'] == 'loader'
    assert record['measured_batches'] == batches  # over epochs of 6
    assert record['loader_images_per_sec'] > 0
    printed = capfd.readouterr().out
    assert 'images_per_sec' not in record
    assert 'loader' in printed
    assert ('caution: only 19 measured batches: use --measure_batches 20' in printed) == (batches < 20)
