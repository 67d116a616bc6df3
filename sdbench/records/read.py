"""Read records, as the commands write them or a CSV file has them, as the rows of a report.

Which settings tell records apart follows from the flags (setup.py), so that a new flag is in reports on the day that it
is a flag.
"""
import csv
import datetime
import io
import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from sdbench.costs import Prices
from sdbench.errors import UserError
from sdbench.gpus import full_name
from sdbench.records.figures import OF_A_RUN
from sdbench.records.setup import SPEED_SETTINGS, learns, read_value, setup_of, text_of
from sdbench.records.status import COMPLETE, FORECAST, why_unreliable

# Losses on --eval_remote are ranked and drawn together only where these agree: others are of other latents or samples.
OF_LOSSES = ['image_size', 'input', 'model_name', 'pretrained', 'eval_remote']

# The settings of an evaluation. Scores are on one line of a picture only where all agree.
OLDER_WEIGHTS = {'live': 'raw', 'averaged': 'EMA'}  # names in records of older versions
EVALUATED = ['model', 'weights', 'data', 'samples', 'image_size', 'steps', 'caption', 'network', 'inception_sha256',
             'clip', 'clip_sha256']

LEARNED = ['eval_loss', 'eval_batch', 'eval_samples', 'loss', 'trained_batches']  # the training result, in a table
# What the last record of a training says of all of it
WHOLE_TRAINING = (*LEARNED, 'evaluations', 'eval_held_out', 'trained_epochs', 'gpu_hours', 'dollars', 'max_duration')

# The status of a row is what its figures are. Any other one is that of a run without a speed, such as failed.
MEASURED = 'measured'
EXTRAPOLATED = 'extrapolated'  # from other rows, here or by its source
UNRELIABLE = 'not reliable'
WITH_FIGURES = [MEASURED, EXTRAPOLATED, FORECAST]

# Text after the name of the data of an evaluation, by whether the model was trained on it
TRAINED_ON = {False: '', True: ' (the model was trained on it)', None: ' (not known to be held out)'}


def number(record: dict, key: str) -> float:
    """Return a number of a record, NaN where it does not have it. Raises UserError if it is no finite number."""
    value = record.get(key, math.nan)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isinf(value):
        raise UserError(f'{key} {value!r} is not a finite number')
    return float(value)


def read_records(path: str) -> list[dict]:
    """Return the rows of a file of JSON lines, or of a CSV file (*.csv), whose separator is , or ; or a tab.

    Raises OSError if it cannot be read, and UserError, which names file and line, for what is no record or cannot be
    calculated with.
    """
    # Lines with their numbers, which an error names. A row of a CSV file may span several.
    text = Path(path).read_text(encoding='utf-8-sig', errors='replace')
    if path.lower().endswith('.csv'):
        separator = max(',;\t', key=text.partition('\n')[0].count)
        reader = csv.DictReader(io.StringIO(text), restval='', delimiter=separator)
        lines = ((reader.line_num, cells) for cells in reader)
        parse = dict
    else:
        lines = ((number, line) for number, line in enumerate(text.split('\n'), start=1) if line.strip())
        parse = json.loads

    # What is no record ends the report: a row that was left out in silence would be missing in every figure.
    rows = []
    for line_number, line in lines:
        try:
            rows += rows_of(parse(line))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f'{path}:{line_number}: not a record: {error}; fix or remove that line') from None
    return rows


def read_all(paths: Sequence[str]) -> list[dict]:
    """Return the rows of several files, each run once.

    A record that is there twice, or here and in a file of --csv, counts once, since its rows are the same; and the
    records of one training are joined. Raises UserError as `read_records` does, and for a file without records.
    """
    rows = {}  # by all that is in them
    for path in paths:
        found = read_records(path)
        if not found:
            raise UserError(f'{path}: no records in it; give a file of --results, not a plan of --csv')
        for row in found:
            rows.setdefault(str({key: value for key, value in row.items() if key != 'record'}), row)
    return join_trainings(list(rows.values()))


