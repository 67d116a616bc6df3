"""Claims about report.py, its tables and its pictures, against figures worked out by hand or by numpy."""

import csv
import json
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

import report
from sdbench.report.pictures import short_name
from tests.runs import ROOT, one_error_line

PUBLISHED = str(ROOT / 'published.csv')
IMAGES_PER_SEC = {8: 128.2, 16: 254.0, 32: 485.7, 64: 912.2, 128: 1618.4, 256: 2589.4}
MINIMAL = {'device': 'H200', 'num_devices': 8, 'image_size': 512, 'images_per_sec': 800.0}
CPU = {'device': 'Xeon', 'device_type': 'cpu', 'num_devices': 1, 'images_per_sec': 8.0}
FORECAST = {'status': 'forecast', 'model_name': 'sd2'}
LOADER = {'stage': 'loader', 'images_per_sec': None, 'loader_images_per_sec': 32_000.0}
ENCODE = {'stage': 'encode', 'images_per_sec': 4000, 'bytes_per_image': 50_000}
FLAGS = {'model_name': 'sd2', 'image_size': 512, 'dataset': '5e1f', 'batch_size': 2048, 'seed': 17,
         'learning_rate': 1e-4}
TRAINING = FLAGS | {'dataset': 'streaming', 'images_per_sec': 400.0, 'trained_batches': 2000}
EVALUATION = {
    'stage': 'evaluate', 'model': 'kept/ep0-ba1000-rank0.pt', 'data': 'coco.txt', 'samples': 30000, 'steps': 50,
    'weights': 'averaged', 'trained_batches': 1000, 'images_seen': 2_048_000,
    'training': FLAGS | {'remote': 's3://bucket'}, 'clip': 'CLIP-ViT-H-14', 'fid_of_published_weights': True,
    'scores': [{'guidance': 4, 'fid': 70.0, 'clip_score': 15.0}, {'guidance': 1.5, 'fid': 95.5, 'clip_score': 14.0}]}
LATER = EVALUATION | {'model': 'kept/ep0-ba2000-rank0.pt', 'trained_batches': 2000, 'images_seen': 4_096_000,
                      'scores': [{'guidance': 1.5, 'fid': 40.0, 'clip_score': 20.0},
                                 {'guidance': 4, 'fid': 30.0, 'clip_score': 25.0}]}


@pytest.fixture
def write(tmp_path):
    """Writes records, each the changes to a minimal one, and returns the path; None leaves a key out."""
    def write(*records):
        path = tmp_path / 'records.jsonl'
        path.write_text(''.join(json.dumps(MINIMAL | record) + '\n' for record in records))
        return str(path)
    return write


@pytest.fixture
def printed(capsys):
    """Calls report.py and returns what it prints."""
    def printed(*argv):
        report.main([str(argument) for argument in argv])
        return capsys.readouterr().out
    return printed


def tables(text: str) -> list[list[dict[str, str]]]:
    """The rows of each Markdown table in a report, as dicts of heading to text."""
    found = []
    for block in text.split('\n\n'):
        if block.startswith('|'):
            heading, _, *rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in block.splitlines()]
            found.append([dict(zip(heading, row, strict=True)) for row in rows])
    return found


def columns(table: list[dict[str, str]], *names: str) -> list[tuple[str, ...]]:
    return [tuple(row[name] for name in names) for row in table]


# The published table

def test_published_csv_gives_the_published_table_and_the_originals_program_on_an_h100(printed):
    [table] = tables(printed(PUBLISHED))
    assert columns(table[:6], 'GPUs', 'images/s', 'days', 'cost', 'efficiency', 'notes') == [
        ('8', '128.2', '258.85', '$99,400', '100.0 %', ''), ('16', '254.0', '130.65', '$100,339', '99.1 %', ''),
        ('32', '485.7', '68.32', '$104,946', '94.7 %', ''), ('64', '912.2', '36.38', '$111,757', '88.9 %', ''),
        ('128', '1,618.4', '20.50', '$125,982', '78.9 %', ''),
        ('256', '2,589.4', '12.82', '$157,480', '63.1 %', 'extrapolated by its source')]
    of_h100 = [row for row in table if row['device'] == 'H100 80GB HBM3']
    assert columns(of_h100, 'device_train_microbatch_size', 'images/s') == [('4', '189.3'), ('32', '385.3')]


