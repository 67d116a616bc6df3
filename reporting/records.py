"""Throughput records: lines of JSON or rows of CSV, read, checked and made one table."""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from measuring.caution import doubt
from settings.switch_table import SWITCHES

# Records are averaged and fitted together only where all of these agree; one that is not stated agrees with no value.
# More devices leave each a smaller share of a fixed batch: to be one table, all runs need a microbatch that fits them.
SWITCHES_OF_SPEED = tuple(switch.flag for switch in SWITCHES if switch.bears_on_speed)
EARLIER_SWITCHES = ('channels_last_norms',)  # that only records of earlier versions state
SETTINGS = ('device', 'image_size', 'stage', 'model_name', 'batch_size', 'device_train_microbatch_size', 'precision',
            'use_ema', 'encoders', 'encoder_precision', 'dataset', 'num_workers', *SWITCHES_OF_SPEED,
            *EARLIER_SWITCHES, 'clip_grad_norm', 'ema_start', 'versions')
WHOLE_NUMBERS = ('num_devices', 'image_size', 'batch_size', 'device_train_microbatch_size')
IDENTITY = ('date', 'git_commit')  # what tells runs of one setting apart
MEASUREMENTS = ('images_per_sec', 'loader_images_per_sec', 'bytes_per_image')
GROUNDS_OF_DOUBT = ('measured_batches', 'queue_batches', 'drift', 'other_load', 'cpu_cores')
COLUMNS_OF_RECORDS = (*SETTINGS, 'status', 'extrapolated', 'num_devices', 'num_nodes', *IDENTITY, 'on_cpu',
                      *MEASUREMENTS, 'doubt', 'notes', 'measured', 'reliable')
DEFAULTS = {'stage': 'train', 'status': 'complete', 'extrapolated': False}
MOST_NOTE_CHARACTERS = 70
NAMES_OF_CPUS = re.compile(r'\b(CPU|Processor|Xeon|EPYC|Ryzen|Threadripper|Neoverse|Apple M\d+|x86_64|aarch64)\b'
                           r'|Core\(TM\)')


def read_records(path: str) -> tuple[pd.DataFrame, list[str]]:
    """The records of a file of JSON lines, or of a CSV file (*.csv), a row each, and a sentence for each line that was
    left out because it was cut.

    Records of evaluations are passed over. The settings, `num_nodes` and what tells runs apart are text, '' where a
    record does not state one. `num_devices` is an integer; the measurements are floats, NaN where there is none.
    `notes` says why a record is not `measured`, which means complete and not extrapolated, or what its `doubt` is,
    without which it is `reliable`. Raises ValueError, which names file and line, for anything that cannot be calculated
    with.
    """
    left_out = []
    records = []
    is_empty = True
    for number, record in numbered_records(path, left_out):
        is_empty = False
        if is_evaluation(record):
            continue
        try:
            records.append(checked_record(record))
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{path}:{number}: not a record: {error}') from None
    if is_empty:
        raise ValueError(f'{path}: no records in it; benchmark.py --results {path} adds one')
    flags = ('measured', 'reliable', 'on_cpu')
    dtypes = {'num_devices': 'int64'} | dict.fromkeys(MEASUREMENTS, float) | dict.fromkeys(flags, bool)
    return pd.DataFrame(records, columns=COLUMNS_OF_RECORDS).astype(dtypes), left_out


def settings_in_one(rows: pd.DataFrame, keys: Sequence[str] = SETTINGS) -> pd.Series:
    """The settings `keys` of each row in one text, by which pandas groups ten times as fast as by thirty columns."""
    texts = ['\n'.join(settings) for settings in zip(*(rows[key] for key in keys), strict=True)]
    return pd.Series(texts, index=rows.index, dtype=object)


def numbered_records(path: str, left_out: list[str]) -> Iterator[tuple[int, object]]:
    """The number of its line and the value of each record of a file; what was cut goes into `left_out` as a sentence.

    Raises ValueError, which names file and line, if there is none that can be read.
    """
    try:
        lines = Path(path).read_text(encoding='utf-8-sig', errors='replace').split('\n')
    except OSError as error:
        raise ValueError(f'{path}: {error.strerror}; give files of JSON lines or CSV') from None
    if path.lower().endswith('.csv'):
        return csv_records(path, lines)
    return json_records(path, lines, left_out)


def is_evaluation(record: object) -> bool:
    """Whether a record is one of evaluate.py, which has no place among speeds; see reporting/quality.py."""
    return isinstance(record, dict) and record.get('stage') == 'evaluate'


