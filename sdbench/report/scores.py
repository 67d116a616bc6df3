"""Make the table of the scores of evaluate.py, with what the training until then took."""
import math

import pandas as pd

from sdbench.costs import Prices, gpu_hours, price_of

FROM_SPEED = ('GPU-hours and cost of an evaluation are those of the images seen, at the images/s of the training in '
              'these records that has the same flags; what was trained before with other flags is not in them.')


def score_table(evaluations: pd.DataFrame, records: pd.DataFrame, prices: Prices) -> pd.DataFrame:
    """Return a row for each guidance scale of each evaluation, checkpoints in order, and what the training took.

    Args:
        evaluations: their rows.
        records: the rows of speeds that may be relied on.
        prices: of GPUs.
    """
    rows = evaluations.sort_values(['model', 'trained_batches', 'guidance'], kind='stable', ignore_index=True)
    trainings = [record for record in records.get('record', ()) if record['stage'] == 'train']
    hours = []
    dollars = []
    devices = []
    for record in rows['record']:
        training = training_of(record, trainings)
        if training is None:
            hours.append(math.nan)
            dollars.append(math.nan)
            devices.append('')
        else:
            hours.append(gpu_hours(training['images_per_sec'], training['num_devices'], record['images_seen']))
            dollars.append(hours[-1] * price_of(training['device'], prices))
            devices.append(training['device'])
    return rows.assign(total_gpu_hours=hours, cost_usd=dollars, device=devices)


def training_of(evaluation: dict, trainings: list[dict]) -> dict | None:
    """Return the last record of a training with the flags of an evaluation's that was as long.

    It is None where there is none, or it was on a CPU.
    """
    flags = evaluation.get('training', {})
    for training in reversed(trainings):
        in_both = (flags.keys() & training.keys()) - {'dataset', 'remote'}  # the same data may have moved
        is_same = 'batch_size' in in_both and all(flags[key] == training[key] for key in in_both)
        is_as_long = training.get('trained_batches', 0) >= evaluation.get('trained_batches', math.inf)
        if is_same and is_as_long and training.get('device_type') != 'cpu':
            return training
    return None
