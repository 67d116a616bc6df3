"""What a command does before its work, and a run before its first batch."""
import importlib.util
import io
import os
import subprocess
import sys

import pytest

from sdbench import process
from sdbench.flags.commands import Report
from sdbench.flags.parser import answer_early
from sdbench.training.run import log_config
from tests.runs import ROOT, settings_of


def test_segments_grow_before_torch_is_imported_unless_the_user_has_set_something():
    program = """
import os, runpy, sys

class Watch:
    def find_spec(self, name, *_):
        if name == 'torch':
            print({name: value for name, value in os.environ.items() if 'ALLOC_CONF' in name})
            sys.exit(7)

sys.meta_path.insert(0, Watch())
sys.argv = ['benchmark.py', '--use_synth_data']
runpy.run_path('benchmark.py', run_name='__main__')
"""
    ours = {'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True'}
    plain = {name: value for name, value in os.environ.items() if 'ALLOC_CONF' not in name}
    for theirs in ({}, {'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:512'}, {'PYTORCH_ALLOC_CONF': 'backend:native'}):
        done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, env=plain | theirs | {'PYTHONPATH': str(ROOT)},
                              capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (7, f'{theirs or ours}\n'), done.stderr


def test_a_cpu_is_told_what_stable_diffusion_takes_there_and_what_takes_less(capsys):
    log_config(settings_of('--use_synth_data', '--device_train_microbatch_size', '4'))
    warning, _ = capsys.readouterr().err.splitlines()
    assert '18 GB' in warning and '2,048 images' in warning
    command = warning.partition('python benchmark.py ')[2].split()
    log_config(settings_of(*command))
    assert 'warning' not in capsys.readouterr().err


@pytest.mark.parametrize('has_gpu, of_the_user, policy', [
    (False, None, 'PASSIVE'), (False, 'ACTIVE', 'ACTIVE'), (True, None, None)])
def test_threads_sleep_on_a_machine_without_a_gpu_unless_the_user_says_otherwise(tmp_path, monkeypatch, has_gpu,
                                                                                  of_the_user, policy):
    device = tmp_path / 'gpu'
    if has_gpu:
        device.touch()
    monkeypatch.setattr(process, 'GPU_DEVICES', (str(device),))
    environment = {} if of_the_user is None else {'OMP_WAIT_POLICY': of_the_user}
    monkeypatch.setattr(os, 'environ', environment)
    process.begin()
    assert environment.get('OMP_WAIT_POLICY') == policy


def test_output_that_takes_ascii_alone_ends_no_command(monkeypatch):
    log = io.BytesIO()
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(log, 'ascii', write_through=True))
    process.begin()
    print('converted 猫')
    assert log.getvalue() == b'converted \\u732b\n'


def test_where_the_environment_is_not_active_one_line_says_how_it_is_made_so(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(sys, 'argv', ['report.py', 'results.jsonl'])
    with pytest.raises(SystemExit):
        answer_early(Report, '')
    line = capsys.readouterr().err
    assert line.startswith('report.py: error: ') and line.count('\n') == 1
    assert 'source .venv/bin/activate' in line
