"""What a run does before its first batch, and what it does only once."""
import os
import subprocess
import sys

import pytest
import torch

import benchmark
from fitting import warn_of_a_slow_cpu
from settings import allocator
from settings.allocator import let_segments_grow
from tests.runs import ROOT, TINY, one_error_line, settings_of


def test_a_run_finds_its_model_once_and_gives_it_memory_once(monkeypatch, capfd):
    found = []
    devices = []

    class Built(benchmark.StableDiffusion):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            devices.append(next(self.parameters()).device.type)

    def stop(**_):
        raise ValueError('enough')

    find = benchmark.find_model
    monkeypatch.setattr(benchmark, 'find_model', lambda *args: found.append(args) or find(*args))
    monkeypatch.setattr(benchmark, 'StableDiffusion', Built)
    monkeypatch.setattr(benchmark, 'Trainer', stop)
    assert 'enough' in one_error_line(['--use_synth_data', *TINY, '--results', os.devnull], capfd)
    assert found == [('tiny', False)]
    assert devices == ['meta', 'cpu']


@pytest.mark.parametrize('version, variable', [
    ('2.7.0', 'PYTORCH_CUDA_ALLOC_CONF'), ('2.11.0+cu130', 'PYTORCH_ALLOC_CONF'),
])
def test_segments_grow_unless_the_user_has_set_something(monkeypatch, version, variable):
    monkeypatch.setattr(os, 'environ', {})
    monkeypatch.setattr(allocator.importlib.metadata, 'version', lambda package: version)
    let_segments_grow()
    assert os.environ == {variable: 'expandable_segments:True'}
    for theirs in ({'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:512'}, {'PYTORCH_ALLOC_CONF': ''}):
        monkeypatch.setattr(os, 'environ', dict(theirs))
        let_segments_grow()
        assert os.environ == theirs


def test_it_is_said_before_torch_is_imported():
    program = """
import os, runpy, sys

class Watch:
    def find_spec(self, name, *_):
        if name == 'torch':
            print(os.environ['PYTORCH_CUDA_ALLOC_CONF'])
            sys.exit(7)

sys.meta_path.insert(0, Watch())
sys.argv = ['benchmark.py', '--use_synth_data']
runpy.run_path('benchmark.py', run_name='__main__')
"""
    environment = {name: value for name, value in os.environ.items() if name not in allocator.VARIABLES}
    if tuple(map(int, torch.__version__.split('.')[:2])) >= allocator.NEW_NAME_SINCE:
        program = program.replace('PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF')
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, env=environment | {'PYTHONPATH': str(ROOT)},
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, 'expandable_segments:True\n'), done.stderr


def test_a_cpu_that_needs_hours_for_a_batch_says_so_before_the_first_and_names_what_takes_seconds(capsys):
    warn_of_a_slow_cpu(settings_of('--use_synth_data', '--device_train_microbatch_size', '4'), int(3570.5e9))
    told = capsys.readouterr().err
    assert 'A batch is 7,312 TFLOP' in told and 'minutes a batch' in told and told.count('\n') == 1
    command = told.partition('model takes seconds: python benchmark.py ')[2].split()
    warn_of_a_slow_cpu(settings_of(*command), 172_000_000)
    assert capsys.readouterr().err == ''
