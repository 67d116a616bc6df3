"""Turn records into days, GPU-hours and dollars, and predict more GPUs.

    python report.py results.jsonl                     # a row for each setting and number of GPUs that was measured
    python report.py published.csv --extrapolate 512 1024 --figure days.png --csv table.csv
    python report.py results.jsonl --phase 1126400000@256 --phase 1740800000@512  # as SD2 base was really trained
    python report.py results.jsonl --compare           # a row for each training, and its speed over the first's
    python report.py results.jsonl --days 3 --dollars_per_gpu_hour H100=2.5 H200=3.2  # what three days buy
    python report.py results.jsonl --quality quality.png # scores of evaluate.py, over guidance and over the training

A record is a line of JSON as benchmark.py, encode.py or evaluate.py writes it, or a row of a CSV file with the same
keys as columns. A setting is a column where rows differ in it, and stands above the table where they agree. A figure
is rounded once, when printed: to the decimals of the published table, or to three significant digits where these are
more. --csv holds the rows of all tables unrounded, with every setting.
"""
from sdbench.exits import one_line_errors
from sdbench.flags.commands import Report
from sdbench.flags.parser import parse

if __name__ == '__main__':
    parse(Report, __doc__)  # a mistake is answered before pandas, which takes a second

import csv
import io
import json
import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from sdbench.costs import (
    SECONDS_PER_DAY,
    TRAINING_IMAGES,
    Prices,
    days_to_train,
    gpu_hours,
    price_of,
    storage_in_words,
)
from sdbench.errors import plural
from sdbench.flags.train import SWITCHES
from sdbench.measuring.figures import FIGURES, IN_TABLES, Figure
from sdbench.measuring.reliability import why_unreliable
from sdbench.measuring.versions import PACKAGES
from sdbench.report.pictures import CONDITIONS, EXTRAPOLATED, FORECAST, JUDGES, MEASURED, draw_quality, draw_speeds

HASHES = ['inception_sha256', 'clip_sha256']  # shown by their beginning
VERSIONS = ['python', 'cuda', *PACKAGES]
# Records are averaged and fitted together only where all of these agree; one that is not stated agrees with no value.
SETTINGS = ['stage', 'device', 'image_size', 'model_name', 'input', 'dataset', 'batch_size', *SWITCHES, 'use_ema',
            'num_workers', 'clip_grad_norm', 'ema_start', *VERSIONS]
EVALUATED = [*CONDITIONS, *JUDGES['fid'], *JUDGES['clip_score']]
# What a row's figures are; any other status is that of a run without figures to rely on, such as failed.
DOUBTED = 'not reliable'
WITH_FIGURES = [MEASURED, EXTRAPOLATED, FORECAST]
INPUTS = {'in_loop': 'images', 'text_in_loop': 'latents'}  # of a training, by the encoders in its loop
NUMBERS = ('num_devices', 'image_size', 'batch_size', 'device_train_microbatch_size', 'images_per_sec',
           'loader_images_per_sec')
# Columns of figures in their order: those of a record, and those that follow from them.
COLUMNS = {
    'num_devices': Figure('{}s', cell='{}', decimals=None),
    'images_per_sec': FIGURES['images_per_sec'],
    'images_per_sec_per_device': Figure('images/s per {}', cell='{}', decimals=2),
    'scaling_efficiency': Figure('efficiency', cell='{} %'),
    'speed_over_first': Figure('over the first', cell='{} x', decimals=2),
    **{key: FIGURES[key] for key in IN_TABLES},
    'guidance': Figure('guidance', cell='{}'),
    'fid': Figure('FID', cell='{}', decimals=2),
    'clip_score': Figure('CLIP score', cell='{}', decimals=2),
    'trained_batches': Figure('batches', cell='{}', decimals=None),
    'images_seen': Figure('images seen', cell='{}', decimals=None),
    'days': Figure('days', cell='{}', decimals=2),
    'gpu_hours': Figure('GPU-hours', cell='{}', decimals=0),
    'cost_usd': Figure('cost', cell='${}', decimals=0),
    'images_in_days': Figure('images in --days', cell='{}', decimals=0),
}
UNKNOWN = dict.fromkeys(IN_TABLES, math.nan)  # the figures of a row that was not measured
FOR_US = ['record', 'setting', 'label', 'on_cpu']  # columns that are not for the CSV file

