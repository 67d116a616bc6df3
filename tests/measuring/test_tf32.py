"""The record says whether float32 is TF32, as torch does, in its way of saying it before 2.9 and after."""
from types import SimpleNamespace

import pytest
import torch

from measuring.record import uses_tf32


@pytest.mark.parametrize('newer', [False, True])
@pytest.mark.parametrize('matmul, convolution', [(True, True), (True, False), (False, True), (False, False)])
def test_tf32_is_what_torch_allows_for_products_or_convolutions(as_on_a_gpu, monkeypatch, newer, matmul, convolution):
    def flags(allowed: bool) -> SimpleNamespace:
        return SimpleNamespace(fp32_precision='tf32' if allowed else 'ieee') if newer else SimpleNamespace(
            allow_tf32=allowed)

    as_on_a_gpu()
    monkeypatch.setattr(torch.cuda, 'is_tf32_supported', lambda: True)
    monkeypatch.setattr(torch.backends.cuda, 'matmul', flags(matmul))
    convolutions = flags(convolution)
    convolutions.conv = flags(convolution)
    monkeypatch.setattr(torch.backends, 'cudnn', convolutions)
    assert uses_tf32() is (matmul or convolution)


def test_a_gpu_without_tf32_and_a_cpu_use_none(as_on_a_gpu, monkeypatch):
    as_on_a_gpu()
    monkeypatch.setattr(torch.cuda, 'is_tf32_supported', lambda: False)
    assert uses_tf32() is False
    as_on_a_gpu(count=0)
    assert uses_tf32() is None
