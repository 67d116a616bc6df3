"""The commands that convert.py and encode.py name run as they are printed."""
import shlex

import torch

from benchmark import main
from harness.next_command import training_command


def test_the_training_that_is_named_runs_here(shards, results):
    command = shlex.split(training_command(shards, 24))
    assert command[:4] == ['composer', '-n', '1', 'benchmark.py']
    record = main([*command[4:], '--measure_batches', '2', '--warmup_batches', '1', '--results', str(results)])
    assert (record['status'], record['batch_size'], record['model_name']) == ('complete', 16, 'tiny')


def test_gpus_share_the_batch(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 6)
    assert '--batch_size 60 ' in training_command('a', 100) + ' '


def test_the_batch_is_a_power_of_two_of_what_there_is_and_flags_stay():
    assert '--batch_size 1 ' in training_command('my photos', 1) + ' '
    assert '--batch_size 2048 ' in training_command('a', 10_000) + ' '
    command = training_command('my photos', 21, ['--model_name', 'my model', '--image_size', '256'])
    assert command == ("composer -n 1 benchmark.py --remote 'my photos' --use_ema --batch_size 16 --model_name "
                       "'my model' --image_size 256")
