"""The commands that convert.py and encode.py name run as they are printed."""
import shlex

from benchmark import main
from cli.next_command import training_command


def test_the_training_that_is_named_runs_here(shards, results):
    command = shlex.split(training_command(shards, 7))
    assert command[:2] == ['python', 'benchmark.py']
    record = main([*command[2:], '--measure_batches', '2', '--warmup_batches', '1', '--results', str(results)])
    assert (record['status'], record['batch_size'], record['model_name']) == ('complete', 4, 'tiny')


def test_gpus_share_the_batch(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1,2,3,4,5')
    command = training_command('a', 100)
    assert command.startswith('composer benchmark.py ') and '--batch_size 60 ' in f'{command} '


def test_the_batch_is_a_power_of_two_of_what_there_is_and_flags_stay():
    assert '--batch_size 1 ' in training_command('my photos', 1) + ' '
    assert '--batch_size 2048 ' in training_command('a', 10_000) + ' '
    command = training_command('my photos', 21, ['--model_name', 'my model', '--image_size', '256'])
    assert command == ("python benchmark.py --remote 'my photos' --use_ema --batch_size 16 --model_name "
                       "'my model' --image_size 256")