def test_the_costs_on_the_front_page_are_those_that_its_command_prints(printed):
    _, plans = tables(printed(ROOT / 'docs/plan.jsonl', '--phase', '1126400000@256', '--phase', '1740800000@512',
                              '--dollars_per_gpu_hour', '2', 'H100=2.5', 'H200=3.2', 'B200=5'))
    section = (ROOT / 'README.md').read_text().partition('## What Stable Diffusion 2 costs')[2]
    [rows] = tables(section.partition('These rows')[0])
    expected = [(short_name(plan['device']), plan['input'], plan['days'], plan['GPU-hours'], plan['cost'])
                for plan in plans]
    assert sorted(columns(rows, '8 GPUs', 'input', 'days', 'GPU-hours', 'cost')) == sorted(expected)
    for row in rows:
        dollars = float(row['$ an hour']) * float(row['GPU-hours'].replace(',', ''))
        assert dollars == pytest.approx(float(row['cost'].strip('$').replace(',', '')), rel=1e-3)


# Predictions

def test_64_and_128_gpus_are_predicted_from_8_16_and_32_within_1_5_percent(printed, write):
    few = write(*({'num_devices': n, 'images_per_sec': IMAGES_PER_SEC[n], 'batch_size': 2048} for n in (8, 16, 32)))
    [table] = tables(printed(few, '--extrapolate', 128, 64))
    for row, count in zip(table[3:], (64, 128), strict=True):
        assert row['notes'] == 'extrapolated'
        assert row['GPUs'] == str(count)
        assert float(row['images/s'].replace(',', '')) == pytest.approx(IMAGES_PER_SEC[count], rel=0.015)


def test_the_fit_leaves_out_the_row_that_its_source_extrapolated_and_says_how_good_it_is(printed):
    text = printed(PUBLISHED, '--extrapolate', 512, 1024)
    [table] = tables(text)
    assert columns(table, 'notes')[6:8] == [('extrapolated',), ('extrapolated; 2 images a GPU: a smaller microbatch',)]
    n, seconds = np.array(list(IMAGES_PER_SEC)[:5]), 2048 / np.array(list(IMAGES_PER_SEC.values())[:5])
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / n, n**0], axis=1) / seconds[:, None], np.ones(5), rcond=None)
    assert f'step_seconds(n) = {a:.5g} / n + {b:.5g} for a batch of 2,048 images, fitted on 8, 16, 32, 64, 128' in text
    worst = max(zip(n, seconds / (a / n + b) - 1, strict=True), key=lambda pair: abs(pair[1]))
    assert f'worst residual {worst[1]:+.1%} of the images/s, on {worst[0]} GPUs' in text


def test_efficiency_is_over_the_fewest_gpus_that_were_measured_with_the_same_settings(printed, write):
    [table] = tables(printed(PUBLISHED, '--extrapolate', 4))
    assert columns(table, 'GPUs', 'efficiency')[:3] == [('4', '101.2 %'), ('8', '100.0 %'), ('16', '99.1 %')]
    [table] = tables(printed(write({}, {'use_ema': True}, {'use_ema': True, 'num_devices': 16})))
    assert columns(table, 'use_ema', 'efficiency') == [('', ''), ('yes', '100.0 %'), ('yes', '50.0 %')]


def test_several_settings_are_predicted_each_from_its_own_runs(printed, write):
    runs = [{'num_devices': n, 'images_per_sec': speed * n, 'use_ema': ema}
            for ema, speed in ((True, 10.0), (False, 20.0)) for n in (8, 16, 32)]
    text = printed(write(*runs, {'precision': 'fp32'}), '--extrapolate', 64)
    [table] = tables(text)
    predicted = [row for row in table if row['notes'] == 'extrapolated']
    assert columns(predicted, 'use_ema', 'GPUs', 'images/s') == [('yes', '64', '640.0'), ('no', '64', '1,280.0')]
    assert 'use_ema yes: step_seconds' in text
    assert 'use_ema no: step_seconds' in text