def rows_of(record: dict) -> list[dict]:
    """Return the row of a record of speed, or one for each guidance scale of an evaluation.

    The checks of a proof, and a plan that was written by --csv, are in no table.
    """
    if not isinstance(record, dict):
        raise UserError('not one JSON object')
    if None in record:  # where csv puts the cells that no column has
        raise UserError('more cells than columns; give numbers without commas')
    if record.get('stage') in ('proof', 'plan'):
        return []
    stated = {'stage': 'train', 'status': COMPLETE, 'extrapolated': False}
    for key, value in record.items():
        known = value if key == 'training_id' else read_value(value)  # digits of an id are no number
        if known is not None:
            stated[key] = known
    if 'device' in stated:
        stated['device'] = full_name(str(stated['device']))
    if stated['stage'] == 'evaluate':
        return score_rows(stated)
    return [speed_row(stated)]


def speed_row(record: dict) -> dict:
    """Return what the table needs of a record of speed. Settings are text, '' where it does not state one.

    Raises UserError if a number that is needed is missing or not positive.
    """
    # what it must have
    speed = 'loader_images_per_sec' if record['stage'] == 'loader' else 'images_per_sec'
    needed = ['device', 'num_devices', 'image_size']
    if record['status'] in (COMPLETE, FORECAST):
        needed.append(speed)
    missing = [key for key in needed if key not in record]
    if missing:
        raise UserError(f'no {", ".join(missing)}; a record needs {", ".join(needed)}')
    for key in needed[1:]:
        if number(record, key) <= 0:
            raise UserError(f'{key} {record[key]!r} is not a positive number')

    # settings
    row = setup_of(record)
    if record.get('eval_held_out') is False:
        row['eval_remote'] += TRAINED_ON[None]
    row['training_id'] = record.get('training_id', '')  # so that equal figures of two trainings are two rows
    row['date'] = moment(record['date']) if 'date' in record else ''
    commit, dash, dirty = text_of(record.get('git_commit')).partition('-')
    row['git_commit'] = commit[:8] + dash + dirty

    # figures
    row['num_devices'] = record['num_devices']
    row['microbatch'] = number(record, 'device_train_microbatch_size')  # also one that was found
    for key in (*OF_A_RUN, 'images_per_sec_least', 'images_per_sec_most'):
        row[key] = number(record, key)
    for key in LEARNED:
        row[key] = number(record, key) if learns(record) else math.nan
    row['images_per_sec'] = number(record, speed)
    row['evaluations'] = [(float(images), math.nan if loss is None else float(loss))
                          for images, loss in record.get('evaluations', ())]
    row['on_cpu'] = record.get('device_type') == 'cpu'
    row['prices'] = prices_of(record)
    row['status'], row['notes'] = status_and_notes(record)
    row['record'] = record
    return row


def moment(date: str) -> str:
    """Return a date in UTC, which it is in where it does not say otherwise, so that later ones are larger as text.

    Raises ValueError if it is no date as ISO 8601 has them.
    """
    found = datetime.datetime.fromisoformat(date)
    if found.tzinfo is not None:
        found = found.astimezone(datetime.UTC)
    return found.replace(tzinfo=None).isoformat(' ')


def prices_of(record: dict) -> Prices:
    """Return the prices that a record was given, as --dollars_per_gpu_hour takes them."""
    given = record.get('dollars_per_gpu_hour', ())
    if isinstance(given, (int, float)):  # of a CSV file
        return ((None, float(given)),)
    return tuple((name, float(dollars)) for name, dollars in given)


