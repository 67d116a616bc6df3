"""Read records, as the commands write them or a CSV file has them, as the rows of a report.

SETTINGS says which keys tell records apart. It follows from the flags, so that a new flag is in reports on the day that
it is a flag.
"""
import csv
import datetime
import io
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sdbench.costs import Prices
from sdbench.errors import UserError
from sdbench.flags.train import ENCODERS, SAME_ON_RESUME, SWITCHES, TAKE_NO_TIME, Train
from sdbench.records.figures import OF_A_RUN
from sdbench.records.status import COMPLETE, FORECAST, why_unreliable
from sdbench.records.versions import PACKAGES

VERSIONS = ['python', 'cuda', *PACKAGES]

# The settings of a record of speed, in the order in which a table has them. Records are averaged and fitted together
# only where all agree. A loader has nothing of a model. Measurements and forecasts learn nothing.
OF_A_LOADER = ['stage', 'device', 'image_size', 'input', 'dataset', 'batch_size']
OF_A_MODEL = ['model_name', *SWITCHES, 'network_gbits']
OF_LEARNING = []
for field in SAME_ON_RESUME:
    if field.name in TAKE_NO_TIME:
        OF_LEARNING.append(field.name)
    elif field.name not in (*OF_A_LOADER, *OF_A_MODEL, 'use_synth_data', 'use_synth_latents'):  # which `dataset` says
        OF_A_MODEL.append(field.name)
OF_LEARNING += ['max_duration', 'load_weights', 'remote', 'eval_remote']
OF_SPEED = [*OF_A_LOADER, *OF_A_MODEL, 'num_workers', *VERSIONS]
SETTINGS = [*OF_SPEED, *OF_LEARNING]
# Losses on --eval_remote are ranked and drawn together only where these agree: others are of other latents or samples.
OF_LOSSES = ['image_size', 'input', 'model_name', 'pretrained', 'eval_remote']

# The settings of an evaluation. Scores are on one line of a picture only where all agree.
EVALUATED = ['model', 'weights', 'data', 'samples', 'image_size', 'steps', 'caption', 'network', 'inception_sha256',
             'clip', 'clip_sha256']

# What a run says of its evaluation at a batch, and of the whole training, with the runs that it resumed.
OF_AN_EVALUATION = ('eval_loss', 'eval_batch', 'eval_samples', 'eval_held_out')
OF_A_TRAINING = ('loss', 'trained_batches', 'trained_epochs', 'gpu_hours', 'dollars', 'max_duration')
LEARNED = ['eval_loss', 'eval_batch', 'eval_samples', 'loss', 'trained_batches']  # in a table

# The status of a row is what its figures are. Any other one is that of a run without a speed, such as failed.
MEASURED = 'measured'
EXTRAPOLATED = 'extrapolated'  # from other rows, here or by its source
UNRELIABLE = 'not reliable'
WITH_FIGURES = [MEASURED, EXTRAPOLATED, FORECAST]

# What is said behind the name of data, by whether the model was trained on it.
TRAINED_ON = {False: '', True: ' (the model was trained on it)', None: ' (not known to be held out)'}
INPUTS = {ENCODERS[False]: 'images', ENCODERS[True]: 'latents'}  # of a training, by the encoders in its loop
NOT_KNOWN = ('', 'none', 'nan', 'null', 'auto')  # as CSV files have it; an automatic microbatch that was never found
TRUTHS = {'true': True, 'yes': True, 'false': False, 'no': False}


def read_value(value: Any) -> Any:
    """Return a value of a record: a cell of a CSV file as JSON has it where that is possible, or else as text.

    So FALSE and 512.0, as spreadsheets and pandas write them, are false and 512. What is not known, such as an empty
    cell or NaN, is None.
    """
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in NOT_KNOWN:
            return None
        if text.lower() in TRUTHS:
            return TRUTHS[text.lower()]
        try:
            value = json.loads(text)
        except ValueError:
            return text
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


# What a training had of a flag that was not there yet
DEFAULTS = {field.name: read_value(json.loads(json.dumps(field.default))) for field in fields(Train)
            if field.name in SETTINGS}
