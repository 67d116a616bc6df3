"""Claims about setups: a measurement, its plan and the forecast for it have the same setup."""
import json
import shlex

import pytest

import benchmark
import report
from sdbench.errors import redacted
from sdbench.gpus import CARDS, machines_for
from sdbench.records.figures import summary_lines
from sdbench.records.setup import forecast_command, setup_of
from sdbench.records.summary import notes_on_speed
from tests.runs import ROOT, SMALLEST, settings_of

# GPU count and GPUs per machine by GPU; None: as many per machine as usual
LAYOUTS = {'NVIDIA H100 80GB HBM3': [(1, None), (8, None), (12, None), (64, None)],
           'NVIDIA L40S': [(1, None), (8, 8), (8, None), (16, 16), (16, 8)],
           'NVIDIA GB200': [(8, None), (64, None)]}
SETUPS = [(device, gpus, per_node, flags) for device, layouts in LAYOUTS.items() for gpus, per_node in layouts
          for flags in ('--use_synth_data --use_ema', '--use_synth_latents --compile',
                        '--use_synth_data --compile --device_train_microbatch_size 2 --max_duration 50ba')]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr('sdbench.forecast.dry_run.with_one_change', lambda settings: {'none': settings})


@pytest.mark.parametrize('device, gpus, per_node, flags', SETUPS)
def test_the_printed_command_makes_a_forecast_with_which_a_measurement_corrects_a_plan(
        tmp_path, capsys, device, gpus, per_node, flags):
    """The measured speed is 0.9 of the forecast speed. The microbatch was found by the search or given by a flag."""
    plan, results = tmp_path / 'plan.jsonl', tmp_path / 'results.jsonl'
    flags = [*shlex.split(flags), '--model_name', SMALLEST, '--image_size', '16', '--batch_size', str(12 * gpus)]
    layout = ['--gpus_per_node', str(per_node)] if per_node else []
    planned = benchmark.main([*flags, '--max_duration', '100ba', '--dry_run', str(gpus), '--gpu', device, *layout,
                              '--network_gbits', '100', '--results', str(plan)])

    # Make the record of a run on these GPUs from the record of the plan.
    per_node = per_node or min(gpus, CARDS[device].gpus_per_node)
    network = 100 if machines_for(gpus, per_node) > 1 else None
    by_default = [name for name in planned[0]['by_default'] if name != 'max_duration' or '50ba' not in flags]
    measured = planned[0] | {
        'status': 'complete', 'dry_run': None, 'gpu': [], 'gpus_per_node': per_node, 'network_gbits': network,
        'num_nodes': machines_for(gpus, per_node), 'max_duration': '50ba', 'measured_batches': 30,
        'command': shlex.join(['benchmark.py', *flags]), 'by_default': by_default, 'training_id': 'x',
        'device_train_microbatch_size': 3 if '2' not in flags else 2, 'data_wait_fraction': 0.0}
    command = forecast_command(measured, str(plan))
    [forecast] = benchmark.main(command[1:])
    measured |= {'images_per_sec': 0.9 * forecast['images_per_sec'], 'images_per_sec_least': None}
    results.write_text(json.dumps(measured) + '\n')

    # The report has one plan for these GPUs, with as many images as before and 0.9 of the forecast speed.
    capsys.readouterr()
    report.main([str(plan), str(results), '--phase', '16'])
    text = ' '.join(capsys.readouterr().out.split())
    assert f'Plan: train on {1200 * gpus:,} images at 16 px' in text
    assert text.count(f'| {gpus} x ') == 1
    assert 'are multiplied by 0.90' in text
    assert 'corrects no plan' not in text
    assert ('Gbit/s' in text) == bool(network and device != 'NVIDIA GB200')


def test_a_microbatch_that_the_search_found_is_forecast_without_a_memory_margin(monkeypatch):
    """On an H200, a microbatch of 128 took 132.2 of 139.8 GiB, which leaves less than the margin of 12 %."""
    monkeypatch.chdir(ROOT)
    flags = ['@recipes/fastest.txt', '--no-compile', '--use_ema', '--use_synth_data', '--batch_size', '128',
             '--dry_run', '1', '--gpu', 'NVIDIA-H200']
    [searched] = benchmark.main(flags)
    [found] = benchmark.main([*flags, '--device_train_microbatch_size', '128'])
    assert (searched['device_train_microbatch_size'], found['device_train_microbatch_size']) == (64, 128)
    with pytest.raises(SystemExit):
        benchmark.main([*flags, '--batch_size', '256', '--device_train_microbatch_size', '256'])


@pytest.mark.parametrize('changes, machines, network', [
    ({'num_devices': 12, 'gpus_per_node': 8}, '2', 'network not stated'),
    ({'num_devices': 8, 'num_nodes': 1, 'network_gbits': 100}, '1', ''),
    ({'num_devices': 16, 'num_nodes': 2, 'network_gbits': 100}, '2', '100 Gbit/s network'),
    ({'num_devices': 8, 'num_nodes': 2, 'device': 'NVIDIA GB200'}, '2', ''), ({'num_devices': 8}, '', '')])
def test_a_network_is_a_setting_only_between_machines_that_nvlink_does_not_connect(changes, machines, network):
    setup = setup_of({'stage': 'train', 'status': 'complete', 'device': 'NVIDIA L40S'} | changes)
    assert (setup['num_nodes'], setup['network']) == (machines, network)


def test_no_forecast_command_is_printed_for_a_gpu_without_a_peak_in_its_precision():
    record = {'images_per_sec': 10.0, 'data_wait_fraction': 0.0, 'device': 'NVIDIA H200', 'device_type': 'cuda',
              'num_devices': 1, 'stage': 'train', 'status': 'complete', 'measured_batches': 20}
    settings = settings_of('--use_synth_data')
    for precision, is_there in (('fp32', False), ('amp_bf16', True)):
        notes = notes_on_speed(record | {'precision': precision}, settings)
        assert ('forecast_command' in notes) == is_there


def test_figures_of_a_summary_are_plain_numbers():
    values = {'gpu_hours': 4890.0, 'dollars': 14425.0, 'encoded': 'all', 'images_per_sec': 12440.0}
    spent, encoded = summary_lines(['spent', 'encoded'], values)
    assert spent == 'spent           4,890.0 GPU-hours, $14,425.00'
    assert encoded == 'encoded         all, 12,440.0 images/s'


def test_caption_weights_are_not_redacted_as_a_password():
    for text, expected in (('--caption_weights key=2', '--caption_weights key=2'),
                           ('AccountKey=abcdefgh', 'AccountKey=***')):
        assert redacted(text) == expected
