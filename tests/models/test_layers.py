"""Divisions by one that are left out: nothing changes but the kernels."""
import torch

import benchmark
from sdbench.models.layers import skip_divisions_by_one


def loss_and_gradients(skip: bool) -> list[torch.Tensor]:
    """Return loss and gradients of a step in bf16 by autocast, with the same weights, samples and noise each time."""
    torch.manual_seed(0)
    model = benchmark.StableDiffusion('tiny', 64).train()
    if skip:
        skip_divisions_by_one(model)
    torch.manual_seed(1)
    batch = {'image': torch.rand(2, 3, 64, 64) * 2 - 1, 'caption': torch.randint(1000, (2, 77))}
    with torch.autocast('cpu', torch.bfloat16):
        loss = model.loss(model(batch), batch)
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.unet.parameters())]


def test_loss_and_gradients_are_the_same_to_the_bit():
    for divided, skipped in zip(loss_and_gradients(False), loss_and_gradients(True), strict=True):
        assert torch.equal(divided, skipped)


def test_another_divisor_than_one_stays():
    block = torch.nn.Module()
    block.output_scale_factor = 1.5
    skip_divisions_by_one(block)
    assert block.output_scale_factor == 1.5
