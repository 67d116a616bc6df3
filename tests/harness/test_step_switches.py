"""The switches of a step and of the process: they do what they say, and leave the process as it was."""
import contextlib
import json

import pytest
import torch
from composer.trainer import trainer as composers_trainer
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

import benchmark
from harness.options import benchmark_parser
from harness.preflight import fill_in_training_defaults
from harness.switches import process_switches
from harness.tracing import AttentionKernels, kernels_of_attention
from models.loading import find_model
from tests.forked_runs import run, traced
from tests.runs import TINY


def arguments(*argv: str):
    args = benchmark_parser('').parse_args(['--use_synth_data', *TINY, '--results', '/dev/null', *argv])
    fill_in_training_defaults(args)
    return args


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
    args = arguments('--precision', 'amp_bf16', '--device_train_microbatch_size', '2', '--max_duration', '2ba', *argv)
    run = benchmark.build_run(args, benchmark.build_data(args, find_model('tiny')))
    try:
        with WeightCasts(run.model.unet) as casts:
            assert benchmark.train(run) == {'status': 'complete'}
    finally:
        run.safeguard.release_signals()
    return casts.count, [weight.detach() for weight in run.model.unet.parameters()]


def test_weights_are_cast_once_a_batch_and_learn_the_same(monkeypatch):
    for_each_microbatch, expected = trained_in_bf16(monkeypatch)
    once, weights = trained_in_bf16(monkeypatch, '--cast_weights_once')
    assert once == for_each_microbatch / 2 > 50
    assert all(map(torch.equal, weights, expected))
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0  # none was left open


@pytest.mark.parametrize('attention, order', [
    ('sdpa', None), ('cudnn', ['CUDNN_ATTENTION', 'FLASH_ATTENTION', 'EFFICIENT_ATTENTION', 'MATH']),
    ('math,flash', ['MATH', 'FLASH_ATTENTION', 'CUDNN_ATTENTION', 'EFFICIENT_ATTENTION'])])
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


def test_the_record_says_which_kernels_computed_attention(monkeypatch):
    """On a CPU, whose one kernel is known: two attentions in each of the UNet's transformer blocks."""
    kernels = AttentionKernels(last_batch=1)
    monkeypatch.setattr(benchmark, 'tracing_callbacks', lambda args: [kernels])
    blocks = []
    build_model = benchmark.build_model

    def counted(*args):
        model = build_model(*args)
        blocks[:] = [name for name, _ in model.unet.named_modules() if name.endswith(('attn1', 'attn2'))]
        return model

    monkeypatch.setattr(benchmark, 'build_model', counted)
    record = benchmark.main(['--use_synth_latents', *TINY, '--warmup_batches', '2', '--device_train_microbatch_size',
                             '2', '--results', '/dev/null'])
    [(name, calls)] = record['attention_kernels'].items()
    assert name == '_scaled_dot_product_flash_attention_for_cpu'
    assert calls >= len(blocks) > 4  # the text encoder's are counted as well


def test_kernels_of_attention_are_known_by_their_operators():
    names = ['aten::scaled_dot_product_attention', 'aten::_scaled_dot_product_cudnn_attention', 'aten::mm',
             'aten::_scaled_dot_product_cudnn_attention', 'aten::_scaled_dot_product_attention_math',
             'xformers_flash3::flash_fwd', 'xformers::efficient_attention_forward_cutlass', 'aten::linear']
    assert kernels_of_attention(names) == {
        '_scaled_dot_product_cudnn_attention': 2, '_scaled_dot_product_attention_math': 1,
        'xformers_flash3::flash_fwd': 1, 'xformers::efficient_attention_forward_cutlass': 1}


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