def json_records(path: str, lines: list[str], left_out: list[str]) -> Iterator[tuple[int, object]]:
    """The number and the value of each line that is not blank; what was cut goes into `left_out` as a sentence."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if not is_cut(line, error):
                raise ValueError(f'{path}:{number}: not a record: no line of JSON ({error}); give files that '
                                 '--results named, or CSV') from None
            left_out.append(f'Left out: {path}:{number} is cut, as by a full disk or a killed run.')
            continue
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{path}:{number}: not a record: {error}') from None
        yield number, record


def is_cut(line: str, error: json.JSONDecodeError) -> bool:
    """Whether a line that is no JSON is the beginning of a record, as a full disk leaves it."""
    line = line.strip()
    return line.startswith('{') and (not line.endswith('}') or error.pos >= len(line))


def csv_records(path: str, lines: list[str]) -> Iterator[tuple[int, dict]]:
    """The number of its last line and the values of each row below the heading."""
    reader = csv.DictReader(lines)
    try:
        for row in reader:
            yield reader.line_num, {key: value_of_csv_cell(cell) for key, cell in row.items()}
    except csv.Error as error:
        raise ValueError(f'{path}:{reader.line_num}: not a record: {error}') from None


def value_of_csv_cell(cell):
    """A number as a float, yes and no (or true and false) as a bool, and anything else as it is."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        truths = {'true': True, 'yes': True, 'false': False, 'no': False}
        return truths.get(str(cell).lower(), cell)


def checked_record(record) -> dict:
    """The columns of `read_records` for one record; ValueError if it cannot be calculated with."""
    if not isinstance(record, dict) or None in record:
        raise ValueError('not one JSON object, or more cells than columns')
    record = DEFAULTS | stated_values(record)
    for key in ('stage', 'status'):
        record[key] = one_line_of_text(record[key])
    require_keys(record)
    require_numbers(record)
    checked = {key: one_line_of_text(record.get(key, '')) for key in (*SETTINGS, 'status', 'extrapolated')}
    if record.get('num_workers_by_default') is True:  # it follows from the machine, and is no setting of the run
        checked['num_workers'] = 'default'
    checked['num_devices'] = record['num_devices']
    checked['num_nodes'] = one_line_of_text(record.get('num_nodes', ''))
    checked['date'] = one_line_of_text(record.get('date', ''))[:19].replace('T', ' ')  # to the second
    checked['git_commit'] = short_commit(one_line_of_text(record.get('git_commit', '')))
    checked['on_cpu'] = is_on_cpu(record)
    for key in MEASUREMENTS:
        checked[key] = record.get(key)
    has_speed = 'images_per_sec' in record or 'loader_images_per_sec' in record
    checked['doubt'] = doubt(record) if has_speed else ''
    checked['notes'] = why_not_measured(record) or checked['doubt']
    checked['measured'] = record['status'] == 'complete' and not record['extrapolated']
    checked['reliable'] = checked['measured'] and not checked['doubt']
    return checked


def stated_values(record: dict) -> dict:
    """The record without what is not stated; a whole number that was written as a float becomes an integer."""
    stated = {}
    for key, value in record.items():
        if value in (None, '', 'auto'):
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        stated[key] = value
    return stated


def require_keys(record: dict) -> None:
    """Raises ValueError if a key is missing that no figure can be worked out without."""
    needed = ['device', 'num_devices', 'image_size']
    if record['status'] == 'complete' and record['stage'] == 'loader':
        needed.append('loader_images_per_sec')
    elif record['status'] == 'complete':
        needed.append('images_per_sec')
    missing = [key for key in needed if key not in record]
    if missing:
        raise ValueError(f'no {", ".join(missing)}; a record needs {", ".join(needed)}')


def require_numbers(record: dict) -> None:
    """Raises ValueError for a number that is not positive and finite, or not whole where it counts something, and for
    what is no number where a doubt would follow from it."""
    for key in (*WHOLE_NUMBERS, *MEASUREMENTS):
        if key not in record:
            continue
        value = record[key]
        expected = 'a positive number'
        kinds = (int, float)
        if key in WHOLE_NUMBERS:
            expected = 'a positive whole number'
            kinds = (int,)
        if type(value) not in kinds or not 1e-15 < value < 1e15:  # a bool is no number
            raise ValueError(f'{key} {repr(value)[:80]} is not {expected}')
    for key in GROUNDS_OF_DOUBT:
        value = record.get(key, 0)
        if type(value) not in (int, float) or not -1e15 < value < 1e15:
            raise ValueError(f'{key} {repr(value)[:80]} is not a number')


def short_commit(commit: str) -> str:
    """The first digits of a commit, with the mark of files that differ from it."""
    return re.sub(r'^([0-9a-f]{8})[0-9a-f]+', r'\1', commit)


def is_on_cpu(record: dict) -> bool:
    """Whether the devices of a record are processes on a CPU; by its name in records that do not state their kind."""
    if 'device_type' in record:
        return record['device_type'] == 'cpu'
    return NAMES_OF_CPUS.search(str(record['device'])) is not None


def why_not_measured(record: dict) -> str:
    """The status and error of a run that is not complete, or that the figure is extrapolated; '' for a measured one."""
    if record['status'] != 'complete':
        reason = one_line_of_text(f'{record["status"]}: {record.get("error", "")}')
        return reason[:MOST_NOTE_CHARACTERS].rstrip(': ')
    if record['extrapolated']:
        return 'extrapolated by its source'
    return ''


def one_line_of_text(value) -> str:
    """A value as one line that holds no commands to the terminal: what is not printable becomes U+FFFD."""
    if value is True:
        return 'yes'
    if value is False:
        return 'no'
    if isinstance(value, dict):
        value = ', '.join(f'{name} {value[name]}' for name in sorted(value) if value[name] is not None)
    line = ' '.join(str(value).split())
    return ''.join(character if character.isprintable() else '\ufffd' for character in line)
