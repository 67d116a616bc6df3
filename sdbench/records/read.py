"""Read records, which are lines of JSON or rows of a CSV file, and turn them into the rows of a report.

The settings that distinguish rows come from the flags (setup.py), so a new flag appears in reports by itself.
"""
import csv
import datetime
import io
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdbench.costs import Prices
from sdbench.errors import UserError
from sdbench.gpus import full_name
from sdbench.records.figures import RUN_FIGURES
from sdbench.records.setup import SPEED_SETTINGS, has_training_result, known_value, setup_of, text_of
from sdbench.records.status import COMPLETE, FORECAST, why_unreliable

# Losses on --eval_remote are ranked and plotted together only if these settings agree: losses on other latents or other
# samples do not compare.
LOSS_SETTINGS = ['image_size', 'input', 'model_name', 'pretrained', 'eval_remote']

# The settings of an evaluation. Scores are on one line of a figure only if all of these agree.
EVALUATION_SETTINGS = ['model', 'weights', 'data', 'samples', 'image_size', 'steps', 'caption', 'network',
                       'inception_sha256', 'clip', 'clip_sha256']
OLDER_WEIGHTS = {'live': 'raw', 'averaged': 'EMA'}  # names in records of older versions

# The training result: its figures in a table, and the keys that the last record of a training has for all of it
RESULT_FIGURES = ['eval_loss', 'eval_batch', 'eval_samples', 'loss', 'trained_batches']
RESULT_KEYS = (*RESULT_FIGURES, 'evaluations', 'eval_held_out', 'trained_epochs', 'gpu_hours', 'dollars',
               'max_duration')

# The status of a row says where its figures come from. A run without a speed has the status of its record, such as
# failed.
MEASURED = 'measured'
EXTRAPOLATED = 'extrapolated'  # from other rows, by this report or by the source of the record
UNRELIABLE = 'not reliable'
WITH_FIGURES = [MEASURED, EXTRAPOLATED, FORECAST]

# Text after the name of the evaluation data, by whether the model was trained on these data
TRAINED_ON = {False: '', True: ' (the model was trained on it)', None: ' (not known to be held out)'}

# What people, spreadsheets and pandas write into CSV files for true, false and unknown values
CELLS = {'true': True, 'yes': True, 'false': False, 'no': False, '': None, 'nan': None, 'none': None, 'null': None}


def read_all(paths: Sequence[str]) -> list[dict]:
    """Return the rows of all records in some files, with the records of one training joined.

    A record that is there twice counts once. Raises UserError, with the file and the line, if a line is not a record or
    lacks a number, and if a file has no records. Raises OSError if a file cannot be read.
    """
    rows = {}  # by the content of their record
    for path in paths:
        has_records = False
        for number, line in numbered_lines(path):
            # A line that is not a record ends the report, because every figure would be wrong without it.
            try:
                record = parse_record(line)
                if record['stage'] in ('proof', 'plan'):  # a check of a proof, or a plan of --csv
                    continue
                rows[json.dumps(record)] = score_rows(record) if record['stage'] == 'evaluate' else [speed_row(record)]
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f'{path}:{number}: not a record: {error}; fix or remove that line') from None
            has_records = True
        if not has_records:
            raise UserError(f'{path}: no records in it; give a file of --results, not a plan of --csv')
    return join_trainings([row for of_record in rows.values() for row in of_record])


def numbered_lines(path: str) -> Iterable[tuple[int, str | dict[str, str]]]:
    """Yield each line of a file that is not empty, or the cells of each row of a CSV file, with its line number.

    A row of a CSV file may span several lines. Its separator is a comma, a semicolon or a tab.
    """
    text = Path(path).read_text(encoding='utf-8-sig', errors='replace')
    if path.lower().endswith('.csv'):
        separator = max(',;\t', key=text.partition('\n')[0].count)
        reader = csv.DictReader(io.StringIO(text), restval='', delimiter=separator)
        for cells in reader:
            yield reader.line_num, cells
    else:
        for number, line in enumerate(text.split('\n'), start=1):
            if line.strip():
                yield number, line