DEFAULTS = {name: value for name, value in DEFAULTS.items() if value is not None}


def number(record: dict, key: str) -> float:
    """Return a number of a record, NaN where it does not have it. Raises UserError if it is no finite number."""
    value = record.get(key, math.nan)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isinf(value):
        raise UserError(f'{key} {value!r} is not a finite number')
    return float(value)


def read_records(path: str) -> list[dict]:
    """Return the rows of a file of JSON lines, or of a CSV file (*.csv).

    Raises OSError if it cannot be read, and ValueError, which names file and line, for what is no record or cannot be
    calculated with.
    """
    # Lines with their numbers, which an error names. A row of a CSV file may span several.
    text = Path(path).read_text(encoding='utf-8-sig', errors='replace')
    if path.lower().endswith('.csv'):
        reader = csv.DictReader(io.StringIO(text), restval='')
        lines = ((reader.line_num, cells) for cells in reader)
        parse = dict
    else:
        lines = ((number, line) for number, line in enumerate(text.split('\n'), start=1) if line.strip())
        parse = json.loads

    # what is no record ends the report: a row that was left out in silence would be missing in every figure
    rows = []
    for line_number, line in lines:
        try:
            rows += rows_of(parse(line))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f'{path}:{line_number}: not a record: {error}; mend or remove that line') from None
    return rows


def read_all(paths: Sequence[str]) -> list[dict]:
    """Return the rows of several files, each run once.

    A record that is there twice, or here and in a file of --csv, counts once, for its rows are the same; and a training
    that was resumed is joined. Raises UserError as `read_records` does, and for a file without records.
    """
    rows = {}  # by all that is in them
    for path in paths:
        found = read_records(path)
        if not found:
            raise UserError(f'{path}: no records in it; give a file of --results, not a plan of --csv')
        for row in found:
            rows.setdefault(str({key: value for key, value in row.items() if key != 'record'}), row)
    return join_resumed(list(rows.values()))


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
    stated = {}
    for key, value in record.items():
        known = read_value(value)
        if known is not None:
            stated[key] = known
    if stated.get('stage') == 'evaluate':
        return score_rows(stated)
    return [speed_row(stated)]


def speed_row(record: dict) -> dict:
    """Return what the table needs of a record of speed. Settings are text, '' where it does not state one.

    Raises UserError if a number that is needed is missing or not positive.
    """
    # what it must have
    record = {'stage': 'train', 'status': COMPLETE, 'extrapolated': False} | record
    if record['stage'] == 'train' and 'command' in record:  # it has all flags that there were
        record = DEFAULTS | record
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

    # settings, but for those that do nothing there, and what the program chose where it was left open
    by_default = record.get('by_default', ())
    is_measurement = 'max_duration' in by_default or 'max_duration' not in record and 'measure_batches' in record
    learns = record['stage'] == 'train' and record['status'] != FORECAST and not is_measurement
    idle = [*by_default]
    if not learns:
        idle += OF_LEARNING
    if record['stage'] == 'loader':
        idle += OF_A_MODEL
    stated = record | record.get('versions', {}) | dict.fromkeys(idle)
    row = {key: words(stated.get(key)) for key in (*SETTINGS, 'num_nodes')}
    if record.get('eval_held_out') is False:
        row['eval_remote'] += TRAINED_ON[None]
    encoders = words(record.get('encoders'))
    row['input'] = INPUTS.get(encoders, encoders)
    row['date'] = moment(record['date']) if 'date' in record else ''
    commit, dash, dirty = words(record.get('git_commit')).partition('-')
    row['git_commit'] = commit[:8] + dash + dirty

    # figures
    row['num_devices'] = record['num_devices']
    row['microbatch'] = number(record, 'device_train_microbatch_size')  # also one that was found
    for key in (*OF_A_RUN, 'images_per_sec_least', 'images_per_sec_most'):
        row[key] = number(record, key)
    for key in LEARNED:
        row[key] = number(record, key) if learns else math.nan
    row['images_per_sec'] = number(record, speed)
    losses = {}  # by images seen; of a batch that was evaluated again, the last counts
    for images, loss in record.get('evaluations', ()):
        losses[float(images)] = math.nan if loss is None else float(loss)
    row['evaluations'] = sorted(losses.items())
    row['on_cpu'] = record.get('device_type') == 'cpu'
    row['prices'] = prices_of(record)
    row['status'], row['notes'] = status_and_notes(record)
    row['record'] = record
    return row


