"""Evaluations: what evaluate.py has scored, beside what the training until then took."""
import json
from collections.abc import Iterable

import pandas as pd

from settings.costs import gpu_hours
from reporting.records import is_evaluation, is_on_cpu, numbered_records, one_line_of_text
from reporting.tables import Table

# Where MLPerf Training's benchmark of Stable Diffusion ends. Its CLIP score is a cosine, here it is 100 of them.
MLPERF_FID = 90.0
MLPERF_CLIP_SCORE = 15.0
MLPERF = (f'MLPerf Training ends its Stable Diffusion benchmark at FID {MLPERF_FID:g} or less and a CLIP score of '
          f'{MLPERF_CLIP_SCORE:g} or more (0.15 as it writes it), of 30,000 captions of COCO 2014. It scores by CLIP '
          'ViT-H-14: those of other CLIP models differ.')
FROM_SPEED = ('GPU-hours and cost are those of the images seen, at the images/s of the training in these records that '
              'has the same flags; what was trained before with other flags, as in an earlier phase, is not in them.')
INCEPTION = 'inception-v3'  # how the name of its network begins in records
COLUMNS = ['model', 'weights', 'judges', 'guidance', 'fid', 'clip_score', 'trained_batches', 'images_seen', 'gpu_hours',
           'cost_usd', 'notes']


def read_evaluations(paths: Iterable[str], dollars_per_gpu_hour: float) -> pd.DataFrame:
    """A row for each guidance scale of each evaluation in files of records; of one that was repeated, the last.

    `fid`, `clip_score`, `images_seen`, `gpu_hours` and `cost_usd` are floats, NaN where they are not known. `curve`
    tells the evaluations apart, `training` the trainings, and `judges` what scores can be compared by. Raises
    ValueError, which names file and line, for a record without scores.
    """
    evaluations = {}
    trainings = []
    for path in paths:
        for number, record in numbered_records(path, []):
            if is_evaluation(record):
                try:
                    evaluations[identity(record)] = rows_of(record)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise ValueError(f'{path}:{number}: not a record of evaluate.py: {type(error).__name__} '
                                     f'{one_line_of_text(error)[:100]}') from None
            elif isinstance(record, dict) and record.get('stage', 'train') == 'train':
                trainings.append(record)
    rows = []
    for curve, (record, scored) in enumerate(evaluations.values()):
        hours = hours_until(record, trainings)
        for row in scored:
            rows.append(row | {'curve': curve, 'gpu_hours': hours, 'cost_usd': hours * dollars_per_gpu_hour})
    columns = [*COLUMNS, 'curve', 'training', 'on_cpu', 'versions', 'device', 'stage', 'status', 'by_inception']
    numbers = ('guidance', 'fid', 'clip_score', 'images_seen', 'gpu_hours', 'cost_usd')
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float) | {'by_inception': bool})


def identity(record: dict) -> str:
    """What an evaluation has in common with its repetition, as when it was killed after its last picture."""
    keys = ('model_sha256', 'data', 'samples', 'seed', 'steps', 'image_size', 'precision', 'inception_sha256',
            'clip_sha256', 'resize')
    guidance = [score['guidance'] for score in record['scores']]
    return json.dumps([[record.get(key) for key in keys], guidance, record.get('trained_batches')])


def rows_of(record: dict) -> tuple[dict, list[dict]]:
    """The record itself, and a row for each of its scores, without what the training took."""
    model = one_line_of_text(record.get('model', '')).rstrip('/')
    if model.endswith('.pt'):
        model = model.rpartition('/')[0] or model
    batches = record.get('trained_batches')
    common = {
        'model': model,
        'weights': one_line_of_text(record.get('weights') or ''),
        'judges': judges_of(record),
        'trained_batches': '' if batches is None else f'{int(batches):,}',
        'images_seen': number_or_nan(record.get('images_seen')),
        'notes': notes_on(record),
        'training': json.dumps(record.get('training'), sort_keys=True) if record.get('training') else model,
        'on_cpu': is_on_cpu(record),
        'versions': '',
        'device': one_line_of_text(record.get('device', '')),
        'stage': 'evaluate',
        'status': 'complete',
        'by_inception': is_by_inception(record),
    }
    scored = [common | {key: number_or_nan(score[key]) for key in ('guidance', 'fid', 'clip_score')}
              for score in record['scores']]
    return record, scored