def join_trainings(rows: list[dict]) -> list[dict]:
    """Join the rows of each training: one for each setup that it ran in, with the training result of its last record.

    Records with the same `training_id` are one training, and a record without one is a training of its own. Of a setup
    the last part with a reliable speed counts, or else its last part. If the training ended without completing, the
    note of its last part says so. Each row has the number of its `training`.
    """
    trainings = {}  # rows by training, in the order of the records
    for place, row in enumerate(rows):
        trainings.setdefault(row['record'].get('training_id', place), []).append(row)

    joined = []
    for place, parts in enumerate(trainings.values()):
        parts.sort(key=lambda part: part.get('date', ''))  # a sort that keeps the order of records without a date
        last = parts[-1]
        kept = {}  # part by its setup
        for part in parts:
            setup = tuple(part.get(key) for key in (*SPEED_SETTINGS, 'num_devices', 'num_nodes'))
            if part['status'] == MEASURED or setup not in kept or kept[setup]['status'] != MEASURED:
                kept[setup] = part
        result = {key: last['record'].get(key) for key in WHOLE_TRAINING}
        for part in kept.values():
            if part is not last:
                [part] = rows_of(part['record'] | result)
                if last['status'] not in (*WITH_FIGURES, UNRELIABLE):
                    part['notes'] = '; '.join(filter(None, [part['notes'], f'last part {last["notes"]}']))
            joined.append(part | {'training': place})
    return joined


def status_and_notes(record: dict) -> tuple[str, str]:
    """Return the status of a record of speed, and what the table says of it."""
    # a forecast's range is what was seen of its errors; where that is not known, the figure stands alone
    status = text_of(record['status'])
    if status == FORECAST:
        if record.get('images_per_sec_least') is None:
            return FORECAST, 'forecast, not tested'
        least, most = record['images_per_sec_least'], record['images_per_sec_most']
        return FORECAST, f'forecast: {least:,.0f} to {most:,.0f} images/s'

    # a run without a speed, one whose speed is doubtful, one that its source has calculated, and all others
    if status != COMPLETE:
        reason = f'{status}: {text_of(record.get("error"))}'
        return status, textwrap.shorten(reason, 70, placeholder=' ...').rstrip(': ')
    if why_unreliable(record):
        return UNRELIABLE, f'images/s {UNRELIABLE}: {why_unreliable(record)}'
    if record['extrapolated']:
        return EXTRAPOLATED, 'extrapolated by its source'
    return MEASURED, ''


def score_rows(record: dict) -> list[dict]:
    """Return a row for each guidance scale of an evaluation; a score that was not asked for is NaN."""
    row = {key: text_of(record.get(key)) for key in EVALUATED}
    row['weights'] = OLDER_WEIGHTS.get(row['weights'], row['weights'])
    row['data'] += TRAINED_ON[record.get('trained_on_data')]
    for key in ('inception_sha256', 'clip_sha256'):
        row[key] = row[key][:8]
    if row['model'].endswith('.pt'):
        row['model'] = row['model'].rpartition('/')[0] or row['model']  # checkpoints of one training are one model
    for key in ('trained_batches', 'images_seen'):
        row[key] = number(record, key)

    # what the training of the model took, but of one on a CPU
    training = record.get('training', {})
    row['device'] = training.get('device', 'CPU')
    row['total_gpu_hours'] = math.nan if row['device'] == 'CPU' else float(training['gpu_hours'])
    row['dollars'] = math.nan if training.get('dollars') is None else float(training['dollars'])

    # what the scores cannot be compared with
    notes = []
    if record.get('fid_is_biased'):
        notes.append('FID of few pictures is too high')
    if record.get('fid_of_published_weights') is False:
        notes.append('FID by other weights')
    row |= {'stage': 'evaluate', 'status': MEASURED, 'notes': ', '.join(notes), 'record': record}

    rows = []
    for score in record['scores']:
        figures = {'guidance': float(score['guidance'])}
        for key in ('fid', 'clip_score'):
            figures[key] = math.nan if score.get(key) is None else float(score[key])
        rows.append(row | figures)
    return rows
