"""Properties of reports on any records: tables, --csv and --html agree, and order and copies change nothing."""
import contextlib
import io
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as some

import report
from tests.report_tables import tables

DATA = [{}, {'eval_remote': 'held-out', 'eval_sha256': 'a' * 64}, {'eval_remote': 'held-out', 'eval_sha256': 'b' * 64}]
DEVICES = ['NVIDIA H200', 'NVIDIA B200', 'NVIDIA L40S']
FIGURES = ('GPUs', 'images/s', 'eval loss', 'batches')  # the same texts in Markdown and on a page
MEASURED = {'device': 'NVIDIA H200', 'num_devices': 8, 'image_size': 512, 'images_per_sec': 800.0}
# Without shrinking, which would make hundreds of reports.
REPORTS = settings(max_examples=6, deadline=None, phases=[Phase.reuse, Phase.generate])
dates = some.datetimes().map(lambda date: f'{date:%Y-%m-%dT%H:%M:%S+00:00}' if date.year > 1000 else None)
switches = some.fixed_dictionaries({
    'device': some.sampled_from(DEVICES), 'num_devices': some.sampled_from([8, 16]),
    'image_size': some.sampled_from([256, 512]), 'images_per_sec': some.integers(100, 9999).map(lambda n: n / 7),
    'compile': some.sampled_from([None, False, True, 'reduce-overhead']), 'use_ema': some.booleans(),
    'attention': some.sampled_from([None, 'sdpa', 'xformers']),
    'device_train_microbatch_size': some.sampled_from([None, 8, 16]),
    'by_default': some.sampled_from([[], ['device_train_microbatch_size']]),
    'status': some.sampled_from(['complete', 'complete', 'complete', 'failed', 'interrupted']),
    'error': some.sampled_from([None, 'out of "memory", |', 'a\nb']),
    'drift': some.sampled_from([None, 0.01, 0.5]), 'peak_memory_gib': some.sampled_from([None, 70.5]),
    'date': dates, 'command': some.sampled_from([None, 'benchmark.py']),
    'dollars_per_gpu_hour': some.sampled_from([None, [['H200', 3.0]], [[None, 4.5]]])})


@some.composite
def trainings(draw) -> list[dict]:
    """Return the records of a training that was resumed, or of one without an id."""
    training_id = draw(some.none() | some.text('0123456789e', min_size=12, max_size=12))
    records = []
    batch = 0
    for _ in range(draw(some.integers(1, 3)) if training_id else 1):
        first, batch = batch, batch + draw(some.integers(1, 100))
        data = draw(some.sampled_from(DATA))
        loss = draw(some.integers(1, 9999)) / 10_000
        evaluated = {'eval_loss': loss, 'eval_batch': batch, 'evaluations': [[batch, loss]]} if data else {}
        records.append(draw(switches) | data | evaluated | {
            'training_id': training_id, 'first_batch': first, 'trained_batches': batch, 'loss': 0.5,
            'max_duration': '300ba', 'learning_rate': draw(some.sampled_from([1e-4, 1e-3])),
            'load_weights': draw(some.sampled_from([None, 's3://a-bucket/with/a/long/name/and/more/of/it']))})
    return records


measurements = switches.map(lambda record: [record | {'measure_batches': 20}])
encodings = switches.map(lambda record: [record | {'stage': 'encode'}])
loaders = switches.map(lambda record: [record | {'stage': 'loader', 'loader_images_per_sec': 9000.5}])
many_records = some.lists(trainings() | measurements | encodings | loaders, min_size=1, max_size=4).map(
    lambda of: sum(of, []))


def write(records: list[dict], name: str = 'records.jsonl') -> str:
    """Write records into the folder of the test, where an example replaces the files of the one before it."""
    Path(name).write_text(''.join(json.dumps(record) + '\n' for record in records))
    return name


def printed(*argv) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        report.main([*argv])
    return output.getvalue()


def rows_of(text: str, with_notes: bool = True) -> list[tuple]:
    """Return the figures and all texts of each row, sorted. Row numbers follow from the order of the rows."""
    found = []
    for row in tables(text)[0]:
        texts = row['text'] if with_notes else re.sub('(median of .*? to [0-9.,]+|another training .*?)(; |$)', '',
                                                      row['text']).removesuffix('; ')
        texts = re.split('; |, ', texts) + [row.get('device', '')]
        figures = {key: value for key, value in row.items() if value
                   and key not in ('run', 'text', 'settings', 'notes', 'device', 'over the first')}
        found.append((sorted(figures.items()), sorted(filter(None, texts))))
    return sorted(found)


@pytest.mark.parametrize('flags', [(), ('--compare',)])
@REPORTS
@given(records=many_records, seed=some.integers(0, 99))
def test_neither_the_order_of_records_and_files_nor_a_second_copy_changes_a_row(flags, records, seed):
    if flags and all('stage' in record for record in records):  # no training
        return
    text = printed(write(records), *flags)
    assert max(map(len, text.splitlines())) <= 120
    others = random.Random(seed).sample(records, len(records))
    copies = [dict(reversed(record.items())) for record in others]  # with their keys in another order
    half = len(records) // 2
    parts = {'copies.jsonl': copies, 'second.jsonl': others[half:], 'first.jsonl': others[:half]}
    paths = [write(part, name) for name, part in parts.items() if part]
    assert rows_of(printed(*paths, *flags)) == rows_of(text)
    if all(record['date'] for record in records) and len({record['date'] for record in records}) == len(records):
        assert printed(*paths, *flags) == text


