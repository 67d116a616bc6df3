"""Read records, as the commands write them or a CSV file has them, as the rows of a report."""
import csv
import io
import json
import math
import os
import textwrap
from pathlib import Path

from sdbench.flags.train import SAME_ON_RESUME, SWITCHES
from sdbench.records.figures import OF_A_RUN
from sdbench.records.keys import COMPLETE, ENCODERS, FORECAST, why_unreliable
from sdbench.records.versions import PACKAGES

# What bears on speed. A loader has nothing of a model.
OF_A_MODEL = ['model_name', *SWITCHES, 'use_ema', 'clip_grad_norm', 'ema_start']
VERSIONS = ['python', 'cuda', *PACKAGES]
OF_SPEED = ['stage', 'device', 'image_size', 'input', 'dataset', 'batch_size', *OF_A_MODEL, 'num_workers', *VERSIONS]
# What bears on what a training learns, beside those. Measurements and forecasts learn nothing.
OF_LEARNING = [field.name for field in SAME_ON_RESUME
               if field.name not in (*OF_SPEED, 'use_synth_data', 'use_synth_latents')]  # which `dataset` says
OF_LEARNING += ['max_duration', 'load_weights', 'remote', 'eval_remote']
# Records are averaged and fitted together only where all of these agree; a missing value differs from any other.
SETTINGS = [*OF_SPEED, *OF_LEARNING]
LEARNED = ['eval_loss', 'loss', 'trained_batches']
# Losses on --eval_remote are ranked and drawn together only where these agree: others are of other latents or samples.
COMPARABLE = ['model_name', 'image_size', 'pretrained', 'input', 'eval_remote']
# What a run says of the whole training, with the runs that it resumed; another --max_duration may be given to each.
OF_A_WHOLE_TRAINING = [*LEARNED, 'trained_epochs', 'eval_batch', 'gpu_hours', 'dollars', 'max_duration']
# Scores are on one line of a picture only where these agree, and those of the network that the score is from.
CONDITIONS = ['model', 'weights', 'data', 'samples', 'image_size', 'steps']
NETWORKS = {'fid': ['network', 'inception_sha256'], 'clip_score': ['clip', 'clip_sha256']}
EVALUATED = [*CONDITIONS, *NETWORKS['fid'], *NETWORKS['clip_score']]
HASHES = ['inception_sha256', 'clip_sha256']  # shown by their beginning

# The status of a row is what its figures are. Any other one is that of a run without a speed, such as failed.
MEASURED = 'measured'
EXTRAPOLATED = 'extrapolated'  # from other rows, here or by its source
UNRELIABLE = 'not reliable'
WITH_FIGURES = [MEASURED, EXTRAPOLATED, FORECAST]

# What is said behind the name of data, by whether the model was trained on it.
TRAINED_ON = {False: '', True: ' (the model was trained on it)', None: ' (not known to be held out)'}
INPUTS = {ENCODERS[False]: 'images', ENCODERS[True]: 'latents'}  # of a training, by the encoders in its loop
POSITIVE = ('num_devices', 'image_size', 'batch_size', 'device_train_microbatch_size', 'images_per_sec',
            'loader_images_per_sec')


