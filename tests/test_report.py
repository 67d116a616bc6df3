"""Claims about report.py, its tables and its figures, compared with numbers from manual or numpy calculations."""

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

import report
from sdbench.costs import price_of
from sdbench.flags.commands import Report
from sdbench.flags.parser import parse
from tests.report_tables import columns, tables
from tests.runs import ROOT, one_error_line

PUBLISHED = str(ROOT / 'published.csv')
MINIMAL = {'device': 'H200', 'num_devices': 8, 'image_size': 512, 'images_per_sec': 800.0}
CPU = {'device': 'Xeon', 'device_type': 'cpu', 'num_devices': 1, 'images_per_sec': 8.0}
LOADER = {'stage': 'loader', 'images_per_sec': None, 'loader_images_per_sec': 32_000.0}
ENCODE = {'stage': 'encode', 'images_per_sec': 4000, 'bytes_per_image': 50_000}
FLAGS = {'model_name': 'sd2', 'image_size': 512, 'dataset': '5e1f', 'batch_size': 2048, 'seed': 17,
         'learning_rate': 1e-4}
TRAINING = FLAGS | {'dataset': 'streaming', 'images_per_sec': 400.0, 'trained_batches': 2000}
EVALUATION = {
    'stage': 'evaluate', 'model': 'kept/ep0-ba1000-rank0.pt', 'data': 'coco.txt', 'samples': 30000, 'steps': 50,
    'weights': 'averaged', 'trained_batches': 1000, 'images_seen': 2_048_000,
    'training': FLAGS | {'remote': 's3://bucket'}, 'clip': 'CLIP-ViT-H-14', 'fid_of_published_weights': True,
    'trained_on_data': False,
    'scores': [{'guidance': 4, 'fid': 70.0, 'clip_score': 15.0}, {'guidance': 1.5, 'fid': 95.5, 'clip_score': 14.0}]}
