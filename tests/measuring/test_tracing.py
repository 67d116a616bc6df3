"""--profile: a trace that the usual tools open, of a few batches, whose run is in no report's figures."""
import json

import benchmark
import report
from tests.runs import TINY


def test_a_trace_holds_three_batches_and_its_run_is_in_no_figure(tmp_path, results, smallest_model, capfd):
    folder = tmp_path / 'trace'
    record = benchmark.main(['--use_synth_latents', *TINY, '--model_name', smallest_model, '--measure_batches', '5',
                             '--profile', str(folder), '--results', str(results)])
    [torchs] = (folder / 'torch').iterdir()
    [composers] = (folder / 'composer').iterdir()
    assert torchs.name == 'rank0.5.pt.trace.json'  # the suffix by which TensorBoard knows a trace
    events = json.loads(torchs.read_text())['traceEvents']
    assert len({event['name'] for event in events if event['name'].startswith('ProfilerStep#')}) == 3
    names = {event['name'] for event in events}
    assert {'aten::convolution', 'aten::native_group_norm', 'Optimizer.step#AdamW.step'} <= names
    assert any('train_batch' in event.get('name', '') for event in json.loads(composers.read_text()))
    assert record['status'] == 'profiled'
    assert 'no report counts them' in capfd.readouterr().out
    report.main([str(results)])
    assert 'profiled' in capfd.readouterr().out
