"""benchmarks/kernels.py counts the arithmetic in a trace as torch does, and assigns kernels to their operators."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.kernels import main, operators_of
from tests.runs import ROOT


def network() -> torch.Tensor:
    """Return a loss that needs one of each kind of arithmetic."""
    images = torch.randn(2, 8, 16, 16)  # no gradient: its convolution has only the one for the weight
    hidden = F.conv2d(images, torch.randn(4, 8, 3, 3, requires_grad=True), stride=2, padding=1)
    hidden = F.conv2d(hidden, torch.randn(16, 4, 3, 3, requires_grad=True), padding=1)
    tokens = F.linear(hidden.flatten(2).mT, torch.randn(16, 16, requires_grad=True), torch.randn(16))[:, None]
    return (F.scaled_dot_product_attention(tokens, tokens, tokens) @ torch.randn(2, 1, 16, 4)).sum()


@pytest.fixture
def trace(tmp_path):
    with profile(with_flops=True, record_shapes=True) as profiler:
        with torch.profiler.record_function('ProfilerStep#1'):
            network().backward()
    profiler.export_chrome_trace(str(tmp_path / 'trace.json'))
    return tmp_path / 'trace.json'


def test_the_arithmetic_in_a_trace_is_what_torchs_counter_counts(trace):
    spans = [span for span in json.loads(trace.read_text())['traceEvents'] if span.get('cat') == 'cpu_op']
    found = operators_of(sorted(spans, key=lambda span: (span['ts'], -span['dur']))).groupby('kind')['operations'].sum()
    with FlopCounterMode(display=False) as counter:
        network().backward()
    counts = {str(operator): count for operator, count in counter.get_flop_counts()['Global'].items()}
    assert found['convolution forward'] == counts['aten.convolution']
    assert found['convolution backward'] == counts['aten.convolution_backward']
    assert found['matrix products'] == sum(count for name, count in counts.items() if name.endswith('mm'))
    assert found['attention backward'] == 2.5 * found['attention forward'] == 10 * 2 * 64 * 64 * 16


def test_kernels_of_a_gpu_count_for_the_operator_that_launched_them_and_copies_for_themselves(trace, capsys):
    events = json.loads(trace.read_text())
    number = next(span['args']['External id'] for span in events['traceEvents'] if span['name'] == 'aten::mm')
    kernel = {'ph': 'X', 'cat': 'kernel', 'ts': 0, 'tid': 7, 'args': {'External id': number}}
    events['traceEvents'] += [kernel | {'name': 'sm90_xmma_gemm', 'dur': 2}, kernel | {'name': 'nchwToNhwc', 'dur': 3},
                              kernel | {'name': 'wgrad_of_a_graph', 'dur': 4, 'args': {}}]
    [step] = [span for span in events['traceEvents'] if span['name'] == 'ProfilerStep#1' and span['ph'] == 'X']
    step['dur'] = 10
    events['deviceProperties'] = [{'name': 'NVIDIA H200'}]
    trace.write_text(json.dumps(events))
    main(str(trace))
    percent = {line[:24].strip(): line[24:].split()[1] for line in capsys.readouterr().out.splitlines()[2:]}
    assert percent['matrix products'] == '20.0' and percent['layout copies and casts'] == '30.0'
    assert percent['convolution backward'] == '40.0' and percent['gaps'] == '10.0'


@pytest.mark.long
def test_the_script_of_the_compiled_step_leaves_a_record_of_each_run_and_a_table_of_each_trace(tmp_path):
    small = ['--model_name', 'tiny', '--image_size', '64', '--batch_size', '4', '--device_train_microbatch_size', '4',
             '--no-compile', '--precision', 'fp32', '--measure_batches', '4']
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    subprocess.run(['sh', 'benchmarks/compiled_step.sh', tmp_path, *small], cwd=ROOT, check=True,
                   env=os.environ | {'PATH': path})
    records = list(map(json.loads, (tmp_path / 'records.jsonl').read_text().splitlines()))
    assert [record['status'] for record in records].count('profiled') == 2
    assert len(records) == 9
    for name in ('images', 'latents'):
        assert 'convolution backward' in (tmp_path / f'{name}-profile.txt').read_text()