def parse_record(line: str | dict[str, str]) -> dict[str, Any]:
    """Return the known values of a record, with defaults for stage and status. Raises ValueError if it is no record."""
    if isinstance(line, str):
        record = json.loads(line)
        if not isinstance(record, dict):
            raise UserError('it is not a JSON object')
    else:
        if None in line:  # where csv puts the cells that have no column
            raise UserError('more cells than columns; give numbers without commas')
        # An id such as 12e345678901 also reads as a number.
        record = {key: cell if key == 'training_id' else parse_cell(cell.strip()) for key, cell in line.items()}
    record = {key: known_value(value) for key, value in record.items() if known_value(value) is not None}
    if 'device' in record:
        record['device'] = full_name(str(record['device']))
    return {'stage': 'train', 'status': COMPLETE, 'extrapolated': False} | record


def parse_cell(cell: str) -> Any:
    """Return the value in a cell of a CSV file: JSON if it can be read as JSON, or else text; None if not known."""
    if cell.lower() in CELLS:
        return CELLS[cell.lower()]
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def speed_row(record: dict) -> dict:
    """Return the row of a record of speed: its settings as text ('' if not stated) and its figures.

    Raises UserError if a number that the report needs is missing or not positive.
    """
    # Check the numbers that a report calculates with. A failed run may have no speed.
    speed = 'loader_images_per_sec' if record['stage'] == 'loader' else 'images_per_sec'
    needed = ['device', 'num_devices', 'image_size']
    if record['status'] in (COMPLETE, FORECAST):
        needed.append(speed)
    for key in needed:
        if key not in record:
            raise UserError(f'no {key}; a record needs {", ".join(needed)}')
        if key != 'device' and finite_number(record, key) <= 0:
            raise UserError(f'{key} {record[key]!r} is not a positive number')

    # Settings distinguish rows. Date and commit identify a run.
    row = setup_of(record)
    if record.get('eval_held_out') is False:
        row['eval_remote'] += TRAINED_ON[None]
    row['date'] = utc_time(record['date']) if 'date' in record else ''
    commit, dash, dirty = text_of(record.get('git_commit')).partition('-')
    row['git_commit'] = commit[:8] + dash + dirty

    # A figure that the record lacks is NaN. A measurement has no training result, although it has a loss.
    row['num_devices'] = record['num_devices']
    row['microbatch'] = finite_number(record, 'device_train_microbatch_size')  # from the flag or from the search
    for key in (*RUN_FIGURES, 'images_per_sec_least', 'images_per_sec_most'):
        row[key] = finite_number(record, key)
    for key in RESULT_FIGURES:
        row[key] = finite_number(record, key) if has_training_result(record) else math.nan
    row['images_per_sec'] = finite_number(record, speed)
    row['evaluations'] = [(float(images), math.nan if loss is None else float(loss))
                          for images, loss in record.get('evaluations', ())]
    row['on_cpu'] = record.get('device_type') == 'cpu'
    row['prices'] = prices_of(record)
    row['status'], row['notes'] = status_and_notes(record)
    row['record'] = record
    return row


def finite_number(record: dict, key: str) -> float:
    """Return a number of a record; NaN if the record lacks it. Raises UserError if it is not a finite number."""
    value = record.get(key, math.nan)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isinf(value):
        raise UserError(f'{key} {value!r} is not a finite number')
    return float(value)


def utc_time(date: str) -> str:
    """Return an ISO 8601 date in UTC, as text that sorts by time. A date without a time zone is in UTC already."""
    found = datetime.datetime.fromisoformat(date)
    return found.replace(tzinfo=found.tzinfo or datetime.UTC).astimezone(datetime.UTC).strftime('%Y-%m-%d %H:%M:%S')


def prices_of(record: dict) -> Prices:
    """Return the prices that a record was given, in the form of --dollars_per_gpu_hour."""
    given = record.get('dollars_per_gpu_hour', ())
    if isinstance(given, (int, float)):  # one price for all GPUs, in a CSV file
        return ((None, float(given)),)
    return tuple((name, float(dollars)) for name, dollars in given)


