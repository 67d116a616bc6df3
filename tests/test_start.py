"""A command prepares its process, and a run warns before its first batch."""
import getpass
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdbench import process
from sdbench.flags.commands import Report
from sdbench.flags.parser import answer_early
from sdbench.training.run import announce_build
from tests.runs import ROOT, refusal, settings_of, wait_until


def test_a_machine_without_gpu_warns_about_stable_diffusion_and_suggests_the_tiny_model(capsys, monkeypatch):
    monkeypatch.setattr('os.sysconf', {'SC_PAGE_SIZE': 1, 'SC_PHYS_PAGES': 23e9}.get)
    announce_build(settings_of('--use_synth_data', '--device_train_microbatch_size', '4'))
    warning, _ = capsys.readouterr().err.splitlines()
    assert 'needs 23 GB for a microbatch of 4 images' in warning and '2,048 images' in warning
    with pytest.raises(ValueError, match='23 GB of memory; .* needs 26 GB for a microbatch of 4 images; give'):
        announce_build(settings_of('--use_synth_data', '--use_ema', '--device_train_microbatch_size', '4'))
    command = warning.partition('python benchmark.py ')[2].split()
    announce_build(settings_of(*command))
    assert 'warning' not in capsys.readouterr().err


@pytest.mark.parametrize('has_gpu, before, after', [
    (True, {}, {'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True'}),
    (False, {'PYTORCH_ALLOC_CONF': 'backend:native'}, {'OMP_WAIT_POLICY': 'PASSIVE'}),
    (False, {'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:512', 'OMP_WAIT_POLICY': 'ACTIVE'}, {}),
    (True, {'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:512'}, {})])
def test_allocator_and_openmp_are_configured_unless_the_user_has_done_so(tmp_path, monkeypatch, has_gpu, before, after):
    monkeypatch.setattr(process, 'GPU_DEVICES', (str(tmp_path if has_gpu else tmp_path / 'none'),))
    environment = before.copy()
    monkeypatch.setattr(os, 'environ', environment)
    process.begin()
    assert environment == before | after


def test_a_user_id_without_a_name_is_named_by_its_number(monkeypatch):
    monkeypatch.setattr(os, 'environ', {})
    monkeypatch.setattr('pwd.getpwuid', {}.__getitem__)  # raises KeyError
    process.begin()
    assert getpass.getuser() == str(os.getuid())


def test_an_ascii_terminal_does_not_end_a_command(monkeypatch):
    log = io.BytesIO()
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(log, 'ascii', write_through=True))
    process.begin()
    print('converted 猫')
    assert log.getvalue() == b'converted \\u732b\n'


RANK = """
import os, signal, time
os.environ['LOCAL_RANK'] = '0'
signal.signal(signal.SIGTERM, lambda *_: (open('signalled', 'w').close(), os._exit(0)))
from sdbench.process import begin
begin()
open('begun', 'w').close()
time.sleep(600)
"""
LAUNCHER = 'import subprocess, sys; subprocess.run([sys.executable, "-c", sys.argv[1]])'


def test_a_rank_gets_sigterm_when_its_launcher_is_killed(tmp_path):
    launcher = subprocess.Popen([sys.executable, '-c', LAUNCHER, RANK], env={**os.environ, 'PYTHONPATH': str(ROOT)})
    wait_until(Path('begun').exists)
    launcher.kill()
    launcher.wait()
    wait_until(Path('signalled').exists)


@pytest.mark.parametrize('limit, cores', [
    (None, 8), ('400000 100000', 4), ('50000 100000', 1), ('max 100000', 8), ('9900000 100000', 8)])
def test_cores_are_the_smaller_of_affinity_and_container_quota(limit, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: range(8))
    if limit:
        (tmp_path / 'cpu.max').write_text(f'{limit}\n')
    assert process.cpu_cores(str(tmp_path)) == cores


def test_without_the_environment_a_one_line_error_says_how_to_activate_it(monkeypatch, capfd):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(sys, 'argv', ['report.py', 'results.jsonl'])
    line = refusal(capfd, answer_early, Report, '')
    assert line.startswith('report.py: error: ')
    assert 'source .venv/bin/activate' in line
