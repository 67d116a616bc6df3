"""The kit itself: its lists are CUDA's, and it casts as torch's documentation says of CUDA."""
import pytest
import torch
import torch.nn.functional as F
from torch import bfloat16, float16, float32, float64

from fitting.cuda_autocast import cuda_lists, cuda_rules, registered
from tests.cuda_rules import Dtypes, Fault

CONVOLUTION = torch.nn.Conv2d(4, 8, 3)
LINEAR = torch.nn.Linear(6, 6)
IMAGE = torch.randn(2, 4, 6, 6)


def test_the_lists_are_those_that_torchs_dispatcher_has_for_cuda():
    names = [name for names in cuda_lists().values() for name in names]
    assert len(names) == len(set(names))
    # the first raises, no CPU has the next three, and the last is not in the header that lists the others
    others = {'binary_cross_entropy', 'cudnn_convolution', 'cudnn_convolution_transpose', '_cudnn_rnn',
              'linalg_matrix_sqrth'}
    assert set(names) == set(registered('AutocastCUDA')) - others


@pytest.mark.parametrize('dtype', [bfloat16, float16])
@pytest.mark.parametrize('call, in_half, expected', [
    (lambda half: CONVOLUTION(IMAGE), False, 'half'),
    (lambda half: LINEAR(IMAGE), False, 'half'),
    (lambda half: IMAGE @ IMAGE, False, 'half'),
    (lambda half: F.scaled_dot_product_attention(IMAGE, IMAGE, IMAGE), False, 'half'),
    (lambda half: F.group_norm(IMAGE.to(half), 2), True, 'float32'),
    (lambda half: F.layer_norm(IMAGE.to(half), (6,)), True, 'float32'),
    (lambda half: F.softmax(IMAGE.to(half), -1), True, 'float32'),
    (lambda half: F.mse_loss(IMAGE.to(half), IMAGE.to(half)), True, 'float32'),
    (lambda half: IMAGE.to(half).sum(), True, 'float32'),
    (lambda half: IMAGE.to(half).norm(), True, 'float32'),
    (lambda half: IMAGE.to(half).exp(), True, 'float32'),
    (lambda half: F.interpolate(IMAGE.to(half), scale_factor=2), True, 'float32'),
    (lambda half: torch.addcmul(IMAGE, IMAGE.to(half), IMAGE.to(half)), True, 'float32'),
    (lambda half: F.silu(IMAGE.to(half)), True, 'half'),
    (lambda half: F.gelu(IMAGE), True, 'float32'),
    (lambda half: IMAGE.to(half) + IMAGE, True, 'float32'),
    (lambda half: torch.cat([IMAGE.to(half), IMAGE]), True, 'float32'),
    (lambda half: F.linear(IMAGE.double(), LINEAR.weight.double()), False, 'float64'),
])
def test_an_operator_gives_the_type_that_it_gives_on_cuda(dtype, call, in_half, expected):
    with cuda_rules(), torch.autocast('cpu', dtype):
        result = call(dtype)
    assert result.dtype == {'half': dtype, 'float32': float32, 'float64': float64}[expected]


def test_without_the_rules_a_cpu_is_as_it_was():
    with cuda_rules():
        pass
    with torch.autocast('cpu', bfloat16):
        assert F.group_norm(IMAGE.bfloat16(), 2).dtype == bfloat16
        assert CONVOLUTION(IMAGE).dtype == bfloat16
    with cuda_rules():
        assert CONVOLUTION(IMAGE).dtype == float32  # nobody asked for autocast


def test_meta_tensors_are_cast_as_well():
    image = torch.empty(2, 4, 6, 6, device='meta')
    convolution = torch.nn.Conv2d(4, 8, 3, device='meta')
    with cuda_rules():
        assert convolution(image).dtype == float32
        with torch.autocast('cpu', float16):
            assert convolution(image).dtype == float16
            assert F.group_norm(convolution(image), 2).dtype == float32
            convolution(image).float().sum().backward()
    assert convolution.weight.grad.dtype == float32


def test_gradients_come_back_in_the_type_of_the_weights():
    with cuda_rules(), torch.autocast('cpu', bfloat16), Dtypes() as dtypes:
        CONVOLUTION(IMAGE).float().sum().backward()
    assert CONVOLUTION.weight.grad.dtype == float32
    assert dtypes.of('convolution', 'convolution_backward') == {bfloat16}


def test_a_fault_spoils_the_passes_that_it_is_told_to():
    layer = torch.nn.Linear(2, 2)
    Fault(layer, {1})
    gradients = []
    for _ in range(3):
        layer.zero_grad()
        layer(torch.ones(1, 2)).sum().backward()
        gradients.append(bool(layer.weight.grad.isfinite().all()))
    assert gradients == [True, False, True]
