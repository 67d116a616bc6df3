"""Peaks of GPUs, against what each card's architecture gives."""
import pytest

from models.flops import peak_tflops
from models.peaks import PEAKS

# multiprocessors, gigahertz of the boost clock, FLOPs of a multiprocessor in a clock
BY_ARCHITECTURE = {
    'NVIDIA A100-SXM4-80GB': (108, 1.410, 2048),
    'NVIDIA H100 80GB HBM3': (132, 1.830, 4096),
    'NVIDIA H100 PCIe': (114, 1.620, 4096),
    'NVIDIA H200': (132, 1.830, 4096),
    'NVIDIA A10': (72, 1.695, 1024),
    'NVIDIA L4': (58, 2.040, 1024),
    'NVIDIA L40S': (142, 2.520, 1024),
    'NVIDIA GeForce RTX 4090': (128, 2.520, 512),
    'Tesla V100-SXM2-16GB': (80, 1.530, 1024),
    'Tesla T4': (40, 1.590, 1024),
}


@pytest.mark.parametrize('name', BY_ARCHITECTURE)
def test_a_datasheets_peak_is_what_the_architecture_gives(name):
    multiprocessors, gigahertz, flops_in_a_clock = BY_ARCHITECTURE[name]
    assert PEAKS[name] == pytest.approx(multiprocessors * gigahertz * flops_in_a_clock / 1000, rel=0.015)


@pytest.mark.parametrize('name, bf16, fp16', [
    ('NVIDIA A100-SXM4-40GB', 312, 312), ('NVIDIA H200', 989, 989), ('NVIDIA B200', 2250, 2250),
    ('NVIDIA H100 PCIe', 756, 756), ('Tesla T4', None, 65), ('NVIDIA H100', None, None), ('NVIDIA A10G', None, None)])
def test_a_peak_is_of_the_exact_card_and_of_the_precision(name, bf16, fp16, as_on_a_gpu):
    as_on_a_gpu(name=name)
    assert peak_tflops('amp_bf16') == peak_tflops('bf16') == bf16
    assert peak_tflops('amp_fp16') == peak_tflops('fp16') == fp16
    assert peak_tflops('fp32') is None
