"""What report.py says of evaluations: their scores, what the training until them took, and when they were good."""
import csv
import json

import pytest

import report
from reporting import quality_figure
from reporting.quality import MLPERF_CLIP_SCORE, MLPERF_FID, read_evaluations

FLAGS = {'model_name': 'sd2', 'image_size': 512, 'batch_size': 2048, 'seed': 17, 'learning_rate': 1e-4}
GPU = {'device': 'NVIDIA H100 80GB HBM3', 'device_type': 'cuda', 'num_devices': 8}
TRAINING = GPU | FLAGS | {'stage': 'train', 'images_per_sec': 400.0, 'trained_batches': 2000}
EVALUATION = GPU | {
    'stage': 'evaluate', 'model': 'kept/ep0-ba1000-rank0.pt', 'model_sha256': '1', 'data': 'coco.txt', 'samples': 30000,
    'image_size': 512, 'steps': 50, 'seed': 17, 'weights': 'averaged', 'trained_batches': 1000,
    'images_seen': 2_048_000, 'training': FLAGS | {'remote': 's3://bucket'}, 'clip': 'vit',
    'scores': [{'guidance': 1.5, 'fid': 95.5, 'clip_score': 14.0}, {'guidance': 4, 'fid': 0.0, 'clip_score': 15.0}]}
LATER = EVALUATION | {'model_sha256': '2', 'trained_batches': 2000, 'images_seen': 4_096_000, 'scores': [
    {'guidance': 1.5, 'fid': 40.0, 'clip_score': 20.0}, {'guidance': 4, 'fid': 30.0, 'clip_score': 25.0}]}


@pytest.fixture
def write(tmp_path):
    def write(*records) -> str:
        path = tmp_path / 'results.jsonl'
        path.write_text(''.join(json.dumps(record) + '\n' for record in records))
        return str(path)
    return write


def test_gpu_hours_and_dollars_are_those_of_the_images_seen_at_the_speed_of_the_training(write):
    rows = read_evaluations([write(TRAINING, EVALUATION, LATER)], dollars_per_gpu_hour=3)
    assert list(rows['gpu_hours']) == pytest.approx([2_048_000 / 400 / 3600 * 8] * 2 + [4_096_000 / 400 / 3600 * 8] * 2)
    assert list(rows['cost_usd']) == pytest.approx([hours * 3 for hours in rows['gpu_hours']])
    assert list(rows['guidance']) == [1.5, 4, 1.5, 4] and list(rows['fid']) == [95.5, 0, 40, 30]


@pytest.mark.parametrize('change', [{'learning_rate': 2e-4}, {'trained_batches': 999}, {'device_type': 'cpu'},
                                    {'images_per_sec': None}, {'stage': 'encode'}], ids=str)
def test_the_speed_of_another_training_is_not_taken(write, change):
    rows = read_evaluations([write(TRAINING | change, EVALUATION)], 2)
    assert rows['gpu_hours'].isna().all() and rows['cost_usd'].isna().all()


def test_an_evaluation_that_was_repeated_counts_once_and_another_one_as_well(write):
    repeated = EVALUATION | {'samples_drawn': 0, 'date': 'later'}
    assert len(read_evaluations([write(EVALUATION, repeated)], 2)) == 2
    assert len(read_evaluations([write(EVALUATION, EVALUATION | {'samples': 10})], 2)) == 4


def test_the_report_has_a_table_of_scores_and_says_when_both_lines_were_first_reached(write, tmp_path, capsys):
    few = LATER | {'fid_is_biased': True, 'fid_of_published_weights': False}
    report.main([write(TRAINING, EVALUATION, few), '--csv', str(tmp_path / 'table.csv')])
    text = capsys.readouterr().out
    assert '### Evaluations: 30,000 pictures of 512 px, 50 steps, CLIP vit' in text
    assert 'kept: both lines are first reached after 2,048,000 images, at guidance 4, 11.38 GPU-hours, $22.76.' in text
    assert 'FID of few pictures is too high, FID by other weights' in text and 'CLIP ViT-H-14' in text
    rows = list(csv.DictReader(open(tmp_path / 'table.csv')))
    assert [row['fid'] for row in rows] == ['', '95.5', '0.0', '40.0', '30.0'] and rows[0]['images_per_sec'] == '400.0'