# One table of what was measured

def test_records_of_different_settings_are_rows_of_one_table_with_the_setting_as_a_column(printed, write):
    first, second = ({'date': n, 'seed': n, 'command': n} for n in (1, 2))  # which are no settings
    [table] = tables(printed(write({'compile': True} | first, {'compile': 'reduce-overhead'},
                                   {'compile': True} | second)))
    assert not {'date', 'seed', 'command'} & table[0].keys()
    assert columns(table, 'compile', 'notes') == [('yes', 'median of 2 runs, 800.0 to 800.0'), ('reduce-overhead', '')]


def test_versions_and_what_a_training_reads_are_settings(printed, write):
    one = {'versions': {'torch': '2.7.0', 'diffusers': '0.39.0'}, 'encoders': 'in_loop'}
    other = {'versions': {'torch': '2.11.0', 'diffusers': '0.39.0'}, 'encoders': 'text_in_loop'}
    text = printed(write(one, other))
    assert columns(tables(text)[0], 'torch', 'input') == [('2.7.0', 'images'), ('2.11.0', 'latents')]
    assert text.startswith('All rows: stage train, device H200, image_size 512\nVersions: diffusers 0.39.0\n')


def test_gpus_on_fewer_nodes_are_another_row_and_enter_the_fit_alone(printed, write):
    runs = [(8, 1, 800.0), (16, 2, 1600.0), (16, 16, 1200.0), (16, 16, 1400.0), (32, 4, 3200.0)]
    path = write(*({'num_devices': gpus, 'num_nodes': nodes, 'images_per_sec': speed} for gpus, nodes, speed in runs))
    [table] = tables(printed(path, '--extrapolate', 64))
    assert sorted(columns(table, 'GPUs', 'num_nodes', 'images/s')) == sorted([
        ('8', '1', '800.0'), ('16', '2', '1,600.0'), ('16', '16', '1,300.0'), ('32', '4', '3,200.0'),
        ('64', '', '6,400.0')])


def test_workers_that_the_program_chose_are_one_setting_and_others_are_not(printed, write):
    runs = [{'num_devices': n, 'num_workers': workers} for n, workers in ((1, 8), (2, 4))]
    [table] = tables(printed(write(*(run | {'num_workers_by_default': True} for run in runs))))
    assert columns(table, 'efficiency') == [('100.0 %',), ('50.0 %',)]
    [table] = tables(printed(write(*(run | {'num_workers_by_default': False} for run in runs))))
    assert columns(table, 'num_workers') == [('8',), ('4',)]
    assert 'efficiency' not in table[0]


def test_the_model_tiny_has_no_days_unless_they_are_asked_for(printed, write):
    path = write({'model_name': 'tiny'})
    text = printed(path)
    assert 'days' not in tables(text)[0][0]
    assert '--training_images asks for them' in text
    assert tables(printed(path, '--training_images', 1_000_000))[0][0]['cost']


@pytest.mark.parametrize('changes, note', [
    ({'status': 'failed', 'images_per_sec': None, 'error': 'CUDA\nout of memory'}, 'failed: CUDA out of memory'),
    ({'status': 'interrupted'}, 'interrupted'), ({'measured_batches': 5}, 'not reliable: only 5 measured batches'),
    ({'measured_batches': 30, 'queue_batches': 16}, 'not reliable: only 30 measured batches'),
    ({'drift': -0.2}, 'not reliable: ')])
