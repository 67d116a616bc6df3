"""While other programs run the threads of a training sleep while they wait; on a machine with a GPU nothing changes."""
import os

import pytest

from sdbench import process


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
    process.sleep_while_waiting()
    assert environment.get('OMP_WAIT_POLICY') == policy