LATER = EVALUATION | {'model': 'kept/ep0-ba2000-rank0.pt', 'trained_batches': 2000, 'images_seen': 4_096_000,
                      'scores': [{'guidance': 1.5, 'fid': 40.0, 'clip_score': 20.0},
                                 {'guidance': 4, 'fid': 30.0, 'clip_score': 25.0}]}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes records, given as changes to a minimal record, and returns the path."""
    def write(*records):
        path = tmp_path / 'records.jsonl'
        path.write_text(''.join(json.dumps(MINIMAL | record) + '\n' for record in records))
        return str(path)
    return write


@pytest.fixture
def printed(capsys):
    """Return a function that calls report.py and returns its output."""
    def printed(*argv):
        report.main([str(argument) for argument in argv])
        return capsys.readouterr().out
    return printed


# The published table

def test_published_csv_gives_the_published_table_and_speeds_on_an_h100(printed):
    [table] = tables(printed(PUBLISHED))
    assert columns(table[:6], 'GPUs', 'images/s', 'days', 'cost', 'efficiency', 'text') == [
        ('8', '128.2', '258.85', '$99,400', '100.0 %', 'microbatch 4'),
        ('16', '254.0', '130.65', '$100,339', '99.1 %', 'microbatch 4'),
        ('32', '485.7', '68.32', '$104,946', '94.7 %', 'microbatch 4'),
        ('64', '912.2', '36.38', '$111,757', '88.9 %', 'microbatch 4'),
        ('128', '1,618.4', '20.50', '$125,982', '78.9 %', 'microbatch 4'),
        ('256', '2,589.4', '12.82', '$157,480', '63.1 %', 'microbatch 4; extrapolated by its source')]
    of_h100 = [row for row in table if row['device'] == 'H100 80GB']
    assert columns(of_h100, 'settings', 'images/s') == [('microbatch 4', '189.3'), ('microbatch 32', '385.3')]


# Predictions

def test_speeds_on_64_and_128_gpus_are_predicted_within_1_5_percent_from_8_16_and_32(printed, write):
    few = {8: 128.2, 16: 254.0, 32: 485.7}
    for batch in ({'batch_size': 2048}, {}):  # also where the batch is not stated
        path = write(*({'num_devices': n, 'images_per_sec': speed} | batch for n, speed in few.items()))
        [table] = tables(printed(path, '--extrapolate', 64, 128))
        for row, speed in zip(table[3:], (912.2, 1618.4), strict=True):
            assert float(row['images/s'].replace(',', '')) == pytest.approx(speed, rel=0.015)


def test_the_fit_ignores_extrapolated_rows_and_prints_its_worst_residual(printed):
    text = printed(PUBLISHED, '--extrapolate', 512, 1024)
    [table] = tables(text)
    assert [row['text'] for row in table[6:8]] == [
        'microbatch 4; extrapolated', 'microbatch 4; extrapolated; 2 images per GPU, a smaller microbatch']
    text = ' '.join(text.split())
    assert 'needs three GPU counts: A100 80GB, microbatch 4; A100 80GB, microbatch 32' in text
    n, seconds = np.array([8, 16, 32, 64, 128]), 2048 / np.array([128.2, 254.0, 485.7, 912.2, 1618.4])
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / n, n**0], axis=1) / seconds[:, None], np.ones(5), rcond=None)
    assert f'step_seconds(n) = {a:.5g} / n + {b:.5g} for a batch of 2,048 images, fitted on 8, 16, 32, 64, 128' in text
    worst = max(zip(n, seconds / (a / n + b) - 1, strict=True), key=lambda pair: abs(pair[1]))
    assert f'worst residual {worst[1]:+.1%} of the images/s, on {worst[0]} GPUs' in text


def test_each_setting_is_predicted_from_its_own_runs(printed, write):
    runs = [{'num_devices': n, 'images_per_sec': speed * n, 'use_ema': ema, 'batch_size': 2048}
            for ema, speed in ((True, 10.0), (False, 20.0)) for n in (8, 16, 32)]
    text = printed(write(*runs, {'precision': 'fp32', 'batch_size': 2048}), '--extrapolate', 64)
    [table] = tables(text)
    predicted = [row for row in table if 'extrapolated' in row['text']]
    assert columns(predicted, 'text', 'GPUs', 'images/s') == [
        ('EMA; extrapolated', '64', '640.0'), ('extrapolated', '64', '1,280.0')]
    assert re.findall('(.*EMA): step_seconds', text) == ['EMA']
    assert 'defaults: step_seconds' in text


# Tables of measurements

def test_records_with_different_settings_are_rows_of_one_table_with_a_column_of_settings(printed, write):
    first, second = ({'date': f'2026-01-0{n}', 'seed': n, 'command': n, 'measure_batches': 20}
                     for n in (1, 2))  # without an effect on speed
    [table] = tables(printed(write({'compile': True} | first, {'compile': 'reduce-overhead'},
                                   {'compile': True} | second)))
    assert not {'date', 'seed', 'command'} & table[0].keys()
    assert columns(table, 'text') == [
        ('batch of 2048, compile; median of 2 runs, 800.0 to 800.0',), ('compile reduce-overhead',)]

    # A record that is older than a flag has the flag's default.
    runs = [{'command': 'benchmark.py'}, {'command': 'benchmark.py', 'adam_betas': [0.9, 0.999], 'compile': False},
            {'command': 'benchmark.py', 'compile': True}]
    assert columns(tables(printed(write(*runs)))[0], 'settings') == [('',), ('compile',)]

    # The versions of libraries, and images or latents as input, are settings too.
    one = {'versions': {'torch': '2.7.0', 'diffusers': '0.39.0'}, 'encoders': 'in_loop'}
    other = {'versions': {'torch': '2.11.0', 'diffusers': '0.39.0'}, 'encoders': 'text_in_loop'}
    text = printed(write(one, other))
    assert columns(tables(text)[0], 'settings') == [('torch 2.7.0',), ('on latents, torch 2.11.0',)]
    assert text.split('\n\n')[1] == 'All rows: stage train, device NVIDIA H200, image_size 512, diffusers 0.39.0'


def test_runs_on_the_fewest_machines_have_a_row_and_are_the_only_ones_in_the_fit(printed, write):
    runs = [(8, 1, 800.0), (16, 2, 1600.0), (16, 16, 1200.0), (16, 16, 1400.0), (32, 4, 3200.0)]
    path = write(*({'num_devices': gpus, 'num_nodes': nodes, 'images_per_sec': speed, 'batch_size': 2048}
                   for gpus, nodes, speed in runs))
    [table] = tables(printed(path, '--extrapolate', 64))
    words = {row['images/s']: row['text'] for row in table}
    assert '2 machines' in words['1,600.0'] and '16 machines' in words['1,300.0']
    assert 'extrapolated' in words['6,400.0']


LEARNED = {'trained_batches': 100, 'eval_loss': 0.38, 'eval_batch': 100, 'loss': 0.4, 'learning_rate': 1e-4,
           'eval_remote': 'held-out'}


def test_trainings_with_different_learning_flags_are_separate_rows_with_their_losses(printed, write):
    better = LEARNED | {'learning_rate': 1e-3, 'eval_loss': 0.29, 'loss': 0.3}
    longer = LEARNED | {'trained_batches': 200, 'eval_loss': 0.37, 'date': '2026-01-01'}
    measured = {'measure_batches': 20, 'learning_rate': 1e-2, 'loss': 9.0}  # has no training result
    text = printed(write(longer, LEARNED, better, measured, measured | {'learning_rate': 1e-1}))
    learned = [(row['text'].partition(',')[0], *columns([row], 'eval loss', 'loss', 'batches')[0])
               for row in tables(text)[0] if row['batches']]
    assert sorted(learned) == [
        ('learning rate 0.0001', '0.3700', '0.400', '200'), ('learning rate 0.0001', '0.3800', '0.400', '100'),
        ('learning rate 0.001', '0.2900', '0.300', '100')]

    # A record that is older than --lr_final has its default, 0.0.
    older = LEARNED | {'command': 'benchmark.py'}
    [table] = tables(printed(write(older, older | {'lr_final': 0.0})))
    assert columns(table, 'text') == [('',)] * 2


def test_losses_on_different_latents_are_ranked_and_plotted_separately_with_the_lowest_first(printed, figure_of, write):
    worse, better = (LEARNED | {'pretrained': True, 'learning_rate': rate, 'save_folder': f'runs/{rate}',
                                'eval_loss': loss, 'evaluations': [[100, loss]]}
                     for rate, loss in ((1e-2, 0.7), (1e-3, 0.6)))
    of_noise = LEARNED | {'pretrained': False, 'eval_loss': 0.25, 'evaluations': [[100, 0.25]], 'eval_batch': 50}
    path = write(worse, of_noise, better)
    figure = figure_of(path, '--learned', 'learned.png')
    assert [axes.get_title() for axes in figure.axes] == ['pretrained', 'defaults']
    text = printed(path, '--learned', 'learned.png')
    assert [('pretrained' in row['text'], row['eval loss']) for row in tables(text)[0]] == [
        (False, '0.2500'), (True, '0.6000'), (True, '0.7000')]
    assert 'evaluated after different batches' in text


def test_a_resumed_training_is_one_row_with_the_result_at_its_end(printed, write):
    """The training stopped at batch 29, ended at 60, and was extended to 80 with too few batches for a speed."""
    run = LEARNED | {'training_id': 'a', 'max_duration': '60ba', 'first_batch': 0}
    first = run | {'status': 'interrupted', 'trained_batches': 29, 'eval_loss': 0.7, 'evaluations': [[20, 0.7]]}
    second = run | {'first_batch': 29, 'trained_batches': 60, 'eval_loss': 0.6, 'eval_batch': 60,
                    'evaluations': [[20, 0.7], [40, 0.65], [60, 0.6]]}
    third = second | {'max_duration': '80ba', 'first_batch': 60, 'trained_batches': 80, 'measured_batches': 5,
                      'images_per_sec': 1.0}
    other = run | {'training_id': 'b', 'learning_rate': 1e-3, 'trained_batches': 60}
    again = run | {'training_id': None, 'trained_batches': 60, 'date': '2026-01-02'}  # a record of an older version
    others = [ENCODE | FLAGS | {'save_folder': 'runs/a'}, LOADER | FLAGS]  # other records with the same flags
    for flags in ([], ['--compare']):
        text = printed(write(first, other, second, third, again), *flags)
        assert sorted(columns(tables(text)[0], 'batches', 'eval loss', 'eval batch')) == [
            ('60', '0.3800', '100'), ('60', '0.3800', '100'), ('80', '0.6000', '60')]
    text = printed(write(first, *others, second))
    assert [row['batches'] for row in tables(text)[0]].count('60') == 1 and len(tables(text)[0]) == 3
    [table] = tables(printed(write(first, second, third | {'num_devices': 16, 'measured_batches': 20})))
    assert columns(table, 'GPUs', 'images/s', 'batches') == [('8', '800.0', '80'), ('16', '1.00', '80')]


def test_each_setup_of_a_training_has_a_row_and_a_note_if_the_last_part_failed(printed, write):
    part = LEARNED | {'training_id': '12e345678901', 'first_batch': 0}
    failed = part | {'status': 'failed', 'error': 'NCCL timeout', 'num_devices': 16, 'images_per_sec': None}
    text = printed(write(failed, part | {'first_batch': 100, 'trained_batches': 200}))
    assert [(row['GPUs'], row['images/s'], row['batches']) for row in tables(text)[0]] == [
        ('8', '800.0', '200'), ('16', '', '200')]
    text = printed(write(part, failed | {'num_devices': 8, 'first_batch': 100}))
    [row] = tables(text)[0]
    assert (row['images/s'], row['text']) == ('800.0', 'last part failed: NCCL timeout')
    other = part | {'training_id': '34e5678901234'}  # both would be infinite as numbers
    assert len(tables(printed(write(part, other)))[0]) == 2


def test_a_gpu_name_with_and_without_nvidia_is_the_same_gpu(printed, write):
    path = write(*({'device': f'{maker}H100 80GB HBM3', 'images_per_sec': speed}
                   for maker, speed in (('', 300.0), ('NVIDIA ', 500.0))))
    assert [row['images/s'] for row in tables(printed(path))[0]] == ['400.0']


def test_efficiency_relative_to_one_machine_does_not_depend_on_the_order_of_networks(printed, write):
    runs = [{'num_nodes': 1}] + [{'num_nodes': 2, 'num_devices': 16, 'network_gbits': gbits, 'images_per_sec': speed}
                                 for gbits, speed in ((100, 1200.0), (400, 1500.0))]
    assert 'efficiency' not in tables(printed(write(*runs)))[0][0]
    for run in runs[1:]:
        [table] = tables(printed(write(runs[0], run)))
        assert [row['efficiency'] for row in table] == ['100.0 %', f'{run["images_per_sec"] / 16:.1f} %']


def test_a_loss_that_may_include_training_samples_is_not_compared_with_others(printed, write):
    doubtful = LEARNED | {'eval_loss': 0.1, 'eval_held_out': False}
    text = printed(write(LEARNED | {'eval_held_out': True}, doubtful))
    assert sorted((row['text'], row['eval loss']) for row in tables(text)[0]) == [
        ('eval remote held-out', '0.3800'), ('eval remote held-out (not known to be held out)', '0.1000')]


def test_no_table_is_wider_than_120_characters_and_no_setting_or_note_is_lost(printed):
    text = printed(*sorted((ROOT / 'results').glob('*.jsonl')))
    [table] = tables(text)
    assert max(map(len, text.splitlines())) <= 120
    for words, speed in (('original.txt, batch of 64', '28.2'), ('fastest.txt, batch of 100, microbatch 50', '98.0'),
                         ('original.txt, batch of 64; images/s not reliable: speed changed by -11.3%', '20.5')):
        assert words in [row['text'] for row in table if row['images/s'] == speed]


def test_markup_and_control_characters_in_a_record_stay_text_in_a_cell(printed, write):
    path = write({'device': 'H200 \x1b[31m| red', 'versions': {'torch': '2\x1b[31m'}},
                 {'status': 'failed', 'error': 'a | b\x1b]0;c\x07'})
    text = printed(path)
    assert text.replace('\n', '').isprintable()
    assert r'H200 [31m\| red' in text and r'failed: a \| b ]0;c' in text


def test_a_report_ends_silently_when_its_reader_closes_the_pipe():
    done = subprocess.run(f'{sys.executable} report.py published.csv | true', shell=True, cwd=ROOT, capture_output=True)
    assert done.stderr == b''


@pytest.mark.parametrize('changes, note', [
    ({'status': 'failed', 'images_per_sec': None, 'error': 'CUDA\nout of memory'}, 'failed: CUDA out of memory'),
    ({'status': 'interrupted'}, 'interrupted'),
    ({'measured_batches': 5}, 'images/s not reliable: only 5 measured batches'),
    ({'measured_batches': 30, 'queue_batches': 16}, 'images/s not reliable: only 30 measured batches'),
    ({'drift': -0.2}, 'images/s not reliable: ')])
def test_a_run_that_is_not_complete_or_reliable_has_a_note_and_no_days(printed, write, changes, note):
    sound = {'drift': 0.09, 'measured_batches': 20}
    path = write({'images_per_sec': 400.0} | changes, sound, sound | {'images_per_sec': 820.0})
    sound, other = tables(printed(path))[0]
    assert columns([sound], 'images/s', 'days', 'notes') == [('810.0', '40.97', 'median of 2 runs, 800.0 to 820.0')]
    assert other['days'] == ''
    assert other['notes'].startswith(note)
    [compared] = tables(printed(path, '--compare'))
    assert columns(compared, 'over the first') == [('',), ('1.00 x',), ('1.02 x',)]


def test_compare_has_a_row_for_each_training_with_its_speed_over_the_first_of_its_model_and_size(printed, write):
    same = {'use_ema': True, 'cudnn_benchmark': False, 'model_name': 'sd2'}
    runs = [{'compile': False, 'date': '2026-11-20T10:00:00+00:00', 'git_commit': 'a' * 40},
            {'compile': True, 'date': '2026-11-21T10:00:00+00:00', 'git_commit': 'b' * 40, 'images_per_sec': 1000.0},
            {'compile': True, 'date': '2026-11-22T10:00:00+00:00', 'git_commit': 'b' * 40 + '-dirty'},
            {'compile': True, 'image_size': 256, 'images_per_sec': 3000.0}]
    text = printed(write(LOADER, *(same | run for run in runs), ENCODE), '--compare')
    [table] = tables(text)
    assert columns(table, 'run', 'text', 'date', 'over the first') == [
        ('1', '512 pixels, commit aaaaaaaa', '2026-11-20 10:00:00', '1.00 x'),
        ('2', '512 pixels, compile, commit bbbbbbbb', '2026-11-21 10:00:00', '1.25 x'),
        ('3', '512 pixels, compile, commit bbbbbbbb-dirty', '2026-11-22 10:00:00', '1.00 x'),
        ('4', '256 pixels, compile', '', '1.00 x')]
    assert 'use_ema yes' in ' '.join(text.partition('All rows: ')[2].split())
    assert 'cudnn_benchmark' not in text


def test_cpus_have_no_gpu_hours_loaders_and_encodings_no_days_and_tiny_days_only_on_request(printed, write):
    [table] = tables(printed(write({}, CPU, LOADER, ENCODE)))
    assert columns(table, 'settings', 'images/s', 'days', 'GPU-hours', 'cost') == [
        ('', '800.0', '41.48', '7,964', '$15,929'), ('', '8.00', '4,148.15', '', ''),
        ('loader', '32,000.0', '', '', ''), ('encode', '4,000.0', '', '', '')]
    text = printed(write({'model_name': 'tiny'}))
    assert 'days' not in tables(text)[0][0]
    assert tables(printed(write({'model_name': 'tiny'}), '--training_images', 1_000_000))[0][0]['cost']


@pytest.mark.parametrize('prices, dollars', [
    (['4', 'H100=5', '3', 'H100=6'], {'H100 PCIe': 6, 'A100-SXM4-40GB': 3}),
    (['H100-80GB=2.4', 'H200=3.5', 'H100=3.2'], {'NVIDIA H100 80GB HBM3': 3.2, 'NVIDIA H200': 3.5}),  # behind a file
    (['H100-80GB=2.4', '4'], {'NVIDIA H100 80GB HBM3': 4}),
    (['A100=1.2', 'A100-80GB=2'], {'NVIDIA A100-SXM4-80GB': 2, 'NVIDIA A100-SXM4-40GB': 1.2}),
    (['H200=3.2', 'H200 NVL=2'], {'NVIDIA H200': 3.2, 'NVIDIA H200 NVL': 2, 'H200': 3.2}),
    (['H100 SXM=3', 'A100 80 GB=2'], {'NVIDIA H100 80GB HBM3': 3, 'H100 SXM5': 3, 'H100 PCIe': None, 'A100 80GB': 2}),
    (['NVIDIA A100-SXM4-40GB=1.1'], {'A100-SXM4-40GB': 1.1, 'A100-SXM4-80GB': None, 'GTX 1080': None}), ([], {'x': 2})])
def test_a_price_applies_to_the_gpus_that_its_name_matches_and_the_last_one_counts(prices, dollars):
    parsed = parse(Report, '', ['records', '--dollars_per_gpu_hour', *prices] if prices else ['records'])
    for device, price in dollars.items():
        found = price_of(device, parsed.dollars_per_gpu_hour)
        assert price == found or price is None and found != found, device


# Files

def test_the_csv_holds_the_rows_of_all_tables_unrounded(tmp_path, printed):
    printed(PUBLISHED, '--csv', tmp_path / 'table.csv', '--extrapolate', 512)
    rows = list(csv.DictReader((tmp_path / 'table.csv').open()))[:7]
    assert float(rows[3]['days']) == 2_867_200_000 / 912.2 / 86_400
    assert float(rows[3]['scaling_efficiency']) == pytest.approx(912.2 / 64 / (128.2 / 8), rel=1e-14)
    assert [row['extrapolated'] for row in rows] == ['false'] * 5 + ['true', 'true']


def test_a_csv_may_have_semicolons_and_an_evaluation_without_scores(tmp_path, printed, write):
    (tmp_path / 'x.csv').write_text('device;num_devices;image_size;images_per_sec\nH200;8;512;800\n')
    assert tables(printed(tmp_path / 'x.csv'))[0][0]['images/s'] == '800.0'
    unscored = EVALUATION | {'scores': [{'guidance': 7.5, 'fid': None, 'clip_score': None}]}
    printed(write(unscored), '--csv', tmp_path / 'y.csv')
    assert tables(printed(tmp_path / 'y.csv'))[0][0]['guidance'] == '7.50'


def test_a_csv_that_a_spreadsheet_has_saved_gives_the_same_rows_and_no_run_counts_twice(tmp_path, printed, write):
    run = {'use_ema': True, 'extrapolated': 0, 'batch_size': 2048, 'measured_batches': 20, 'training_id': 'a'}
    path = write(run, run | {'num_devices': 16, 'loss': math.nan, 'training_id': 'b'})
    expected = printed(path, path, '--csv', tmp_path / 'table.csv')  # a file that is given twice counts once
    text = (tmp_path / 'table.csv').read_text()
    for old, new in (('true', 'TRUE'), ('false', 'False'), (',2048,', ',2048.0,'), (',,', ',nan,')):
        text = text.replace(old, new)
    (tmp_path / 'again.csv').write_text(text)
    for paths in ([tmp_path / 'again.csv'], [path, tmp_path / 'again.csv']):
        assert tables(printed(*paths)) == tables(expected)


def test_values_that_the_program_chose_are_not_settings(printed, write):
    found = {'by_default': ['device_train_microbatch_size', 'compile_blocks'], 'batch_size': 2048}
    runs = [found | {'num_devices': n, 'compile_blocks': n > 1, 'device_train_microbatch_size': size, 'device': device,
                     'images_per_sec': 90.0 * n, 'dollars_per_gpu_hour': [['H200', 3.0], ['B200', 5.0]]}
            for n, size in ((1, 64), (8, 32), (16, 16)) for device in ('NVIDIA H200', 'NVIDIA B200')]
    [chosen] = tables(printed(write(*({'num_devices': n, 'num_workers': n} for n in (1, 2)))))
    assert columns(chosen, 'settings') == [('num workers 1',), ('num workers 2',)]
    text = printed(path := write(*runs))
    assert columns(tables(text)[0], 'device', 'GPUs', 'efficiency', 'microbatch') == [
        ('H200', '1', '100.0 %', '64'), ('H200', '8', '100.0 %', '32'), ('H200', '16', '100.0 %', '16'),
        ('B200', '1', '100.0 %', '64'), ('B200', '8', '100.0 %', '32'), ('B200', '16', '100.0 %', '16')]
    assert 'H200 $3, B200 $5 per GPU-hour (from the records; --dollars_per_gpu_hour replaces them)' in text
    assert 'Costs: $9 per GPU-hour for every GPU (' in printed(path, '--dollars_per_gpu_hour', 9)


def test_each_run_has_the_forecast_for_its_own_flags_and_its_error_but_a_record_without_flags_has_none(printed, write):
    """fastest.txt reached 98.0 images/s on one H200 (docs/forecast.md)."""
    text = printed(ROOT / 'results/1xH200-torch-2.11.jsonl', write({'device': 'NVIDIA H100 PCIe'}))
    rows = {row['images/s']: row for row in tables(text)[0]}
    assert columns([rows['98.0']], 'forecast', 'forecast - measured') == [('97.1', '-1 %')]
    assert columns([rows['800.0']], 'forecast', 'forecast - measured') == [('', '')]


def test_forecasts_in_records_of_earlier_versions_are_counted_and_not_used(printed, write, capsys):
    forecast = {'status': 'forecast', 'model_name': 'sd2', 'images_per_sec_least': 1.0}
    text = printed(write({}, forecast, forecast | {'num_devices': 16}))
    assert [row['images/s'] for row in tables(text)[0]] == ['800.0']
    assert 'Not used: 2 forecasts in these files: plan.py and --dry_run calculate forecasts now.' in text
    with pytest.raises(SystemExit):
        report.main([write(forecast)])
    assert 'no measurement, only 1 forecast' in capsys.readouterr().err


def test_a_gpu_without_a_datasheet_needs_a_price_for_its_exact_name(write, capfd):
    path = write({'device': 'NVIDIA H800'}, {'device': 'NVIDIA A100-SXM4-80GB MIG 3g.40gb'})
    prices = ('--dollars_per_gpu_hour', 'H800=3', 'A100-SXM4-80GB MIG 3g.40gb=1', 'A100=9')
    report.main([path, *prices])
    assert 'H800 $3, A100 80GB MIG 3g.40gb $1 per GPU-hour' in capfd.readouterr().out
    line = one_error_line([path, '--dollars_per_gpu_hour', 'H10=3'], capfd, report.main)
    assert '--dollars_per_gpu_hour H10=3: no record has this GPU, and H10 is not a known GPU; did you' in line


@pytest.mark.parametrize('records, argv, reason', [
    ([{}, {'images_per_sec': None}], [], 'records.jsonl:2: not a record: no images_per_sec'),
    ([{}, {'images_per_sec': '1,618'}], [], "records.jsonl:2: not a record: images_per_sec '1,618'"),
    ([{}, {'num_devices': 0}], [], 'records.jsonl:2: not a record: num_devices 0 is not a positive number'),
    ([{}, {'loss': math.inf}], [], 'records.jsonl:2: not a record: loss inf is not a finite number'),
    ([{}, {'date': '20/11/2026'}], [], "records.jsonl:2: not a record: Invalid isoformat string: '20/11/2026'"),
    ([{}, {'stage': 'evaluate', 'scores': [{'fid': 1}]}], [], 'records.jsonl:2: not a record: '),
    ([{}, {}, {'num_devices': 16}], ['--extrapolate', '64'], 'measurements of one setting on three GPU counts'),
    ([{}, {'num_devices': 16}, {'num_devices': 32, 'drift': 0.5}], ['--extrapolate', '64'], 'reliable measurements'),
    ([EVALUATION | {'images_seen': None, 'scores': [{'guidance': 2, 'fid': 7.0, 'clip_score': None}]}],
     ['--quality', 'quality.png'], 'no evaluation has both scores')])
def test_invalid_records_are_refused_with_their_line_and_flags_with_a_reason(write, capfd, records, argv, reason):
    assert reason in one_error_line([write(*records), *argv], capfd, report.main)


# Scores of evaluate.py

def test_scores_are_a_separate_table_sorted_by_checkpoint_and_guidance(printed, write):
    [_], scores = tables(text := printed(write(TRAINING, LATER, EVALUATION)))
    assert columns(scores, 'batches', 'guidance', 'FID', 'CLIP score', 'images seen') == [
        ('1,000', '1.50', '95.50', '14.00', '2,048,000'), ('1,000', '4.00', '70.00', '15.00', '2,048,000'),
        ('2,000', '1.50', '40.00', '20.00', '4,096,000'), ('2,000', '4.00', '30.00', '25.00', '4,096,000')]
    assert 'All rows: model kept, weights EMA, data coco.txt, samples 30000, ' in text


def test_scores_have_the_gpu_hours_and_cost_of_their_training_and_notes_on_comparability(printed, write):
    def spent(hours: float, device: str = 'NVIDIA H200') -> dict:
        return {'training': FLAGS | {'gpu_hours': hours, 'device': device}}
    prices = ('--dollars_per_gpu_hour', 'H200=3', 'H100=9')
    [scores] = tables(printed(write(EVALUATION | spent(100), LATER | spent(200)), *prices))
    assert columns(scores, 'GPU-hours', 'cost')[::2] == [('100', '$300'), ('200', '$600')]
    hours = {'NVIDIA H200': 10, 'NVIDIA L4': 30}  # resumed on other GPUs
    several = {'training': spent(40, 'NVIDIA L4')['training'] | {'gpu_hours_by_device': hours, 'dollars': 70}}
    text = printed(write(EVALUATION | several))
    assert columns(tables(text)[0], 'cost') == [('$70.0',)] * 2
    assert 'as their trainings recorded them' in text and 'per GPU-hour' not in text
    [scores] = tables(printed(write(EVALUATION | several), '--dollars_per_gpu_hour', 'H200=8', 'L4=2'))
    assert columns(scores, 'cost') == [('$140',)] * 2
    [scores] = tables(printed(write(EVALUATION | spent(100, 'CPU'), LATER)))
    assert 'GPU-hours' not in scores[0]
    few = EVALUATION | {'fid_is_biased': True, 'fid_of_published_weights': False}
    for is_trained_on, words in ((True, 'the model was trained on it'), (None, 'not known to be held out')):
        [scores] = tables(text := printed(write(few | {'trained_on_data': is_trained_on})))
        assert f'data coco.txt ({words})' in ' '.join(text.split())
    assert columns(scores, 'notes') == [('FID biased by few images, non-standard FID weights',)] * 2


# Figures

@pytest.fixture
def figure_of(printed, monkeypatch):
    """Return a function that calls report.py and returns the one figure that it draws, without writing a file."""
    def figure_of(*argv):
        figures = []
        monkeypatch.setattr(matplotlib.figure.Figure, 'savefig', lambda figure, *_, **__: figures.append(figure))
        printed(*argv)
        [figure] = figures
        return figure
    return figure_of


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_figure_of_days_has_a_line_per_setting_and_fills_measured_points(figure_of, tmp_path):
    original = tmp_path / 'original.csv'  # the rows of the original's authors, one setting on several GPU counts
    original.write_text(''.join(Path(PUBLISHED).read_text().splitlines(keepends=True)[:7]))
    [axes] = figure_of(original, '--figure', 'days.png').axes
    assert (axes.get_xscale(), axes.get_yscale()) == ('log', 'log')
    assert legend(axes) == ['A100 40GB']
    lines = [line for line in axes.lines if len(line.get_xdata())]
    filled = [line for line in lines if line.get_marker() == 'o' and line.get_markerfacecolor() != 'white']
    hollow = [line for line in lines if line.get_marker() == 'o' and line.get_markerfacecolor() == 'white']
    assert [list(line.get_xdata()) for line in filled] == [[8, 16, 32, 64, 128, 256]]
    assert filled[0].get_ydata() == pytest.approx([258.85, 130.65, 68.32, 36.38, 20.50, 12.82], 1e-3)
    assert [list(line.get_xdata()) for line in hollow] == [[256]]  # over a filled point
    [ideal] = [line for line in lines if line.get_linestyle() == '--']
    assert ideal.get_ydata()[[0, -1]] == pytest.approx([258.85, 258.85 * 8 / 256], 1e-3)


def test_gpu_counts_with_failed_or_unreliable_runs_have_a_cross(figure_of, write):
    runs = [{'num_devices': n, 'images_per_sec': 100.0 * n} for n in (8, 16, 32)]
    doubtful = [{'num_devices': 64, 'drift': 0.5}, {'num_devices': 128, 'status': 'failed', 'images_per_sec': None}]
    [axes] = figure_of(write(*runs, *doubtful), '--extrapolate', 64, 128, 256, '--figure', 'days.png').axes
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() == 'x'] == [[64, 128]]
    [axes] = figure_of(write(*runs), '--figure', 'days.png').axes
    assert not [line for line in axes.lines if line.get_marker() == 'x']


def test_lines_of_days_differ_in_label_and_marker_and_have_one_point_per_gpu_count(figure_of, write):
    runs = [{'num_devices': n, 'num_nodes': nodes} for n, nodes in ((8, 1), (8, 2), (16, 2))]
    runs += [run | {'compile': True} for run in runs] + [{'attention': str(n)} for n in range(9)]
    [axes] = figure_of(write(*runs), '--figure', 'days.png').axes
    lines = [line for line in axes.lines if line.get_linestyle() == '-' and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in lines] == [[8, 16]] * 2 + [[8]] * 9  # on the fewest machines
    assert len({line.get_label() for line in lines}) == len({line.get_marker() for line in lines}) == 11
    assert len({str(line.get_color()) for line in lines}) == 1  # all lines are for one GPU model


def test_the_figure_of_losses_has_a_line_per_training_over_images_and_over_dollars(figure_of, write):
    """The training stopped at batch 45 and resumed at 40 on other GPUs: 4.6 GPU-hours in all, at $3 each."""
    run = LEARNED | {'training_id': 'a', 'save_folder': 'runs/a', 'batch_size': 1000,
                     'drift': 0.5}  # dollars follow from no speed
    stopped = run | {'status': 'interrupted', 'trained_batches': 45, 'gpu_hours': 1.8, 'evaluations': [
        [0, 0.5], [20_000, 0.45], [40_000, 0.4]]}
    resumed = run | {'num_devices': 16, 'first_batch': 40, 'trained_batches': 80, 'gpu_hours': 4.6,
                     'evaluations': [[0, 0.5], [20_000, 0.45], [40_000, 0.41], [60_000, None], [80_000, 0.38]]}
    faster = run | {'training_id': 'b', 'learning_rate': 1e-3, 'trained_batches': 40, 'gpu_hours': 1.0,
                    'evaluations': [[40_000, 0.35]]}
    other = faster | {'training_id': 'c', 'save_folder': 'runs/b', 'evaluations': [[40_000, 0.36]]}
    path = write(stopped, resumed, faster, other)
    images, dollars = figure_of(path, '--learned', 'learned.png', '--dollars_per_gpu_hour', 3).axes
    assert [line.get_xydata().tolist() for line in images.lines] == [
        [[0, 0.5], [20_000, 0.45], [40_000, 0.41], [80_000, 0.38]], [[40_000, 0.35]], [[40_000, 0.36]]]
    assert list(dollars.lines[0].get_xdata()) == pytest.approx([3 * 4.6 * share for share in (0, 0.25, 0.5, 1)])
    assert legend(images) == [f'learning rate {line}' for line in (
        '0.0001, in runs/a', '0.001, in runs/a', '0.001, in runs/b')]
    on_two = faster | {'gpu_hours_by_device': {'NVIDIA L4': 0.25, 'NVIDIA H200': 0.75}}
    prices = ('--dollars_per_gpu_hour', 'L4=4', 'H200=8')
    [_, dollars] = figure_of(write(on_two), '--learned', 'learned.png', *prices).axes
    assert list(dollars.lines[0].get_xdata()) == [7]
    on_a_cpu = figure_of(write(faster | {'device_type': 'cpu'}), '--learned', 'learned.png')
    assert len(on_a_cpu.axes) == 1  # without dollars


def test_the_figure_of_scores_has_a_line_per_model_and_network_over_guidance_and_over_images(figure_of, write):
    curve, fid, clip = figure_of(write(TRAINING, EVALUATION, LATER), '--quality', 'quality.png').axes
    assert [list(line.get_xdata()) for line in curve.lines] == [[14, 15], [20, 25]]
    assert [list(line.get_ydata()) for line in curve.lines] == [[95.5, 70], [40, 30]]
    assert [list(line.get_ydata()) for line in fid.lines] == [[95.5, 40], [70, 30]]
    assert list(fid.lines[0].get_xdata()) == list(clip.lines[0].get_xdata()) == [2_048_000, 4_096_000]
    assert legend(curve) == ['batch 1,000, guidance 1.5, 4', 'batch 2,000, guidance 1.5, 4']
    by_other_networks = (EVALUATION | {'inception_sha256': name} for name in 'ab')
    curve, fid, _ = figure_of(write(*by_other_networks), '--quality', 'quality.png').axes
    assert (len(curve.lines), len(fid.lines)) == (2, 4)


def test_figures_are_written_and_their_files_are_named(tmp_path, printed, write):
    paths = [tmp_path / 'days.png', tmp_path / 'quality.svg']
    text = printed(write(TRAINING, EVALUATION), '--figure', paths[0], '--quality', paths[1])
    assert text.endswith(f'Written: {paths[0]}, {paths[1]}\n')
    assert paths[0].read_bytes().startswith(b'\x89PNG')
    assert 'guidance 4' in paths[1].read_text()
