"""The record says whether float32 is TF32, as torch does, in its way of saying it before 2.9 and after."""
from types import SimpleNamespace

import pytest
import torch

from measuring.record import uses_tf32


def flags(newer: bool, allowed: bool) -> SimpleNamespace:
    """What torch says of products, or of convolutions."""
    if newer:
        return SimpleNamespace(fp32_precision='tf32' if allowed else 'ieee')
    return SimpleNamespace(allow_tf32=allowed)


@pytest.mark.parametrize('newer', [False, True])
@pytest.mark.parametrize('matmul, convolution', [(True, False), (False, True), (False, False)])
def test_tf32_is_what_torch_allows_for_products_or_convolutions(as_on_a_gpu, monkeypatch, newer, matmul, convolution):
    as_on_a_gpu()
    monkeypatch.setattr(torch.cuda, 'is_tf32_supported', lambda: True)
    monkeypatch.setattr(torch.backends.cuda, 'matmul', flags(newer, matmul))
    convolutions = flags(newer, convolution)
    convolutions.conv = flags(newer, convolution)
    monkeypatch.setattr(torch.backends, 'cudnn', convolutions)
    assert uses_tf32() is (matmul or convolution)