def test_a_file_of_evaluations_alone_is_a_report_and_none_enters_the_speeds(write, capsys):
    report.main([write(EVALUATION)])
    alone = capsys.readouterr().out
    assert '| kept' in alone and 'images/s |' not in alone
    report.main([write(TRAINING, EVALUATION)])
    assert capsys.readouterr().out.count('images/s |') == 1


@pytest.mark.parametrize('change', [{'scores': None}, {'scores': [{'guidance': 1}]}, {'samples': 'many'},
                                    {'scores': [{'guidance': 1, 'fid': -1, 'clip_score': None}]}], ids=str)
def test_a_record_without_scores_is_named_in_one_line(write, capsys, change):
    with pytest.raises(SystemExit):
        report.main([write(TRAINING, EVALUATION | change)])
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and 'results.jsonl:2: not a record of evaluate.py' in error


@pytest.fixture
def drawn(monkeypatch, capsys):
    """Calls report.py with --quality and returns the figure, which is not written."""
    def draw(path: str):
        kept = []
        monkeypatch.setattr(quality_figure, 'save', lambda figure, path, flag: kept.append(figure))
        report.main([path, '--quality', 'quality.png'])
        return kept[0]
    return draw


def test_the_picture_has_both_scores_over_guidance_and_over_images_with_mlperfs_lines(drawn, write):
    curve, fid, clip = drawn(write(TRAINING, EVALUATION, LATER)).axes
    assert [list(line.get_xdata()) for line in curve.lines[:2]] == [[14, 15], [20, 25]]
    assert [list(line.get_ydata()) for line in curve.lines[:2]] == [[95.5, 0], [40, 30]]
    assert [text.get_text() for text in curve.texts] == ['1.5', '4'] * 2
    assert [list(line.get_ydata()) for line in fid.lines[:2]] == [[95.5, 40], [0, 30]]
    assert list(fid.lines[0].get_xdata()) == list(clip.lines[0].get_xdata()) == [2_048_000, 4_096_000]
    assert set(fid.lines[2].get_ydata()) == {MLPERF_FID} and set(clip.lines[2].get_ydata()) == {MLPERF_CLIP_SCORE}
    hours = fid.child_axes[0]
    assert hours.xaxis.get_major_formatter()(10, None) == '10\n$20'
    assert hours._functions[0](2_048_000) == pytest.approx(2_048_000 / 400 / 3600 * 8)


def test_a_distance_by_another_network_has_no_lines_of_mlperf_and_a_wide_span_a_logarithmic_axis(drawn, write, capsys):
    other = {'network': 'a small network'}
    far = EVALUATION | other | {'scores': [{'guidance': 2, 'fid': 5000.0, 'clip_score': None}]}
    near = LATER | other | {'scores': [{'guidance': 2, 'fid': 20.0, 'clip_score': None}]}
    [fid] = drawn(write(far, near)).axes
    assert fid.get_yscale() == 'log' and len(fid.lines) == 1
    text = capsys.readouterr().out
    assert 'FID by a small network' in text and 'MLPerf' not in text and 'first reached' not in text


def test_the_picture_leaves_out_the_panels_that_nothing_is_known_for(drawn, write, capsys):
    without_training = EVALUATION | {'images_seen': None, 'training': None}
    assert len(drawn(write(without_training)).axes) == 1
    only_fid = EVALUATION | {'scores': [{'guidance': 2, 'fid': 7.0, 'clip_score': None}]}
    [fid] = drawn(write(only_fid)).axes
    assert fid.get_ylabel() == 'FID' and not fid.child_axes
    with pytest.raises(SystemExit):
        drawn(write(TRAINING))
    assert '--quality quality.png: no record with both scores' in capsys.readouterr().err