TINY_NOTE = 'The model tiny is for trying things out and has no days and no cost; --training_images asks for them.'
FROM_SPEED = ('GPU-hours and cost of an evaluation are those of the images seen, at the images/s of the training in '
              'these records that has the same flags; what was trained before with other flags is not in them.')


def main(argv=None):
    settings = parse(Report, __doc__, argv, 'report.py')
    with one_line_errors('report.py'):
        print(report(settings))


def report(settings: Report) -> str:
    """The report as Markdown. Writes the files that --csv, --figure and --quality name.

    Raises ValueError if a record cannot be calculated with, or what was asked for does not follow from the records.
    """
    rows = []
    for path in settings.records:
        rows += read_records(path)
    records = pd.DataFrame([row for row in rows if row['stage'] != 'evaluate'])
    evaluations = pd.DataFrame([row for row in rows if row['stage'] == 'evaluate'])
    require_what_flags_need(settings, records, evaluations)
    tables = []
    blocks = []
    if len(records):
        speeds, sentences = speed_table(records, settings)
        tables.append(speeds)
        keys = [*SETTINGS, 'num_nodes']
        if settings.compare:
            keys = ['run', *keys, 'date', 'git_commit']
        blocks += [in_common(speeds, keys), markdown(speeds, keys), *sentences]
    if settings.phase:
        plans, left_out = plan_table(records, settings)
        tables.append(plans)
        phases = [f'{plural(images, "image")} at {size} px' for images, size in settings.phase]
        plan = f'Plan, for each number of devices that was measured: train on {", then ".join(phases)}'
        blocks += [plan, markdown(plans, SETTINGS)]
        if left_out:
            blocks.append(f'Not in the plan: {"; ".join(left_out)}')
    if len(evaluations):
        scores = score_table(evaluations, records, settings.dollars_per_gpu_hour)
        tables.append(scores)
        blocks += [in_common(scores, EVALUATED), markdown(scores, EVALUATED)]
        if scores['gpu_hours'].notna().any():
            blocks.append(FROM_SPEED)
    if settings.csv:
        write_csv(settings.csv, pd.concat(tables))
    if settings.figure:
        trained = speeds[speeds['stage'] == 'train']
        draw_speeds(settings.figure, trained, settings.training_images or TRAINING_IMAGES, in_common(trained, SETTINGS))
    if settings.quality:
        draw_quality(settings.quality, scores, in_common(scores, EVALUATED))
    written = [path for path in (settings.csv, settings.figure, settings.quality) if path]
    if written:
        blocks.append(f'Written: {", ".join(written)}')
    return '\n\n'.join(blocks)


def require_what_flags_need(settings: Report, records: pd.DataFrame, evaluations: pd.DataFrame) -> None:
    """Raises ValueError if there are no records of the kind that a flag needs."""
    if records.empty or (records['stage'] != 'train').all():
        for flag in ('compare', 'extrapolate', 'phase', 'figure'):
            if getattr(settings, flag):
                raise ValueError(f'--{flag} needs records of a training, and there are none')
    if settings.quality and evaluations.empty:
        raise ValueError('--quality needs records of evaluate.py, and there are none')


def write_csv(path: str, rows: pd.DataFrame) -> None:
    """Writes rows unrounded, with those of their columns that hold something."""
    rows = rows.drop(columns=FOR_US, errors='ignore').replace('', None)
    rows.dropna(axis='columns', how='all').to_csv(path, index=False)


