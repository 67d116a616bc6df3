"""Read records, which are lines of JSON or rows of a CSV file, and turn them into the rows of a report.

The settings that distinguish rows come from the flags (setup.py), so a new flag appears in reports by itself.
"""
import contextlib
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
from sdbench.records.metrics import RUN_METRICS
from sdbench.records.settings import EVAL_DATA, SPEED_SETTINGS, has_training_result, known_value, setup_of, text_of
from sdbench.records.status import COMPLETE, FAILED, UNMEASURED, why_unreliable

# Losses on --eval_remote are ranked and plotted together only if these settings agree: losses on other latents or other
# samples do not compare.
LOSS_SETTINGS = ['image_size', 'input', 'model_name', 'pretrained', *EVAL_DATA]

# The settings of an evaluation. Scores are on one line of a figure only if all of these agree.
EVALUATION_SETTINGS = ['model', 'weights', 'data', 'samples', 'image_size', 'steps', 'caption', 'network',
                       'inception_sha256', 'clip', 'clip_sha256']
OLDER_WEIGHTS = {'live': 'raw', 'averaged': 'EMA'}  # names in records of older versions

# The training result: its figures in a table, and the keys that the last record of a training has for all of it
RESULT_METRICS = ['eval_loss', 'eval_batch', 'eval_samples', 'loss', 'trained_batches']
EVAL_KEYS = (*EVAL_DATA, 'eval_loss', 'eval_batch', 'eval_samples', 'eval_held_out', 'evaluations',
             'other_evaluations')
RESULT_KEYS = (*EVAL_KEYS, 'loss', 'trained_batches', 'trained_epochs', 'gpu_hours', 'dollars', 'max_duration')

# The status of a row says where its figures come from. A run without a speed has the status of its record, such as
# failed.
MEASURED = 'measured'
EXTRAPOLATED = 'extrapolated'  # from other rows, by this report or by the source of the record
UNRELIABLE = 'not reliable'
WITH_FIGURES = [MEASURED, EXTRAPOLATED]

# Text after the name of the evaluation data, by whether the model was trained on these data
TRAINED_ON = {False: '', True: ' (the model was trained on it)', None: ' (not known to be held out)'}

# What people, spreadsheets and pandas write for true, false and unknown values
WORDS = {'true': True, 'yes': True, 'false': False, 'no': False, '': None, 'nan': None, 'none': None, 'null': None}
# Values that stay text, because 12e345678901 also reads as a number
IDS = ('training_id', 'git_commit', 'eval_sha256', 'inception_sha256', 'clip_sha256')
# What --csv adds to the keys of a record; it is computed again
COMPUTED = ('microbatch', 'images_per_sec_per_device', 'forecast_images_per_sec', 'forecast_error',
            'scaling_efficiency', 'speed_over_first', 'guidance', 'fid', 'clip_score', 'days', 'total_gpu_hours',
            'cost_usd', 'notes')
SHARED_ID = 'another training has the same id: a copied --save_folder'


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
                for row in score_rows(record) if record['stage'] == 'evaluate' else [speed_row(record)]:
                    rows.setdefault(row['identity'], row)
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f'{path}:{number}: not a record: {error}; fix or remove that line') from None
            has_records = True
        if not has_records:
            raise UserError(f'{path}: no records in it; give a file of --results, not a plan of --csv')

    # Sort by date, so the order of the files does not matter. Records without a date keep their order, at the end.
    joined = join_trainings([*rows.values()])
    return sorted(joined, key=lambda row: (row['date'] == '', row['date'], row['identity'] if row['date'] else ''))


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
        line = json.loads(line)
        if not isinstance(line, dict):
            raise UserError('it is not a JSON object')
    elif None in line:  # where csv puts the cells that have no column
        raise UserError('more cells than columns; give numbers without commas')
    record = {'stage': 'train', 'status': COMPLETE, 'extrapolated': False}
    for key, value in line.items():
        value = parse_value(key, value)
        if value is not None and key not in COMPUTED:
            record[key] = value
    if 'device' in record:
        record['device'] = full_name(str(record['device']))

    # A loader has its own speed. An encoding that skipped all images has none, although older versions wrote 0.
    if record['stage'] == 'loader' or record['stage'] == 'encode' and record.get('images_per_sec') == 0:
        record.pop('images_per_sec', None)
        if record['stage'] == 'encode':
            record['status'] = UNMEASURED
    return record