def moment(date: str) -> str:
    """Return a date in UTC, which it is in where it does not say otherwise, so that later ones are larger as text.

    Raises UserError if it is no date as ISO 8601 has them.
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


def join_resumed(rows: list[dict]) -> list[dict]:
    """Join the rows of a training that was resumed: one for each setting of speed, with what it learned up to its end.

    A run goes on with the last one before it of its --save_folder, --run_name, --eval_remote and flags of learning. Of
    a setting the last part counts whose speed may be relied on; one that was resumed and has no such speed is no row
    of its own. Each row has the number of its `training`.
    """
    # the parts of each training, in the order of time; trainings stand in the order of the records
    trainings = []
    newest = {}  # training by what its parts agree in
    for place, row in sorted(enumerate(rows), key=lambda pair: pair[1].get('date', '')):
        keys = ['save_folder', 'run_name', 'eval_remote', *(field.name for field in SAME_ON_RESUME)]
        of_training = tuple(words(row['record'].get(key)) for key in keys)
        if row['record'].get('first_batch') and of_training in newest:
            newest[of_training].append((place, row))
        else:
            newest[of_training] = [(place, row)]
            trainings.append(newest[of_training])
    trainings.sort(key=lambda training: min(place for place, _ in training))

    joined = []
    for place, training in enumerate(trainings):
        parts = [part for _, part in training]
        kept = {}  # part by its setting of speed
        for part in parts:
            setting = tuple(part.get(key) for key in (*OF_SPEED, 'num_devices', 'num_nodes'))
            if part['status'] == MEASURED or (part is parts[-1] and setting not in kept):
                kept[setting] = part

        # each has the end of the training, its last evaluation, and all losses
        records = [part['record'] for part in parts]
        evaluated = [record for record in records if 'eval_batch' in record or 'eval_loss' in record] or records
        learned = {key: records[-1].get(key) for key in OF_A_TRAINING}
        learned |= {key: evaluated[-1].get(key) for key in OF_AN_EVALUATION}
        learned['evaluations'] = [pair for record in records for pair in record.get('evaluations', ())]
        for part in kept.values():
            if len(parts) > 1:
                [part] = rows_of(part['record'] | learned)
            joined.append(part | {'training': place})
    return joined


def status_and_notes(record: dict) -> tuple[str, str]:
    """Return the status of a record of speed, and what the table says of it."""
    # a forecast's range is what was seen of its errors; where that is not known, the figure stands alone
    status = words(record['status'])
    if status == FORECAST:
        if record.get('images_per_sec_least') is None:
            return FORECAST, 'forecast, not tested'
        least, most = record['images_per_sec_least'], record['images_per_sec_most']
        return FORECAST, f'forecast: {least:,.0f} to {most:,.0f} images/s'

    # a run without a speed, one whose speed is doubtful, one that its source has calculated, and all others
    if status != COMPLETE:
        reason = f'{status}: {words(record.get("error"))}'
        return status, textwrap.shorten(reason, 70, placeholder=' ...').rstrip(': ')
    if why_unreliable(record):
        return UNRELIABLE, f'images/s {UNRELIABLE}: {why_unreliable(record)}'
    if record['extrapolated']:
        return EXTRAPOLATED, 'extrapolated by its source'
    return MEASURED, ''


def score_rows(record: dict) -> list[dict]:
    """Return a row for each guidance scale of an evaluation; a score that was not asked for is NaN."""
    row = {key: words(record.get(key)) for key in EVALUATED}
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
        figures = {}
        for key in ('guidance', 'fid', 'clip_score'):
            figures[key] = math.nan if score[key] is None else float(score[key])
        rows.append(row | figures)
    return rows


def words(value) -> str:
    """Return a value of a record as one line of text, without what a terminal would take for a command."""
    if value is None or value == []:
        return ''
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    return ' '.join(''.join(char if char.isprintable() else ' ' for char in str(value)).split())