def status_and_notes(record: dict) -> tuple[str, str]:
    """Return the status of the row of a record of speed, and its note in the table."""
    # Only a forecast for a tested kind of setup has a range.
    status = text_of(record['status'])
    if status == FORECAST:
        if record.get('images_per_sec_least') is None:
            return FORECAST, 'forecast, not tested'
        least, most = record['images_per_sec_least'], record['images_per_sec_most']
        return FORECAST, f'forecast: {least:,.0f} to {most:,.0f} images/s'

    # Only a complete run with a speed that has settled is a measurement.
    if status != COMPLETE:
        reason = f'{status}: {text_of(record.get("error"))}'
        return status, textwrap.shorten(reason, 70, placeholder=' ...').rstrip(': ')
    if why_unreliable(record):
        return UNRELIABLE, f'images/s {UNRELIABLE}: {why_unreliable(record)}'
    if record['extrapolated']:
        return EXTRAPOLATED, 'extrapolated by its source'
    return MEASURED, ''


def join_trainings(rows: list[dict]) -> list[dict]:
    """Return one row for each setup in which a training ran, with the result from the last record of the training.

    Records with the same `training_id` are one training, and a record without one is a training by itself. If a
    training ran in one setup several times, the row has its last reliable speed, or else its last record. A training
    that did not complete has a note. Each row gets the running number of its training as `training`.
    """
    trainings = {}  # rows by training, in the order of the records
    for place, row in enumerate(rows):
        trainings.setdefault(row['record'].get('training_id', place), []).append(row)

    joined = []
    for number, parts in enumerate(trainings.values()):
        # Keep one part of each setup.
        parts.sort(key=lambda part: part.get('date', ''))  # keeps the order of records without a date
        kept = {}
        for part in parts:
            setup = tuple(part.get(key) for key in (*SPEED_SETTINGS, 'num_devices', 'num_nodes'))
            if part['status'] == MEASURED or setup not in kept or kept[setup]['status'] != MEASURED:
                kept[setup] = part

        # Every row has the result at the end of the training, even if its speed is from an earlier part.
        last = parts[-1]
        result = {key: last['record'][key] for key in RESULT_KEYS if key in last['record']}
        for part in kept.values():
            if part is not last:
                part = speed_row({key: part['record'][key] for key in part['record'].keys() - RESULT_KEYS} | result)
                if last['status'] not in (*WITH_FIGURES, UNRELIABLE):
                    part['notes'] = '; '.join(filter(None, [part['notes'], f'last part {last["notes"]}']))
            joined.append(part | {'training': number})
    return joined


def score_rows(record: dict) -> list[dict]:
    """Return a row for each guidance scale of an evaluation. A score that was not computed is NaN."""
    row = {key: text_of(record.get(key)) for key in EVALUATION_SETTINGS}
    row['weights'] = OLDER_WEIGHTS.get(row['weights'], row['weights'])
    row['data'] += TRAINED_ON[record.get('trained_on_data')]
    for key in ('inception_sha256', 'clip_sha256'):
        row[key] = row[key][:8]
    if row['model'].endswith('.pt'):
        row['model'] = row['model'].rpartition('/')[0] or row['model']  # checkpoints of one training are one model
    for key in ('trained_batches', 'images_seen'):
        row[key] = finite_number(record, key)

    # A row states the cost of the training up to the checkpoint, unless the training was on a CPU.
    training = record.get('training', {})
    row['device'] = training.get('device', 'CPU')
    row['total_gpu_hours'] = math.nan if row['device'] == 'CPU' else float(training['gpu_hours'])
    row['dollars'] = math.nan if training.get('dollars') is None else float(training['dollars'])

    notes = []
    if record.get('fid_is_biased'):
        notes.append('FID biased by few images')
    if record.get('fid_of_published_weights') is False:
        notes.append('non-standard FID weights')
    row |= {'stage': 'evaluate', 'status': MEASURED, 'notes': ', '.join(notes), 'record': record}

    rows = []
    for score in record['scores']:
        figures = {'guidance': float(score['guidance'])}
        for key in ('fid', 'clip_score'):
            figures[key] = math.nan if score.get(key) is None else float(score[key])
        rows.append(row | figures)
    return rows
