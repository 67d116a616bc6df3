"""The figures of each GPU against what its architecture gives, and the names that it is found by."""
import pytest

from sdbench.gpus import CARDS, cards_named, peak_of

# multiprocessors, gigahertz of the boost clock, FLOPs of a multiprocessor in a clock
BY_ARCHITECTURE = {
    'NVIDIA A100-SXM4-80GB': (108, 1.410, 2048),
    'NVIDIA H100 80GB HBM3': (132, 1.830, 4096),
    'NVIDIA H100 PCIe': (114, 1.620, 4096),
    'NVIDIA H200': (132, 1.830, 4096),
    'NVIDIA GB200': (152, 2.008, 8192),
    'NVIDIA A10': (72, 1.695, 1024),
    'NVIDIA L4': (58, 2.040, 1024),
    'NVIDIA L40S': (142, 2.520, 1024),
    'NVIDIA GeForce RTX 4090': (128, 2.520, 512),
    'NVIDIA GeForce RTX 4080': (76, 2.505, 512),
    'NVIDIA GeForce RTX 4070 Ti': (60, 2.610, 512),
    'NVIDIA RTX PRO 6000 Blackwell Workstation Edition': (188, 2.617, 1024),
    'NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition': (188, 2.280, 1024),
    'Tesla V100-SXM2-16GB': (80, 1.530, 1024),
    'Tesla T4': (40, 1.590, 1024),
}


@pytest.mark.parametrize('name', BY_ARCHITECTURE)
def test_a_datasheets_peak_is_what_the_architecture_gives(name):
    multiprocessors, gigahertz, flops_in_a_clock = BY_ARCHITECTURE[name]
    assert CARDS[name].tflops == pytest.approx(multiprocessors * gigahertz * flops_in_a_clock / 1000, rel=0.015)


@pytest.mark.parametrize('name, bf16, fp16', [
    ('NVIDIA A100-SXM4-40GB', 312, 312), ('NVIDIA H200', 989, 989), ('NVIDIA B200', 2250, 2250),
    ('NVIDIA H100 PCIe', 756, 756), ('Tesla T4', None, 65),
    ('NVIDIA H100', None, None), ('NVIDIA A10G', None, None)])
def test_a_peak_is_of_the_exact_gpu_and_of_the_precision(name, bf16, fp16):
    assert peak_of(name, 'amp_bf16') == peak_of(name, 'bf16') == bf16
    assert peak_of(name, 'amp_fp16') == peak_of(name, 'fp16') == fp16
    assert peak_of(name, 'fp32') is None


@pytest.mark.parametrize('names, found', [
    ((), list(CARDS)),
    *(((name,), ['NVIDIA GeForce RTX 4090']) for name in ('RTX4090', 'rtx-4090', 'GeForce RTX4090', '4090')),
    (('A100-40GB',), ['NVIDIA A100-SXM4-40GB', 'NVIDIA A100-PCIE-40GB']),
    (('a100sxm440gb',), ['NVIDIA A100-SXM4-40GB']),
    (('NVIDIA H100 80GB HBM3',), ['NVIDIA H100 80GB HBM3']), (('A10',), ['NVIDIA A10']), (('L4',), ['NVIDIA L4']),
    (('H200',), ['NVIDIA H200', 'NVIDIA H200 NVL']), (('NVIDIA-H200', 'B200'), ['NVIDIA H200', 'NVIDIA B200'])])
def test_a_gpu_is_found_by_its_name_or_by_whole_words_of_it_whatever_the_capitals_spaces_and_hyphens(names, found):
    assert [card.name for card in cards_named(names)] == found
