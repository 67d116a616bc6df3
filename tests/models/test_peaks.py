"""Peaks of GPUs: each against its multiprocessors, its boost clock and what a multiprocessor does in a clock."""
import pytest

from models.flops import peak_tflops
from models.peaks import PEAKS

# name: multiprocessors, boost clock in GHz, dense FLOPs of one in a clock with float32 accumulation (whitepapers:
# 2048 on A100 and A30, 4096 on Hopper, 1024 on Volta, Turing, GA102 and Ada, of which GeForce cards do half)
BY_ARCHITECTURE = {
    'NVIDIA A100-SXM4-80GB': (108, 1.410, 2048),
    'NVIDIA H100 80GB HBM3': (132, 1.830, 4096),
    'NVIDIA H100 PCIe': (114, 1.620, 4096),
    'NVIDIA H200': (132, 1.830, 4096),
    'NVIDIA A10': (72, 1.695, 1024),
    'NVIDIA A30': (56, 1.440, 2048),
    'NVIDIA A40': (84, 1.740, 1024),
    'NVIDIA L4': (58, 2.040, 1024),
    'NVIDIA L40': (142, 2.490, 512),  # its datasheet gives half of what its chip has in other cards
    'NVIDIA L40S': (142, 2.520, 1024),
    'NVIDIA RTX A6000': (84, 1.800, 1024),
    'NVIDIA RTX 6000 Ada Generation': (142, 2.505, 1024),
    'NVIDIA GeForce RTX 3090': (82, 1.695, 512),
    'NVIDIA GeForce RTX 4090': (128, 2.520, 512),
    'NVIDIA GeForce RTX 5090': (170, 2.407, 512),
    'Tesla V100-SXM2-16GB': (80, 1.530, 1024),
    'Tesla V100-PCIE-16GB': (80, 1.380, 1024),
    'Tesla V100S-PCIE-32GB': (80, 1.597, 1024),
    'Tesla T4': (40, 1.590, 1024),
}


@pytest.mark.parametrize('name', BY_ARCHITECTURE)
def test_a_datasheets_peak_is_what_the_architecture_gives(name):
    multiprocessors, gigahertz, flops_in_a_clock = BY_ARCHITECTURE[name]
    assert PEAKS[name].fp16 == pytest.approx(multiprocessors * gigahertz * flops_in_a_clock / 1000, rel=0.015)


@pytest.mark.parametrize('name, bf16, fp16', [
    ('NVIDIA H100 NVL', 835, 835), ('NVIDIA H200 NVL', 835, 835), ('NVIDIA GH200 480GB', 989, 989),
    ('NVIDIA L40S', 362, 362), ('NVIDIA GeForce RTX 4090', 165.2, 165.2),
    ('Tesla T4', None, 65), ('Tesla V100-SXM2-32GB', None, 125),  # no bf16
    ('NVIDIA L40S-8Q', None, None), ('NVIDIA H100', None, None), ('NVIDIA A10G', None, None),
])
def test_a_peak_is_of_the_exact_card_and_of_the_precision(name, bf16, fp16, as_on_a_gpu):
    as_on_a_gpu(name=name)
    assert peak_tflops('amp_bf16') == peak_tflops('bf16') == bf16
    assert peak_tflops('amp_fp16') == peak_tflops('fp16') == fp16
    assert peak_tflops('fp32') is None


def test_a_card_that_has_bf16_does_it_as_fast_as_fp16():
    for peak in PEAKS.values():
        assert peak.bf16 in (None, peak.fp16)