def test_a_run_that_is_not_complete_or_reliable_says_so_and_nothing_follows_from_it(printed, write, changes, note):
    sound = {'drift': 0.09, 'measured_batches': 20}
    path = write({'images_per_sec': 400.0} | changes, sound, sound | {'images_per_sec': 820.0})
    sound, other = tables(printed(path))[0]
    assert columns([sound], 'images/s', 'days', 'notes') == [('810.0', '40.97', 'median of 2 runs, 800.0 to 820.0')]
    assert other['days'] == ''
    assert other['notes'].startswith(note)
    [compared] = tables(printed(path, '--compare'))
    assert columns(compared, 'over the first') == [('',), ('1.00 x',), ('1.02 x',)]


def test_a_plan_names_what_is_not_in_it_and_why(printed, write):
    text = printed(write({'image_size': 256}, {}, {'num_devices': 16}, {'num_devices': 32, 'drift': 0.5}),
                   '--phase', '1000@256', '--phase', '1000@512')
    left_out = text.partition('Not in the plan: ')[2].splitlines()[0].split('; ')
    assert left_out == ['32 x H200, not reliable: speed changed by +50.0%', '16 x H200, not measured at 256 px']


def test_compare_has_a_row_a_training_what_differs_and_the_speed_over_the_first_of_its_model_and_size(printed, write):
    same = {'use_ema': True, 'cudnn_benchmark': False, 'model_name': 'sd2'}
    runs = [{'compile': False, 'date': '2026-11-20T10:00:00+00:00', 'git_commit': 'a' * 40},
            {'compile': True, 'date': '2026-11-21T10:00:00+00:00', 'git_commit': 'b' * 40, 'images_per_sec': 1000.0},
            {'compile': True, 'date': '2026-11-22T10:00:00+00:00', 'git_commit': 'b' * 40 + '-dirty'},
            {'compile': True, 'image_size': 256, 'images_per_sec': 3000.0}]
    text = printed(write(LOADER, *(same | run for run in runs), ENCODE), '--compare')
    [table] = tables(text)
    assert columns(table, 'run', 'compile', 'image_size', 'date', 'git_commit', 'over the first') == [
        ('1', 'no', '512', '2026-11-20 10:00:00', 'aaaaaaaa', '1.00 x'),
        ('2', 'yes', '512', '2026-11-21 10:00:00', 'bbbbbbbb', '1.25 x'),
        ('3', 'yes', '512', '2026-11-22 10:00:00', 'bbbbbbbb-dirty', '1.00 x'), ('4', 'yes', '256', '', '', '1.00 x')]
    assert 'use_ema' not in table[0]
    assert 'use_ema yes' in text.splitlines()[0]
    assert 'cudnn_benchmark' not in text


def test_a_cpu_has_no_gpu_hours_or_dollars_and_loaders_and_encodings_have_no_days(printed, write):
    [table] = tables(printed(write({}, CPU, LOADER, ENCODE)))
    assert columns(table, 'stage', 'images/s', 'days', 'GPU-hours', 'cost') == [
        ('train', '800.0', '41.48', '7,964', '$15,929'), ('train', '8.00', '4,148.15', '', ''),
        ('loader', '32,000.0', '', '', ''), ('encode', '4,000.0', '', '', '')]


# Plans

def test_phases_add_up_the_days_of_each_size(printed, write):
    at_256 = {'image_size': 256, 'images_per_sec': 3200.0, 'device_train_microbatch_size': 64}
    text = printed(write({}, at_256, {'num_devices': 16}), '--phase', '1126400000@256', '--phase', '1740800000@512')
    [_, [row]] = tables(text)
    days = 1126400000 / 3200 / 86400 + 1740800000 / 800 / 86400
    assert columns([row], 'GPUs', 'days', 'GPU-hours') == [('8', f'{days:.2f}', f'{days * 24 * 8:,.0f}')]
    assert row['notes'] == '4.07 days at 256 px, 25.19 days at 512 px'
    assert 'train on 1,126,400,000 images at 256 px, then 1,740,800,000 images at 512 px' in text
    assert text.rstrip().endswith('Costs: $2 a GPU-hour (--dollars_per_gpu_hour).')


