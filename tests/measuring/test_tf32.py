"""The record says whether float32 is TF32, as torch does, in its way of saying it before 2.9 and after."""
from types import SimpleNamespace

import pytest
import torch

from measuring.record import uses_tf32


@pytest.fixture
def gpu(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_tf32_supported', lambda: True)
    places = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    yield
    for place, allowed in zip(places, before, strict=True):
        place.allow_tf32 = allowed


@pytest.mark.parametrize('matmul, convolution, expected', [(True, True, True), (True, False, True),
                                                           (False, True, True), (False, False, False)])
def test_tf32_is_what_torch_allows_for_products_or_convolutions(gpu, matmul, convolution, expected):
    torch.backends.cuda.matmul.allow_tf32 = matmul  # as Composer's DeviceGPU does
    torch.backends.cudnn.allow_tf32 = convolution
    assert uses_tf32() is expected


class Mixed:
    """torch 2.9 and later where a program has used the newer way: the older one raises."""

    def __init__(self, precision: str):
        self.fp32_precision = precision

    @property
    def allow_tf32(self):
        raise RuntimeError('you have used mix of the legacy and new APIs to set the TF32 status for cublas matmul')


@pytest.mark.parametrize('matmul, convolution, expected', [('tf32', 'tf32', True), ('ieee', 'tf32', True),
                                                           ('tf32', 'ieee', True), ('ieee', 'none', False)])
def test_a_newer_torch_is_asked_in_its_newer_way(gpu, monkeypatch, matmul, convolution, expected):
    monkeypatch.setattr(torch.backends.cuda, 'matmul', Mixed(matmul))
    monkeypatch.setattr(torch.backends, 'cudnn', SimpleNamespace(conv=Mixed(convolution), allow_tf32=None))
    assert uses_tf32() is expected


def test_a_gpu_without_tf32_and_a_cpu_use_none(gpu, as_on_a_gpu, monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = True
    monkeypatch.setattr(torch.cuda, 'is_tf32_supported', lambda: False)
    assert uses_tf32() is False
    as_on_a_gpu(count=0)
    assert uses_tf32() is None


def test_the_record_of_a_cpu_has_no_tf32(plain_run):
    assert plain_run.record['tf32'] is None and plain_run.record['precision'] == 'fp32'
