"""Read records, which are lines of JSON or rows of a CSV file, as the rows of a report."""
import contextlib
import csv
import datetime
import io
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sdbench.costs import Prices
from sdbench.errors import UserError
from sdbench.gpus import full_name
from sdbench.records.metrics import RUN_METRICS
from sdbench.records.settings import (
    EVALUATION_SETTINGS,
    comparable,
    has_training_result,
    known_value,
    one_line_of,
    settings_of,
)
from sdbench.records.status import COMPLETE, UNMEASURED, why_unreliable

OLDER_WEIGHTS = {'live': 'raw', 'averaged': 'EMA'}  # names in records of older versions
# The other numbers of a record that a report calculates with
NUMBERS = ('batch_size', 'first_batch', 'trained_batches', 'gpu_hours', 'dollars', 'num_nodes', 'gpus_per_node')
RESULT_METRICS = ('eval_loss', 'eval_batch', 'eval_samples', 'loss', 'trained_batches')  # of a training as a whole

# The status of a row says where its metrics come from. A run without a speed has the status of its record, such as
# failed.
MEASURED = 'measured'
EXTRAPOLATED = 'extrapolated'  # from other rows, by this report or by the source of the record
UNRELIABLE = 'not reliable'
WITH_SPEED = (MEASURED, EXTRAPOLATED)

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


@dataclass(kw_only=True)
class Row:
    """A row of a report: a run, or the scores of an evaluation at one guidance scale.

    Attributes:
        record: the known values of the record.
        settings: the values that tell rows apart, by name; None where the record does not state one.
        metrics: the numbers of the row by the keys of COLUMNS, as far as they are known.
        status: where the metrics come from, or why there are none.
        notes: what to know about the metrics.
        date: start of the run in UTC, as text that sorts by time; '' if the record states none.
        prices: the prices that the record was given, in the form of --dollars_per_gpu_hour.
        evaluations: images that the training had seen at each evaluation, and the loss; None where it was not finite.
        training: running number of the training that the row belongs to.
        setting: equal for rows whose settings are compared over GPU counts.
    """
    record: dict[str, Any]
    settings: dict[str, Any]
    metrics: dict[str, float]
    status: str = MEASURED
    notes: str = ''
    date: str = ''
    prices: Prices = ()
    evaluations: Sequence[tuple[float, float | None]] = ()
    training: int | None = None
    setting: tuple = ()

    @property
    def stage(self) -> str:
        return self.record['stage']

    @property
    def device(self) -> str:
        return self.settings['device']

    @property
    def on_cpu(self) -> bool:
        return self.record.get('device_type') == 'cpu'

    @cached_property
    def identity(self) -> str:
        """Return a text that copies of a record share, whether they are lines of JSON or rows of --csv."""
        return json.dumps(self.record, sort_keys=True)


def read_all(paths: Sequence[str]) -> list[Row]:
    """Return a row for each record in some files, in the order of their dates. Scores have a row for each guidance.

    A record that is there twice counts once. Raises UserError, with the file and the line, if a line is not a record or
    lacks a number, and if a file has no records. Raises OSError if a file cannot be read.
    """
    rows = {}  # by the content of their record
    for path in paths:
        has_records = False
        for number, line in numbered_lines(path):
            # A line that is not a record ends the report, because every number would be wrong without it.
            try:
                record = parse_record(line)
                if record['stage'] in ('proof', 'plan'):  # a check of a proof, or a plan of --csv
                    continue
                for row in score_rows(record) if record['stage'] == 'evaluate' else [speed_row(record)]:
                    rows.setdefault(row.identity, row)
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f'{path}:{number}: not a record: {error}; fix or remove that line') from None
            has_records = True
        if not has_records:
            raise UserError(f'{path}: no records in it; give a file of --results, not a plan of --csv')

    # Sort by date, so the order of the files does not matter. Records without a date keep their order, at the end.
    return sorted(rows.values(), key=lambda row: (row.date == '', row.date, row.identity if row.date else ''))


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
    record |= {key: str(record[key]) for key in ('stage', 'status')}
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

    Text is read like a cell: as a word for true, false or unknown, as JSON if it is JSON, or else as one line of text.
    """
    if isinstance(value, str):
        value = one_line_of(value)
        if value.lower() in WORDS:
            value = WORDS[value.lower()]
        elif key not in IDS:
            with contextlib.suppress(ValueError):
                value = json.loads(value)
    value = known_value(value)
    return str(value) if key in IDS and value is not None else value


def finite(key: str, value: Any) -> float:
    """Return the value of a key. Raises UserError if it is not a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isinf(value):
        raise UserError(f'{key} {value!r} is not a finite number')
    return value


def finite_numbers(record: dict, keys: Iterable[str]) -> dict[str, float]:
    """Return those of some numbers that a record has. Raises UserError if one of them is not a finite number."""
    return {key: finite(key, record[key]) for key in keys if key in record}


