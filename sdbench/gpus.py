"""What each GPU is by its maker's documents: peak, memory, multiprocessors and link. Nothing here needs torch."""
import difflib
import math
import re
from typing import NamedTuple

from sdbench.errors import UserError

GIB = 2 ** 30  # bytes


class Card(NamedTuple):
    """A GPU by its documents.

    Attributes:
        name: as torch has it.
        tflops: dense TFLOP/s in bf16 and fp16, accumulated in float32, which is what training reaches.
        gigabytes_per_sec: of its memory.
        gib: of its memory that torch finds.
        multiprocessors: that are enabled.
        gigahertz: of their clock, at which the peak holds.
        link_gigabytes_per_sec: that the GPU sends in an exchange of gradients, and receives at the same time, over
            NVLink where it joins all GPUs of a machine, and else over PCIe. A bridge, which joins two, is not counted.
            The rate of the link in one direction by its datasheet, times NVLINK_SHARE or PCIE_SHARE.
        gpus_per_node: GPUs in one machine, as most are sold, or as it was published with.
        gpus_per_link: GPUs that the link joins, where these are more than one machine has; None: those of a machine.
    """
    name: str
    tflops: float
    gigabytes_per_sec: float
    gib: float
    multiprocessors: int
    gigahertz: float
    link_gigabytes_per_sec: float
    gpus_per_node: int = 8
    gpus_per_link: int | None = None


# The share of a link that an all-reduce of large tensors reaches: its "bus bandwidth" over the rate each way. NCCL's
# authors state 370 of 450 GB/s on 8 H100 by a ring (nccl-tests issue 212); a user saw 200 of 300 on 8 A100 (issue 149).
NVLINK_SHARE = 0.8
# By milabench's L40S, whose three speeds on several GPUs are met with 0.5 (docs/planning.md). Others measured 20 of 32
# GB/s between A100 PCIe (nccl-tests issue 178), and on RTX 5090 28 of 64 among 8 and 35 among 4 (nccl issue 1639).
PCIE_SHARE = 0.5
# The share of a network between machines, by a ring: NCCL's authors state 46 to 48 of the 50 GB/s of an adapter of 400
# Gbit/s (nccl-tests issue 290), and 12.2 of 12.5 GB/s at 100 Gbit/s (issue 29), with GPUDirect over InfiniBand. TCP was
# seen to reach 4 to 6 of 12.5 GB/s (nccl issue 450), and AWS's first EFA 6 to 8 (issue 235).
NETWORK_SHARE = 0.92
NVLINK_2, NVLINK_3, NVLINK_4, NVLINK_5 = (rate * NVLINK_SHARE for rate in (150, 300, 450, 900))
PCIE_3, PCIE_4, PCIE_5 = (rate * PCIE_SHARE for rate in (16, 32, 64))  # of 16 lanes