def test_the_title_names_what_is_drawn_alone_and_what_it_can_be_compared_with(drawn, write):
    biased = EVALUATION | {'samples': 64, 'fid_is_biased': True}
    without_scores = EVALUATION | {'steps': 7, 'scores': [{'guidance': 2, 'fid': None, 'clip_score': None}]}
    title = drawn(write(biased, without_scores)).get_suptitle().replace('\n', ' ').replace('\u00a0', ' ')
    assert title == 'Scores of 64 pictures of 512 px, 50 steps, CLIP vit (FID of few pictures is too high)'
    assert drawn(write(TRAINING, EVALUATION)).get_suptitle().count('Scores') == 1


def test_a_score_of_0_has_a_whole_dot_and_the_title_breaks_between_its_parts(drawn, write):
    first = EVALUATION | {'clip': 'clip-vit-base-of-a-long-name and clip', 'images_seen': 8, 'scores': [
        {'guidance': 2, 'fid': None, 'clip_score': 0.0}]}
    picture = drawn(write(first))
    [dot] = [line for line in picture.axes[0].lines if line.get_marker() == 'o']
    assert dot.get_ydata()[0] == 0 and not dot.get_clip_on()
    lines = picture.get_suptitle().replace('\u00a0', ' ').split('\n')
    assert lines[-1] == 'CLIP clip-vit-base-of-a-long-name and clip'


def legend_names(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def trained(number: int, **more) -> dict:
    """An evaluation of a training of its own."""
    return EVALUATION | {'model': f'kept{number}', 'model_sha256': str(number), 'training': {'seed': number}} | more


@pytest.mark.filterwarnings('error')
def test_title_and_legends_of_many_evaluations_end_and_leave_the_panels_their_room(drawn, write):
    many = [trained(number, clip=f'clip{number}', clip_sha256=str(number)) for number in range(60)]
    picture = drawn(write(*many))
    title = picture.get_suptitle().replace('\n', ' ').replace('\u00a0', ' ')
    assert title.count('pictures of') == 3 and title.endswith('CLIP clip2; and 57 more')
    for axes in picture.axes:
        assert sum(name.startswith('kept') for name in legend_names(axes)) == 8
        assert legend_names(axes)[-1] == 'MLPerf'
        assert sum(line.get_marker() == 'o' for line in axes.lines) >= 60  # all are drawn
    picture.canvas.draw()
    assert all(axes.get_position().height > 0.4 for axes in picture.axes)


@pytest.mark.filterwarnings('error')
def test_names_of_more_than_60_characters_are_cut(drawn, write):
    long = trained(1, model='m' * 300, clip='c' * 300)
    picture = drawn(write(long, trained(2)))
    picture.canvas.draw()
    assert f'CLIP {"c" * 55} …' in picture.get_suptitle().replace('\u00a0', ' ').replace('\n', ' ')
    for axes in picture.axes:
        assert legend_names(axes)[0].startswith(f'{"m" * 60} …, ')


def test_a_model_whose_name_begins_with_an_underscore_is_in_the_legends(drawn, write):
    for axes in drawn(write(trained(1, model='_mine'), trained(2))).axes:
        assert legend_names(axes)[0].strip().startswith('_mine')


def test_two_models_of_the_same_training_are_two_lines(drawn, write):
    one, other = trained(1, training=FLAGS), trained(2, training=FLAGS)
    _, fid, _ = drawn(write(one, other)).axes
    assert legend_names(fid)[:-1] == ['kept1, guidance 1.5', 'kept1, guidance 4', 'kept2, guidance 1.5',
                                      'kept2, guidance 4']