def number_or_nan(value) -> float:
    """A float of a number that is finite and not negative, NaN of None. Raises ValueError for anything else."""
    if value is None:
        return float('nan')
    if isinstance(value, bool) or not 0 <= float(value) < 1e15:
        raise ValueError(f'{value!r} is not a number from 0 on')
    return float(value)


def judges_of(record: dict) -> str:
    """What scores can be compared by: pictures, steps and size, and the networks where these are not the usual ones."""
    words = [f'{record["samples"]:,} pictures of {record["image_size"]} px', f'{record["steps"]} steps']
    if not is_by_inception(record):
        words.append(f'FID by {one_line_of_text(record["network"])}')
    if record.get('clip'):
        words.append(f'CLIP {one_line_of_text(record["clip"])}')
    return ', '.join(words)


def is_by_inception(record: dict) -> bool:
    """Whether a FID is by InceptionV3, so that lines that others have drawn mean something."""
    return str(record.get('network') or INCEPTION).startswith(INCEPTION)


def notes_on(record: dict) -> str:
    """Why a FID can be compared with few others."""
    notes = []
    if record.get('fid_is_biased'):
        notes.append('FID of few pictures is too high')
    if record.get('fid_of_published_weights') is False:
        notes.append('FID by other weights')
    return ', '.join(notes)


def hours_until(record: dict, trainings: list[dict]) -> float:
    """GPU-hours of the training until this evaluation, by the speed of the last record that measured it; NaN where
    there is none, or it was on a CPU.
    """
    flags, images = record.get('training'), record.get('images_seen')
    if not flags or not images:
        return float('nan')
    for training in reversed(trainings):
        speed, devices = training.get('images_per_sec'), training.get('num_devices')
        if not speed or not devices or is_on_cpu(training):
            continue
        in_both = flags.keys() & training.keys()
        is_long_enough = training.get('trained_batches', 0) >= record.get('trained_batches', 0)
        if is_long_enough and 'batch_size' in in_both and all(flags[key] == training[key] for key in in_both):
            return gpu_hours(speed, devices, images)
    return float('nan')


def table_of(rows: pd.DataFrame) -> Table:
    """The table of all evaluations; a column that says the same in all rows of several stands in the heading."""
    heading = 'Evaluations'
    columns = list(COLUMNS)
    if rows['judges'].nunique() == 1:
        heading += f': {rows["judges"].iloc[0]}'
        columns.remove('judges')
    remarks = []
    if rows['by_inception'].any():
        remarks.append(MLPERF)
    if rows['gpu_hours'].notna().any():
        remarks.append(FROM_SPEED)
    return Table(heading, rows, columns, remarks + sentences_on_quality(rows))


def sentences_on_quality(rows: pd.DataFrame) -> list[str]:
    """Of each training, when its pictures first were as good as MLPerf asks for."""
    sentences = []
    is_good = (rows['fid'] <= MLPERF_FID) & (rows['clip_score'] >= MLPERF_CLIP_SCORE)
    good = rows[is_good & rows['by_inception'] & rows['images_seen'].notna()]
    for _, of_training in good.groupby('training', sort=False):
        first = of_training.loc[of_training['images_seen'].idxmin()]
        sentence = (f'{first["model"]}: both lines are first reached after {first["images_seen"]:,.0f} images, at '
                    f'guidance {first["guidance"]:g}')
        if first['gpu_hours'] >= 0:
            sentence += f', {first["gpu_hours"]:,.4g} GPU-hours, ${first["cost_usd"]:,.4g}'
        sentences.append(f'{sentence}.')
    return sentences