def parse_value(key: str, value: Any) -> Any:
    """Return a value of a record or a cell of a CSV file; None if it is not known.

    Text is read like a cell: as a word for true, false or unknown, as JSON if it is JSON, or else as text.
    """
    if isinstance(value, str):
        value = value.strip()
        if value.lower() in WORDS:
            value = WORDS[value.lower()]
        elif key not in IDS:
            with contextlib.suppress(ValueError):
                value = json.loads(value)
    value = known_value(value)
    return text_of(value) if key in IDS and value is not None else value


def identity_of(record: dict) -> str:
    """Return a text that two copies of a record share, although one is a line of JSON and the other a row of --csv."""
    return json.dumps({key: value if isinstance(value, (dict, list)) else text_of(value)
                       for key, value in record.items()}, sort_keys=True)


def speed_row(record: dict) -> dict:
    """Return the row of a record of speed: its settings as text ('' if not stated) and its figures.

    Raises UserError if a number that the report needs is missing or not positive.
    """
    # Check the numbers that a report calculates with. A failed run may have no speed.
    speed = 'loader_images_per_sec' if record['stage'] == 'loader' else 'images_per_sec'
    needed = ['device', 'num_devices', 'image_size']
    if record['status'] == COMPLETE:
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
    for key in RUN_METRICS:
        row[key] = finite_number(record, key)
    for key in RESULT_METRICS:
        row[key] = finite_number(record, key) if has_training_result(record) else math.nan
    row['images_per_sec'] = finite_number(record, speed)
    row['evaluations'] = [(float(images), math.nan if loss is None else float(loss))
                          for images, loss in record.get('evaluations', ())]
    row['on_cpu'] = record.get('device_type') == 'cpu'
    row['prices'] = prices_of(record)
    row['status'], row['notes'] = status_and_notes(record)
    row['record'] = record
    row['identity'] = identity_of(record)
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
    # Only a complete run with a speed that has settled is a measurement.
    status = text_of(record['status'])
    if status != COMPLETE:
        reason = f'{status}: {text_of(record.get("error"))}'
        return status, textwrap.shorten(reason, 70, placeholder=' ...').rstrip(': ')
    if why_unreliable(record):
        return UNRELIABLE, f'images/s {UNRELIABLE}: {why_unreliable(record)}'
    if record['extrapolated']:
        return EXTRAPOLATED, 'extrapolated by its source'
    return MEASURED, ''


def split_trainings(rows: list[dict]) -> list[list[dict]]:
    """Return the rows of each training, the oldest first. A record without a `training_id` is a training by itself.

    Records with one id are one training if each run begins where an earlier one has ended. Where runs overlap in
    batches, a --save_folder was copied and both copies were continued. They are two trainings: the second gets another
    id, and all their rows have a note.
    """
    by_id = {}
    for place, row in enumerate(rows):
        by_id.setdefault(row['record'].get('training_id', place), []).append(row)

    trainings = []
    for training_id, parts in by_id.items():
        found = []
        for part in sorted(parts, key=lambda part: (part['record'].get('first_batch', 0), part['date'],
                                                    part['identity'])):
            record = part['record']
            first = record.get('first_batch')
            possible = [training for training in found if first is None or last_saved(training) <= first]
            if possible:  # of two copies, the one in the same folder, or else the longest
                folder = record.get('save_folder')
                max(possible, key=lambda training: (training[-1]['record'].get('save_folder') == folder,
                                                    last_saved(training))).append(part)
            else:
                found.append([part])
        for number, training in enumerate(found, start=1):
            for part in training:
                if number > 1:
                    part['record'] = part['record'] | {'training_id': f'{training_id}-{number}'}
                if len(found) > 1:
                    part['notes'] = joined_notes(part['notes'], SHARED_ID)
        trainings += found
    return trainings


