"""What a run does before its first batch."""
import os
import subprocess
import sys

from fitting import warn_of_a_slow_cpu
from settings.allocator import VARIABLES
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
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    for theirs in ({}, {'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:512'}, {'PYTORCH_ALLOC_CONF': 'backend:native'}):
        done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, env=plain | theirs | {'PYTHONPATH': str(ROOT)},
                              capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (7, f'{theirs or ours}\n'), done.stderr


def test_a_cpu_that_needs_hours_for_a_batch_says_so_before_the_first_and_names_what_takes_seconds(capsys):
    warn_of_a_slow_cpu(settings_of('--use_synth_data', '--device_train_microbatch_size', '4'), int(3570.5e9))
    told = capsys.readouterr().err
    assert 'A batch is 7,312 TFLOP' in told and 'minutes a batch' in told and told.count('\n') == 1
    command = told.partition('model takes seconds: python benchmark.py ')[2].split()
    warn_of_a_slow_cpu(settings_of(*command), 172_000_000)
    assert capsys.readouterr().err == ''
