"""Claims about report.py, its tables and its figures, compared with numbers from manual or numpy calculations."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

import report
from sdbench.costs import price_of, require_named
from sdbench.flags.commands import Report
from sdbench.flags.parser import parse
from tests.report_tables import columns, tables
from tests.runs import ROOT, one_error_line

PUBLISHED = str(ROOT / 'published.csv')
MINIMAL = {'device': 'H200', 'num_devices': 8, 'image_size': 512, 'images_per_sec': 800.0}
CPU = {'device': 'Xeon', 'device_type': 'cpu', 'num_devices': 1, 'images_per_sec': 8.0}
FORECAST = {'status': 'forecast', 'model_name': 'sd2', 'images_per_sec_least': 1.0}
LOADER = {'stage': 'loader', 'images_per_sec': None, 'loader_images_per_sec': 32_000.0}
ENCODE = {'stage': 'encode', 'images_per_sec': 4000, 'bytes_per_image': 50_000}
FLAGS = {'model_name': 'sd2', 'image_size': 512, 'dataset': '5e1f', 'batch_size': 2048, 'seed': 17,
         'learning_rate': 1e-4}
LEARNED = {'trained_batches': 100, 'eval_loss': 0.38, 'eval_batch': 100, 'loss': 0.4, 'learning_rate': 1e-4,
           'eval_remote': 'held-out'}
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


@pytest.fixture
def table_of(printed, write):
    """Return a function that returns the rows of the only table of a report on these records, with these flags."""
    def table_of(*records, flags=()):
        [table] = tables(printed(write(*records), *flags))
        return table
    return table_of


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
    assert [row['images/s'] for row in table if row['device'] == 'H100 80GB'] == ['189.3', '385.3']


@pytest.mark.parametrize('batch', [{'batch_size': 2048}, {}], ids=['known batch', 'unknown batch'])
def test_speeds_on_64_and_128_gpus_are_predicted_within_1_5_percent_from_8_16_and_32(table_of, batch):
    few = [{'num_devices': n, 'images_per_sec': speed} | batch for n, speed in ((8, 128.2), (16, 254.0), (32, 485.7))]
    table = table_of(*few, flags=('--extrapolate', 64, 128))
    predicted = [float(row['images/s'].replace(',', '')) for row in table[3:]]
    assert predicted == pytest.approx([912.2, 1618.4], rel=0.015)


def test_the_fit_ignores_extrapolated_rows_and_prints_its_worst_residual(printed):
    text = printed(PUBLISHED, '--extrapolate', 512, 1024)
    n, seconds = np.array([8, 16, 32, 64, 128]), 2048 / np.array([128.2, 254.0, 485.7, 912.2, 1618.4])
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / n, n**0], axis=1) / seconds[:, None], np.ones(5), rcond=None)
    of_512, of_1024 = tables(text)[0][6:8]
    assert columns([of_512, of_1024], 'GPUs', 'images/s') == [
        (f'{count:,}', f'{2048 / (a / count + b):,.1f}') for count in (512, 1024)]
    assert '2 images per GPU, a smaller microbatch' in of_1024['text']
    assert f'{a:.5g} / n + {b:.5g} for a batch of 2,048 images' in text
    worst = max(zip(n, seconds / (a / n + b) - 1, strict=True), key=lambda pair: abs(pair[1]))
    assert f'{worst[1]:+.1%} of the images/s, on {worst[0]} GPUs' in ' '.join(text.split())


def test_each_setting_is_predicted_from_its_own_runs(table_of):
    runs = [{'num_devices': n, 'images_per_sec': speed * n, 'use_ema': ema, 'batch_size': 2048}
            for ema, speed in ((True, 10.0), (False, 20.0)) for n in (8, 16, 32)]
    table = table_of(*runs, {'precision': 'fp32', 'batch_size': 2048}, flags=('--extrapolate', 64))
    predicted = [row for row in table if 'extrapolated' in row['text']]
    assert columns(predicted, 'text', 'GPUs', 'images/s') == [
        ('EMA; extrapolated', '64', '640.0'), ('extrapolated', '64', '1,280.0')]


def test_records_with_different_settings_are_rows_of_one_table_with_a_column_of_settings(table_of):
    same = [{'compile': True, 'device': f'{maker}H100 80GB HBM3', 'images_per_sec': speed, 'date': f'2026-01-0{n}',
             'seed': n, 'command': n, 'learning_rate': n / 1000, 'loss': 9.0, 'measure_batches': 20}
            for n, maker, speed in ((1, '', 300.0), (2, 'NVIDIA ', 500.0))]
    table = table_of(same[0], {'compile': 'reduce-overhead'}, same[1])
    assert not {'date', 'seed', 'command', 'learning rate', 'loss'} & table[0].keys()
    assert columns(table, 'device', 'images/s', 'text') == [
        ('H100 80GB', '400.0', 'batch of 2048, compile; median of 2 runs, 300.0 to 500.0'),
        ('H200', '800.0', 'compile reduce-overhead')]


def test_versions_of_libraries_and_latents_as_input_are_settings(table_of):
    one = {'versions': {'torch': '2.7.0', 'diffusers': '0.39.0'}, 'encoders': 'in_loop'}
    other = {'versions': {'torch': '2.11.0', 'diffusers': '0.39.0'}, 'encoders': 'text_in_loop'}
    assert columns(table_of(one, other), 'settings') == [('torch 2.7.0',), ('on latents, torch 2.11.0',)]


def test_a_record_that_is_older_than_a_flag_has_the_default_of_the_flag(table_of):
    older = {'command': 'benchmark.py'}
    newer = older | {'adam_betas': [0.9, 0.999], 'compile': False}
    assert columns(table_of(older, newer, older | {'compile': True}), 'settings') == [('',), ('compile',)]
    trained = older | LEARNED
    assert columns(table_of(trained, trained | {'lr_final': 0.0}), 'text') == [('',)] * 2


def test_runs_on_the_fewest_machines_have_a_row_and_are_the_only_ones_in_the_fit(table_of):
    runs = [(8, 1, 800.0), (16, 2, 1600.0), (16, 16, 1200.0), (16, 16, 1400.0), (32, 4, 3200.0)]
    table = table_of(*({'num_devices': gpus, 'num_nodes': nodes, 'images_per_sec': speed, 'batch_size': 2048}
                       for gpus, nodes, speed in runs), flags=('--extrapolate', 64))
    words = {row['images/s']: row['text'] for row in table}
    assert '2 machines' in words['1,600.0'] and '16 machines' in words['1,300.0']
    assert 'extrapolated' in words['6,400.0']


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


def test_a_resumed_training_is_one_row_with_the_result_at_its_end(table_of):
    """The training stopped at batch 29, ended at 60, and was extended to 80 with too few batches for a speed."""
    run = LEARNED | {'training_id': 'a', 'max_duration': '60ba', 'first_batch': 0}
    first = run | {'status': 'interrupted', 'trained_batches': 29, 'eval_loss': 0.7, 'evaluations': [[20, 0.7]]}
    second = run | {'first_batch': 29, 'trained_batches': 60, 'eval_loss': 0.6, 'eval_batch': 60,
                    'evaluations': [[20, 0.7], [40, 0.65], [60, 0.6]]}
    third = second | {'max_duration': '80ba', 'first_batch': 60, 'trained_batches': 80, 'measured_batches': 5,
                      'images_per_sec': 1.0}
    others = [run | {'training_id': 'b', 'learning_rate': 1e-3, 'trained_batches': 60},
              run | {'training_id': None, 'trained_batches': 60, 'date': '2026-01-02'},  # of an older version
              ENCODE | FLAGS | {'save_folder': 'runs/a'}, LOADER | FLAGS]
    for flags, rows in (([], 2), (['--compare'], 0)):
        table = table_of(first, second, third, *others, flags=flags)
        assert sorted(columns(table, 'batches', 'eval loss', 'eval batch')) == [('', '', '')] * rows + [
            ('60', '0.3800', '100'), ('60', '0.3800', '100'), ('80', '0.6000', '60')]
    table = table_of(first, second, third | {'num_devices': 16, 'measured_batches': 20})
    assert columns(table, 'GPUs', 'images/s', 'batches') == [('8', '800.0', ''), ('16', '1.00', '80')]


def test_a_training_that_was_evaluated_on_other_data_in_between_has_its_newest_loss_on_each_dataset(table_of):
    def run(sha256: str, loss: float, batch: int, **others) -> dict:
        return LEARNED | {'training_id': 'a', 'first_batch': 0, 'trained_batches': batch, 'eval_sha256': sha256,
                          'eval_remote': sha256, 'eval_loss': loss, 'eval_batch': batch,
                          'evaluations': [[batch, loss]]} | others
    first = run('held-out', 0.84, 15)
    curve = {key: first[key] for key in ('eval_sha256', 'eval_remote', 'eval_loss', 'eval_batch', 'evaluations')}
    on_others = run('others', 0.5, 15, first_batch=15, other_evaluations=[curve])
    longer = run('held-out', 0.81, 30, first_batch=15)
    losses = columns(table_of(first, on_others, longer), 'eval loss', 'eval batch')
    assert sorted(losses) == [('0.5000', '15'), ('0.8100', '30')]
    unevaluated = {key: value for key, value in first.items() if not key.startswith('eval')} | {'evaluations': []}
    assert columns(table_of(unevaluated, longer), 'eval loss') == [('0.8100',)]


def test_each_setup_of_a_training_has_a_row_and_a_note_if_the_last_part_failed(table_of):
    part = LEARNED | {'training_id': '12e345678901', 'first_batch': 0}
    failed = part | {'status': 'failed', 'error': 'NCCL timeout', 'num_devices': 16, 'images_per_sec': None}
    table = table_of(failed, part | {'first_batch': 100, 'trained_batches': 200})
    assert columns(table, 'GPUs', 'images/s', 'batches') == [('8', '800.0', '200'), ('16', '', '')]
    earlier = table_of(part, part | {'num_devices': 16, 'first_batch': 100, 'trained_batches': 200})[0]
    assert earlier['batches'] == ''
    [row] = table_of(part, failed | {'num_devices': 8, 'first_batch': 100})
    assert row['images/s'] == '800.0' and 'NCCL timeout' in row['text']
    other = part | {'training_id': '34e5678901234'}  # both would be infinite as numbers
    assert len(table_of(part, other)) == 2


def test_efficiency_relative_to_one_machine_does_not_depend_on_the_order_of_networks(table_of):
    one, slow, fast = runs = [{'num_nodes': 1}, *(
        {'num_nodes': 2, 'num_devices': 16, 'network_gbits': gbits, 'images_per_sec': speed}
        for gbits, speed in ((100, 1200.0), (400, 1500.0)))]
    assert 'efficiency' not in table_of(*runs)[0]
    for run, efficiency in ((slow, '75.0 %'), (fast, '93.8 %')):
        assert columns(table_of(one, run), 'efficiency') == [('100.0 %',), (efficiency,)]


def test_a_loss_that_may_include_training_samples_is_not_compared_with_others(table_of):
    doubtful = LEARNED | {'eval_loss': 0.1, 'eval_held_out': False}
    table = table_of(LEARNED | {'eval_held_out': True}, doubtful)
    assert sorted(columns(table, 'text', 'eval loss')) == [
        ('eval remote held-out', '0.3800'), ('eval remote held-out (not known to be held out)', '0.1000')]


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
    ({'measured_batches': 5}, 'not reliable: only 5 '),
    ({'measured_batches': 30, 'queue_batches': 16}, 'not reliable: only 30 '),
    ({'drift': -0.2}, 'not reliable: ')])
def test_a_run_that_is_not_complete_or_reliable_has_a_note_and_no_days(table_of, changes, note):
    sound = {'drift': 0.09, 'measured_batches': 20}
    records = [{'images_per_sec': 400.0} | changes, sound, sound | {'images_per_sec': 820.0}]
    good, other = table_of(*records)
    assert (good['images/s'], good['days'], other['days']) == ('810.0', '40.97', '')
    assert note in other['notes']
    assert columns(table_of(*records, flags=['--compare']), 'over the first') == [('',), ('1.00 x',), ('1.02 x',)]


def test_compare_has_a_row_for_each_training_with_its_speed_over_the_first_of_its_model_and_size(table_of):
    same = {'use_ema': True, 'cudnn_benchmark': False, 'model_name': 'sd2'}
    runs = [{'compile': False, 'date': '2026-11-20T10:00:00+00:00', 'git_commit': 'a' * 40},
            {'compile': True, 'date': '2026-11-21T10:00:00+00:00', 'git_commit': 'b' * 40, 'images_per_sec': 1000.0},
            {'compile': True, 'date': '2026-11-22T10:00:00+00:00', 'git_commit': 'b' * 40 + '-dirty'},
            {'compile': True, 'image_size': 256, 'images_per_sec': 3000.0}]
    table = table_of(LOADER, *(same | run for run in runs), ENCODE, flags=['--compare'])
    assert columns(table, 'run', 'text', 'date', 'over the first') == [
        ('1', '512 pixels, commit aaaaaaaa', '2026-11-20 10:00:00', '1.00 x'),
        ('2', '512 pixels, compile, commit bbbbbbbb', '2026-11-21 10:00:00', '1.25 x'),
        ('3', '512 pixels, compile, commit bbbbbbbb-dirty', '2026-11-22 10:00:00', '1.00 x'),
        ('4', '256 pixels, compile', '', '1.00 x')]


def test_cpus_have_no_gpu_hours_loaders_and_encodings_no_days_and_forecasts_and_proofs_no_rows(table_of):
    table = table_of({}, CPU, LOADER, ENCODE, FORECAST, {'stage': 'proof'})
    assert columns(table, 'settings', 'images/s', 'days', 'GPU-hours', 'cost') == [
        ('', '800.0', '41.48', '7,964', '$15,929'), ('', '8.00', '4,148.15', '', ''),
        ('loader', '32,000.0', '', '', ''), ('encode', '4,000.0', '', '', '')]


def test_the_tiny_model_has_days_only_on_request(table_of):
    tiny = {'model_name': 'tiny'}
    assert 'days' not in table_of(tiny)[0]
    assert table_of(tiny, flags=('--training_images', 1_000_000))[0]['cost']


@pytest.mark.parametrize('prices, dollars', [
    (['4', 'H100=5', '3', 'H100=6'], {'H100 PCIe': 6, 'A100-SXM4-40GB': 3}),
    (['H100-80GB=2.4', 'H200=3.5', 'H100=3.2'], {'NVIDIA H100 80GB HBM3': 3.2, 'NVIDIA H200': 3.5}),  # behind a file
    (['H100-80GB=2.4', '4'], {'NVIDIA H100 80GB HBM3': 4}),
    (['A100=1.2', 'A100-80GB=2'], {'NVIDIA A100-SXM4-80GB': 2, 'NVIDIA A100-SXM4-40GB': 1.2}),
    (['H200=3.2', 'H200 NVL=2'], {'NVIDIA H200': 3.2, 'NVIDIA H200 NVL': 2, 'H200': 3.2}),
    (['H100 SXM=3', 'A100 80 GB=2'], {'NVIDIA H100 80GB HBM3': 3, 'H100 SXM5': 3, 'H100 PCIe': None, 'A100 80GB': 2}),
    (['NVIDIA A100-SXM4-40GB=1.1'], {'A100-SXM4-40GB': 1.1, 'A100-SXM4-80GB': None, 'GTX 1080': None}), ([], {'x': 2}),
    (['H800=3', 'A100-SXM4-80GB MIG 3g.40gb=1', 'A100=9'],  # without a datasheet, the exact name counts
     {'NVIDIA H800': 3, 'NVIDIA A100-SXM4-80GB MIG 3g.40gb': 1})])
def test_a_price_applies_to_the_gpus_that_its_name_matches_and_the_last_one_counts(prices, dollars):
    parsed = parse(Report, '', ['records', '--dollars_per_gpu_hour', *prices] if prices else ['records'])
    require_named(dollars, parsed.dollars_per_gpu_hour)
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
    (tmp_path / 'x.csv').write_text(
        'device;num_devices;image_size;images_per_sec;dollars_per_gpu_hour\nH200;8;512;800;3\n')
    [[row]] = tables(printed(tmp_path / 'x.csv'))
    assert (row['images/s'], row['cost']) == ('800.0', '$23,893')
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


def test_values_that_the_program_chose_are_not_settings(table_of):
    found = {'by_default': ['device_train_microbatch_size', 'compile_blocks'], 'batch_size': 2048}
    runs = [found | {'num_devices': n, 'compile_blocks': n > 1, 'device_train_microbatch_size': size, 'device': device,
                     'images_per_sec': 90.0 * n}
            for n, size in ((1, 64), (8, 32), (16, 16)) for device in ('NVIDIA H200', 'NVIDIA B200')]
    assert columns(table_of(*runs), 'device', 'GPUs', 'efficiency', 'microbatch') == [
        (device, gpus, '100.0 %', microbatch) for device in ('H200', 'B200')
        for gpus, microbatch in (('1', '64'), ('8', '32'), ('16', '16'))]
    chosen = table_of(*({'num_devices': n, 'num_workers': n} for n in (1, 2)))
    assert columns(chosen, 'settings') == [('num workers 1',), ('num workers 2',)]


def test_costs_are_at_the_prices_in_the_records_unless_other_prices_are_given(printed, write):
    prices = [['H200', 3.0], ['B200', 5.0]]
    path = write(*({'device': f'NVIDIA {name}', 'dollars_per_gpu_hour': prices} for name, _ in prices))
    for flags, costs, note in (([], ['$23,893', '$39,822'], 'H200 $3, B200 $5 per GPU-hour'),
                               (['--dollars_per_gpu_hour', 9], ['$71,680'] * 2, '$9 per GPU-hour')):
        text = printed(path, *flags)
        assert [row['cost'] for row in tables(text)[0]] == costs
        assert note in text


def test_each_run_has_the_forecast_for_its_own_flags_and_its_error_but_a_record_without_flags_has_none(printed, write):
    """fastest.txt reached 98.0 images/s on one H200 (docs/forecast.md)."""
    [table] = tables(printed(ROOT / 'results/1xH200-torch-2.11.jsonl', write({'device': 'NVIDIA H100 PCIe'})))
    errors = {row['images/s']: (row['forecast'], row['forecast - measured']) for row in table}
    assert (errors['98.0'], errors['800.0']) == (('97.1', '-1 %'), ('', ''))


@pytest.mark.parametrize('records, flags, words', [
    ([{}, {'images_per_sec': None}], [], ['records.jsonl:2', 'images_per_sec']),
    ([{}, {'images_per_sec': '1,618'}], [], ['records.jsonl:2', "images_per_sec '1,618'"]),
    ([{}, {'num_devices': 0}], [], ['records.jsonl:2', 'num_devices 0']),
    ([{}, {'loss': math.inf}], [], ['records.jsonl:2', 'loss inf']),
    ([{}, {'date': '20/11/2026'}], [], ['records.jsonl:2', '20/11/2026']),
    ([{}, {'stage': 'evaluate', 'scores': [{'fid': 1}]}], [], ['records.jsonl:2']),
    ([FORECAST], [], ['only 1 forecast']),
    ([{}, {}, {'num_devices': 16}], ['--extrapolate', '64'], ['three GPU counts']),
    ([{}, {'num_devices': 16}, {'num_devices': 32, 'drift': 0.5}], ['--extrapolate', '64'], ['reliable measurements']),
    ([{}], ['--dollars_per_gpu_hour', 'H10=3'], ['--dollars_per_gpu_hour H10=3', 'no record has this GPU']),
    ([EVALUATION | {'images_seen': None, 'scores': [{'guidance': 2, 'fid': 7.0, 'clip_score': None}]}],
     ['--quality', 'quality.png'], ['no evaluation has both scores'])])
def test_invalid_records_are_refused_with_their_line_and_flags_with_a_reason(write, capfd, records, flags, words):
    line = one_error_line([write(*records), *flags], capfd, report.main)
    assert [word for word in words if word not in line] == []


def test_scores_are_a_separate_table_sorted_by_checkpoint_and_guidance(printed, write):
    [_], scores = tables(printed(write(TRAINING, LATER, EVALUATION)))
    assert columns(scores, 'batches', 'guidance', 'FID', 'CLIP score', 'images seen') == [
        ('1,000', '1.50', '95.50', '14.00', '2,048,000'), ('1,000', '4.00', '70.00', '15.00', '2,048,000'),
        ('2,000', '1.50', '40.00', '20.00', '4,096,000'), ('2,000', '4.00', '30.00', '25.00', '4,096,000')]


def test_scores_have_the_gpu_hours_and_cost_of_their_training(table_of):
    def spent(hours: float, device: str = 'NVIDIA H200', **others) -> dict:
        return {'training': FLAGS | {'gpu_hours': hours, 'device': device} | others}
    prices = ('--dollars_per_gpu_hour', 'H200=3', 'H100=9')
    scores = table_of(EVALUATION | spent(100), LATER | spent(200), flags=prices)
    assert columns(scores, 'GPU-hours', 'cost')[::2] == [('100', '$300'), ('200', '$600')]

    # This training was resumed on other GPUs. It has recorded its own cost, which other prices replace.
    hours = {'NVIDIA H200': 10, 'NVIDIA L4': 30}
    several = EVALUATION | spent(40, 'NVIDIA L4', gpu_hours_by_device=hours, dollars=70)
    for flags, cost in (((), '$70.0'), (('--dollars_per_gpu_hour', 'H200=8', 'L4=2'), '$140')):
        assert columns(table_of(several, flags=flags), 'cost') == [(cost,)] * 2
    assert 'GPU-hours' not in table_of(EVALUATION | spent(100, 'CPU'), LATER)[0]

    # The second phase of a training has counted only itself.
    [row, _] = table_of(EVALUATION | spent(100, load_weights='phase-1'))
    assert 'phase-1' in row['text']


def test_scores_that_cannot_be_compared_with_others_say_why(printed, write):
    few = EVALUATION | {'fid_is_biased': True, 'fid_of_published_weights': False}
    for is_trained_on, words in ((True, 'the model was trained on it'), (None, 'not known to be held out')):
        text = printed(write(few | {'trained_on_data': is_trained_on}))
        assert f'data coco.txt ({words})' in ' '.join(text.split())
        assert columns(tables(text)[0], 'notes') == [('FID biased by few images, non-standard FID weights',)] * 2


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


def points_of(axes, **properties) -> list[list[tuple[float, float]]]:
    """Return the points of each line with these properties, such as `marker='x'`, as (x, y)."""
    return [line.get_xydata().tolist() for line in axes.lines if len(line.get_xdata())
            and all(getattr(line, f'get_{name}')() == value for name, value in properties.items())]


def test_the_figure_of_days_has_a_line_per_setting_a_point_per_gpu_count_and_a_line_of_perfect_scaling(
        figure_of, tmp_path):
    original = tmp_path / 'original.csv'  # the rows of the original's authors, one setting on several GPU counts
    original.write_text(''.join(Path(PUBLISHED).read_text().splitlines(keepends=True)[:7]))
    [axes] = figure_of(original, '--figure', 'days.png').axes
    assert (axes.get_xscale(), axes.get_yscale(), legend(axes)) == ('log', 'log', ['A100 40GB'])
    days = np.array([[8, 258.85], [16, 130.65], [32, 68.32], [64, 36.38], [128, 20.50], [256, 12.82]])
    [measured], [ideal] = points_of(axes, linestyle='-'), points_of(axes, linestyle='--')
    assert np.array(measured) == pytest.approx(days, 1e-3)
    assert np.array([ideal[0], ideal[-1]]) == pytest.approx(np.array([[8, 258.85], [256, 258.85 * 8 / 256]]), 1e-3)
    [extrapolated] = points_of(axes, linestyle='None', markerfacecolor='white')  # over a filled point
    assert [gpus for gpus, _ in extrapolated] == [256]


def test_gpu_counts_with_failed_or_unreliable_runs_have_a_cross(figure_of, write):
    runs = [{'num_devices': n, 'images_per_sec': 100.0 * n} for n in (8, 16, 32)]
    doubtful = [{'num_devices': 64, 'drift': 0.5}, {'num_devices': 128, 'status': 'failed', 'images_per_sec': None}]
    [axes] = figure_of(write(*runs, *doubtful), '--extrapolate', 64, 128, 256, '--figure', 'days.png').axes
    [crosses] = points_of(axes, marker='x')
    assert [gpus for gpus, _ in crosses] == [64, 128]


def test_lines_of_days_differ_in_label_and_marker(figure_of, write):
    [axes] = figure_of(write(*({'attention': str(n)} for n in range(9))), '--figure', 'days.png').axes
    lines = [line for line in axes.lines if line.get_linestyle() == '-' and len(line.get_xdata())]
    assert len({line.get_label() for line in lines}) == len({line.get_marker() for line in lines}) == 9


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
    assert points_of(images) == [
        [[0, 0.5], [20_000, 0.45], [40_000, 0.41], [80_000, 0.38]], [[40_000, 0.35]], [[40_000, 0.36]]]
    assert list(dollars.lines[0].get_xdata()) == pytest.approx([3 * 4.6 * share for share in (0, 0.25, 0.5, 1)])
    assert legend(images) == [f'learning rate {line}' for line in (
        '0.0001, in runs/a', '0.001, in runs/a', '0.001, in runs/b')]
    on_two = faster | {'gpu_hours_by_device': {'NVIDIA L4': 0.25, 'NVIDIA H200': 0.75}}
    prices = ('--dollars_per_gpu_hour', 'L4=4', 'H200=8')
    _, dollars = figure_of(write(on_two), '--learned', 'learned.png', *prices).axes
    assert points_of(dollars) == [[[7, 0.35]]]
    dollars.figure.draw_without_rendering()
    assert all(label.get_text().startswith('$') for label in dollars.get_xticklabels())
    on_a_cpu = faster | {'device_type': 'cpu'}
    for records in ([on_a_cpu], [on_a_cpu, other]):
        assert len(figure_of(write(*records), '--learned', 'learned.png').axes) == 1  # not every training has dollars


def test_the_figure_of_scores_has_a_line_per_model_and_network_over_guidance_and_over_images(figure_of, write):
    curve, fid, clip = figure_of(write(TRAINING, EVALUATION, LATER), '--quality', 'quality.png').axes
    assert points_of(curve) == [[[14, 95.5], [15, 70]], [[20, 40], [25, 30]]]
    assert points_of(fid) == [[[2_048_000, 95.5], [4_096_000, 40]], [[2_048_000, 70], [4_096_000, 30]]]
    assert points_of(clip) == [[[2_048_000, 14], [4_096_000, 20]], [[2_048_000, 15], [4_096_000, 25]]]
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
