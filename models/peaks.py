"""What each GPU can do at most: dense TFLOP/s of its tensor cores, without sparsity, by NVIDIA's documents."""

# TFLOP/s in bf16 and fp16, accumulated in float32, which is what training reaches. By torch's exact device name, since
# another card of the same family has another peak. A card whose documents leave doubt is not here. Where a document
# gives figures with sparsity only, these are half of them.
PEAKS = {
    # NVIDIA A100 Tensor Core GPU datasheet
    'NVIDIA A100-SXM4-40GB': 312,
    'NVIDIA A100-SXM4-80GB': 312,
    'NVIDIA A100-PCIE-40GB': 312,
    'NVIDIA A100 80GB PCIe': 312,
    # NVIDIA H100 Tensor Core GPU datasheet: SXM 1,979 with sparsity, PCIe 1,513, NVL 1,671
    'NVIDIA H100 80GB HBM3': 989,
    'NVIDIA H100 PCIe': 756,
    'NVIDIA H100 NVL': 835,
    # NVIDIA H200 Tensor Core GPU datasheet: SXM 1,979 with sparsity, NVL 1,671
    'NVIDIA H200': 989,
    'NVIDIA H200 NVL': 835,
    # NVIDIA GH200 Grace Hopper Superchip datasheet: 1,979 with sparsity
    'NVIDIA GH200 480GB': 989,
    # NVIDIA HGX platform, B200: 36 PFLOP/s with sparsity for 8 GPUs
    'NVIDIA B200': 2250,
    # NVIDIA A10, A30 and A40 datasheets
    'NVIDIA A10': 125,
    'NVIDIA A30': 165,
    'NVIDIA A40': 149.7,
    # NVIDIA L4, L40 and L40S datasheets
    'NVIDIA L4': 121,
    'NVIDIA L40': 181,
    'NVIDIA L40S': 362,
    # NVIDIA Ampere GA102 GPU Architecture whitepaper. GeForce cards accumulate in float32 at half the rate of float16
    'NVIDIA RTX A6000': 154.8,
    'NVIDIA GeForce RTX 3090': 71,
    # NVIDIA Ada GPU Architecture whitepaper, and for the professional card NVIDIA RTX 6000 Ada Generation datasheet
    'NVIDIA RTX 6000 Ada Generation': 364.2,
    'NVIDIA GeForce RTX 4090': 165.2,
    # NVIDIA RTX Blackwell GPU Architecture whitepaper
    'NVIDIA GeForce RTX 5090': 209.5,
    # NVIDIA V100 and V100S datasheets. The pinned torch has kernels for them; torch 2.15's begin with the T4
    'Tesla V100-SXM2-16GB': 125,
    'Tesla V100-SXM2-32GB': 125,
    'Tesla V100-PCIE-16GB': 112,
    'Tesla V100-PCIE-32GB': 112,
    'Tesla V100S-PCIE-32GB': 130,
    # NVIDIA T4 datasheet
    'Tesla T4': 65,
}


def peak_of(device_name: str, precision: str) -> float | None:
    """Dense TFLOP/s of a GPU in 'bf16', 'fp16', 'amp_bf16' or 'amp_fp16'; None where it is not known, or in fp32."""
    half = precision.removeprefix('amp_')
    if half == 'fp32' or half == 'bf16' and device_name.startswith('Tesla'):  # the V100 and the T4 have no bf16
        return None
    return PEAKS.get(device_name)
