"""Claims about the table of GPUs: peaks follow from the architecture, and names find the right card."""
import pytest

from sdbench.costs import price_of
from sdbench.errors import UserError
from sdbench.gpus import CARDS, cards_named, peak_of

# FLOPs per multiprocessor and clock, which depend on the architecture, and names of the cards with that architecture. A
# GeForce card has half of its architecture's rate.
BY_ARCHITECTURE = {512: ('GeForce', 'L40'),
                   1024: ('V100', 'V100S', 'T4', 'A10', 'A40', 'A6000', 'L4', 'L40S', 'RTX 6000'),
                   2048: ('A100', 'A30'), 4096: ('H100', 'H200', 'H200 NVL', 'GH200'), 8192: ('B200', 'B300', 'GB200')}


def test_every_datasheets_peak_is_what_the_architecture_gives():
    found = {card: flops for flops, names in BY_ARCHITECTURE.items() for card in cards_named(names)}
    assert found.keys() == set(CARDS.values())
    for card, flops in found.items():
        expected = card.multiprocessors * card.gigahertz * flops / 1000
        assert card.tflops == pytest.approx(expected, rel=0.015), card.name


@pytest.mark.parametrize('name, bf16, fp16', [
    ('NVIDIA A100-SXM4-40GB', 312, 312), ('NVIDIA H200', 989, 989), ('NVIDIA B200', 2250, 2250),
    ('NVIDIA H100 PCIe', 756, 756), ('Tesla T4', None, 65),
    ('NVIDIA H100', None, None), ('NVIDIA A10G', None, None)])
def test_a_peak_needs_the_exact_gpu_name_and_depends_on_the_precision(name, bf16, fp16):
    assert peak_of(name, 'amp_bf16') == peak_of(name, 'bf16') == bf16
    assert peak_of(name, 'amp_fp16') == peak_of(name, 'fp16') == fp16
    assert peak_of(name, 'fp32') is None


@pytest.mark.parametrize('names, found', [
    *(((name,), ['NVIDIA GeForce RTX 4090']) for name in ('RTX4090', 'rtx-4090', 'GeForce RTX4090', '4090')),
    (('A100-40GB',), ['NVIDIA A100-SXM4-40GB', 'NVIDIA A100-PCIE-40GB']),
    (('a100sxm440gb',), ['NVIDIA A100-SXM4-40GB']),
    (('NVIDIA H100 80GB HBM3',), ['NVIDIA H100 80GB HBM3']), (('A10',), ['NVIDIA A10']), (('L4',), ['NVIDIA L4']),
    (('H200',), ['NVIDIA H200']), (('H200 SXM5',), ['NVIDIA H200']),
    (('NVIDIA-H200', 'B200'), ['NVIDIA H200', 'NVIDIA B200'])])
def test_a_gpu_is_found_by_whole_words_of_its_name_ignoring_case_spaces_and_hyphens(names, found):
    assert [card.name for card in cards_named(names)] == found


def test_a_name_of_another_gpu_is_refused_with_the_nearest_by_memory_and_priced_only_by_its_own_name():
    with pytest.raises(UserError, match='4070 is not .* nearest to its 12 GB, there are RTX 4070 Ti'):
        cards_named(['4070'])
    assert price_of('NVIDIA GeForce RTX 4070', (('RTX 4070', 0.2), ('4070 Ti', 0.3))) == 0.2
    mig = 'NVIDIA H100 80GB HBM3 MIG 3g.40gb'
    assert price_of('NVIDIA B200', (('', 1.0), ('B200', 2.0), ('', 3.0))) == 2.0
    assert price_of(mig, (('h100 80gb mig 3g.40gb', 1.0), ('H100', 2.0), ('H100 80GB HBM3', 3.0))) == 1.0