def speed_row(record: dict) -> Row:
    """Return the row of a record of speed.

    Raises UserError if a number that the report needs is missing or not positive.
    """
    # Check what a report calculates with. A failed run may have no speed.
    speed = 'loader_images_per_sec' if record['stage'] == 'loader' else 'images_per_sec'
    needed = ['device', 'num_devices', 'image_size']
    if record['status'] == COMPLETE:
        needed.append(speed)
    for key in needed:
        if key not in record:
            raise UserError(f'no {key}; a record needs {", ".join(needed)}')
        if key != 'device' and finite(key, record[key]) <= 0:
            raise UserError(f'{key} {record[key]!r} is not a positive number')
    finite_numbers(record, NUMBERS)

    # Date, commit and folder identify a run, but are no settings: runs that differ in them have the same setup.
    settings = settings_of(record)
    if settings['eval_remote'] and record.get('eval_held_out') is False:
        settings['eval_remote'] = f'{settings["eval_remote"]}{TRAINED_ON[None]}'
    date = ''
    if 'date' in record:  # without a time zone, it is in UTC already
        found = datetime.datetime.fromisoformat(record['date'])
        date = f'{found.replace(tzinfo=found.tzinfo or datetime.UTC).astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}'
    commit, dash, dirty = str(record.get('git_commit', '')).partition('-')
    settings |= {'date': date or None, 'git_commit': commit[:8] + dash + dirty or None,
                 'save_folder': record.get('save_folder')}

    # A measurement has no training result, although it has a loss.
    metrics = finite_numbers(record, ('num_devices', *RUN_METRICS))
    if has_training_result(record):
        metrics |= finite_numbers(record, RESULT_METRICS)
    if speed in record:
        metrics['images_per_sec'] = finite(speed, record[speed])
    found_by_search = 'device_train_microbatch_size' in record and settings['device_train_microbatch_size'] is None
    if found_by_search:  # a microbatch that was given is a setting
        metrics['microbatch'] = finite('device_train_microbatch_size', record['device_train_microbatch_size'])
    prices = record.get('dollars_per_gpu_hour', ())
    if isinstance(prices, (int, float)):  # one price for all GPUs, in a CSV file
        prices = ((None, prices),)
    evaluations = []
    for images, loss in record.get('evaluations', ()):
        is_known = loss is not None and math.isfinite(loss)
        evaluations.append((finite('evaluations', images), loss if is_known else None))
    status, notes = status_and_notes(record)
    return Row(record=record, settings=settings, metrics=metrics, status=status, notes=notes, date=date,
               prices=tuple((name and str(name), finite('dollars_per_gpu_hour', dollars)) for name, dollars in prices),
               evaluations=evaluations)


def status_and_notes(record: dict) -> tuple[str, str]:
    """Return the status of the row of a record of speed, and its note in the table."""
    # Only a complete run with a speed that has settled is a measurement.
    status = record['status']
    if status != COMPLETE:
        reason = f'{status}: {record.get("error", "")}'
        return status, textwrap.shorten(reason, 70, placeholder=' ...').rstrip(': ')
    if why_unreliable(record):
        return UNRELIABLE, f'images/s {UNRELIABLE}: {why_unreliable(record)}'
    if record['extrapolated']:
        return EXTRAPOLATED, 'extrapolated by its source'
    return MEASURED, ''


def joined_notes(*notes: str) -> str:
    """Return the notes of a row as one text, each once."""
    return '; '.join(dict.fromkeys(filter(None, notes)))


def score_rows(record: dict) -> list[Row]:
    """Return a row for each guidance scale of an evaluation."""
    settings = {key: comparable(record.get(key)) for key in EVALUATION_SETTINGS}
    settings['weights'] = OLDER_WEIGHTS.get(settings['weights'], settings['weights'])
    settings['data'] = f'{settings["data"] or ""}{TRAINED_ON[record.get("trained_on_data")]}' or None
    for key in ('inception_sha256', 'clip_sha256'):
        settings[key] = settings[key] and settings[key][:8]
    model = str(settings['model'] or '')
    if model.endswith('.pt'):  # checkpoints of one training are one model
        settings['model'] = model.rpartition('/')[0] or model

    # A row states the cost of the training up to the checkpoint, unless the training was on a CPU.
    training = record.get('training', {})
    settings['device'] = one_line_of(training.get('device', 'CPU'))
    metrics = finite_numbers(record, ('trained_batches', 'images_seen'))
    if settings['device'] != 'CPU':
        metrics['total_gpu_hours'] = float(training['gpu_hours'])
        if training.get('dollars') is not None:  # what the training has cost by its own prices
            metrics['cost_usd'] = float(training['dollars'])

    notes = []
    if training.get('load_weights'):
        notes.append('batches, images and costs do not include the training of --load_weights '
                     f'{one_line_of(str(training["load_weights"]))}')
    if record.get('fid_is_biased'):
        notes.append('FID biased by few images')
    if record.get('fid_of_published_weights') is False:
        notes.append('non-standard FID weights')
    rows = []
    for score in record['scores']:
        known = {key: float(value) for key, value in score.items() if value is not None}
        at_scale = {'guidance': known['guidance'], 'trained_batches': metrics.get('trained_batches')}
        scores = {key: known[key] for key in ('guidance', 'fid', 'clip_score') if key in known}
        rows.append(Row(record=record | {'scores': [known]}, settings=settings | at_scale, metrics=metrics | scores,
                        notes=', '.join(notes)))
    return rows
