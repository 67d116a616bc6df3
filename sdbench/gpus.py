"""Describe each GPU as its datasheet does: peak, memory, multiprocessors and interconnect. Nothing here needs torch."""
import difflib
import math
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from sdbench.errors import UserError

GIB = 2 ** 30  # bytes


class Card(NamedTuple):
    """The numbers of a GPU model from its datasheet."""
    name: str  # of the device, as torch has it
    tflops: float  # dense TFLOP/s in bf16 and fp16 with float32 accumulation, as in training
    gigabytes_per_sec: float  # memory bandwidth
    gib: float  # memory in GiB that torch finds
    multiprocessors: int  # number of enabled multiprocessors
    gigahertz: float  # clock of the multiprocessors at which `tflops` holds
    # What the GPU sends in a gradient all-reduce, while it receives as much. This is the datasheet's rate in one
    # direction times NVLINK_SHARE, if NVLink connects all GPUs in a machine, or else PCIe's rate times PCIE_SHARE. An
    # NVLink bridge between two GPUs does not count.
    link_gigabytes_per_sec: float
    gpus_per_node: int = 8  # GPUs in one machine, as most machines are sold or as the published machine had
    gpus_per_link: int | None = None  # that NVLink connects across machines, as in an NVL72 rack; None: of one machine
    aliases: str = ''  # other names that clouds use


# Fraction of the interconnect's rate in one direction that an all-reduce of large tensors reaches ("bus bandwidth" in
# nccl-tests). NCCL's authors state 370 of 450 GB/s for a ring on 8 H100 (nccl-tests issue 212). A user measured 200 of
# 300 GB/s on 8 A100 (issue 149).
NVLINK_SHARE = 0.8
# With 0.5 the forecast meets milabench's three speeds on several L40S (docs/forecast-model.md). Others measured 20 of
# 32 GB/s between A100 PCIe (nccl-tests issue 178), 28 of 64 GB/s among 8 RTX 5090 and 35 of 64 among 4 (nccl issue
# 1639).
PCIE_SHARE = 0.5
# Fraction of the network bandwidth between machines that a ring reaches. With GPUDirect over InfiniBand, NCCL's authors
# state 46 to 48 of 50 GB/s (400 Gbit/s, nccl-tests issue 290) and 12.2 of 12.5 GB/s (100 Gbit/s, issue 29). TCP reached
# 4 to 6 of 12.5 GB/s (nccl issue 450), and AWS's first EFA 6 to 8 (issue 235).
NETWORK_SHARE = 0.92
NVLINK_2, NVLINK_3, NVLINK_4, NVLINK_5 = (rate * NVLINK_SHARE for rate in (150, 300, 450, 900))
PCIE_3, PCIE_4, PCIE_5 = (rate * PCIE_SHARE for rate in (16, 32, 64))  # GB/s over 16 lanes