@REPORTS
@given(records=many_records)
def test_csv_read_again_has_the_same_rows_settings_and_figures(records):
    first = printed(write(records), '--csv', 'table.csv')
    again = printed('table.csv')
    assert rows_of(again, with_notes=False) == rows_of(first, with_notes=False)


@REPORTS
@given(records=many_records)
def test_the_page_has_the_rows_settings_and_figures_of_the_table(records):
    pytest.importorskip('itables', reason='needs itables: pip install itables')
    [table] = tables(printed(write(records), '--html', 'page.html'))
    on_page = re.search('<table.*?</table>', Path('page.html').read_text(), re.DOTALL)[0]
    heading, *lines = [[' '.join(''.join(cell.itertext()).split()) for cell in row]
                       for row in ElementTree.fromstring(on_page).iter('tr')]
    shown = [dict(zip(heading, line, strict=True)) for line in lines]
    for key in FIGURES:
        assert [row.get(key, '') for row in shown] == [row.get(key, '') for row in table]
    for row, other in zip(shown, table, strict=True):
        texts = re.split('; |, ', f'{row.get("settings", "")}; {row.get("notes", "")}')
        assert {*filter(None, texts)} == {*filter(None, re.split('; |, ', other['text'].replace(r'\|', '|')))} - {
            name.removeprefix('NVIDIA ') for name in DEVICES}


KEYS = ['batch_size', 'compile', 'date', 'device', 'dollars_per_gpu_hour', 'evaluations', 'first_batch', 'image_size',
        'images_per_sec', 'measured_batches', 'num_devices', 'num_nodes', 'precision', 'stage', 'status', 'versions']
VALUES = [None, True, 0, -1, 1e9, 1e400, 7, '', 'x', '1,5', [], [1], [[1, 2, 3]], [[1e400, 1]], {}, {'a': 1}]


@settings(max_examples=30, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(changes=some.dictionaries(some.sampled_from(KEYS), some.sampled_from(VALUES), min_size=1, max_size=3))
def test_any_value_in_a_record_is_reported_or_refused_with_its_line(changes):
    record = MEASURED | {'max_duration': '9ba'} | changes
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            printed(write([record, record | {'use_ema': True}]))
        except SystemExit:
            assert re.search('records.jsonl:[12]: not a record: |no measurement|no records', errors.getvalue())


@pytest.mark.parametrize('flags', [(), ('--compare',), ('--learned', 'learned.svg')])
@REPORTS
@given(losses=some.lists(some.integers(1000, 9999), min_size=2, max_size=5, unique=True),
       width=some.integers(1, 120))
def test_each_text_belongs_to_its_row(flags, losses, width):
    """Each training has its loss in its settings, which may be too wide for the table."""
    records = [MEASURED | {'mfu': 0.3, 'max_duration': '9ba', 'trained_batches': 9, 'eval_loss': loss / 10_000,
                           'eval_batch': 9, 'evaluations': [[9, loss / 10_000]],
                           'load_weights': f'0.{loss}{"x" * width}'} for loss in losses]
    [table] = tables(printed(write(records), *flags))
    assert len(table) == len(losses)
    for row in table:
        assert f'load weights {row["eval loss"]}x' in row['text']


@REPORTS
@given(records=some.lists(trainings(), min_size=1, max_size=5).map(lambda of: sum(of, [])),
       empty=some.sampled_from(['', ' ', 'nan', 'None', 'null']))
def test_records_without_an_id_never_join(records, empty):
    """All trainings are complete and have losses, so each of them is a row."""
    records = [record | DATA[1] | {'status': 'complete', 'drift': None, 'eval_loss': 0.5, 'training_id': empty,
                                   'images_per_sec': float(100 + number)} for number, record in enumerate(records)]
    text = printed(write(records), '--csv', 'table.csv')
    assert len(tables(text)[0]) == len(records)
    rows = pd.read_csv('table.csv', dtype=str, keep_default_na=False)
    rows.assign(training_id=empty).to_csv('table.csv', index=False)
    assert rows_of(printed('table.csv')) == rows_of(text)


@REPORTS
@given(parts=some.lists(some.tuples(some.integers(0, 9), some.integers(1, 9)), min_size=1, max_size=6))
def test_runs_of_one_id_that_overlap_in_batches_are_never_one_training(parts):
    """Each training has its own loss, and all batches of its runs are different."""
    records = []
    for number, (first, batches) in enumerate(parts):
        records.append({'device': 'H200', 'num_devices': 8, 'image_size': 512, 'images_per_sec': 800.0,
                        'training_id': '12e345678901', 'date': f'2026-01-0{number + 1}', 'first_batch': first,
                        'trained_batches': first + batches, 'max_duration': '99ba', 'eval_loss': (number + 1) / 10,
                        'evaluations': [[first + batches, (number + 1) / 10]]})
    text = printed(write(records))
    overlap = Counter(batch for first, batches in parts for batch in range(first, first + batches))
    losses = [row['eval loss'] for row in tables(text)[0]]
    assert len(losses) >= max(overlap.values())
    assert len({*losses}) == len(losses)
    assert ('another training has the same id' in ' '.join(text.split())) == (len(losses) > 1)
