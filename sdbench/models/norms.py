"""Group and layer norms in half precision. Names and weights stay.

Autocast computes norms in float32, which makes float32 of what comes after them too, up to the next convolution, and
keeps it so for the backward pass.
"""
import torch
import torch.nn.functional as F

HALF_PRECISIONS = (torch.bfloat16, torch.float16)


class HalfGroupNorm(torch.nn.GroupNorm):
    """torch's group norm of (B, C, ...) in the type of what comes in; the weights stay as they are."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.dtype not in HALF_PRECISIONS:
            return super().forward(image)
        weight = self.weight.to(image.dtype)
        bias = self.bias.to(image.dtype)
        with torch.autocast(image.device.type, enabled=False):
            return F.group_norm(image, self.num_groups, weight, bias, self.eps)


class HalfLayerNorm(torch.nn.LayerNorm):
    """torch's layer norm in the type of what comes in; the weights stay as they are."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.dtype not in HALF_PRECISIONS:
            return super().forward(states)
        weight = self.weight.to(states.dtype)
        bias = self.bias.to(states.dtype)
        with torch.autocast(states.device.type, enabled=False):
            return F.layer_norm(states, self.normalized_shape, weight, bias, self.eps)


HALVES = {torch.nn.GroupNorm: HalfGroupNorm, torch.nn.LayerNorm: HalfLayerNorm}


def switch_norms_to_half(module: torch.nn.Module) -> None:
    """Let all norms in `module` compute in the type of what comes in, where that is bf16 or fp16, instead of float32.

    They stay the same objects, with the same weights, and get the class that computes so.
    """
    for norm in module.modules():
        if type(norm) in HALVES:
            norm.__class__ = HALVES[type(norm)]
