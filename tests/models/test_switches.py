"""--attention selects the kernel, and --allreduce_precision rounds the gradients."""
import json

import pytest
import torch
from torch.nn.attention import SDPBackend

from sdbench.models.switches import process_switches
from tests.forked_runs import run
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
def test_all_reduced_gradients_in_bf16_train_nearly_like_gradients_in_float32(server, tmp_path):
    losses = []
    for precision in ('fp32', 'bf16'):
        folder = tmp_path / precision
        argv = ['--use_synth_data', *TINY, '--max_duration', '4ba', '--allreduce_precision', precision]
        assert run(server, 2, argv, folder) == [0, 0], (folder / 'log').read_text()
        record = json.loads((folder / 'results.jsonl').read_text())
        assert (record['allreduce_precision'], record['num_devices']) == (precision, 2)
        losses.append(record['loss'])
    exact, rounded = losses
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-3)
