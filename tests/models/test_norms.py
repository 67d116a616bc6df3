"""The switched norms compute what torch's do, in the precision and the layout that they are for, by CUDA's rules."""
import pytest
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch._subclasses.fake_tensor import FakeTensorMode

from models.loading import find_model
from models.norms import (ChannelsLastGroupNorm, HalfChannelsLastGroupNorm, HalfGroupNorm, HalfLayerNorm,
                          LayoutKeepingGroupNorm, switch_norms)
from tests.cuda_rules import cuda_rules

LAST = torch.channels_last


def unet_on_meta(half_precision: bool, channels_last: bool) -> UNet2DConditionModel:
    """The UNet of `tiny` in channels_last. torch treats meta tensors as those of a GPU when it chooses layouts."""
    with torch.device('meta'):
        unet = UNet2DConditionModel.from_config(find_model('tiny').configs['unet'])
    unet.to(memory_format=LAST)
    switch_norms(unet, half_precision, channels_last)
    return unet


def prediction_on_meta(unet: UNet2DConditionModel) -> torch.Tensor:
    latents = torch.empty(2, 4, 16, 16, device='meta').contiguous(memory_format=LAST)
    timesteps = torch.empty(2, dtype=torch.long, device='meta')
    text = torch.empty(2, 77, unet.config.cross_attention_dim, device='meta')
    with torch.autocast('cpu', torch.bfloat16):
        return unet(latents, timesteps, text).sample


def test_the_group_norm_of_channels_last_is_torchs_with_its_gradients():
    torch.manual_seed(0)
    image = (3 * torch.randn(2, 8, 3, 5, dtype=torch.double) + 1).contiguous(memory_format=LAST).requires_grad_()
    weight, bias = torch.randn(2, 8, dtype=torch.double).requires_grad_().unbind()

    def norm(image, weight, bias):
        return LayoutKeepingGroupNorm.apply(image, weight, bias, 4, 1e-5)

    torch.testing.assert_close(norm(image, weight, bias), F.group_norm(image, 4, weight, bias, 1e-5))
    assert torch.autograd.gradcheck(norm, (image, weight, bias))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kind, base, size', [
    (HalfGroupNorm, torch.nn.GroupNorm, (8, 64)), (HalfChannelsLastGroupNorm, torch.nn.GroupNorm, (8, 64)),
    (HalfLayerNorm, torch.nn.LayerNorm, (16,))])
def test_a_norm_in_half_precision_is_as_near_to_float64_as_its_type_allows(dtype, kind, base, size):
    """By their norms: the result and the image's gradient to a unit in the last place of the type, the weights' to ten,
    since a CPU sums those of a layer norm in that type."""
    torch.manual_seed(0)
    exact = base(*size).double()
    torch.nn.init.normal_(exact.weight)
    image = (3 * torch.randn(2, 64, 16, 16) + 2).to(dtype)
    direction = torch.randn(image.shape).to(dtype)
    switched = base(*size)
    switched.load_state_dict(exact.state_dict())
    switched.__class__ = kind
    found = []
    for norm, tensor in ((switched, image), (exact, image.double())):
        tensor.requires_grad_()
        result = norm(tensor)
        result.backward(direction.to(result.dtype))
        found.append([result, tensor.grad, norm.weight.grad, norm.bias.grad])
    assert [tensor.dtype for tensor in found[0]] == [dtype, dtype, torch.float32, torch.float32]
    for half, expected, units in zip(*found, (1, 1, 10, 10), strict=True):
        assert (half - expected).norm() < units * torch.finfo(dtype).eps * expected.norm()


def test_every_block_hands_on_channels_last_where_a_gpu_would_not():
    layouts = []
    for switched in (False, True):
        unet = unet_on_meta(half_precision=False, channels_last=switched)
        keeps = []

        def note(module, inputs, output, keeps=keeps):
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(module, torch.nn.Conv2d):
                return tensor.contiguous(memory_format=LAST)  # as cuDNN gives it; torch's meta tensors follow a CPU
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 4:
                keeps.append(tensor.is_contiguous(memory_format=LAST))
            return None

        for module in unet.modules():
            module.register_forward_hook(note)
        with cuda_rules():
            prediction_on_meta(unet).float().sum().backward()
        layouts.append(keeps)
    before, after = layouts
    assert len(before) == len(after) and before.count(False) > 10
    assert all(after)


@pytest.mark.parametrize('half_precision, channels_last, group_norm', [
    (False, True, ChannelsLastGroupNorm), (True, False, HalfGroupNorm), (True, True, HalfChannelsLastGroupNorm)])
def test_names_and_weights_stay_and_every_norm_is_switched(half_precision, channels_last, group_norm):
    unet = unet_on_meta(half_precision, channels_last)
    assert unet.state_dict().keys() == unet_on_meta(False, False).state_dict().keys()
    norms = {type(module) for module in unet.modules() if isinstance(module, torch.nn.GroupNorm | torch.nn.LayerNorm)}
    assert norms == {group_norm, HalfLayerNorm if half_precision else torch.nn.LayerNorm}


@pytest.mark.parametrize('channels_last', [False, True])
def test_norms_in_half_precision_keep_fewer_bytes_for_the_backward_pass(channels_last):
    kept = [bytes_kept(half_precision, channels_last) for half_precision in (False, True)]
    assert kept[1] < 0.8 * kept[0]


def bytes_kept(half_precision: bool, channels_last: bool) -> int:
    """What autograd keeps of two images of 256 pixels, by CUDA's lists. For fake tensors torch takes fused attention,
    where it would keep attention's matrices of meta tensors."""
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with FakeTensorMode():
        unet = UNet2DConditionModel.from_config(find_model('tiny').configs['unet'])
        switch_norms(unet, half_precision, channels_last)
        latents, text = torch.empty(2, 4, 32, 32), torch.empty(2, 77, unet.config.cross_attention_dim)
        with cuda_rules(), torch.autocast('cpu', torch.bfloat16):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                prediction = unet(latents, torch.zeros(2, dtype=torch.long), text).sample  # keeps the graph alive
        weights = {parameter.untyped_storage()._cdata for parameter in unet.parameters()}
    del prediction
    return sum(number for storage, number in storages.items() if storage not in weights)