def read_records(path: str) -> list[dict]:
    """The rows of a file of JSON lines, or of a CSV file (*.csv).

    Raises ValueError, which names file and line, for what is no record or cannot be calculated with.
    """
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
    rows = []
    for number, line in lines:
        try:
            rows += rows_of(parse(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'{path}:{number}: not a record: {error}') from None
    if not rows:
        raise ValueError(f'{path}: no records in it; benchmark.py --results {path} adds one')
    return rows


def record_of_cells(cells: dict[str | None, str]) -> dict:
    """A row of a CSV file as a record: what JSON can read is that, and all else is text."""
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
    """A row of a record of speed, one for each guidance scale of an evaluation, or none of a proof's other checks."""
    if not isinstance(record, dict):
        raise ValueError('not one JSON object')
    stated = {key: value for key, value in record.items() if value not in (None, '', 'auto')}
    if stated.get('stage') == 'evaluate':
        return score_rows(stated)
    if stated.get('stage') == 'proof':
        return []
    return [speed_row(stated)]


def speed_row(record: dict) -> dict:
    """What the table needs of a record of speed: settings are text, '' where it does not state one.

    Its `status` is MEASURED, EXTRAPOLATED by its source, FORECAST, DOUBTED, or that of a run that is not complete.

    Raises ValueError if a number that is needed is missing or not positive.
    """
    record = {'stage': 'train', 'status': 'complete', 'extrapolated': False} | record | record.get('versions', {})
    speed = 'loader_images_per_sec' if record['stage'] == 'loader' else 'images_per_sec'
    needed = ['device', 'num_devices', 'image_size']
    if record['status'] in ('complete', FORECAST):
        needed.append(speed)
    missing = [key for key in needed if key not in record]
    if missing:
        raise ValueError(f'no {", ".join(missing)}; a record needs {", ".join(needed)}')
    for key in NUMBERS:
        if key in record and (type(record[key]) not in (int, float) or not 0 < record[key] < math.inf):
            raise ValueError(f'{key} {record[key]!r} is not a positive number')

    row = {key: words(record.get(key)) for key in (*SETTINGS, 'num_nodes')}
    if record['stage'] == 'loader':
        row['model_name'] = ''  # it has none
    encoders = words(record.get('encoders'))
    row['input'] = INPUTS.get(encoders, encoders)
    if record.get('num_workers_by_default') is True:  # it follows from the machine, and is no setting of the run
        row['num_workers'] = 'default'
    row['date'] = words(record.get('date'))[:19].replace('T', ' ')  # to the second
    commit, dash, dirty = words(record.get('git_commit')).partition('-')
    row['git_commit'] = commit[:8] + dash + dirty
    row['num_devices'] = record['num_devices']
    for key in IN_TABLES:
        row[key] = float(record.get(key, math.nan))
    row['images_per_sec'] = float(record.get(speed, math.nan))
    row['on_cpu'] = record.get('device_type') == 'cpu'
    row['status'], row['notes'] = status_and_notes(record)
    row['record'] = record
    return row


def status_and_notes(record: dict) -> tuple[str, str]:
    """What the speed of a record is, and what the table says of that."""
    status = words(record['status'])
    if status == FORECAST:
        if record.get('images_per_sec_least') is None:
            return FORECAST, 'forecast, not tested'
        least, most = record['images_per_sec_least'], record['images_per_sec_most']
        return FORECAST, f'forecast: {least:,.0f} to {most:,.0f} images/s'
    if status != 'complete':
        reason = f'{status}: {words(record.get("error"))}'
        return status, textwrap.shorten(reason, 70, placeholder=' ...').rstrip(': ')
    if why_unreliable(record):
        return DOUBTED, f'{DOUBTED}: {why_unreliable(record)}'
    if words(record['extrapolated']) != 'no':
        return EXTRAPOLATED, 'extrapolated by its source'
    return MEASURED, ''


def score_rows(record: dict) -> list[dict]:
    """A row for each guidance scale of an evaluation; a score that was not asked for is NaN."""
    row = {key: words(record.get(key)) for key in EVALUATED}
    for key in HASHES:
        row[key] = row[key][:8]
    if row['model'].endswith('.pt'):
        row['model'] = row['model'].rpartition('/')[0] or row['model']  # checkpoints of one training are one model
    row['trained_batches'] = float(record.get('trained_batches', math.nan))
    row['images_seen'] = float(record.get('images_seen', math.nan))
    notes = []
    if record.get('fid_is_biased'):
        notes.append('FID of few pictures is too high')
    if record.get('fid_of_published_weights') is False:
        notes.append('FID by other weights')
    if 'random_scores' in record:
        notes.append('no scores: a trial by random networks')
    row |= {'stage': 'evaluate', 'status': MEASURED, 'notes': ', '.join(notes), 'record': record}
    rows = []
    for score in record['scores']:
        figures = {}
        for key in ('guidance', 'fid', 'clip_score'):
            figures[key] = math.nan if score[key] is None else float(score[key])
        rows.append(row | figures)
    return rows


def words(value) -> str:
    """A value of a record as one line of text."""
    if value is None:
        return ''
    if isinstance(value, bool):
        return 'yes' if value else 'no'
    return ' '.join(str(value).split())


def speed_table(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """A row for each setting and number of devices, or with --compare for each training, with all that follows from
    its speed; and sentences on them."""
    rows = records.assign(label=labels(records), setting=records.groupby(SETTINGS, sort=False).ngroup())
    sentences = []
    if settings.compare:
        rows = rows[rows['stage'] == 'train'].reset_index(drop=True)
        rows['run'] = [str(number) for number in range(1, len(rows) + 1)]
        rows['speed_over_first'] = over_first(rows, 'images_per_sec', ['model_name', 'image_size'])
    else:
        rows = medians(rows)
        if settings.extrapolate:
            predicted, sentences = predictions(rows, settings.extrapolate)
            rows = pd.concat([rows, predicted])
        rows = rows.sort_values(['setting', 'num_devices'], kind='stable', ignore_index=True)
    rows['images_per_sec_per_device'] = rows['images_per_sec'] / rows['num_devices']
    if not settings.compare:
        several = rows.groupby('setting')['num_devices'].transform('nunique') > 1
        rows['scaling_efficiency'] = over_first(rows, 'images_per_sec_per_device', ['setting']).where(several)

    has_days = (rows['stage'] == 'train') & rows['status'].isin(WITH_FIGURES)
    if settings.training_images is None and (rows['model_name'] == 'tiny').any():
        has_days &= rows['model_name'] != 'tiny'
        sentences.append(TINY_NOTE)
    days = days_to_train(rows['images_per_sec'], settings.training_images or TRAINING_IMAGES).where(has_days)
    if settings.days is not None:
        rows['images_in_days'] = (rows['images_per_sec'] * settings.days * SECONDS_PER_DAY).where(has_days)
        sentences.append(f'The last column is how many images {settings.days:g} days buy.')
    return with_costs(rows, days, settings.dollars_per_gpu_hour), sentences


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """A row with the median of the measured runs of each setting on so many devices and nodes, and one for each other
    record."""
    is_measured = rows['status'] == MEASURED
    merged = []
    for _, runs in rows[is_measured].groupby(['setting', 'num_devices', 'num_nodes']):
        speeds = runs['images_per_sec']
        row = runs.iloc[[0]].assign(**{key: runs[key].median() for key in IN_TABLES})
        if len(runs) > 1:
            row['notes'] = f'median of {len(runs)} runs, {speeds.min():,.1f} to {speeds.max():,.1f}'
        merged.append(row)
    return pd.concat([*merged, rows[~is_measured]])


def with_costs(rows: pd.DataFrame, days: pd.Series, prices: Prices) -> pd.DataFrame:
    """Return the rows with their days and, where they are those of GPUs, GPU-hours and dollars."""
    hours = (days * 24 * rows['num_devices']).where(~rows['on_cpu'])
    dollars = rows['device'].map(lambda device: price_of(device, prices))
    return rows.assign(days=days, gpu_hours=hours, cost_usd=hours * dollars)


def over_first(rows: pd.DataFrame, key: str, group: list[str]) -> pd.Series:
    """Return a figure of the rows over that of the first that was measured in the same group, or else forecast."""
    groups = [rows[name] for name in group]
    bases = rows[key].where(rows['status'] == MEASURED).groupby(groups).transform('first')
    forecasts = rows[key].where(rows['status'] == FORECAST).groupby(groups).transform('first')
    bases = bases.fillna(forecasts)
    return rows[key].where(rows['status'].isin(WITH_FIGURES)) / bases


def predictions(rows: pd.DataFrame, counts: Sequence[int]) -> tuple[pd.DataFrame, list[str]]:
    """Rows for `counts` GPUs at the same batch in each setting that allows it, and sentences that say from what.

    A number of GPUs that was measured on several numbers of nodes counts with the fewest. Raises ValueError if no
    setting allows a prediction.
    """
    counts = sorted(set(counts))
    predicted = []
    sentences = []
    trained = rows[(rows['status'] == MEASURED) & (rows['stage'] == 'train')]
    trained = trained.sort_values(['num_devices', 'num_nodes'], key=pd.to_numeric).drop_duplicates(
        ['setting', 'num_devices'])
    for _, runs in trained.groupby('setting'):
        first = runs.iloc[0]
        batch = int(first['batch_size'] or 1)  # a batch that is not stated cancels out, as long as it is fixed
        if len(runs) < 3 or 1 < batch < counts[-1]:
            continue
        a, b = fit_step_seconds(runs['num_devices'], batch / runs['images_per_sec'])
        for count in counts:
            note = 'extrapolated'
            if batch > 1 and batch / count < int(first['device_train_microbatch_size'] or 1):
                note += f'; {batch / count:.3g} images a GPU: a smaller microbatch'
            predicted.append(first.to_dict() | UNKNOWN | {
                'num_devices': count, 'num_nodes': '', 'images_per_sec': batch / (a / count + b),
                'status': EXTRAPOLATED, 'notes': note})
        residuals = batch / (a / runs['num_devices'] + b) / runs['images_per_sec'] - 1
        worst = residuals.abs().argmax()
        sentences.append(
            f'{first["label"] or "Extrapolated"}: step_seconds(n) = {a:.5g} / n + {b:.5g} for a batch of '
            f'{plural(batch, "image")}, fitted on {", ".join(map(str, runs["num_devices"]))} GPUs; worst residual '
            f'{residuals.iloc[worst]:+.1%} of the images/s, on {runs["num_devices"].iloc[worst]} GPUs.')
    if not predicted:
        raise ValueError(f'--extrapolate {counts[-1]} needs complete and reliable trainings of one setting on three '
                         'numbers of GPUs, and a batch of as many images as GPUs')
    return pd.DataFrame(predicted), sentences


def fit_step_seconds(counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The a, b >= 0 for which a / n + b is closest to the seconds that a step took on n devices.

    Closest by least squares of the relative errors, since the long steps on few devices would outweigh all others in
    absolute ones.
    """
    counts = np.asarray(counts, dtype=float)
    terms = np.stack([1 / counts, np.ones_like(counts)], axis=1)  # (measurements, 2): what a and b are multiplied by
    (a, b), _ = nnls(terms / np.asarray(seconds)[:, None], np.ones_like(counts))
    return a, b


def plan_table(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return a row for each setting and number of devices that was measured, or forecast, at the size of every phase of
    --phase; and what else was trained, each with the reason why it has none.

    A phase takes the speed of the fastest run of its size, whatever the microbatch. A plan on latents has the encoding
    of their images in it, once at each size, where the records have one. Raises ValueError if there is no plan.
    """
    trained = records[records['stage'] == 'train']
    left_out = []
    planned = trained['status'].isin([MEASURED, FORECAST])
    for _, row in trained[~planned].iterrows():
        left_out.append(f'{row["num_devices"]} x {row["device"]}, {row["notes"]}')
    trained = trained[planned]
    keys = ['status', *(key for key in SETTINGS if key not in ('image_size', 'device_train_microbatch_size'))]
    sizes = [size for _, size in settings.phase]
    plans = []
    for _, runs in trained.groupby([*keys, 'num_devices', 'num_nodes'], sort=False):
        of_settings = runs.groupby(['image_size', 'device_train_microbatch_size'])['images_per_sec'].median()
        speeds = of_settings.groupby('image_size').max()
        unmeasured = [size for size in sizes if size not in speeds.index]
        if unmeasured:
            first = runs.iloc[0]
            left_out.append(f'{first["num_devices"]} x {first["device"]}, not measured at '
                            f'{" and ".join(unmeasured)} px')
            continue
        days = [days_to_train(speeds[size], images) for images, size in settings.phase]
        notes = [f'{printed("days", some)} days at {size} px' for some, size in zip(days, sizes, strict=True)]
        if runs['status'].iloc[0] == FORECAST:
            notes.insert(0, 'forecast')
        if runs['input'].iloc[0] == 'latents':
            for size in dict.fromkeys(sizes):
                some, note = days_to_encode(records, runs.iloc[0], size)
                days.append(some)
                notes.append(note)
        plan = runs.iloc[[0]].assign(stage='plan', image_size=', then '.join(sizes),
                                     device_train_microbatch_size='', notes=', '.join(notes), **UNKNOWN)
        plans.append(with_costs(plan, pd.Series(sum(days), index=plan.index), settings.dollars_per_gpu_hour))
    if not plans:
        raise ValueError(f'--phase: no number of devices has reliable records of one setting at {" and ".join(sizes)} '
                         'px; measure each size with the same flags')
    return pd.concat(plans).sort_values('num_devices', kind='stable'), left_out


def days_to_encode(records: pd.DataFrame, run: pd.Series, size: str) -> tuple[float, str]:
    """Return the days of encoding the images of a dataset once at a size, on the GPUs of a run, and a note on them.

    A record of encode.py says how many images its dataset has, how fast they are encoded, and into how many bytes. Of
    several of the same model, size and GPUs the one with the most images counts. Without one it is 0 days.
    """
    same = {'stage': 'encode', 'image_size': size}
    for key in ('model_name', 'device', 'num_devices'):
        same[key] = run[key]
    encoding = None
    images = 0
    for _, row in records[records['status'].isin([MEASURED, FORECAST])].iterrows():
        stored = row['record'].get('stored_samples', 0)
        if stored > images and all(row[key] == value for key, value in same.items()):
            encoding, images = row, stored
    if encoding is None:
        return 0.0, f'without encoding the images at {size} px'
    days = days_to_train(encoding['images_per_sec'], images)
    note = f'{printed("days", days)} days to encode {plural(images, "image")} at {size} px'
    if encoding['status'] == FORECAST and run['status'] != FORECAST:
        note += ' by forecast'
    if 'bytes_per_image' in encoding['record']:
        note += f' ({storage_in_words(images * encoding["record"]["bytes_per_image"])})'
    return days, note


def score_table(evaluations: pd.DataFrame, records: pd.DataFrame, prices: Prices) -> pd.DataFrame:
    """A row for each guidance scale of each evaluation, checkpoints in order, and what the training until then took."""
    trainings = [record for record in records.get('record', ()) if record['stage'] == 'train']
    rows = evaluations.sort_values(['model', 'trained_batches', 'guidance'], kind='stable', ignore_index=True)
    hours = []
    dollars = []
    for record in rows['record']:
        training = training_of(record, trainings)
        if training is None:
            hours.append(math.nan)
            dollars.append(math.nan)
        else:
            hours.append(gpu_hours(training['images_per_sec'], training['num_devices'], record['images_seen']))
            dollars.append(hours[-1] * price_of(training['device'], prices))
    return rows.assign(gpu_hours=hours, cost_usd=dollars)


def training_of(evaluation: dict, trainings: list[dict]) -> dict | None:
    """Return the last record of a training with the flags of an evaluation's that was as long; None where there is
    none, or it was on a CPU.
    """
    flags = evaluation.get('training', {})
    for training in reversed(trainings):
        has_hours = 'images_per_sec' in training and training.get('device_type') != 'cpu'
        in_both = (flags.keys() & training.keys()) - {'dataset'}  # of a checkpoint it is the hash of an index
        is_same = 'batch_size' in in_both and all(flags[key] == training[key] for key in in_both)
        if has_hours and is_same and training.get('trained_batches', 0) >= evaluation.get('trained_batches', math.inf):
            return training
    return None


def differing(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """The keys with several values, or, within a stage, with a value in some rows and none in others."""
    in_a_stage = rows.groupby('stage')[list(keys)].nunique().max()  # '' is a value
    stated = rows[list(keys)].replace('', None).nunique()
    return [key for key in keys if in_a_stage[key] > 1 or stated[key] > 1]


def labels(rows: pd.DataFrame) -> list[str]:
    """What tells the setting of each row from those of the other trainings."""
    keys = differing(rows[rows['stage'] == 'train'], SETTINGS)
    texts = []
    for _, row in rows.iterrows():
        stated = [f'{key} {row[key]}' for key in keys if row[key]]
        texts.append(', '.join(stated))
    return texts


def in_common(rows: pd.DataFrame, keys: Sequence[str]) -> str:
    """What rows agree in, of some keys, with the versions on a line of their own; a switch that is off is not named."""
    columns = differing(rows, keys)
    settings = []
    versions = []
    for key in keys:
        value = rows[key].max()  # '' where a row does not state it
        if key in columns or value in ('', 'no'):
            continue
        if key in VERSIONS:
            versions.append(f'{key} {value}')
        else:
            settings.append(f'{key} {value}')
    lines = []
    if settings:
        lines.append(f'All rows: {", ".join(settings)}')
    if versions:
        lines.append(f'Versions: {", ".join(versions)}')
    return '\n'.join(lines)


def markdown(rows: pd.DataFrame, keys: Sequence[str]) -> str:
    """An aligned Markdown table: those of its keys that rows differ in, the figures and the notes. A column with
    nothing in it is left out."""
    device = 'GPU'
    if 'on_cpu' in rows and rows['on_cpu'].any():
        device = 'device'
    cells = pd.DataFrame(index=rows.index)
    alignment = []
    for key in [*differing(rows, keys), *COLUMNS, 'notes']:
        if key not in rows:
            continue
        texts = [printed(key, value) for value in rows[key]]
        if not any(texts):
            continue
        heading = key
        if key in COLUMNS:
            heading = COLUMNS[key].heading.format(device)
        cells[heading] = texts
        alignment.append('right' if key in COLUMNS else 'left')
    return cells.to_markdown(index=False, disable_numparse=True, colalign=alignment)


def printed(key: str, value: str | float) -> str:
    """A figure with its column's decimals, or with three significant digits where these are more; a text as it is."""
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return ''
    template, decimals = COLUMNS[key].cell, COLUMNS[key].decimals
    if '%' in template:
        value *= 100
    if decimals is None:
        decimals = 0
    elif value:
        decimals = max(decimals, 2 - math.floor(math.log10(value)))
    return template.format(f'{value:,.{decimals}f}')


if __name__ == '__main__':
    main()