# By torch's exact device name, since another card of the same family has other figures. A card whose documents leave
# doubt is not here. Where a document gives peaks with sparsity only, these are half of them.
CARDS = {card.name: card for card in (
    # NVIDIA A100 Tensor Core GPU datasheet
    Card('NVIDIA A100-SXM4-40GB', 312, 1555, 39.4, 108, 1.41, NVLINK_3),
    Card('NVIDIA A100-SXM4-80GB', 312, 2039, 79.2, 108, 1.41, NVLINK_3),
    Card('NVIDIA A100-PCIE-40GB', 312, 1555, 39.4, 108, 1.41, PCIE_4),
    Card('NVIDIA A100 80GB PCIe', 312, 1935, 79.2, 108, 1.41, PCIE_4),
    # NVIDIA H100 Tensor Core GPU datasheet: SXM 1,979 with sparsity, PCIe 1,513, NVL 1,671
    Card('NVIDIA H100 80GB HBM3', 989, 3352, 79.2, 132, 1.83, NVLINK_4),
    Card('NVIDIA H100 PCIe', 756, 2039, 79.2, 114, 1.62, PCIE_5),
    Card('NVIDIA H100 NVL', 835, 3938, 93.1, 132, 1.55, PCIE_5),
    # NVIDIA H200 Tensor Core GPU datasheet: SXM 1,979 with sparsity, NVL 1,671
    Card('NVIDIA H200', 989, 4800, 139.8, 132, 1.83, NVLINK_4),
    Card('NVIDIA H200 NVL', 835, 4800, 139.8, 132, 1.55, PCIE_5),
    # NVIDIA GH200 Grace Hopper Superchip datasheet: 1,979 with sparsity. A machine has one; others are behind PCIe
    Card('NVIDIA GH200 480GB', 989, 4000, 94.5, 132, 1.83, PCIE_5, 1),
    # NVIDIA HGX platform, B200 and B300: 36 PFLOP/s with sparsity for 8 GPUs
    Card('NVIDIA B200', 2250, 8000, 178, 148, 1.86, NVLINK_5),
    Card('NVIDIA B300 SXM6 AC', 2250, 8000, 267.6, 148, 1.86, NVLINK_5),
    # NVIDIA GB200 NVL72 datasheet: 360 PFLOP/s with sparsity for 72 GPUs, which are 18 machines of 4
    Card('NVIDIA GB200', 2500, 8000, 184.3, 152, 2.01, NVLINK_5, 4, 72),
    # NVIDIA A10, A30 and A40 datasheets
    Card('NVIDIA A10', 125, 600, 22.1, 72, 1.70, PCIE_4),
    Card('NVIDIA A30', 165, 933, 23.5, 56, 1.44, PCIE_4),
    Card('NVIDIA A40', 149.7, 696, 44.4, 84, 1.74, PCIE_4),
    # NVIDIA L4, L40 and L40S datasheets. NVIDIA's own machines of the L40S in MLPerf had 4, as others have 8
    Card('NVIDIA L4', 121, 300, 22.0, 58, 2.04, PCIE_4),
    Card('NVIDIA L40', 181, 864, 44.4, 142, 2.49, PCIE_4),
    Card('NVIDIA L40S', 362, 864, 44.4, 142, 2.52, PCIE_4, 4),
    # NVIDIA Ampere GA102 GPU Architecture whitepaper. GeForce cards accumulate in float32 at half the rate of float16
    Card('NVIDIA RTX A6000', 154.8, 768, 47.4, 84, 1.80, PCIE_4),
    Card('NVIDIA GeForce RTX 3090', 71, 936, 23.6, 82, 1.70, PCIE_4),
    # NVIDIA Ada GPU Architecture whitepaper, and for the professional card NVIDIA RTX 6000 Ada Generation datasheet
    Card('NVIDIA RTX 6000 Ada Generation', 364.2, 960, 47.4, 142, 2.51, PCIE_4),
    Card('NVIDIA GeForce RTX 4090', 165.2, 1008, 23.5, 128, 2.52, PCIE_4),
    Card('NVIDIA GeForce RTX 4080', 97.5, 717, 15.6, 76, 2.51, PCIE_4),
    Card('NVIDIA GeForce RTX 4070 Ti', 80.2, 504, 11.6, 60, 2.61, PCIE_4),
    # NVIDIA RTX Blackwell GPU Architecture whitepaper, and that of the RTX PRO cards
    Card('NVIDIA GeForce RTX 5090', 209.5, 1792, 31.4, 170, 2.41, PCIE_5),
    Card('NVIDIA RTX PRO 6000 Blackwell Workstation Edition', 503.8, 1792, 94.9, 188, 2.62, PCIE_5),
    Card('NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition', 438.9, 1792, 94.9, 188, 2.28, PCIE_5),
    # NVIDIA V100 and V100S datasheets. The pinned torch has kernels for them; torch 2.15's begin with the T4
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

    None where it is not known, or in fp32.
    """
    half = precision.removeprefix('amp_')
    if half == 'fp32' or half == 'bf16' and device_name.startswith('Tesla'):  # the V100 and the T4 have no bf16
        return None
    if device_name not in CARDS:
        return None
    return CARDS[device_name].tflops


def machines_for(num_devices: int, gpus_per_node: int | str) -> int:
    """Return how many machines have so many GPUs, rounded up.

    Args:
        num_devices: GPUs.
        gpus_per_node: GPUs in each machine, or the name of a GPU whose usual machines these are; those of an unknown
            GPU have 8.
    """
    if isinstance(gpus_per_node, str):
        gpus_per_node = CARDS[gpus_per_node].gpus_per_node if gpus_per_node in CARDS else 8
    return math.ceil(num_devices / gpus_per_node)


def is_one_nvlink_domain(device: str, num_devices: int) -> bool:
    """Tell whether the GPU's link joins so many of them across machines, so that they need no network."""
    return device in CARDS and num_devices <= (CARDS[device].gpus_per_link or 0)


# What clouds call cards beside the name that they have for torch.
OTHER_NAMES = {'NVIDIA A100-SXM4-40GB': 'A100 SXM', 'NVIDIA A100-SXM4-80GB': 'A100 SXM',
               'NVIDIA H100 80GB HBM3': 'H100 SXM, H100 SXM5', 'NVIDIA H200': 'H200 SXM, H200 SXM5, H200 141GB',
               'NVIDIA B200': 'B200 SXM, B200 SXM6'}


def words_in(text: str) -> list[str]:
    """Return the words of a GPU's name, in capitals, which spaces or hyphens part; 80 GB is 80GB."""
    return re.findall('[A-Z0-9]+', re.sub('([0-9]) GB', r'\1GB', text.upper()))


def has_words(device_name: str, words: str) -> bool:
    """Tell whether a GPU's names have all of some words, whatever their capitals, spaces and hyphens."""
    names = f'{device_name}, {OTHER_NAMES.get(device_name, "")}'.upper()
    patterns = [rf'\b{"[ -]?".join(word)}\b' for word in words_in(words)]  # RTX4090 for RTX 4090, not A10 for A100
    return all(re.search(pattern, names) for pattern in patterns)


def short_name(device: str) -> str:
    """Return the name of a GPU as people say it: 'A100 40GB' for 'NVIDIA A100-SXM4-40GB'."""
    for words in ('NVIDIA ', 'GeForce ', '-SXM4', ' HBM3'):
        device = device.replace(words, '')
    return device.replace('-', ' ')


def unknown_gpu(words: str) -> str:
    """Say that some words name no known GPU, and which they may mean."""
    known = [short_name(name) for name in CARDS]
    nearest = difflib.get_close_matches(words.upper(), known)
    remedy = f'did you mean {" or ".join(nearest)}?' if nearest else f'known are {", ".join(known)}'
    return f'{words} is no GPU that is known here; {remedy}'


def full_name(device: str) -> str:
    """Return torch's name of a GPU that is named with or without its maker; any other name stays as it is."""
    for name in CARDS:
        if words_in(device) in (words_in(name), words_in(name.removeprefix('NVIDIA '))):
            return name
    return device


def cards_named(names: tuple[str, ...]) -> list[Card]:
    """Return the cards of some names: the card that has just this name, or else all that have its words in theirs.

    Without names these are all cards. Raises UserError for a name that is no card's.
    """
    found = []
    for words in names or ('',):
        cards = [card for card in CARDS.values() if words_in(card.name) == words_in(words)]
        cards = cards or [card for card in CARDS.values() if has_words(card.name, words)]
        if not cards:
            raise UserError(unknown_gpu(words))
        found += [card for card in cards if card not in found]
    return found