# Cards by torch's exact device name, because another card of the same family has other numbers. Cards with unclear
# datasheets are missing. If a datasheet gives only the peak with sparsity, the peak here is half of it.
CARDS = {card.name: card for card in (
    # NVIDIA A100 Tensor Core GPU datasheet
    Card('NVIDIA A100-SXM4-40GB', 312, 1555, 39.4, 108, 1.41, NVLINK_3, aliases='A100 SXM'),
    Card('NVIDIA A100-SXM4-80GB', 312, 2039, 79.2, 108, 1.41, NVLINK_3, aliases='A100 SXM'),
    Card('NVIDIA A100-PCIE-40GB', 312, 1555, 39.4, 108, 1.41, PCIE_4),
    Card('NVIDIA A100 80GB PCIe', 312, 1935, 79.2, 108, 1.41, PCIE_4),
    # NVIDIA H100 Tensor Core GPU datasheet: SXM 1,979 with sparsity, PCIe 1,513, NVL 1,671
    Card('NVIDIA H100 80GB HBM3', 989, 3352, 79.2, 132, 1.83, NVLINK_4, aliases='H100 SXM, H100 SXM5'),
    Card('NVIDIA H100 PCIe', 756, 2039, 79.2, 114, 1.62, PCIE_5),
    Card('NVIDIA H100 NVL', 835, 3938, 93.1, 132, 1.55, PCIE_5),
    # NVIDIA H200 Tensor Core GPU datasheet: SXM 1,979 with sparsity, NVL 1,671
    Card('NVIDIA H200', 989, 4800, 139.8, 132, 1.83, NVLINK_4, aliases='H200 SXM, H200 SXM5, H200 141GB'),
    Card('NVIDIA H200 NVL', 835, 4800, 139.8, 132, 1.55, PCIE_5),
    # NVIDIA GH200 Grace Hopper Superchip datasheet: 1,979 with sparsity. A machine has one GPU
    Card('NVIDIA GH200 480GB', 989, 4000, 94.5, 132, 1.83, PCIE_5, 1),
    # NVIDIA HGX platform, B200 and B300: 36 PFLOP/s with sparsity for 8 GPUs
    Card('NVIDIA B200', 2250, 8000, 178, 148, 1.86, NVLINK_5, aliases='B200 SXM, B200 SXM6'),
    Card('NVIDIA B300 SXM6 AC', 2250, 8000, 267.6, 148, 1.86, NVLINK_5),
    # NVIDIA GB200 NVL72 datasheet: 360 PFLOP/s with sparsity for 72 GPUs in 18 machines
    Card('NVIDIA GB200', 2500, 8000, 184.3, 152, 2.01, NVLINK_5, 4, 72),
    # NVIDIA A10, A30 and A40 datasheets
    Card('NVIDIA A10', 125, 600, 22.1, 72, 1.70, PCIE_4),
    Card('NVIDIA A30', 165, 933, 23.5, 56, 1.44, PCIE_4),
    Card('NVIDIA A40', 149.7, 696, 44.4, 84, 1.74, PCIE_4),
    # NVIDIA L4, L40 and L40S datasheets. NVIDIA's MLPerf machines had 4 L40S each; other machines have 8
    Card('NVIDIA L4', 121, 300, 22.0, 58, 2.04, PCIE_4),
    Card('NVIDIA L40', 181, 864, 44.4, 142, 2.49, PCIE_4),
    Card('NVIDIA L40S', 362, 864, 44.4, 142, 2.52, PCIE_4, 4),
    # NVIDIA Ampere GA102 GPU Architecture whitepaper. GeForce cards accumulate in float32 at half the rate of float16
    Card('NVIDIA RTX A6000', 154.8, 768, 47.4, 84, 1.80, PCIE_4),
    Card('NVIDIA GeForce RTX 3090', 71, 936, 23.6, 82, 1.70, PCIE_4),
    # NVIDIA Ada GPU Architecture whitepaper and NVIDIA RTX 6000 Ada Generation datasheet
    Card('NVIDIA RTX 6000 Ada Generation', 364.2, 960, 47.4, 142, 2.51, PCIE_4),
    Card('NVIDIA GeForce RTX 4090', 165.2, 1008, 23.5, 128, 2.52, PCIE_4),
    Card('NVIDIA GeForce RTX 4080', 97.5, 717, 15.6, 76, 2.51, PCIE_4),
    Card('NVIDIA GeForce RTX 4070 Ti', 80.2, 504, 11.6, 60, 2.61, PCIE_4),
    # NVIDIA RTX Blackwell and RTX PRO Blackwell GPU Architecture whitepapers
    Card('NVIDIA GeForce RTX 5090', 209.5, 1792, 31.4, 170, 2.41, PCIE_5),
    Card('NVIDIA RTX PRO 6000 Blackwell Workstation Edition', 503.8, 1792, 94.9, 188, 2.62, PCIE_5),
    Card('NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition', 438.9, 1792, 94.9, 188, 2.28, PCIE_5),
    # NVIDIA V100 and V100S datasheets. The pinned torch has kernels for them, torch 2.15 does not
    Card('Tesla V100-SXM2-16GB', 125, 900, 15.8, 80, 1.53, NVLINK_2),
    Card('Tesla V100-SXM2-32GB', 125, 900, 31.7, 80, 1.53, NVLINK_2),
    Card('Tesla V100-PCIE-16GB', 112, 900, 15.8, 80, 1.38, PCIE_3),
    Card('Tesla V100-PCIE-32GB', 112, 900, 31.7, 80, 1.38, PCIE_3),
    Card('Tesla V100S-PCIE-32GB', 130, 1134, 31.7, 80, 1.60, PCIE_3),
    # NVIDIA T4 datasheet
    Card('Tesla T4', 65, 320, 14.6, 40, 1.59, PCIE_3),
)}


def peak_of(device_name: str, precision: str) -> float | None:
    """Return the dense TFLOP/s of a GPU in 'bf16', 'fp16', 'amp_bf16' or 'amp_fp16'.

    It is None in fp32 and for a GPU that is not in CARDS.
    """
    half = precision.removeprefix('amp_')
    if half == 'fp32' or half == 'bf16' and device_name.startswith('Tesla'):  # the V100 and the T4 have no bf16
        return None
    return CARDS[device_name].tflops if device_name in CARDS else None


