"""Layers of diffusers' networks that are exchanged in place, so that a step moves fewer bytes; weights stay."""
import torch
import torch.nn.functional as F

HALF_PRECISIONS = (torch.bfloat16, torch.float16)


class HalfGroupNorm(torch.nn.GroupNorm):
    """torch's group norm of (B, C, ...), computed in the type of its input."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.dtype not in HALF_PRECISIONS:
            return super().forward(image)
        weight = self.weight.to(image.dtype)
        bias = self.bias.to(image.dtype)
        with torch.autocast(image.device.type, enabled=False):
            return F.group_norm(image, self.num_groups, weight, bias, self.eps)


class HalfLayerNorm(torch.nn.LayerNorm):
    """torch's layer norm, computed in the type of its input."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.dtype not in HALF_PRECISIONS:
            return super().forward(states)
        weight = self.weight.to(states.dtype)
        bias = self.bias.to(states.dtype)
        with torch.autocast(states.device.type, enabled=False):
            return F.layer_norm(states, self.normalized_shape, weight, bias, self.eps)


HALF_NORMS = {torch.nn.GroupNorm: HalfGroupNorm, torch.nn.LayerNorm: HalfLayerNorm}


def switch_norms_to_half(network: torch.nn.Module) -> None:
    """Let all norms of a network compute in the type of their input where that is bf16 or fp16.

    Autocast computes norms in float32, makes float32 of what follows them up to the next convolution, and keeps it so
    for the backward pass. The norms stay the same objects with the same weights; only their class changes.
    """
    for norm in network.modules():
        if type(norm) in HALF_NORMS:
            norm.__class__ = HALF_NORMS[type(norm)]
