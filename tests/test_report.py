"""Claims about report.py, against figures worked out by hand or by numpy."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.font_manager import findfont, get_font

import report
from settings.flags import parse
from settings.train import Train
from settings import costs
from reporting import figures, records, tables, throughput

ROOT = Path(__file__).parents[1]
PUBLISHED = str(ROOT / 'published.csv')
IMAGES_PER_SEC = {8: 128.2, 16: 254.0, 32: 485.7, 64: 912.2, 128: 1618.4, 256: 2589.4}
MINIMAL = {'device': 'H200', 'num_devices': 8, 'image_size': 512, 'images_per_sec': 800.0}


@pytest.fixture
def write(tmp_path):
    """Writes records, each the changes to a minimal one, and returns the path; None leaves a key out."""
    def write(*records, name='records.jsonl'):
        path = tmp_path / name
        path.write_text(''.join(json.dumps(MINIMAL | record) + '\n' for record in records))
        return str(path)
    return write


@pytest.fixture
def drawn(capsys, monkeypatch):
    """Calls report.py with --figure and returns the figure, which is not written."""
    def draw(*argv):
        kept = []
        with monkeypatch.context() as patched:
            patched.setattr(figures, 'save', lambda figure, path: kept.append(figure))
            printed(capsys, *argv, '--figure', 'figure.png')
        figure, = kept
        return figure
    return draw


def printed(capsys, *argv):
    report.main([str(arg) for arg in argv])
    return capsys.readouterr().out


def cells(text):
    """The rows of every Markdown table in a report, as dicts of heading to text, table by table."""
    tables = []
    for block in text.split('\n\n'):
        if block.startswith('|'):
            lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in block.splitlines()]
            tables.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    return tables


def refusal(capsys, *argv):
    with pytest.raises(SystemExit) as exit_info:
        report.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2 and out == ''
    assert err.count('\n') == 1 and err.startswith('report.py: error: ')
    return err


def test_the_published_eight_gpu_row_is_reproduced():
    assert costs.days_to_train(128.2) == pytest.approx(258.85, abs=0.01)


# As printed by mosaicml/diffusion-benchmark. Its images/s have one decimal, which leaves its days uncertain by 0.04 %.
@pytest.mark.parametrize('count, days, hours', [(8, 258.83, 49_696), (16, 130.63, 50_166), (32, 68.33, 52_470),
                                                (64, 36.38, 55_875), (128, 20.5, 62_987), (256, None, 78_735)])
def test_days_and_gpu_hours_are_the_published_ones(count, days, hours):
    speed = IMAGES_PER_SEC[count]
    assert days is None or costs.days_to_train(speed) == pytest.approx(days, rel=4e-4)
    assert costs.gpu_hours(speed, count) == pytest.approx(hours, rel=4e-4)


def test_the_published_days_on_256_gpus_disagree_with_the_published_images_per_second():
    assert abs(costs.days_to_train(IMAGES_PER_SEC[256]) / 12.83 - 1) > 1e-3


def test_published_csv_gives_the_published_table(capsys):
    table, = cells(printed(capsys, PUBLISHED))
    assert [row['GPUs'] for row in table] == ['8', '16', '32', '64', '128', '256']
    assert [row['images/s'] for row in table] == ['128.2', '254.0', '485.7', '912.2', '1,618.4', '2,589.4']
    assert [row['days'] for row in table] == ['258.85', '130.65', '68.32', '36.38', '20.50', '12.82']
    assert table[0]['cost'] == '$99,400' and table[4]['efficiency'] == '78.9 %'
    assert [row['notes'] for row in table] == [''] * 5 + ['extrapolated by its source']


def test_every_line_of_a_table_is_as_long_as_the_others(capsys):
    lines = [line for line in printed(capsys, PUBLISHED).splitlines() if line.startswith('|')]
    assert len(lines) == 8 and len({len(line) for line in lines}) == 1


@pytest.mark.parametrize('key, value, expected', [
    ('days', 258.8548, '258.85'), ('images_per_sec', 0.05123, '0.0512'), ('cost_usd', 99400.24, '$99,400'),
    ('cost_usd', 1.234, '$1.23'), ('scaling_efficiency', 0.789, '78.9 %'), ('notes', 'a | b', r'a \| b')])
def test_a_figure_keeps_its_decimals_or_three_significant_digits(key, value, expected):
    assert tables.printed_figure(key, value) == expected


def test_64_and_128_gpus_are_predicted_from_8_16_and_32_within_1_5_percent(capsys, write):
    few = write(*({'num_devices': n, 'images_per_sec': IMAGES_PER_SEC[n], 'batch_size': 2048} for n in (8, 16, 32)))
    table, = cells(printed(capsys, few, '--extrapolate', 128, 64))
    for row, count in zip(table[3:], (64, 128), strict=True):
        assert row['notes'] == 'extrapolated' and row['GPUs'] == str(count)
        assert float(row['images/s'].replace(',', '')) == pytest.approx(IMAGES_PER_SEC[count], rel=0.015)


def test_the_row_that_its_source_extrapolated_does_not_enter_the_fit(capsys):
    text = printed(capsys, PUBLISHED, '--extrapolate', 512)
    n, seconds = np.array(list(IMAGES_PER_SEC)[:5]), 2048 / np.array(list(IMAGES_PER_SEC.values())[:5])
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / n, n**0], axis=1) / seconds[:, None], np.ones(5), rcond=None)
    assert f'step_seconds(n) = {a:.5g} / n + {b:.5g} for a batch of 2048, fitted on 8, 16, 32, 64, 128 GPUs' in text
    worst = max(zip(n, seconds / (a / n + b) - 1, strict=True), key=lambda pair: abs(pair[1]))
    assert f'worst residual {worst[1]:+.1%} of the images/s, on {worst[0]} GPUs' in text


@pytest.mark.parametrize('seconds', [[16, 8, 4.5, 2.4], [16, 8, 4, 2], [16, 7, 3, 1], [2, 2.2, 2.1, 2.5]])
def test_the_fit_is_the_best_with_a_and_b_not_negative(seconds):
    counts, seconds = np.array([8, 16, 32, 64]), np.array(seconds)
    a, b = throughput.fit_step_seconds(list(counts), list(seconds))
    assert a >= 0 and b >= 0

    def error(a, b):
        return (((a / counts + b) / seconds - 1) ** 2).sum(axis=-1)
    assert error(a, b) <= error(np.linspace(0, 200, 401)[:, None, None], np.linspace(0, 4, 401)[:, None]).min() + 1e-12


@pytest.mark.parametrize('counts', [(8,), (8, 16), (8, 8, 8, 16)])
def test_fewer_than_three_measured_counts_are_not_extrapolated(capsys, write, counts):
    path = write(*({'num_devices': n, 'images_per_sec': 100.0 * n} for n in counts))
    assert f'three numbers of GPUs measured in one setting, not {len(set(counts))}' in refusal(
        capsys, path, '--extrapolate', 64)


def test_more_gpus_than_images_in_a_batch_are_not_extrapolated(capsys):
    assert '--extrapolate 4096' in refusal(capsys, PUBLISHED, '--extrapolate', 4096)


@pytest.mark.parametrize('microbatch, notes', [
    (4, ['extrapolated', 'extrapolated; 2 images a GPU: a smaller microbatch']), (2, ['extrapolated'] * 2),
    (None, ['extrapolated'] * 2)])
def test_a_prediction_says_where_a_gpu_has_fewer_images_than_the_microbatch(capsys, write, microbatch, notes):
    how = {'batch_size': 2048, 'device_train_microbatch_size': microbatch}
    if microbatch is None:
        del how['device_train_microbatch_size']
    path = write(*(how | {'num_devices': n, 'images_per_sec': IMAGES_PER_SEC[n]} for n in (8, 16, 32)))
    table, = cells(printed(capsys, path, '--extrapolate', 512, 1024))
    assert [row['notes'] for row in table[3:]] == notes


def test_what_is_written_is_named(capsys, tmp_path):
    files = [str(tmp_path / name) for name in ('table.csv', 'days.svg')]
    report.main([PUBLISHED, '--csv', files[0], '--figure', files[1]])
    assert capsys.readouterr().err == f'wrote {files[0]}\nwrote {files[1]}\n'


def test_the_model_tiny_has_days_in_a_plan_alone_and_the_remark_says_so(capsys, write):
    text = printed(capsys, write({'model_name': 'tiny'}), '--phase', '1000@512')
    assert 'has no days and no cost but in a plan of --phase;' in text
    assert [bool(table[0].get('days')) for table in cells(text)] == [False, True]


@pytest.mark.parametrize('names, title', [
    (['tiny'], 'Images per second in training tiny'), ([''], 'Images per second in training Stable Diffusion'),
    (['tiny', 'models/own/'], 'Images per second in training 2 models'),
    (['models/own/'], 'Images per second in training own')])
def test_the_title_of_a_figure_names_the_model(drawn, write, names, title):
    assert drawn(write(*({'model_name': name} for name in names))).get_suptitle() == title


def test_repeated_runs_are_one_row_with_median_and_spread(capsys, write):
    (row,), = cells(printed(capsys, write(*({'images_per_sec': speed, 'seed': speed} for speed in (790, 860, 800)))))
    assert row['images/s'] == '800.0' and row['notes'] == 'median of 3 runs, 790.0 to 860.0'


@pytest.mark.parametrize('key, one, other', [
    ('device', 'H100', 'H200'), ('image_size', 256, 512), ('batch_size', 1024, 2048), ('precision', 'amp_fp16', 'fp32'),
    ('use_ema', True, False), ('encoders', 'in_loop', 'none'), ('compile', True, False), ('stage', 'encode', 'train'),
    ('device_train_microbatch_size', 4, 8), ('versions', {'torch': '2.7.0'}, {'torch': '2.11.0'}),
    ('num_workers', 8, 4), ('compile', True, 'reduce-overhead'), ('half_precision_norms', True, False),
    ('channels_last_norms', True, False), ('cast_weights_once', True, False), ('cudnn_benchmark', True, False),
    ('compile_blocks', True, False), ('allreduce_precision', 'bf16', 'fp32')])
def test_records_of_different_settings_are_separate_tables_and_those_of_one_share_a_row(capsys, write, key, one, other):
    text = printed(capsys, write({key: one}, {key: other}, {key: one}))
    assert sorted(row['notes'] for row, in cells(text) if 'notes' in row) == ['median of 2 runs, 800.0 to 800.0']
    headings = [line for line in text.splitlines() if line.startswith('### ')]
    assert len(headings) == 2 and records.one_line_of_text(one) in headings[0]
    other_is_the_default = tables.defaults().get(key) == records.one_line_of_text(other) or key == 'compile_blocks'
    if other_is_the_default and key not in tables.ALWAYS_STATED:
        assert headings[1] == '### at the defaults'
    else:
        assert records.one_line_of_text(other) in headings[1]


@pytest.mark.parametrize('key', ['num_devices', 'date', 'seed', 'command', 'git_commit'])
def test_records_that_differ_in_no_setting_share_a_table(capsys, write, key):
    assert len(cells(printed(capsys, write({key: 1}, {key: 2})))) == 1


def test_gpus_on_fewer_nodes_are_another_row_and_enter_the_fit_alone(capsys, write):
    runs = [(8, 1, 800.0), (16, 2, 1600.0), (16, 4, 1200.0), (16, 4, 1400.0), (32, 4, 3200.0)]
    path = write(*({'num_devices': gpus, 'num_nodes': nodes, 'images_per_sec': speed} for gpus, nodes, speed in runs))
    text = printed(capsys, path, '--extrapolate', 64)
    table, = cells(text)
    assert [(row['GPUs'], row['nodes'], row['images/s']) for row in table] == [
        ('8', '1', '800.0'), ('16', '2', '1,600.0'), ('16', '4', '1,300.0'), ('32', '4', '3,200.0'),
        ('64', '', '6,400.0')]
    assert 'fitted on 8, 16, 32 GPUs' in text
    assert 'nodes' not in cells(printed(capsys, write({}, {'num_devices': 16, 'num_nodes': 2})))[0][0]


def test_a_plan_joins_no_runs_on_different_numbers_of_nodes(capsys, write):
    path = write({'num_devices': 16, 'num_nodes': 2}, {'num_devices': 16, 'num_nodes': 4, 'image_size': 256})
    assert '256 and 512 px' in refusal(capsys, path, '--phase', '1@256', '--phase', '1@512')


def test_workers_that_the_program_chose_are_one_setting_and_others_are_not(capsys, write):
    runs = [{'num_devices': n, 'num_workers': workers} for n, workers in ((1, 8), (2, 4))]
    table, = cells(printed(capsys, write(*(run | {'num_workers_by_default': True} for run in runs))))
    assert [row['efficiency'] for row in table] == ['100.0 %', '50.0 %']
    assert len(cells(printed(capsys, write(*(run | {'num_workers_by_default': False} for run in runs))))) == 2


def test_records_of_one_setting_are_told_apart_by_date_and_commit(capsys, drawn, write):
    runs = [{'date': f'2026-11-2{day}T10:00:00+00:00', 'git_commit': commit}
            for day, commit in ((0, 'a' * 40), (1, 'b' * 40 + '-dirty'))]
    path = write(*runs)
    table, = cells(printed(capsys, path, '--compare'))
    assert [(row['date'], row['git_commit']) for row in table] == [
        ('2026-11-20 10:00:00', 'aaaaaaaa'), ('2026-11-21 10:00:00', 'bbbbbbbb-dirty')]
    assert labels(drawn(path, '--compare').axes[0]) == [
        '2026-11-20 10:00:00, aaaaaaaa', '2026-11-21 10:00:00, bbbbbbbb-dirty']
    compared, = cells(printed(capsys, write(runs[0] | {'use_ema': True}, runs[1] | {'use_ema': False}), '--compare'))
    assert 'date' not in compared[0]


CPU = {'device': 'Intel(R) Xeon(R) Processor @ 2.70GHz', 'num_devices': 1, 'images_per_sec': 8.0}


@pytest.mark.parametrize('record, kind, on_cpu', [
    (CPU, 'CPU rank', True), ({'device': 'X', 'device_type': 'cpu'}, 'CPU rank', True),
    ({'device': 'X', 'device_type': 'cuda'}, 'GPU', False), ({'device': 'NVIDIA A100 Tensor Core'}, 'GPU', False)])
def test_a_cpu_has_days_but_no_gpus_gpu_hours_or_dollars(capsys, drawn, write, record, kind, on_cpu):
    path = write(record)
    (row,), = cells(printed(capsys, path))
    assert row[f'{kind}s'] and row[f'images/s per {kind}'] and row['days']
    assert ('GPU-hours' not in row and 'cost' not in row) == on_cpu
    assert kind in labels(drawn(path).axes[0])[0]


def test_cpus_and_gpus_in_one_table_are_devices(capsys, write):
    table, = cells(printed(capsys, write({}, CPU), '--compare'))
    assert [(row['devices'], row['GPU-hours'], row['cost']) for row in table] == [
        ('8', '7,964', '$15,929'), ('1', '', '')]


def test_the_model_tiny_has_no_days_unless_they_are_asked_for(capsys, drawn, write):
    path = write({'model_name': 'tiny'}, {'model_name': 'tiny', 'num_devices': 16},
                 ENCODE | {'model_name': 'tiny'}, LATENTS | {'model_name': 'tiny'})
    text = printed(capsys, path)
    assert 'days' not in {heading for table in cells(text) for row in table for heading in row} and '$' not in text
    assert '--training_images asks for them' in text and '### Plan' not in text
    assert 'days' not in drawn(path).get_suptitle()
    asked_for = printed(capsys, path, '--training_images', 1_000_000)
    assert '$' in asked_for and '### Plan' in asked_for and 'asks for them' not in asked_for


def test_compare_has_a_row_a_record_what_differs_and_the_speed_over_the_first(capsys, write):
    path = write({'compile': False, 'use_ema': True}, {'compile': True, 'use_ema': True, 'images_per_sec': 1000.0})
    table, = cells(printed(capsys, path, '--compare'))
    assert [(row['compile'], row['over first']) for row in table] == [('no', '1.00 x'), ('yes', '1.25 x')]
    assert 'use_ema' not in table[0] and 'device' not in table[0]


@pytest.mark.parametrize('status, note', [('failed', 'failed: CUDA out of memory'), ('interrupted', 'interrupted')])
def test_a_run_that_did_not_end_shows_as_such_and_is_not_averaged(capsys, write, status, note):
    ended = {'status': status, 'images_per_sec': None, 'error': 'CUDA\nout of memory' if status == 'failed' else None}
    table, = cells(printed(capsys, write({}, ended, {})))
    assert [(row['images/s'], row['days']) for row in table] == [('800.0', '41.48'), ('', '')]
    assert table[1]['notes'] == note and table[0]['notes'].startswith('median of 2 runs')


def test_an_interrupted_runs_figures_are_shown_but_not_fitted(capsys, write):
    path = write({}, {'num_devices': 16}, {'num_devices': 32, 'status': 'interrupted'})
    assert cells(printed(capsys, path))[0][2]['images/s'] == '800.0'
    assert 'not 2' in refusal(capsys, path, '--extrapolate', 64)


DOUBTS = [{'measured_batches': 5}, {'measured_batches': 30, 'queue_batches': 16}, {'drift': 38.277}, {'drift': -0.2},
          {'other_load': 1.6, 'cpu_cores': 2}]
SOUND = {'measured_batches': 20, 'queue_batches': 4, 'drift': 0.09}


@pytest.mark.parametrize('doubt', DOUBTS)
def test_a_speed_that_is_not_to_be_relied_on_is_marked_with_a_line_below_and_has_no_days(capsys, write, doubt):
    path = write(doubt | {'images_per_sec': 400.0}, SOUND, SOUND | {'images_per_sec': 820.0})
    text = printed(capsys, path)
    table, = cells(text)
    assert [(row['images/s'], row['efficiency']) for row in table] == [('810.0', '100.0 %'), ('400.0 *', '49.4 % *')]
    assert [row['days'] for row in table] == ['40.97', ''] and table[1]['cost'] == ''
    assert table[1]['notes'].startswith(('only ', 'drift ', 'other programs '))
    assert table[0]['notes'].startswith('median of 2 runs')
    assert text.count('Figures marked * are not to be relied on') == 1
    compared, = cells(printed(capsys, path, '--compare'))
    assert [row['over first'] for row in compared] == ['0.500 x *', '1.00 x', '1.02 x']


def test_records_that_nothing_is_wrong_with_have_no_mark(capsys, write):
    failed = {'status': 'failed', 'images_per_sec': None, 'measured_batches': 0}
    text = printed(capsys, write(SOUND, {}, failed, {'drift': None, 'measured_batches': None}))
    assert '*' not in text and 'median of 3 runs' in text


def test_records_in_doubt_alone_are_compared_and_marked(capsys, write):
    table, = cells(printed(capsys, write({'drift': 0.5}, {'drift': -0.5, 'images_per_sec': 400.0}), '--compare'))
    assert [row['over first'] for row in table] == ['1.00 x *', '0.500 x *']


def test_nothing_is_extrapolated_from_records_in_doubt(capsys, write):
    runs = [{'num_devices': n, 'images_per_sec': 100.0 * n} for n in (8, 16, 32)]
    runs[2] |= {'drift': 0.5}
    path = write(*runs)
    assert 'not 2, and those marked * do not count' in refusal(capsys, path, '--extrapolate', 64)
    table, = cells(printed(capsys, write(*runs, {'num_devices': 4, 'images_per_sec': 400.0}), '--extrapolate', 64))
    assert [(row['images/s'], row['days']) for row in table[3:]] == [('3,200.0 *', ''), ('6,400.0', '5.19')]
    assert 'no number of devices was measured' in refusal(capsys, write({'drift': 0.5}), '--phase', '1@512')
    encoding = ENCODE | {'measured_batches': 5}
    assert '### Plan' not in printed(capsys, write(encoding, LATENTS))


@pytest.mark.parametrize('loader, model, words', [
    ({}, {'drift': 0.5}, "32,000.0 images/s, 40.0 * times the model's 800.0 *."),
    ({'measured_batches': 5}, {}, "32,000.0 * images/s, 40.0 * times the model's 800.0.")])
def test_a_doubt_is_marked_in_the_ratio_of_a_loader_to_its_model(capsys, write, loader, model, words):
    loader = loader | {'stage': 'loader', 'images_per_sec': None, 'loader_images_per_sec': 32_000.0}
    text = printed(capsys, write(model, loader))
    assert words in text and 'Figures marked *' in text
    better = printed(capsys, write({'drift': 0.5, 'images_per_sec': 9000.0}, {}, loader | {'measured_batches': 20}))
    assert "40.0 times the model's 800.0." in better


def test_a_doubt_is_marked_in_the_figure_and_in_the_csv(drawn, write, tmp_path, capsys):
    path = write({}, {'drift': 0.5, 'images_per_sec': 1000.0})
    figure = drawn(path, '--compare')
    assert texts(figure.axes[0]) == ['800.0   1.00 x', '1,000.0 *   1.25 x *']
    assert 'Figures marked * are not' in figure.get_supxlabel().replace('\n', ' ')
    printed(capsys, path, '--csv', tmp_path / 'table.csv')
    assert [row['doubt'] for row in csv.DictReader((tmp_path / 'table.csv').open())] == ['', 'drift +50.0%']


def test_phases_add_up_the_days_of_each_size(capsys, write):
    at_256 = {'image_size': 256, 'images_per_sec': 3200.0, 'device_train_microbatch_size': 64}
    path = write({}, at_256, {'num_devices': 16})
    *_, (row,) = cells(printed(capsys, path, '--phase', '1126400000@256', '--phase', '1740800000@512'))
    days = 1126400000 / 3200 / 86400 + 1740800000 / 800 / 86400
    assert row['GPUs'] == '8' and row['days'] == f'{days:.2f}' and row['GPU-hours'] == f'{days * 24 * 8:,.0f}'
    assert row['notes'] == '4.07 days at 256 px, 25.19 days at 512 px'


def test_phases_of_one_size_add_up(capsys, write):
    *_, (row,) = cells(printed(capsys, write({}), '--phase', '1000000000@512', '--phase', '1867200000@512'))
    assert row['days'] == '41.48'


def test_a_plan_takes_the_fastest_measured_record_of_a_size(capsys, write):
    path = write({'device_train_microbatch_size': 4}, {'device_train_microbatch_size': 8, 'images_per_sec': 900.0},
                 {'images_per_sec': 1000.0, 'extrapolated': True}, {'images_per_sec': 1000.0, 'status': 'interrupted'})
    *_, (row,) = cells(printed(capsys, path, '--phase', '77760000@512'))
    assert row['days'] == '1.00'


@pytest.mark.parametrize('count, speed, remote, cache', [
    (8, 128.2, 2.564, 58), (9, 128.2, 2.564, 29), (128, 1618.4, 32.368, 3.625), (256, 2589.4, 51.788, 1.8125)])
def test_scale_on_paper_is_what_the_hand_computes(tmp_path, capsys, write, count, speed, remote, cache):
    path = write({'num_devices': count, 'images_per_sec': speed})
    printed(capsys, path, '--image_bytes', 20_000, '--csv', tmp_path / 'table.csv')
    row, = csv.DictReader((tmp_path / 'table.csv').open())
    assert float(row['remote_mb_per_sec']) == pytest.approx(remote)
    assert float(row['cache_tb_per_node']) == pytest.approx(cache)


@pytest.mark.parametrize('image_bytes, images, shards', [
    (1 << 20, 64, '1 shard'), (1 << 20, 65, '2 shards'), (20_000, 2_900_000_000, '864,268 shards')])
def test_a_part_of_a_shard_is_a_shard(capsys, image_bytes, images, shards):
    text = printed(capsys, PUBLISHED, '--image_bytes', image_bytes, '--dataset_images', images)
    assert f'is {shards} of 64 MiB' in text


@pytest.mark.parametrize('more', [[], ['--compare']])
def test_image_bytes_adds_remote_cache_and_shards(tmp_path, capsys, more):
    flags = ['--image_bytes', 20_000, '--dataset_images', 1_450_000_000, '--csv', tmp_path / 'table.csv', *more]
    text = printed(capsys, PUBLISHED, *flags)
    table, = cells(text)
    assert (table[1]['remote'], table[1]['cache']) == ('5.08 MB/s', '14.50 TB')
    assert 'An epoch of 1,450,000,000 samples is 432,134 shards of 64 MiB' in text
    rows = list(csv.DictReader((tmp_path / 'table.csv').open()))
    assert float(rows[1]['remote_mb_per_sec']) == 5.08 and float(rows[1]['cache_tb_per_node']) == 14.5
    assert 'remote' not in printed(capsys, PUBLISHED, *more)


@pytest.mark.parametrize('record', [{'loader_images_per_sec': 32000.0},
                                    {'stage': 'loader', 'images_per_sec': None, 'loader_images_per_sec': 32000.0}])
def test_the_loader_is_shown_in_times_the_model(capsys, write, record):
    path = write({'images_per_sec': 900.0, 'num_devices': 4}, {'images_per_sec': 640.0, 'use_ema': True}, {}, record)
    assert "40.0 times the model's 800.0" in printed(capsys, path)


def test_a_table_that_cannot_be_extrapolated_says_so_below_another_that_can(capsys, write):
    text = printed(capsys, PUBLISHED, write({}), '--extrapolate', 512)
    assert '| extrapolated ' in text and '\n--extrapolate: a fit needs three' in text


def test_price_and_images_are_flags(capsys):
    row = cells(printed(capsys, PUBLISHED, '--training_images', 11_076_480, '--dollars_per_gpu_hour', 10))[0][0]
    assert (row['days'], row['GPU-hours'], row['cost']) == ('1.00', '192', '$1,920')


def test_a_csv_of_several_settings_tells_them_and_unfinished_runs_apart(tmp_path, capsys, write):
    path = write({'use_ema': True}, {'use_ema': False}, {'use_ema': False, 'status': 'failed', 'images_per_sec': None})
    printed(capsys, path, '--csv', tmp_path / 'table.csv')
    rows = list(csv.DictReader((tmp_path / 'table.csv').open()))
    assert [(row['use_ema'], row['days'][:5], row['status']) for row in rows] == [
        ('yes', '41.48', 'complete'), ('no', '41.48', 'complete'), ('no', '', 'failed')]


def test_the_csv_holds_the_rows_unrounded(tmp_path, capsys):
    printed(capsys, PUBLISHED, '--csv', tmp_path / 'table.csv', '--extrapolate', 512)
    text = (tmp_path / 'table.csv').read_text()
    assert text.splitlines()[0] == ('device,num_devices,images_per_sec,images_per_sec_per_device,scaling_efficiency,'
                                    'days,gpu_hours,cost_usd,extrapolated')
    rows = list(csv.DictReader(text.splitlines()))
    assert [row['extrapolated'] for row in rows] == ['no'] * 5 + ['yes'] * 2
    assert float(rows[3]['days']) == 2_867_200_000 / 912.2 / 86_400
    assert float(rows[3]['scaling_efficiency']) == pytest.approx(912.2 / 64 / (128.2 / 8), rel=1e-14)


def test_the_same_records_give_the_same_report_from_jsonl_and_csv_with_a_byte_order_mark(tmp_path, capsys, write):
    rows = csv.DictReader(Path(PUBLISHED).open())
    lines = write(*({key: records.value_of_csv_cell(cell) for key, cell in row.items()} for row in rows))
    (tmp_path / 'bom.jsonl').write_bytes(b'\xef\xbb\xbf' + Path(lines).read_bytes())
    texts = {printed(capsys, path) for path in (PUBLISHED, lines, tmp_path / 'bom.jsonl')}
    assert len(texts) == 1


BAD_RECORDS = [
    ({'images_per_sec': None}, 'no images_per_sec'), ({'device': ''}, 'no device'),
    ({'num_devices': 0}, 'num_devices 0'),
    ({'images_per_sec': -1.0}, 'images_per_sec -1'), ({'images_per_sec': float('nan')}, 'images_per_sec nan'),
    ({'images_per_sec': float('inf')}, 'images_per_sec inf'), ({'images_per_sec': True}, 'images_per_sec True'),
    ({'images_per_sec': 10**400}, 'images_per_sec 1000'), ({'num_devices': 1.5}, 'num_devices 1.5'),
    ({'images_per_sec': '1,618'}, "images_per_sec '1,618'"), ({'batch_size': -2}, 'batch_size -2'),
    ({'drift': 'x'}, "drift 'x' is not a number"), ({'measured_batches': True}, 'measured_batches True'),
    ({'bytes_per_image': 0}, 'bytes_per_image 0'), ({'bytes_per_image': 'x'}, "bytes_per_image 'x'"),
    ({'loader_images_per_sec': 0}, 'loader_images_per_sec 0'), ({'stage': 'loader'}, 'no loader_images_per_sec')]


@pytest.mark.parametrize('record, reason', BAD_RECORDS)
def test_a_bad_record_is_named_by_file_and_line(capsys, write, record, reason):
    path = write({}, record)
    assert f'{path}:2: not a record: {reason}' in refusal(capsys, path)


@pytest.mark.parametrize('name, content, reason', [
    ('a.jsonl', b'{"device": 1}\nnot json\n', ':1: not a record: no num_devices, image_size, images_per_sec'),
    ('a.jsonl', b'\n\nnot json\n', ':3: '), ('a.jsonl', b'[1]\n', ':1: not a record: not one JSON object'),
    ('a.jsonl', b'[' * 100_000, ':1: '), ('a.jsonl', b'', ': no records'), ('a.csv', b'', ': no records'),
    ('a.csv', b'device,num_devices\n', ': no records'), ('a.csv', b'device,num_devices\nx,1,2\n', ':2: '),
    ('a.csv', b'device,num_devices,image_size,images_per_sec\nH200,8,512,\n', ':2: not a record: no images_per_sec'),
    ('a.csv', b'device,num_devices,image_size,images_per_sec\nH200,8,512,inf\n', ':2: not a record: images_per_sec'),
    ('a.jsonl', b'\x89PNG\r\n\x1a\n\xff', ':1: not a record: '), ('a.jsonl', b'{"device": "H2', ': no records')])
def test_a_bad_file_is_named(tmp_path, capsys, name, content, reason):
    (tmp_path / name).write_bytes(content)
    assert f'{tmp_path / name}{reason}' in refusal(capsys, tmp_path / name)


@pytest.mark.parametrize('left', [1, 0.5, 0.8, 0.99])
def test_a_line_that_was_cut_is_left_out_and_named(tmp_path, capsys, left):
    whole = json.dumps({'versions': {'torch': '2.7.0'}} | MINIMAL | {'gpu': {'name': 'x'}})
    cut = whole[:int(left * (len(whole) - 1))]
    path = tmp_path / 'results.jsonl'
    for lines in ([whole, cut], [cut, whole]):  # the next run begins a line of its own
        path.write_text('\n'.join(lines))
        text = printed(capsys, path)
        assert f'Left out: {path}:{lines.index(cut) + 1} is cut' in text
        assert cells(text)[0][0]['images/s'] == '800.0' and len(cells(text)[0]) == 1
    path.write_text(whole)
    assert 'Left out' not in printed(capsys, path)


def test_phases_that_no_number_of_gpus_has_all_of_are_refused(capsys, write):
    path = write({}, {'num_devices': 16, 'image_size': 256})
    assert 'at 256 and 512 px; the records have 256 px on 16 GPUs, 512 px on 8 GPUs' in refusal(
        capsys, path, '--phase', '1@256', '--phase', '1@512')
    assert 'have none that count' in refusal(capsys, write({'drift': 1.5}), '--phase', '1@512')


def test_a_missing_matplotlib_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    assert 'matplotlib' in refusal(capsys, PUBLISHED, '--figure', tmp_path / 'days.png')


# On 8 GPUs: encoding 86,400,000 images takes 0.25 days, 48 GPU-hours, $96; training on the latents of 172,800,000 takes
# 2 days, 384 GPU-hours, $768, and with the encoders in the loop 4 days, 768 GPU-hours, $1536. Latents take 4.32 TB.
ENCODE = {'stage': 'encode', 'images_per_sec': 4000, 'bytes_per_image': 50_000}
LATENTS = {'encoders': 'text_in_loop', 'images_per_sec': 1000, 'device_train_microbatch_size': 8}
IN_LOOP = {'encoders': 'in_loop', 'images_per_sec': 500, 'device_train_microbatch_size': 4}
IMAGES = ['--dataset_images', 86_400_000, '--training_images', 172_800_000]


def plans(tmp_path, capsys, *argv):
    """The printed rows of the last table, and the rows of its plans in the CSV file."""
    table = cells(printed(capsys, *argv, '--csv', tmp_path / 'table.csv'))[-1]
    return table, [row for row in csv.DictReader((tmp_path / 'table.csv').open()) if row['stage'] == 'plan']


def test_encoding_once_costs_the_encoding_the_training_on_latents_and_their_storage(tmp_path, capsys, write):
    table, rows = plans(tmp_path, capsys, write(ENCODE, IN_LOOP, LATENTS), *IMAGES)
    assert [row['encoders'] for row in table] == [row['encoders'] for row in rows] == ['in_loop', 'text_in_loop']
    assert [(row['days'], row['GPU-hours']) for row in table] == [('4.00', '768'), ('2.25', '432')]
    assert (table[1]['encoding'], table[1]['latents'], table[0]['cost']) == ('0.250 days', '4.32 TB', '$1,536')
    assert float(rows[1]['cost_usd']) == pytest.approx(96 + 768 + 4.32 * 23 * 2 / (365 / 12))
    assert rows[1]['images_per_sec'] == rows[0]['encode_days'] == rows[0]['pays_off_images'] == ''


@pytest.mark.parametrize('price, images', [
    (0, 86_400_000 * (8 / 4000) / (8 / 500 - 8 / 1000)),  # D e / (f - l)
    (23, 172_800_000 * 96 / (1536 - 768 - 4.32 * 23 * 2 / (365 / 12))), (2750, None), (10_000, None)])
def test_encoding_once_pays_off_once_training_has_saved_its_cost(tmp_path, capsys, write, price, images):
    argv = [write(ENCODE, IN_LOOP, LATENTS), *IMAGES, '--dollars_per_tb_month', price]
    table, rows = plans(tmp_path, capsys, *argv)
    assert float(rows[1]['pays_off_images']) == (pytest.approx(images) if images else float('inf'))
    assert table[1]['pays off from'] == (f'{images:,.0f} images' if images else 'never')
    if images:  # at that many images the two plans cost the same
        _, rows = plans(tmp_path, capsys, *argv, '--training_images', round(images))
        assert float(rows[0]['cost_usd']) == pytest.approx(float(rows[1]['cost_usd']))


@pytest.mark.parametrize('speed', [500, 400])
def test_encoding_once_never_pays_off_where_training_on_latents_is_not_faster(tmp_path, capsys, write, speed):
    path = write(ENCODE, IN_LOOP, LATENTS | {'images_per_sec': speed})
    assert plans(tmp_path, capsys, path, *IMAGES, '--dollars_per_tb_month', 0)[0][1]['pays off from'] == 'never'


def test_an_encoding_is_shared_out_over_the_gpus_that_train_and_the_median_of_its_records_counts(capsys, write):
    encodings = [ENCODE | {'num_devices': n, 'images_per_sec': speed, 'bytes_per_image': size}
                 for n, speed, size in [(1, 400, 10_000), (2, 1000, 50_000), (8, 8000, 90_000)]]  # 400, 500, 1000 each
    table = cells(printed(capsys, write(*encodings, LATENTS, LATENTS | {'num_devices': 16}), *IMAGES))[-1]
    assert [(row['encoding'], row['GPU-hours'], row['latents']) for row in table] == [
        ('0.250 days', '432', '4.32 TB'), ('0.125 days', '816', '4.32 TB')]
    assert 'pays off from' not in table[0]  # nothing to compare with


@pytest.mark.parametrize('key, value', [('num_devices', 16), ('use_ema', True), ('dataset', 'streaming'),
                                        ('device', 'H100'), ('encoders', 'none'), ('status', 'interrupted')])
def test_latents_are_compared_only_with_a_run_that_agrees_in_all_but_encoders_and_microbatch(capsys, write, key, value):
    table = cells(printed(capsys, write(ENCODE, IN_LOOP | {key: value}, LATENTS), *IMAGES))[-1]
    assert table[-1]['days'] == '2.25' and 'pays off from' not in table[-1]


@pytest.mark.parametrize('other', [{'device': 'H100'}, {'model_name': 'tiny'}, {'image_size': 256},
                                   {'status': 'interrupted'}, {'bytes_per_image': None}])
def test_a_plan_whose_encoding_was_not_measured_has_no_cost_and_says_so(capsys, write, other):
    there = {'device': 'another', 'image_size': 1024}  # without any encode record there is no table of plans
    table = cells(printed(capsys, write(ENCODE | there, ENCODE | other, IN_LOOP, LATENTS), *IMAGES))[-1]
    assert [row['days'] for row in table] == ['4.00', ''] and table[1]['cost'] == ''
    assert table[1]['notes'] == 'no encode record with bytes_per_image at 512 px'


def test_phases_on_latents_encode_each_image_once_for_each_size(tmp_path, capsys, write):
    at_256 = [record | {'image_size': 256, 'images_per_sec': 4 * record['images_per_sec']}
              for record in (ENCODE | {'bytes_per_image': 12_500}, IN_LOOP, LATENTS)]
    path, size_512 = write(ENCODE, IN_LOOP, LATENTS, *at_256), ['--phase', '86400000@512', '--phase', '86400000@512']
    argv = [path, *IMAGES, '--dollars_per_tb_month', 0, '--phase', '172800000@256', *size_512]
    _, (in_loop, latents) = plans(tmp_path, capsys, *argv)
    assert float(in_loop['days']) == pytest.approx(1 + 2 + 2)
    assert float(latents['encode_days']) == pytest.approx(0.0625 + 0.25)
    assert float(latents['days']) == pytest.approx(0.0625 + 0.25 + 0.5 + 1 + 1)
    assert float(latents['latents_tb']) == pytest.approx(1.08 + 4.32)
    assert float(latents['pays_off_images']) == pytest.approx(345_600_000 * 0.3125 / (5 - 2.5))
    table = cells(printed(capsys, write(*at_256[1:], ENCODE, IN_LOOP, LATENTS), *argv[1:]))[-1]
    assert table[1]['notes'] == 'no encode record with bytes_per_image at 256 px' and table[1]['cost'] == ''


def test_encode_records_have_tables_of_their_own_for_the_data_set_and_enter_no_fit_or_figure(capsys, write, tmp_path):
    path = write(*({**ENCODE, 'num_devices': n} for n in (8, 16, 32)), LATENTS)
    encode, train, _ = cells(printed(capsys, path, *IMAGES))
    assert (encode[0]['days'], encode[0]['GPU-hours'], encode[0]['cost']) == ('0.250', '48.0', '$96.0')
    assert encode[0]['latents'] == '4.32 TB' and 'latents' not in train[0] and train[0]['days'] == '2.00'
    assert [len(table) for table in cells(printed(capsys, path, '--compare'))[:2]] == [3, 1]
    assert 'not 1' in refusal(capsys, path, '--extrapolate', 64)
    assert 'no complete record' in refusal(capsys, write(ENCODE), '--figure', tmp_path / 'days.png')
    assert 'no training' in refusal(capsys, write(ENCODE), '--extrapolate', 64)


def test_an_encoding_says_that_it_counts_the_data_set_and_not_the_images_to_train_on(capsys, write):
    path = write(ENCODE, LATENTS)
    text = printed(capsys, path, '--training_images', 1000)
    below_table = text.split('### ')[1]  # of the encoding, which comes first
    assert cells(below_table)[0][0]['days'] == '8.39'
    assert 'all 2,900,000,000 images of the data set once (--dataset_images)' in below_table
    assert '--training_images does not change them' in below_table
    assert 'all 2,900,000,000 images of the data set (--dataset_images) are encoded' in text.split('### Plan')[1]
    assert '--training_images does not change them' in printed(capsys, path, '--compare')
    assert '--dataset_images' not in printed(capsys, write(LATENTS))
    assert 'Of an encoding: days, GPU-hours, cost, latents count all' in text
    tiny = write(ENCODE | {'model_name': 'tiny'})
    assert 'Of an encoding' not in printed(capsys, tiny) + printed(capsys, tiny, '--compare')
    on_cpu = printed(capsys, write(ENCODE | CPU, LATENTS | CPU))
    assert 'Of an encoding: days, latents count' in on_cpu and 'the cost holds' not in on_cpu


@pytest.mark.parametrize('other, more, column, ratios', [
    ({'status': 'interrupted'}, [], 'efficiency', ['100.0 %', '', '50.0 %']),
    ({'status': 'interrupted'}, ['--compare'], 'over first', ['', '1.00 x', '1.00 x']),
    ({'extrapolated': True}, [], 'efficiency', ['100.0 %', '110.0 %', '50.0 %']),
    ({'extrapolated': True}, ['--compare'], 'over first', ['1.10 x', '1.00 x', '1.00 x'])])
def test_ratios_are_those_of_complete_runs_to_the_first_measured_one(capsys, write, other, more, column, ratios):
    table, = cells(printed(capsys, write(other | {'images_per_sec': 880.0}, {}, {'num_devices': 16}), *more))
    assert [row[column] for row in table] == ratios
    alone, = cells(printed(capsys, write(other), *more))
    assert column not in alone[0] and alone[0]['images/s'] == '800.0'


def test_what_all_records_have_in_common_is_said_once_and_headings_say_what_differs(capsys, write):
    common = {'precision': 'amp_bf16', 'use_ema': True}
    path = write(*(common | {'compile': value, 'versions': {'composer': '0.32.1', 'torch': torch}}
                   for value, torch in ((False, '2.7.0'), (True, '2.11.0'))))
    text = printed(capsys, path)
    assert text.startswith('All records in the tables: H200, 512 px, stage train, use_ema yes, composer 0.32.1, other '
                           'settings at the defaults\n')
    assert [line for line in text.splitlines() if line.startswith('#')] == [
        '### torch 2.7.0', '### compile yes, torch 2.11.0']
    assert text.count('0.32.1') == 1
    table, = cells(printed(capsys, path, '--compare'))
    assert [row['versions'] for row in table] == ['torch 2.7.0', 'torch 2.11.0']


def test_a_setting_that_some_records_do_not_state_is_named_in_their_heading(capsys, write):
    text = printed(capsys, write({'use_ema': True}, {}))
    assert '### use_ema yes\n' in text and '### not stated: use_ema\n' in text


def test_settings_at_their_defaults_are_named_where_nothing_else_tells_tables_apart(capsys, write):
    text = printed(capsys, write({'compile': False}, {'compile': False, 'use_ema': False}, {'use_ema': True}))
    assert [line for line in text.splitlines() if line.startswith('#')] == [
        '### use_ema not stated', '### use_ema no', '### use_ema yes']


def test_a_record_of_benchmark_py_without_flags_names_no_switch(capsys, write):
    flags = vars(parse(Train, '', ['--use_synth_data']))
    machine = {'precision': 'amp_bf16', 'encoder_precision': 'bf16', 'channels_last': True, 'dataset': 'synthetic',
               'num_workers': 0, 'num_workers_by_default': True, 'encoders': 'in_loop', 'batch_size': 64}
    text = printed(capsys, write(flags | machine | MINIMAL))
    assert text.startswith('All records in the tables: H200, 512 px, stage train, batch_size 64, encoders in_loop, '
                           'dataset synthetic, other settings at the defaults\n')


def test_a_switch_at_its_default_is_in_no_heading_beside_records_that_have_it_not(capsys, write):
    one = {'num_devices': 1}
    text = printed(capsys, write(ENCODE | one, one | {'compile': False, 'compile_blocks': False}), '--compare')
    assert [line for line in text.splitlines() if line.startswith('#')] == ['### stage encode', '### stage train']


def test_a_quoted_cell_of_two_lines_counts_as_two_lines_of_the_file(tmp_path, capsys):
    path = tmp_path / 'a.csv'
    path.write_text('device,num_devices,image_size,images_per_sec\n"H\n200",8,512,5\n\nH200,8,512,x\n')
    assert f'{path}:5: not a record: images_per_sec' in refusal(capsys, path)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def labels(axes):
    return [label.get_text().replace('\n', ' ').replace('\u00a0', ' ') for label in axes.get_yticklabels()]


SPEEDS = [{'compile': False, 'use_ema': True, 'device_train_microbatch_size': 8},
          {'compile': True, 'use_ema': True, 'device_train_microbatch_size': 16, 'images_per_sec': 1000.0},
          {'compile': False, 'use_ema': False, 'device_train_microbatch_size': 8, 'images_per_sec': 900.0},
          {'compile': False, 'use_ema': True, 'device_train_microbatch_size': 32, 'images_per_sec': None,
           'status': 'failed', 'error': 'out of memory'}]


def test_the_ladder_is_a_bar_for_each_record_named_by_what_differs_and_is_not_at_its_default(drawn, write):
    axes, = drawn(write(*SPEEDS), '--compare').axes
    assert [bar.get_width() for bar in axes.patches] == [800, 1000, 900, 0] and axes.get_xlim()[0] == 0
    assert labels(axes) == [
        'device_train_microbatch_size 8, use_ema yes', 'device_train_microbatch_size 16, use_ema yes, compile yes',
        'device_train_microbatch_size 8', 'device_train_microbatch_size 32, use_ema yes']
    assert texts(axes) == ['800.0   1.00 x', '1,000.0   1.25 x', '900.0   1.12 x', 'failed: out of memory']
    assert axes.yaxis_inverted()  # the first record is on top


def test_bars_of_tables_of_their_own_have_no_ratio(drawn, write):
    assert texts(drawn(write(*SPEEDS)).axes[0])[:3] == ['800.0', '1,000.0', '900.0']


def test_bars_that_are_all_as_long_as_the_first_have_no_ratio(drawn, write):
    runs = [{'date': f'2026-11-2{day}T10:00:00+00:00', 'images_per_sec': 800 + day / 10} for day in range(3)]
    assert texts(drawn(write(*runs), '--compare').axes[0]) == ['800.0', '800.1', '800.2']


def test_a_setting_that_a_record_does_not_state_is_named_so_in_its_label(drawn, write):
    assert labels(drawn(write({}, {'precision': 'fp32'}), '--compare').axes[0]) == [
        'not stated: precision', 'precision fp32']


def test_a_microbatch_that_is_the_whole_share_of_a_rank_on_a_cpu_is_in_no_label(drawn, write):
    runs = [CPU | {'num_devices': 2, 'batch_size': batch, 'device_train_microbatch_size': batch // 2}
            for batch in (4, 16, 32)]
    assert labels(drawn(write(*runs), '--compare').axes[0]) == ['batch_size 4', 'batch_size 16', 'batch_size 32']
    runs[1]['device_train_microbatch_size'] = 4
    assert labels(drawn(write(*runs), '--compare').axes[0])[1] == 'batch_size 16, device_train_microbatch_size 4'


def test_a_default_is_named_only_where_it_tells_two_settings_apart(drawn, write):
    others = [{'batch_size': 8 * n, 'compile': False, 'use_ema': False} for n in range(1, 12)]
    found = labels(drawn(write({'batch_size': 8}, *others), '--compare').axes[0])
    assert found == ['batch_size 8, use_ema not stated, compile not stated', 'batch_size 8, use_ema no, compile no',
                     *[f'batch_size {8 * n}' for n in range(2, 12)]]


def test_labels_that_differ_only_after_eight_lines_are_not_cut(drawn, write):
    long = {'model_name': 'an/architecture-' * 30}
    runs = [long | {'num_workers': n} for n in (1, 2)]
    found = labels(drawn(write({'model_name': 'other'}, *runs), '--compare').axes[0])
    assert [label.rpartition(' ')[2] for label in found[1:]] == ['1', '2']


def test_a_date_is_in_the_labels_of_those_bars_that_nothing_else_tells_apart(drawn, write):
    path = write(*({'compile': compiled, 'date': f'2026-11-2{day}T10:00:00+00:00'}
                   for day, compiled in enumerate((True, False, False))))
    assert labels(drawn(path, '--compare').axes[0]) == [
        'compile yes', 'at the defaults, 2026-11-21 10:00:00', 'at the defaults, 2026-11-22 10:00:00']


@pytest.mark.parametrize('more', [[], ['--compare']])
def test_one_record_is_one_bar(drawn, write, more):
    figure = drawn(write({'num_workers': 1}), *more)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [800] and labels(figure.axes[0]) == ['8 GPUs']
    assert texts(figure.axes[0]) == ['800.0'] and 'num_workers 1, ' in figure.get_supxlabel()
    assert '2,867,200,000 images take 41.48 days' in figure.get_supxlabel()


def test_several_gpu_counts_show_days_beside_efficiency(drawn):
    figure = drawn(PUBLISHED)
    days, efficiency = figure.axes
    assert texts(days) == ['258.85', '130.65', '68.32', '36.38', '20.50', '12.82']
    assert texts(efficiency) == ['100.0 %', '99.1 %', '94.7 %', '88.9 %', '78.9 %', '63.1 %']
    assert labels(days) == [f'{count} GPUs' for count in IMAGES_PER_SEC]
    assert days.get_xlim()[0] == efficiency.get_xlim()[0] == 0
    assert [bar.get_facecolor()[3] for bar in days.patches] == [1] * 5 + [0]  # the extrapolated one is hollow
    assert 'Hollow bars are extrapolated' in figure.get_supxlabel()


def test_nodes_are_named_where_some_gpus_ran_on_several_numbers_of_them(drawn, write):
    figure = drawn(write(*({'num_devices': gpus, 'num_nodes': nodes} for gpus, nodes in ((8, 1), (16, 2), (16, 4)))))
    assert labels(figure.axes[0]) == ['8 GPUs on 1 node', '16 GPUs on 2 nodes', '16 GPUs on 4 nodes']


def test_the_figure_says_what_it_leaves_out(drawn, write):
    counts = [{'num_devices': n, 'images_per_sec': 100.0 * n} for n in (8, 16)]
    path = write(*counts, {'status': 'interrupted'}, ENCODE)
    assert 'Not drawn: 1 run without days: not ended, or in doubt.\nNot drawn: 1 row of encoding.' in drawn(
        path).get_supxlabel()
    many = write(*({'seed': seed} for seed in range(figures.MOST_BARS + 2)))
    figure = drawn(many, '--compare')
    assert len(figure.axes[0].patches) == figures.MOST_BARS
    assert 'Not drawn: the last 2 records.' in figure.get_supxlabel()
    settings = [count | {'seed': 0, 'num_workers': n} for n in range(1, len(figures.COLORS) + 2) for count in counts]
    assert 'Not drawn: 2 rows of more than 8 settings' in drawn(write(*settings)).get_supxlabel()


def boxes_of_texts(figure):
    """The boxes of everything written in a figure, in pixels."""
    figure.draw_without_rendering()
    written = [*figure.texts, *(text for legend in figure.legends for text in (legend.get_title(), *legend.texts))]
    for axes in figure.axes:
        written += [axes.xaxis.label, *axes.texts]
        written += [label for label in axes.get_yticklabels() if label.get_visible()]
        written += [label for label in axes.get_xticklabels() if axes.get_xlim()[0] <= label.get_position()[0]
                    <= axes.get_xlim()[1]]
    return [text.get_window_extent() for text in written if text.get_text() and text.get_visible()]


LONG = {'model_name': 'an/architecture-with-a-long-name', 'device': 'H100 $1 $2', 'encoder_precision': 'fp32',
        'attention': 'xformers', 'dataset': 'streaming', 'channels_last': False, 'fused_optimizer': False}
SHORT = {'model_name': 'short', 'precision': 'fp32', 'encoder_precision': 'fp32', 'attention': 'sdpa',
         'dataset': 'synthetic', 'channels_last': False, 'fused_optimizer': False}


@pytest.mark.parametrize('changes, more', [
    ([SHORT, LONG, *SPEEDS], ['--compare']),
    ([how | {'num_devices': n, 'images_per_sec': speed * factor} for n, speed in IMAGES_PER_SEC.items()
      for how, factor in ((SHORT, 1), (LONG, 1.07))], ['--extrapolate', 512, 1024])])
def test_no_text_of_a_figure_runs_into_another_or_out_of_it(drawn, write, changes, more):
    figure = drawn(write(*changes), *more)
    boxes = boxes_of_texts(figure)
    for index, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[index + 1:])


def test_the_figure_is_written_and_letters_that_no_font_has_are_one_warning(tmp_path, capsys, write):
    path = write({'device': 'Über $1 中文'}, {'num_devices': 16, 'extrapolated': True}, {'status': 'failed'})
    report.main([path, '--figure', str(tmp_path / 'days.png')])
    assert (tmp_path / 'days.png').read_bytes().startswith(b'\x89PNG')
    warned = capsys.readouterr().err.removesuffix(f'wrote {tmp_path / "days.png"}\n')
    if figures.fonts_for(records.read_records(path)[0])[1]:
        assert warned.count('\n') == 1 and 'shows boxes for 中文, which no font here has' in warned
    else:
        assert not warned


def test_a_letter_that_the_usual_font_lacks_comes_from_another_installed_one(write):
    letter = '\u20dd'  # of STIX, which comes with matplotlib
    rows, _ = records.read_records(write({'device': f'a{letter}'}))
    (usual, other), missing = figures.fonts_for(rows)
    assert not missing and usual == 'DejaVu Sans' and ord(letter) in get_font(findfont(other)).get_charmap()


def test_neither_torch_nor_matplotlib_is_imported_for_a_table():
    code = ('import report, sys; report.main(sys.argv[1:]); '
            'assert not {"torch", "matplotlib"} & {*sys.modules}')
    subprocess.run([sys.executable, '-c', code, PUBLISHED], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_a_label_breaks_between_settings_and_a_name_longer_than_a_line_begins_one_and_breaks_at_a_hyphen():
    label = figures.wrapped('H200 Über, model_name Über/eine-Architektur-mit-sehr-langem-Namen, compile yes', 40)
    assert label.replace('\u00a0', ' ').split('\n') == [
        'H200 Über, model_name', 'Über/eine-Architektur-mit-sehr-langem-', 'Namen,', 'compile yes']
    assert figures.wrapped('a b, ' * 10, 4).split('\n')[7:] == ['a\u00a0b, …']