def machines_for(num_devices: int, gpus_per_node: int | str) -> int:
    """Return how many machines have `num_devices` GPUs in all, rounded up.

    `gpus_per_node` may be the name of a GPU, for the machines that it is usually sold in. An unknown GPU counts as
    sold in machines with 8.
    """
    if isinstance(gpus_per_node, str):
        gpus_per_node = CARDS[gpus_per_node].gpus_per_node if gpus_per_node in CARDS else 8
    return math.ceil(num_devices / gpus_per_node)


def is_one_nvlink_domain(device: str, num_devices: int) -> bool:
    """Tell whether NVLink connects this many GPUs across machines. Their gradients then need no network."""
    return device in CARDS and num_devices <= (CARDS[device].gpus_per_link or 0)


def short_name(device: str) -> str:
    """Return a short name for a GPU, such as 'A100 40GB' for 'NVIDIA A100-SXM4-40GB'."""
    for words in ('NVIDIA ', 'GeForce ', '-SXM4', ' HBM3'):
        device = device.replace(words, '')
    return device.replace('-', ' ')


# Memory in GB of GPUs that people ask for and that are not in CARDS
OTHER_GPUS = {'A10G': 24, 'A2': 16, 'A16': 16, 'P100': 16, 'RTX 2080 Ti': 11, 'RTX 3060': 12, 'RTX 3070': 8,
              'RTX 3080': 10, 'RTX 3080 Ti': 12, 'RTX 3090 Ti': 24, 'RTX 4060': 8, 'RTX 4060 Ti': 16, 'RTX 4070': 12,
              'RTX 5070': 12, 'RTX 5070 Ti': 16, 'RTX 5080': 16, 'RTX A4000': 16, 'RTX A5000': 24}


def spelling(name: str) -> str:
    """Return the letters and digits of a GPU name in upper case, without words that many people leave out."""
    return re.sub('NVIDIA|GEFORCE|TESLA|RTX|[^A-Z0-9]', '', name.upper())


NAMES = {spelling(name): name for name in (*CARDS, *OTHER_GPUS)}


@cache
def gpus_named(name: str) -> frozenset[str]:
    """Return the GPUs that a name means, in --gpu, in a price or in a record.

    This is the GPU with exactly this name, or else every GPU in CARDS whose name contains its words. A GPU that nothing
    here knows, such as a MIG slice, is meant only by its own full or short name.
    """
    if spelling(name) in NAMES:
        return frozenset({NAMES[spelling(name)]})
    # Match whole words, but A100SXM also for A100 SXM.
    words = re.findall('[A-Z0-9]+', re.sub('([0-9]) GB', r'\1GB', name.upper()))
    patterns = [rf'\b{"[ -]?".join(word)}\b' for word in words]
    found = [card.name for card in CARDS.values()
             if words and all(re.search(pattern, f'{card.name}, {card.aliases}'.upper()) for pattern in patterns)]
    return frozenset(found or {spelling(short_name(name))})


def full_name(device: str) -> str:
    """Return torch's name for a GPU if `device` means exactly one in CARDS; any other name is unchanged."""
    name, *others = gpus_named(device)
    return name if name in CARDS and not others else device


def cards_named(names: Iterable[str]) -> list[Card]:
    """Return the cards that each name means, or all cards without names. Raises UserError for a name of none."""
    if not names:
        return list(CARDS.values())
    found = {}
    for name in names:
        cards = {card.name: card for card in CARDS.values() if card.name in gpus_named(name)}
        if not cards:
            raise UserError(f'--gpu {unknown_gpu(name)}')
        found |= cards
    return list(found.values())


def unknown_gpu(name: str) -> str:
    """Return an error message for a GPU name that is not known, with the nearest known GPUs by memory or by name."""
    gigabytes = OTHER_GPUS.get(NAMES.get(spelling(name)))
    if gigabytes:
        cards = sorted(CARDS.values(), key=lambda card: abs(card.gib * GIB / 1e9 - gigabytes))[:3]
        nearest = ', '.join(short_name(card.name) for card in cards)
        return f'{name} is not a known GPU; with memory nearest to its {gigabytes} GB, there are {nearest}'
    known = [short_name(card) for card in CARDS]
    nearest = difflib.get_close_matches(name.upper(), known)
    remedy = f'did you mean {" or ".join(nearest)}?' if nearest else f'known GPUs are {", ".join(known)}'
    return f'{name} is not a known GPU; {remedy}'