def test_a_plan_takes_the_fastest_measured_speed_of_a_size(printed, write):
    path = write({'device_train_microbatch_size': 4}, {'device_train_microbatch_size': 8, 'images_per_sec': 900.0},
                 {'images_per_sec': 1000.0, 'extrapolated': True}, {'images_per_sec': 1000.0, 'status': 'interrupted'})
    [_, [row]] = tables(printed(path, '--phase', '77760000@512'))
    assert row['days'] == '1.00'


def test_a_plan_on_latents_has_their_encoding_in_it_or_says_at_which_size_it_has_not(printed, write):
    latents = {'encoders': 'text_in_loop', 'model_name': 'sd2', 'images_per_sec': 1000}
    encoded = ENCODE | {'model_name': 'sd2', 'images_per_sec': 5000, 'stored_samples': 864_000_000}
    others = [encoded | {'stored_samples': 1_728_000_000} | changes for changes in (
        {'model_name': 'tiny'}, {'device': 'H100'}, {'num_devices': 16}, {'image_size': 128}, {'status': 'failed'})]
    forecast = encoded | {'status': 'forecast', 'image_size': 256, 'stored_samples': 432_000_000}
    text = printed(write(latents, latents | {'image_size': 256}, latents | {'image_size': 64}, *others, encoded,
                         encoded | {'stored_samples': 1000}, forecast),  # the former of the held-out samples
                   '--phase', '86400000@256', '--phase', '86400000@512', '--phase', '86400000@256', '--phase',
                   '86400000@64')
    [_, [row]] = tables(text)
    assert row['days'] == '7.00'  # 4 of training, 2 and 1 of encoding
    assert row['cost'] == '$2,688'
    assert row['notes'].endswith(
        'at 64 px, 1.00 days to encode 432,000,000 images at 256 px (21.6 TB; forecast, not tested), 2.00 days to '
        'encode 864,000,000 images at 512 px (43.2 TB), without encoding the images at 64 px')


# Files

def test_forecasts_are_planned_and_priced_by_card_and_told_apart_from_what_was_measured(printed, write):
    path = write(*[FORECAST | {'device': device, 'image_size': size, 'images_per_sec': speed,
                               'images_per_sec_least': least, 'images_per_sec_most': most}
                   for device, size, speed, least, most in (
                       ('NVIDIA H200', 256, 4000.0, 3200.0, 5000.0), ('NVIDIA H200', 512, 1000.0, 800.0, 1250.0),
                       ('NVIDIA B200', 256, 8000.0, None, None), ('NVIDIA B200', 512, 2000.0, 1600.0, 2500.0))],
                 {'device': 'NVIDIA H200', 'model_name': 'sd2', 'images_per_sec': 990.0})
    rows, plans = tables(printed(path, '--phase', '345600000@256', '--phase', '86400000@512', '--days', '3',
                                 '--dollars_per_gpu_hour', '2', 'B200=5'))
    assert [row['notes'] for row in rows if row['device'] == 'NVIDIA H200' and row['image_size'] == '512'] == [
        '', 'forecast: 800 to 1,250 images/s']
    assert [row['images in --days'] for row in rows if row['images/s'] == '990.0'] == ['256,608,000']
    by_gpu = {plan['device']: plan for plan in plans}
    assert by_gpu['NVIDIA H200']['cost'] == '$768'  # 2 days of 8 GPUs at $2
    assert by_gpu['NVIDIA B200']['cost'] == '$960'  # 1 day at $5
    of_h200 = by_gpu['NVIDIA H200']['notes']
    assert of_h200 == 'forecast: 1.00 days at 256 px (0.800 to 1.25), 1.00 days at 512 px (0.800 to 1.25)'
    assert by_gpu['NVIDIA B200']['notes'].startswith('forecast: 0.500 days at 256 px (not tested), ')


@pytest.fixture
def original(tmp_path) -> str:
    """The rows of published.csv that the original's authors measured: one setting on several numbers of GPUs."""
    path = tmp_path / 'original.csv'
    path.write_text(''.join(Path(PUBLISHED).read_text().splitlines(keepends=True)[:7]))
    return str(path)


