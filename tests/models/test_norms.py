"""Norms in half precision compute what torch's do, as near as their type allows, by CUDA's rules."""
import pytest
import torch
from diffusers import UNet2DConditionModel
from torch._subclasses.fake_tensor import FakeTensorMode

from fitting.fake_step import norms_in_float32
from models.loading import find_model
from models.norms import switch_norms_to_half


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kind, size', [(torch.nn.GroupNorm, (8, 64)), (torch.nn.LayerNorm, (16,))])
def test_a_norm_in_half_precision_is_as_near_to_float64_as_its_type_allows(dtype, kind, size):
    """By their norms: the result and the image's gradient to a unit in the last place of the type, the weights' to ten,
    since a CPU sums those of a layer norm in that type."""
    torch.manual_seed(0)
    exact = kind(*size).double()
    torch.nn.init.normal_(exact.weight)
    image = (3 * torch.randn(2, 64, 16, 16) + 2).to(dtype)
    direction = torch.randn(image.shape).to(dtype)
    switched = kind(*size)
    switched.load_state_dict(exact.state_dict())
    switch_norms_to_half(switched)
    found = []
    for norm, tensor in ((switched, image), (exact, image.double())):
        tensor.requires_grad_()
        result = norm(tensor)
        result.backward(direction.to(result.dtype))
        found.append([result, tensor.grad, norm.weight.grad, norm.bias.grad])
    assert [tensor.dtype for tensor in found[0]] == [dtype, dtype, torch.float32, torch.float32]
    for half, expected, units in zip(*found, (1, 1, 10, 10), strict=True):
        assert (half - expected).norm() < units * torch.finfo(dtype).eps * expected.norm()


def test_norms_in_half_precision_keep_fewer_bytes_for_the_backward_pass():
    assert bytes_kept(half_precision=True) < 0.8 * bytes_kept(half_precision=False)


def bytes_kept(half_precision: bool) -> int:
    """What autograd keeps of two images of 256 pixels, by CUDA's lists. For fake tensors torch takes fused attention,
    where it would keep attention's matrices of meta tensors."""
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode():
        unet = UNet2DConditionModel.from_config(find_model('tiny').configs['unet'])
        if half_precision:
            switch_norms_to_half(unet)
        latents, text = torch.empty(2, 4, 32, 32), torch.empty(2, 77, unet.config.cross_attention_dim)
        with norms_in_float32(), torch.autocast('cpu', torch.bfloat16):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                prediction = unet(latents, torch.zeros(2, dtype=torch.long), text).sample  # keeps the graph alive
        weights = {parameter.untyped_storage()._cdata for parameter in unet.parameters()}
    del prediction
    return sum(number for storage, number in storages.items() if storage not in weights)
