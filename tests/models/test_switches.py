"""The switches of a step and of the process do what they say, and divisions by one are left out without a trace."""
import json

import pytest
import torch
from torch.nn.attention import SDPBackend

import benchmark
from sdbench.models.layers import skip_divisions_by_one
from sdbench.models.switches import process_switches
from tests.forked_runs import run, traced
from tests.runs import TINY, settings_of


@pytest.mark.parametrize('attention, order', [
    ('sdpa', None), ('cudnn', ['CUDNN_ATTENTION', 'FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH']),
    ('efficient', ['EFFICIENT_ATTENTION', 'MATH'])])
def test_attention_tries_the_kernel_first_that_is_asked_for(attention, order):
    before = torch._C._get_sdp_priority_order()
    with process_switches(settings_of('--use_synth_data', *TINY, '--attention', attention)):
        tried = torch._C._get_sdp_priority_order()
        assert torch.backends.cuda.cudnn_sdp_enabled() == (attention != 'efficient')
    if order is None:
        assert tried == before
    else:
        assert [SDPBackend(number).name for number in tried[:len(order)]] == order
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.long
def test_gradients_that_two_ranks_send_in_bf16_train_nearly_as_those_in_float32(server, tmp_path):
    losses = {}
    for precision in ('fp32', 'bf16'):
        folder = tmp_path / precision
        folder.mkdir()
        argv = ['--use_synth_data', *TINY, '--max_duration', '4ba', '--allreduce_precision', precision]
        assert run(server, 2, argv, folder) == [0, 0], (folder / 'log').read_text()
        record = json.loads((folder / 'results.jsonl').read_text())
        assert (record['allreduce_precision'], record['num_devices']) == (precision, 2)
        batches = [sorted(batch.items()) for batch in traced(folder, 2)]
        losses[precision] = [[float.fromhex(json.loads(seen)[0]) for _, [seen] in rank] for rank in batches]
    for exact, rounded in zip(losses['fp32'], losses['bf16'], strict=True):
        assert rounded[0] == exact[0]  # the first comes before any gradient
        assert rounded[1:] != exact[1:]
        assert rounded == pytest.approx(exact, rel=1e-3)


# Divisions by one

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