def test_the_csv_holds_the_rows_of_all_tables_unrounded(tmp_path, printed, original):
    printed(original, '--csv', tmp_path / 'table.csv', '--extrapolate', 512, '--phase', '1000000@512')
    rows = list(csv.DictReader((tmp_path / 'table.csv').open()))
    assert [row['status'] for row in rows] == ['measured'] * 5 + ['extrapolated'] * 2 + ['measured'] * 5
    assert float(rows[3]['days']) == 2_867_200_000 / 912.2 / 86_400
    assert float(rows[3]['scaling_efficiency']) == pytest.approx(912.2 / 64 / (128.2 / 8), rel=1e-14)
    assert rows[-1]['stage'] == 'plan'


@pytest.mark.parametrize('record, reason', [
    ({'images_per_sec': None}, 'no images_per_sec'), ({'images_per_sec': '1,618'}, "images_per_sec '1,618'"),
    ({'stage': 'evaluate', 'scores': [{'guidance': 1}]}, '')])
def test_a_bad_record_is_named_by_file_and_line(write, capfd, record, reason):
    path = write({}, record)
    assert f'{path}:2: not a record: {reason}' in one_error_line([path], capfd, report.main)


@pytest.mark.parametrize('records, argv, reason', [
    ([{}, {}, {'num_devices': 16}], ['--extrapolate', '64'], 'trainings of one setting on three numbers of GPUs'),
    ([{}, {'num_devices': 16}, {'num_devices': 32, 'drift': 0.5}], ['--extrapolate', '64'], 'reliable trainings'),
    ([{'drift': 0.5}], ['--phase', '1@512'], 'no number of devices has reliable records'),
    ([{}, {'image_size': 256, 'num_nodes': 2}], ['--phase', '1@256', '--phase', '1@512'], 'at 256 and 512 px'),
    ([EVALUATION | {'images_seen': None, 'scores': [{'guidance': 2, 'fid': 7.0, 'clip_score': None}]}],
     ['--quality', 'quality.png'], 'no evaluation has both scores')])
def test_what_the_records_do_not_allow_is_refused(write, capfd, records, argv, reason):
    assert reason in one_error_line([write(*records), *argv], capfd, report.main)


# Scores of evaluate.py

def test_scores_are_a_table_of_their_own_with_the_checkpoints_in_order(printed, write):
    text = printed(write(TRAINING, LATER, EVALUATION))
    speeds, scores = tables(text)
    assert len(speeds) == 1
    assert columns(scores, 'batches', 'guidance', 'FID', 'CLIP score', 'images seen') == [
        ('1,000', '1.50', '95.50', '14.00', '2,048,000'), ('1,000', '4.00', '70.00', '15.00', '2,048,000'),
        ('2,000', '1.50', '40.00', '20.00', '4,096,000'), ('2,000', '4.00', '30.00', '25.00', '4,096,000')]
    assert 'All rows: model kept, weights averaged, data coco.txt, samples 30000, ' in text


def test_gpu_hours_of_a_checkpoint_are_those_of_the_images_seen_at_the_speed_of_its_training(printed, write):
    _, scores = tables(printed(write(TRAINING, EVALUATION, LATER), '--dollars_per_gpu_hour', 3))
    hours = 2_048_000 / 400 / 3600 * 8
    assert columns(scores, 'GPU-hours', 'cost')[::2] == [(f'{hours:.1f}', f'${3 * hours:.1f}'),
                                                         (f'{2 * hours:.1f}', f'${6 * hours:.1f}')]


@pytest.mark.parametrize('change', [{'learning_rate': 2e-4}, {'trained_batches': 999}, {'device_type': 'cpu'},
                                    {'images_per_sec': None, 'status': 'failed'}, {'stage': 'encode'}], ids=str)
def test_the_speed_of_another_training_is_not_taken(printed, write, change):
    _, scores = tables(printed(write(TRAINING | change, EVALUATION)))
    assert 'GPU-hours' not in scores[0]


