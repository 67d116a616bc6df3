"""The UNet's norms in half precision, and group norms that keep images in channels_last. Names and weights stay.

Autocast computes norms in float32, which makes float32 of what comes after them too, up to the next convolution, and
keeps it so for the backward pass. On a GPU, torch 2.7.0 brings an image from channels_last to channels first before a
group norm, and the next convolution brings it back.
"""
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_2d import Transformer2DModel

HALF_DTYPES = (torch.bfloat16, torch.float16)


def switch_norms(unet: torch.nn.Module, half_precision: bool, channels_last: bool) -> None:
    """Change how the norms of a UNet compute, in place, whatever device it is on, meta as well.

    Args:
        unet: of diffusers.
        half_precision: in the type of what comes in, where that is bf16 or fp16, instead of float32.
        channels_last: from the layout and to the layout of channels_last; where a transformer would end in channels
            first, it keeps that layout as well.
    """
    group_norm = {(False, False): torch.nn.GroupNorm, (True, False): HalfGroupNorm,
                  (False, True): ChannelsLastGroupNorm, (True, True): HalfChannelsLastGroupNorm}
    classes = {torch.nn.GroupNorm: group_norm[half_precision, channels_last]}
    if half_precision:
        classes[torch.nn.LayerNorm] = HalfLayerNorm
    if channels_last:
        classes[Transformer2DModel] = ChannelsLastTransformer
    for module in unet.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]


class HalfGroupNorm(torch.nn.GroupNorm):
    """torch's group norm of (B, C, ...) in the type of what comes in; the weights stay in float32."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.dtype not in HALF_DTYPES:
            return super().forward(image)
        weight = self.weight.to(image.dtype)
        bias = self.bias.to(image.dtype)
        with without_autocast(image):
            return F.group_norm(image, self.num_groups, weight, bias, self.eps)


class HalfLayerNorm(torch.nn.LayerNorm):
    """torch's layer norm in the type of what comes in; the weights stay in float32."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if states.dtype not in HALF_DTYPES:
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


class ChannelsLastGroupNorm(torch.nn.GroupNorm):
    """A group norm of images (B, C, H, W) that leaves them in channels_last, in float32 as autocast's is."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.dtype in HALF_DTYPES:
            image = image.float()
        return self.normalize(image)

    def normalize(self, image: torch.Tensor) -> torch.Tensor:
        """The same in the type that `image` has."""
        image = image.contiguous(memory_format=torch.channels_last)
        return LayoutKeepingGroupNorm.apply(image, self.weight, self.bias, self.num_groups, self.eps)


class HalfChannelsLastGroupNorm(ChannelsLastGroupNorm):
    """The same in the type of what comes in. Statistics are in float32 all the same."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.normalize(image)


class LayoutKeepingGroupNorm(torch.autograd.Function):
    """A group norm from operators that keep the layout of an image (B, C, H, W): sums over pixels, and addcmul.

    Each pass over the image reads and writes its own type. Statistics and sums are in float32, or in float64 where the
    image is; what is written is rounded to its type each time. For the backward pass only the image is kept.
    """

    @staticmethod
    def forward(ctx, image, weight, bias, groups, epsilon):
        mean, deviation = statistics(image, groups, epsilon)  # (B, C)
        ctx.save_for_backward(image, weight, mean, deviation)
        ctx.groups = groups
        scale = weight / deviation
        return scaled_and_shifted(image, scale, bias - mean * scale)

    @staticmethod
    def backward(ctx, gradient):
        """With x for the normalized image and g for its gradient: (g - mean(g) - x mean(g x)) / deviation."""
        image, weight, mean, deviation = ctx.saved_tensors
        normalized = scaled_and_shifted(image, 1 / deviation, -mean / deviation)
        gradient_sum = gradient.sum((2, 3), dtype=mean.dtype)  # (B, C)
        product_sum = (gradient * normalized).sum((2, 3), dtype=mean.dtype)  # (B, C)
        pixels = image[0, 0].numel()
        gradient_mean = mean_of_groups(gradient_sum * weight / pixels, ctx.groups)
        product_mean = mean_of_groups(product_sum * weight / pixels, ctx.groups)
        of_image = scaled_and_shifted(normalized, -product_mean / deviation, -gradient_mean / deviation, normalized)
        of_image.addcmul_(gradient, (weight / deviation)[:, :, None, None])
        return of_image, product_sum.sum(0), gradient_sum.sum(0), None, None


def statistics(image: torch.Tensor, groups: int, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the standard deviation of each channel's group, (B, C) each, of an image (B, C, H, W)."""
    dtype = torch.promote_types(image.dtype, torch.float32)
    pixels = image[0, 0].numel()
    mean = mean_of_groups(image.sum((2, 3), dtype=dtype) / pixels, groups)
    # the norm needs no copy of the image in float32, as its squares would
    squares = torch.linalg.vector_norm(image, dim=(2, 3), dtype=dtype).square()
    variance = mean_of_groups(squares / pixels, groups) - mean.square()
    return mean, torch.sqrt(variance.clamp(min=0) + epsilon)


def mean_of_groups(values: torch.Tensor, groups: int) -> torch.Tensor:
    """Each value (B, C) replaced with the mean of its group of channels."""
    batch, channels = values.shape
    means = values.reshape(batch, groups, channels // groups).mean(2, keepdim=True)
    return means.expand(-1, -1, channels // groups).reshape(batch, channels)


def scaled_and_shifted(image: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor,
                       out: torch.Tensor | None = None) -> torch.Tensor:
    """`image` (B, C, H, W) times `scale` plus `shift`, (B, C) each, in one pass; `out` has the image's type."""
    if out is None:
        out = torch.empty_like(image)
    return torch.addcmul(shift[:, :, None, None], image, scale[:, :, None, None], out=out)


class ChannelsLastTransformer(Transformer2DModel):
    """diffusers' transformer for images (B, C, H, W), whose result keeps the layout of what came in.

    diffusers 0.39.0 makes it channels first, and the sum with what came in takes the layout of its first operand.
    """

    def _get_output_for_continuous_inputs(self, hidden_states, residual, batch_size, height, width, inner_dim):
        if not self.use_linear_projection:
            return super()._get_output_for_continuous_inputs(hidden_states, residual, batch_size, height, width,
                                                             inner_dim)
        hidden_states = self.proj_out(hidden_states)  # (B, H W, C)
        image = hidden_states.reshape(batch_size, height, width, inner_dim).permute(0, 3, 1, 2)
        return image + residual
