"""The types of numbers that flags name."""
import torch

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}  # of --encoder_precision
AUTOCAST_DTYPES = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}  # of --precision, where it has autocast
