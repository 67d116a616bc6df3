"""Group and layer norms in half precision. Names and weights stay.

Autocast computes norms in float32, which makes float32 of what comes after them too, up to the next convolution, and
keeps it so for the backward pass.
"""
import torch
import torch.nn.functional as F

HALF_PRECISIONS = (torch.bfloat16, torch.float16)


def switch_norms_to_half(module: torch.nn.Module) -> None:
    """Let all norms in `module` compute in the type of what comes in, where that is bf16 or fp16, instead of float32.

    Each is replaced by one with the same weights, under the same name, whatever device it is on, meta as well.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.GroupNorm:
                half = HalfGroupNorm(child.num_groups, child.num_channels, child.eps, child.affine, device='meta')
            elif type(child) is torch.nn.LayerNorm:
                half = HalfLayerNorm(child.normalized_shape, child.eps, child.elementwise_affine, device='meta')
            else:
                continue
            half.weight = child.weight
            half.bias = child.bias
            half.train(child.training)
            setattr(parent, name, half)


class HalfGroupNorm(torch.nn.GroupNorm):
    """torch's group norm of (B, C, ...) in the type of what comes in; the weights stay as they are."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.dtype not in HALF_PRECISIONS:
            return super().forward(image)
        weight = self.weight.to(image.dtype)
        bias = self.bias.to(image.dtype)
        with without_autocast(image):
            return F.group_norm(image, self.num_groups, weight, bias, self.eps)


class HalfLayerNorm(torch.nn.LayerNorm):
    """torch's layer norm in the type of what comes in; the weights stay as they are."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.dtype not in HALF_PRECISIONS:
            return super().forward(states)
        weight = self.weight.to(states.dtype)
        bias = self.bias.to(states.dtype)
        with without_autocast(states):
            return F.layer_norm(states, self.normalized_shape, weight, bias, self.eps)


def without_autocast(tensor: torch.Tensor):
    """A context in which autocast leaves what is computed from `tensor` as it is; a meta tensor counts as a CPU's."""
    device = tensor.device.type
    if device == 'meta':  # has no autocast of its own
        device = 'cpu'
    return torch.autocast(device, enabled=False)
