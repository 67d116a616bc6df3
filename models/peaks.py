"""What each GPU can do at most: dense TFLOP/s of its tensor cores, without sparsity, by NVIDIA's documents."""
from typing import NamedTuple


class Peak(NamedTuple):
    """Dense TFLOP/s, accumulated in float32, which is what training reaches. None: the GPU lacks the format."""
    bf16: float | None
    fp16: float | None


# By torch's exact device name, because another card of the same family has another peak. A card whose documents leave
# doubt is not here. Where a document gives figures with sparsity only, these are half of them.
PEAKS = {
    # NVIDIA A100 Tensor Core GPU datasheet
    'NVIDIA A100-SXM4-40GB': Peak(bf16=312, fp16=312),
    'NVIDIA A100-SXM4-80GB': Peak(bf16=312, fp16=312),
    'NVIDIA A100-PCIE-40GB': Peak(bf16=312, fp16=312),
    'NVIDIA A100 80GB PCIe': Peak(bf16=312, fp16=312),
    # NVIDIA H100 Tensor Core GPU datasheet: SXM 1,979 with sparsity, PCIe 1,513, NVL 1,671
    'NVIDIA H100 80GB HBM3': Peak(bf16=989, fp16=989),
    'NVIDIA H100 PCIe': Peak(bf16=756, fp16=756),
    'NVIDIA H100 NVL': Peak(bf16=835, fp16=835),
    # NVIDIA H200 Tensor Core GPU datasheet: SXM 1,979 with sparsity, NVL 1,671
    'NVIDIA H200': Peak(bf16=989, fp16=989),
    'NVIDIA H200 NVL': Peak(bf16=835, fp16=835),
    # NVIDIA GH200 Grace Hopper Superchip datasheet: 1,979 with sparsity
    'NVIDIA GH200 480GB': Peak(bf16=989, fp16=989),
    # NVIDIA HGX platform, B200: 36 PFLOP/s with sparsity for 8 GPUs
    'NVIDIA B200': Peak(bf16=2250, fp16=2250),
    # NVIDIA A10, A30 and A40 datasheets
    'NVIDIA A10': Peak(bf16=125, fp16=125),
    'NVIDIA A30': Peak(bf16=165, fp16=165),
    'NVIDIA A40': Peak(bf16=149.7, fp16=149.7),
    # NVIDIA L4, L40 and L40S datasheets
    'NVIDIA L4': Peak(bf16=121, fp16=121),
    'NVIDIA L40': Peak(bf16=181, fp16=181),
    'NVIDIA L40S': Peak(bf16=362, fp16=362),
    # NVIDIA Ampere GA102 GPU Architecture whitepaper. GeForce cards accumulate in float32 at half the rate of float16
    'NVIDIA RTX A6000': Peak(bf16=154.8, fp16=154.8),
    'NVIDIA GeForce RTX 3090': Peak(bf16=71, fp16=71),
    # NVIDIA Ada GPU Architecture whitepaper, and for the professional card NVIDIA RTX 6000 Ada Generation datasheet
    'NVIDIA RTX 6000 Ada Generation': Peak(bf16=364.2, fp16=364.2),
    'NVIDIA GeForce RTX 4090': Peak(bf16=165.2, fp16=165.2),
    # NVIDIA RTX Blackwell GPU Architecture whitepaper
    'NVIDIA GeForce RTX 5090': Peak(bf16=209.5, fp16=209.5),
    # NVIDIA V100 and V100S datasheets. The pinned torch has kernels for them; torch 2.15's begin with the T4
    'Tesla V100-SXM2-16GB': Peak(bf16=None, fp16=125),
    'Tesla V100-SXM2-32GB': Peak(bf16=None, fp16=125),
    'Tesla V100-PCIE-16GB': Peak(bf16=None, fp16=112),
    'Tesla V100-PCIE-32GB': Peak(bf16=None, fp16=112),
    'Tesla V100S-PCIE-32GB': Peak(bf16=None, fp16=130),
    # NVIDIA T4 datasheet
    'Tesla T4': Peak(bf16=None, fp16=65),
}


def peak_of(device_name: str, precision: str) -> float | None:
    """Dense TFLOP/s of a GPU in 'bf16', 'fp16', 'amp_bf16' or 'amp_fp16'; None where it is not known, or in fp32."""
    peak = PEAKS.get(device_name)
    if peak is None:
        return None
    return {'bf16': peak.bf16, 'fp16': peak.fp16}.get(precision.removeprefix('amp_'))
