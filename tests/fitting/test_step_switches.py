"""The switches of a step and of the process: they do what they say, and leave the process as it was."""
import contextlib
import functools
import json

import pytest
import torch
from composer.trainer import trainer as composers_trainer
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import benchmark
from fitting.switches import gradients_in_buckets, process_switches, torchs_attention_order, torchs_order
from models.loading import find_model
from tests.cuda_rules import one_rank
from tests.forked_runs import run, traced
from tests.runs import TINY, settings_of


def arguments(*argv: str):
    return settings_of('--use_synth_data', *TINY, '--results', '/dev/null', *argv)


class WeightCasts(TorchDispatchMode):
    """How often a float32 weight of a model was cast."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.weights = {parameter.data_ptr() for parameter in model.parameters()}
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.weights:
            self.count += 1
        return function(*args, **(kwargs or {}))


def trained_in_bf16(monkeypatch, *argv: str) -> tuple[int, list[torch.Tensor]]:
    """Two batches of two microbatches under torch's own autocast: how often weights were cast, and the weights."""
    @contextlib.contextmanager
    def autocast(precision, *_, **__):
        with torch.autocast('cpu', torch.bfloat16):
            yield

    monkeypatch.setattr(composers_trainer, '_validate_precision', lambda precision, device: None)
    monkeypatch.setattr(composers_trainer, 'get_precision_context', autocast)
    settings = arguments('--precision', 'amp_bf16', '--device_train_microbatch_size', '2', '--max_duration', '2ba',
                         *argv)
    data = benchmark.build_data(settings, find_model('tiny'))
    with benchmark.StopAtSignal() as stop:
        model, trainer = benchmark.build_run(settings, data, stop)
        with WeightCasts(model.unet) as casts:
            trainer.fit()
    return casts.count, [weight.detach() for weight in model.unet.parameters()]


def test_weights_are_cast_once_a_batch_and_learn_the_same(monkeypatch):
    for_each_microbatch, expected = trained_in_bf16(monkeypatch)
    once, weights = trained_in_bf16(monkeypatch, '--cast_weights_once')
    assert once == for_each_microbatch / 2 > 50
    assert all(map(torch.equal, weights, expected))
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0  # none was left open


@pytest.mark.parametrize('attention, order', [
    ('sdpa', None), ('cudnn', ['CUDNN_ATTENTION', 'FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH']),
    ('math,flash', ['MATH', 'FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'CUDNN_ATTENTION'])])
def test_attention_tries_its_kernels_in_the_order_that_is_asked_for(attention, order):
    before = torch._C._get_sdp_priority_order()
    query = torch.randn(2, 2, 16, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    with process_switches(arguments('--attention', attention, '--cudnn_benchmark')):
        tried = torch._C._get_sdp_priority_order()
        found = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        assert torch.backends.cudnn.benchmark
    torch.testing.assert_close(found, expected)
    if order is None:
        assert tried == before
    else:
        assert [SDPBackend(number).name for number in tried[:4]] == order
    assert torch._C._get_sdp_priority_order() == before and not torch.backends.cudnn.benchmark


def test_torchs_own_order_is_the_one_that_it_settles_at_its_first_attention(monkeypatch):
    """As torch 2.15 does on a Hopper GPU, where cuDNN's kernel comes first from then on."""
    settled = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    attend = torch.nn.functional.scaled_dot_product_attention

    def first_attention(*args):
        torch._C._set_sdp_priority_order([int(backend) for backend in settled])
        return attend(*args)

    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', first_attention)
    torchs_order.cache_clear()
    try:
        with process_switches(arguments('--attention', 'math')), torchs_attention_order():
            tried = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    finally:
        torch._C._set_sdp_priority_order(before)
        torchs_order.cache_clear()
    assert tried[:4] == settled


@pytest.mark.parametrize('flags', [
    ['--gradient_checkpointing'],
    pytest.param(['--gradient_checkpointing', '--compile'], marks=pytest.mark.long)], ids=str)
def test_the_order_of_kernels_is_the_unets_alone_also_in_the_backward_pass(monkeypatch, smallest_with_attention, flags):
    """Under DDP. Where attention is compiled, its kernels are chosen when its graph is traced."""
    orders = {'unet': [], 'encoders': []}

    def note(place: str) -> None:
        [first, *_] = torch._C._get_sdp_priority_order()
        orders[place].append(SDPBackend(first))

    def backend(graph, inputs):
        note('unet' if any(tensor.requires_grad for tensor in inputs if torch.is_tensor(tensor)) else 'encoders')
        return torch._dynamo.lookup_backend('aot_eager')(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(torch.nn.Module, 'compile', functools.partialmethod(torch.nn.Module.compile, backend=backend))
    settings = arguments('--attention', 'math,flash', '--model_name', smallest_with_attention, '--image_size', '32',
                         *flags)
    with process_switches(settings), one_rank():
        model = benchmark.build_model(settings, latents=False).train()
        if not settings.compile:
            for name, module in model.named_modules():
                if name.endswith(('attn1', 'attn2', 'self_attn')):
                    place = 'unet' if name.startswith('unet') else 'encoders'
                    module.register_forward_pre_hook(lambda *_, place=place: note(place))
        wrapped = DistributedDataParallel(model)
        batch = {'image': torch.rand(2, 3, 32, 32) * 2 - 1, 'caption': torch.randint(49408, (2, 77))}
        loss = model.loss(wrapped(batch), batch)
        in_forward = len(orders['unet'])
        loss.backward()
    torch._dynamo.reset()
    assert set(orders['unet']) == {SDPBackend.MATH}
    assert set(orders['encoders']) == {SDPBackend.FLASH_ATTENTION}
    assert settings.compile or len(orders['unet']) == 2 * in_forward  # it was computed again


@pytest.mark.parametrize('are_views', [True, False])
def test_gradients_lie_in_the_buckets_where_a_batch_is_one_microbatch(are_views):
    """DDP as Composer's Trainer makes it. A bucket holds several gradients, so that a view shows by its storage."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    composers_own = composers_trainer.prepare_ddp_module
    with one_rank(), gradients_in_buckets(is_one_microbatch=are_views):
        wrapped = composers_trainer.prepare_ddp_module(model, False)
        wrapped(torch.randn(4, 8)).sum().backward()
    assert isinstance(wrapped, DistributedDataParallel)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == (1 if are_views else 4)
    assert composers_trainer.prepare_ddp_module is composers_own


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
        assert rounded[0] == exact[0] and rounded[1:] != exact[1:]  # the first comes before any gradient
        assert rounded == pytest.approx(exact, rel=1e-3)
