"""Join the runs of a training that was resumed, and measure repeated runs by their median."""
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sdbench.records.metrics import RUN_METRICS
from sdbench.records.read import MEASURED, UNRELIABLE, WITH_SPEED, Row, joined_notes, speed_row
from sdbench.records.settings import EVAL_DATA, LEARNING_SETTINGS, SPEED_SETTINGS, has_training_result
from sdbench.records.status import FAILED

# The training result: the keys that the newest record of a training has for all of it, and those of a curve of losses
RESULT_KEYS = ('loss', 'trained_batches', 'trained_epochs', 'gpu_hours', 'gpu_hours_by_device', 'dollars',
               'max_duration')
CURVE_KEYS = (*EVAL_DATA, 'eval_loss', 'eval_batch', 'eval_samples', 'eval_held_out', 'evaluations')
OTHER_CURVES = 'other_evaluations'
SHARED_ID = 'another training has the same id: a copied --save_folder, or a resume from an older checkpoint'


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list]:
    """Return the second values of pairs by their first values, in the order of their first appearance."""
    groups = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def split_trainings(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each training, the oldest first. A record without a `training_id` is a training by itself.

    Records with one id are one training if each run begins where an earlier one has ended. Where runs overlap in
    batches, a --save_folder was copied and both copies were continued. They are two trainings: the second gets another
    id, and all their rows have a note.
    """
    trainings = []
    for parts in grouped((row.record.get('training_id', id(row)), row) for row in rows).values():
        found = []
        for part in sorted(parts, key=lambda part: (part.record.get('first_batch', 0), part.date, part.identity)):
            first = part.record.get('first_batch')
            possible = [training for training in found if first is None or last_saved(training) <= first]
            if possible:  # of two copies, the one in the same folder, or else the longest
                folder = part.record.get('save_folder')
                max(possible, key=lambda training: (training[-1].record.get('save_folder') == folder,
                                                    last_saved(training))).append(part)
            else:
                found.append([part])
        for number, training in enumerate(found, start=1):
            for part in training:
                if number > 1:
                    part.record = part.record | {'training_id': f'{part.record["training_id"]}-{number}'}
                if len(found) > 1:
                    part.notes = joined_notes(part.notes, SHARED_ID)
        trainings += found
    return trainings


def last_saved(training: Sequence[Row]) -> int:
    """Return the batch at which the newest run of a training has ended; a run that failed may be repeated."""
    ends = [part.record.get('trained_batches', 0) for part in training
            if 'first_batch' in part.record and part.record['status'] != FAILED]
    return max(ends, default=0)


def join_trainings(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each setup in which a training ran. The row of its last run has the result of the training.

    Several runs in one setup have their median speed. If a training was evaluated on several held-out datasets, there
    is another row for each of the others, because their losses do not compare. A training that did not complete has a
    note. Each row gets the running number of its training.
    """
    joined = []
    for number, parts in enumerate(split_trainings(rows)):
        # The newest record has the result. For each dataset, the newest record of an evaluation on it has the losses.
        last = parts[-1]
        result = {key: last.record[key] for key in RESULT_KEYS if key in last.record}
        evaluated = []
        for part in parts:
            for curve in (*part.record.get(OTHER_CURVES, ()), part.record):
                if curve.get('evaluations') or curve.get('eval_loss') is not None:
                    evaluated.append(curve)
        curves = {}  # losses by the hash of their dataset; the dataset that was evaluated last is the last one
        for curve in evaluated or [last.record]:  # even without a loss, a record names its dataset
            sha256 = curve.get('eval_sha256')
            curves.pop(sha256, None)  # or the new curve would have the place of the earlier one
            curves[sha256] = {key: curve[key] for key in CURVE_KEYS if curve.get(key) is not None}
        *others, newest = curves.values()
        whole = result | newest
        learning_settings = {key: value for key, value in whole.items() if key in LEARNING_SETTINGS}

        setups = grouped(((*(part.settings[key] for key in (*SPEED_SETTINGS, 'num_nodes')),
                           part.metrics['num_devices']), part) for part in parts)
        for runs in setups.values():
            row = median_row([run for run in runs if run.status == MEASURED] or runs[-1:])
            has_result = any(run is last for run in runs)
            if len(parts) > 1:
                row = with_result(row, whole if has_result else learning_settings, is_one_run=runs == [last])
                if row.status == MEASURED and last.status not in (*WITH_SPEED, UNRELIABLE):
                    row.notes = joined_notes(row.notes, f'last part {last.notes}')
            joined.append(replace(row, training=number))
            if has_result:
                row_of_last = row
        if has_training_result(last.record):
            for other in others:
                row = with_result(row_of_last, result | other | {OTHER_CURVES: []})
                joined.append(replace(row, training=number))
    return sorted(joined, key=lambda row: (row.date == '', row.date))


def with_result(row: Row, result: dict, is_one_run: bool = False) -> Row:
    """Return the row of a run with the result of its whole training. It has no first batch unless it is one run."""
    of_a_run = () if is_one_run else (*RESULT_KEYS, *CURVE_KEYS, 'first_batch')
    record = {key: value for key, value in row.record.items() if key not in of_a_run} | result
    measured = {key: row.metrics[key] for key in RUN_METRICS if key in row.metrics}
    found = speed_row(record)
    return replace(found, metrics=found.metrics | measured, notes=row.notes)


def median_row(runs: Sequence[Row]) -> Row:
    """Return the last of some runs of one setup, with their median metrics and the range of their speeds as a note."""
    row = runs[-1]
    if len(runs) == 1:
        return row
    metrics = dict(row.metrics)
    for key in RUN_METRICS:
        known = [run.metrics[key] for run in runs if key in run.metrics]
        if known:
            metrics[key] = statistics.median(known)
    speeds = [run.metrics['images_per_sec'] for run in runs]
    median = f'median of {len(runs)} runs, {min(speeds):,.1f} to {max(speeds):,.1f}'
    record = row.record
    if len({run.metrics.get('microbatch') for run in runs}) > 1:  # the search did not always find the same one
        metrics.pop('microbatch', None)
        record = {key: value for key, value in record.items() if key != 'device_train_microbatch_size'}
    return replace(row, record=record, metrics=metrics, notes=joined_notes(median, *(run.notes for run in runs)))