def test_what_scores_cannot_be_compared_with_is_noted(printed, write):
    [scores] = tables(printed(write(EVALUATION | {'fid_is_biased': True, 'fid_of_published_weights': False})))
    assert columns(scores, 'notes') == [('FID of few pictures is too high, FID by other weights',)] * 2


# Pictures

@pytest.fixture
def drawn(printed, monkeypatch):
    """Calls report.py, which draws one picture, and returns that, which is not written."""
    def drawn(*argv):
        figures = []
        monkeypatch.setattr(matplotlib.figure.Figure, 'savefig', lambda figure, *_, **__: figures.append(figure))
        printed(*argv)
        [figure] = figures
        return figure
    return drawn


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_picture_of_days_has_a_line_a_setting_and_tells_apart_what_was_measured(drawn, original, write):
    forecast = FORECAST | {'device': 'NVIDIA H100 80GB HBM3', 'images_per_sec': 500.0, 'images_per_sec_least': 400.0,
                           'images_per_sec_most': 625.0, 'device_train_microbatch_size': 32}
    path = write(forecast, forecast | {'num_devices': 16, 'images_per_sec': 1000.0, 'device_train_microbatch_size': 16,
                                       'images_per_sec_least': None})
    [axes] = drawn(original, path, '--figure', 'days.png').axes
    assert (axes.get_xscale(), axes.get_yscale()) == ('log', 'log')
    assert legend(axes)[:2] == ['A100 40GB', 'H100 80GB, forecast']
    drawn_lines = [line for line in axes.lines if len(line.get_xdata())]
    filled = [line for line in drawn_lines if line.get_marker() == 'o' and line.get_markerfacecolor() != 'white']
    hollow = [line for line in drawn_lines if line.get_marker() == 'o' and line.get_markerfacecolor() == 'white']
    assert [list(line.get_xdata()) for line in filled] == [[8, 16, 32, 64, 128]]
    assert filled[0].get_ydata() == pytest.approx([258.85, 130.65, 68.32, 36.38, 20.50], 1e-3)
    assert [list(line.get_xdata()) for line in hollow] == [[256], [8, 16]]
    [of_forecast] = [line for line in drawn_lines if list(line.get_xdata()) == [8, 8]]
    assert of_forecast.get_ydata() == pytest.approx([2_867_200_000 / speed / 86_400 for speed in (625, 400)])
    ideal, _ = [line for line in drawn_lines if line.get_linestyle() == '--']
    assert ideal.get_ydata() == pytest.approx([258.85, 258.85 * 8 / 256], 1e-3)


def test_the_picture_of_quality_has_both_scores_over_guidance_and_over_images(drawn, write):
    curve, fid, clip = drawn(write(TRAINING, EVALUATION, LATER), '--quality', 'quality.png').axes
    assert [list(line.get_xdata()) for line in curve.lines] == [[14, 15], [20, 25]]
    assert [list(line.get_ydata()) for line in curve.lines] == [[95.5, 70], [40, 30]]
    assert [list(line.get_ydata()) for line in fid.lines] == [[95.5, 40], [70, 30]]
    assert list(fid.lines[0].get_xdata()) == list(clip.lines[0].get_xdata()) == [2_048_000, 4_096_000]
    assert legend(curve) == ['batch 1,000, guidance 1.5, 4', 'batch 2,000, guidance 1.5, 4']


def test_scores_by_another_network_are_lines_of_their_own(drawn, write):
    one, other = (EVALUATION | {'inception_sha256': name} for name in 'ab')
    curve, fid, _ = drawn(write(one, other), '--quality', 'quality.png').axes
    assert (len(curve.lines), len(fid.lines)) == (2, 4)


def test_pictures_are_written_and_named(tmp_path, printed, write):
    paths = [tmp_path / 'days.png', tmp_path / 'quality.svg']
    text = printed(write(TRAINING, EVALUATION), '--figure', paths[0], '--quality', paths[1])
    assert text.endswith(f'Written: {paths[0]}, {paths[1]}\n')
    assert paths[0].read_bytes().startswith(b'\x89PNG')
    assert 'guidance 4' in paths[1].read_text()