def last_saved(training: list[dict]) -> int:
    """Return the batch at which the newest run of a training has ended; a run that failed may be repeated."""
    ends = [part['record'].get('trained_batches', 0) for part in training
            if 'first_batch' in part['record'] and part['record']['status'] != FAILED]
    return max(ends, default=0)


def join_trainings(rows: list[dict]) -> list[dict]:
    """Return one row for each setup in which a training ran, with the result from the last record of the training.

    If a training ran in one setup several times, the row has its last reliable speed, or else its last record. A
    training that did not complete has a note. If a training was evaluated on several held-out datasets, it has a row
    for each, because their losses do not compare. Each row gets the running number of its training as `training`.
    """
    joined = []
    for number, parts in enumerate(split_trainings(rows)):
        # Keep one part of each setup and held-out dataset. A part without an evaluation counts to the last dataset.
        last = parts[-1]
        final = next((data_of(part) for part in reversed(parts) if data_of(part)), None)
        kept = {}
        for part in parts:
            setup = (*(part.get(key) for key in (*SPEED_SETTINGS, 'num_devices', 'num_nodes')), data_of(part) or final)
            if part['status'] == MEASURED or setup not in kept or kept[setup]['status'] != MEASURED:
                kept[setup] = part
        newest = {data_of(part): part['record'] for part in parts}

        # Rows of the last dataset have the result at the end of the training, even if their speed is from an earlier
        # run. Such a row has no first batch, because it is no longer the row of one run.
        result = {key: last['record'][key] for key in RESULT_KEYS if key in last['record']}
        if final:
            result |= {key: newest[final][key] for key in EVAL_KEYS if key in newest[final]}
        for part in kept.values():
            if part is not last and (data_of(part) or final) == final:
                notes = part['notes']
                of_a_run = {*RESULT_KEYS, 'first_batch'}
                part = speed_row({key: part['record'][key] for key in part['record'].keys() - of_a_run} | result)
                if last['status'] not in (*WITH_FIGURES, UNRELIABLE):
                    notes = joined_notes(notes, f'last part {last["notes"]}')
                part['notes'] = notes
            joined.append(part | {'training': number})

        # Losses on an earlier dataset may be only in a later record, if the run that found them was killed.
        known = [evaluation for part in parts for evaluation in part['record'].get('evaluations', ())]
        for other in last['record'].get('other_evaluations', ()):
            if any(evaluation not in known for evaluation in other['evaluations']):
                joined.append(speed_row(last['record'] | other) | {'training': number})
    return joined


def data_of(row: dict) -> tuple | None:
    """Return which held-out data a training was evaluated on; None if it was not evaluated."""
    record = row['record']
    if not has_training_result(record) or not record.get('evaluations') and record.get('eval_loss') is None:
        return None
    return tuple(record.get(key) for key in EVAL_DATA)


def joined_notes(*notes: str) -> str:
    """Return the notes of a row as one text, each once."""
    return '; '.join(dict.fromkeys(filter(None, notes)))


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
    row |= {'stage': 'evaluate', 'status': MEASURED, 'notes': ', '.join(notes), 'date': ''}

    rows = []
    for score in record['scores']:
        known = {key: float(value) for key, value in score.items() if value is not None}
        figures = {'guidance': known['guidance']} | {key: known.get(key, math.nan) for key in ('fid', 'clip_score')}
        own = record | {'scores': [known]}
        rows.append(row | figures | {'record': own, 'identity': identity_of(own)})
    return rows