def read_records(path: str) -> list[dict]:
    """Return the rows of a file of JSON lines, or of a CSV file (*.csv).

    Raises ValueError, which names file and line, for what is no record or cannot be calculated with.
    """
    # Lines with their numbers, which an error names. A row of a CSV file may span several.
    if os.path.isdir(path):
        raise ValueError(f'{path} is a folder; give a file of records, which --results of the run names')
    text = Path(path).read_text(encoding='utf-8-sig', errors='replace')
    if path.lower().endswith('.csv'):
        reader = csv.DictReader(io.StringIO(text), restval='')
        lines = ((reader.line_num, cells) for cells in reader)
        parse = record_of_cells
    else:
        lines = ((number, line) for number, line in enumerate(text.split('\n'), start=1) if line.strip())
        parse = json.loads

    # what is no record ends the report: a row that was left out in silence would be missing in every figure
    rows = []
    for number, line in lines:
        try:
            rows += rows_of(parse(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'{path}:{number}: not a record: {error}; mend or remove that line') from None
    return rows


def record_of_cells(cells: dict[str | None, str]) -> dict:
    """Return a row of a CSV file as a record: what JSON can read is that, and all else is text."""
    if None in cells:
        raise ValueError('more cells than columns; give numbers without commas')
    record = {}
    for key, cell in cells.items():
        try:
            record[key] = json.loads(cell)
        except ValueError:
            record[key] = cell
    return record


def rows_of(record: dict) -> list[dict]:
    """Return the row of a record of speed, or one for each guidance scale of an evaluation.

    The checks of a proof, and a plan that was written by --csv, are in no table.
    """
    if not isinstance(record, dict):
        raise ValueError('not one JSON object')
    stated = {key: value for key, value in record.items() if value not in (None, '', 'auto')}
    if stated.get('stage') in ('proof', 'plan'):
        return []
    if stated.get('stage') == 'evaluate':
        return score_rows(stated)
    return [speed_row(stated)]


def speed_row(record: dict) -> dict:
    """Return what the table needs of a record of speed. Settings are text, '' where it does not state one.

    Raises ValueError if a number that is needed is missing or not positive.
    """
    # what it must have
    record = {'stage': 'train', 'status': COMPLETE, 'extrapolated': False} | record
    speed = 'loader_images_per_sec' if record['stage'] == 'loader' else 'images_per_sec'
    needed = ['device', 'num_devices', 'image_size']
    if record['status'] in (COMPLETE, FORECAST):
        needed.append(speed)
    missing = [key for key in needed if key not in record]
    if missing:
        raise ValueError(f'no {", ".join(missing)}; a record needs {", ".join(needed)}')
    for key in POSITIVE:
        if key in record and (type(record[key]) not in (int, float) or not 0 < record[key] < math.inf):
            raise ValueError(f'{key} {record[key]!r} is not a positive number')

    # settings, but for those that do nothing there
    stated = record | record.get('versions', {})
    row = {key: words(stated.get(key)) for key in (*SETTINGS, 'num_nodes')}
    learns = record['stage'] == 'train' and record['status'] != FORECAST and 'measure_batches' not in record
    if not learns:
        row |= dict.fromkeys(OF_LEARNING, '')
    if record['stage'] == 'loader':
        row |= dict.fromkeys(OF_A_MODEL, '')
    if record.get('num_workers_by_default') is True:  # it follows from the machine
        row['num_workers'] = ''
    if record.get('eval_held_out') is False:
        row['eval_remote'] += TRAINED_ON[None]
    encoders = words(record.get('encoders'))
    row['input'] = INPUTS.get(encoders, encoders)
    row['date'] = words(record.get('date'))[:19].replace('T', ' ')  # to the second
    commit, dash, dirty = words(record.get('git_commit')).partition('-')
    row['git_commit'] = commit[:8] + dash + dirty

    # figures
    row['num_devices'] = record['num_devices']
    for key in (*OF_A_RUN, 'images_per_sec_least', 'images_per_sec_most'):
        row[key] = float(record.get(key, math.nan))
    for key in LEARNED:
        row[key] = float(record.get(key, math.nan)) if learns else math.nan
    row['images_per_sec'] = float(record.get(speed, math.nan))
    row['on_cpu'] = record.get('device_type') == 'cpu'
    row['status'], row['notes'] = status_and_notes(record)
    row['record'] = record
    return row


def join_resumed(rows: list[dict]) -> list[dict]:
    """Join the rows of a training that was resumed: one for each setting of speed, with what it learned up to its end.

    A run goes on with the last one before it of its --save_folder, --run_name and flags of learning. Of a setting the
    last part counts whose speed may be relied on; one that was resumed and has no such speed is no row of its own.
    """
    # the parts of each training
    trainings = []
    newest = {}  # training by what its parts agree in
    flags = [key for key in OF_LEARNING if key not in ('max_duration', 'load_weights', 'remote')]
    for row in rows:
        record = row['record']
        of_training = (record.get('save_folder'), record.get('run_name'), *(row.get(key) for key in flags))
        if record.get('first_batch') and of_training in newest:
            newest[of_training].append(row)
        else:
            newest[of_training] = [row]
            trainings.append(newest[of_training])

    joined = []
    for parts in trainings:
        if len(parts) == 1:
            joined += parts
            continue
        learned = {}
        evaluations = {}  # loss by images seen: of a batch that was evaluated again, the last counts
        for part in parts:
            learned |= {key: part['record'][key] for key in OF_A_WHOLE_TRAINING if key in part['record']}
            evaluations |= dict(part['record'].get('evaluations', ()))
        learned['evaluations'] = sorted(evaluations.items())
        kept = {}  # part by its setting of speed
        for part in parts:
            setting = tuple(part[key] for key in (*OF_SPEED, 'num_devices', 'num_nodes'))
            if part['status'] == MEASURED or (part is parts[-1] and setting not in kept):
                kept[setting] = part
        joined += [speed_row(part['record'] | learned) for part in kept.values()]
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
    if words(record['extrapolated']) != 'no':
        return EXTRAPOLATED, 'extrapolated by its source'
    return MEASURED, ''


def score_rows(record: dict) -> list[dict]:
    """Return a row for each guidance scale of an evaluation; a score that was not asked for is NaN."""
    row = {key: words(record.get(key)) for key in EVALUATED}
    row['data'] += TRAINED_ON[record.get('trained_on_data')]
    for key in HASHES:
        row[key] = row[key][:8]
    if row['model'].endswith('.pt'):
        row['model'] = row['model'].rpartition('/')[0] or row['model']  # checkpoints of one training are one model
    row['trained_batches'] = float(record.get('trained_batches', math.nan))
    row['images_seen'] = float(record.get('images_seen', math.nan))
    training = record.get('training', {})
    row['device'] = training.get('device', 'CPU')
    row['total_gpu_hours'] = math.nan if row['device'] == 'CPU' else training['gpu_hours']

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
    if value is None:
        return ''
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    return ' '.join(''.join(char if char.isprintable() else ' ' for char in str(value)).split())
