"""More ranks than GPUs are refused before anything touches a GPU, which would end in a traceback."""
import composer.utils
import pytest
import torch

import benchmark
from cli import checks

TINY = ['--model_name', 'tiny', '--image_size', '64', '--batch_size', '16']


@pytest.fixture
def sixteen_ranks_on_eight_gpus(as_on_a_gpu, monkeypatch):
    """Fakes; whatever uses a GPU fails, as setting device 8 of 8 does."""
    def no_such_device(*args, **kwargs):
        raise RuntimeError('CUDA error: invalid device ordinal')
    for name, number in (('WORLD_SIZE', 16), ('LOCAL_WORLD_SIZE', 16), ('RANK', 0), ('LOCAL_RANK', 0)):
        monkeypatch.setenv(name, str(number))
    as_on_a_gpu(count=8)
    for name in ('set_device', 'current_device', 'get_device_properties', 'get_device_name', '_lazy_init'):
        monkeypatch.setattr(torch.cuda, name, no_such_device)
    for module in (benchmark, composer.utils):
        monkeypatch.setattr(module, 'get_device', no_such_device)


@pytest.mark.parametrize('argv', [['--use_synth_data', *TINY], TINY], ids=['alone', 'with another mistake'])
def test_more_ranks_than_gpus_are_named_before_a_gpu_is_touched(argv, sixteen_ranks_on_eight_gpus, results, capfd):
    with pytest.raises(SystemExit):
        benchmark.main([*argv, '--results', str(results)])
    out, err = capfd.readouterr()
    assert out == '' and err.count('\n') == 1 and 'Traceback' not in err
    assert 'error: composer -n 16 is more than the 8 GPUs of this machine; use -n 8' in err


def test_more_ranks_than_cores_where_there_is_no_gpu_are_one_line(monkeypatch, capfd):
    monkeypatch.setattr(checks.os, 'sched_getaffinity', lambda _: {0, 1})
    for processes, line in (('2', ''), ('8', 'warning: no GPU here: the 8 processes of composer -n 8 share 2 cores')):
        monkeypatch.setenv('LOCAL_WORLD_SIZE', processes)
        checks.refuse_more_ranks_than_gpus()
        error = capfd.readouterr().err
        assert error.startswith(line) and error.count('\n') == bool(line)


def test_as_many_ranks_as_gpus_are_let_pass(sixteen_ranks_on_eight_gpus, monkeypatch):
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '8')
    checks.refuse_more_ranks_than_gpus()
