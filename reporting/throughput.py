"""Tables of throughput: medians of repeated runs, what follows from images per second, and more GPUs than measured."""

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from inputs.words import counted
from settings.costs import Assumptions, days_to_train

GPUS_PER_NODE = 8


def rows_of_setting(records: pd.DataFrame) -> pd.DataFrame:
    """A row for each number of devices and of nodes with the median of its reliable runs, and for each other record."""
    rows = [records[~records['reliable']]]
    for _, runs in records[records['reliable']].groupby(['num_devices', 'num_nodes']):
        rows.append(median_of_runs(runs))
    return pd.concat(rows).sort_values(['num_devices', 'reliable'], ascending=[True, False], kind='stable')


def median_of_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """One row: the first run with the median images per second of all, and their spread in its notes."""
    speeds = runs['images_per_sec']
    row = runs.iloc[[0]].assign(images_per_sec=speeds.median())
    if len(runs) > 1:
        row['notes'] = f'median of {len(runs)} runs, {speeds.min():,.1f} to {speeds.max():,.1f}'
    return row


def with_costs(rows: pd.DataFrame, days: pd.Series, dollars_per_gpu_hour: float) -> pd.DataFrame:
    """The rows with their days and, where they are those of GPUs, GPU-hours and dollars."""
    gpu_hours = (days * 24 * rows['num_devices']).where(~rows['on_cpu'])
    return rows.assign(days=days, gpu_hours=gpu_hours, cost_usd=gpu_hours * dollars_per_gpu_hour)


def with_figures(rows: pd.DataFrame, given: Assumptions) -> pd.DataFrame:
    """The rows of one stage with all that follows from their throughput; NaN where a row has none.

    Ratios are to the first reliable row, or where there is none to the first measured one, of complete runs alone: one
    that was interrupted shows another speed. Nothing is extrapolated from a speed in doubt.
    """
    speed = rows['images_per_sec']
    per_device = speed / rows['num_devices']
    complete = rows['status'] == 'complete'
    num_images = given.training_images
    if rows['stage'].iloc[0] == 'encode':
        num_images = given.dataset_images
    is_counted = given.counts_tiny | (rows['model_name'] != 'tiny')
    days = days_to_train(speed, num_images).where(is_counted & (rows['doubt'] == ''))
    firsts = rows['reliable'] if rows['reliable'].any() else rows['measured']
    rows = with_costs(rows, days, given.dollars_per_gpu_hour).assign(
        images_per_sec_per_device=per_device,
        scaling_efficiency=over_first(per_device, firsts, complete),
        speed_over_first=over_first(speed, firsts, complete),
        latents_tb=(given.dataset_images * rows['bytes_per_image'] / 1e12).where(is_counted))
    if given.image_bytes:
        nodes = np.ceil(rows['num_devices'] / GPUS_PER_NODE)
        epoch_tb = given.dataset_images * given.image_bytes / 1e12
        rows['remote_mb_per_sec'] = speed * given.image_bytes / 1e6  # to all nodes together, while nothing is cached
        rows['cache_tb_per_node'] = (epoch_tb / nodes).where(speed.notna())  # an even share
    return rows


def over_first(values: pd.Series, firsts: pd.Series, complete: pd.Series) -> pd.Series:
    """The values of complete runs divided by the first of `firsts`; NaN for the others, or where that has none."""
    if not firsts.any():
        return values.where(firsts)
    return values.where(complete) / values[firsts].iloc[0]


def fit_step_seconds(counts: list[int], seconds: list[float]) -> tuple[float, float]:
    """The a, b >= 0 for which a / n + b is closest to the seconds that a step took on n devices.

    Closest by least squares of the relative errors, since the long steps on few devices would outweigh all others in
    absolute ones. Raises ValueError where the seconds are too far apart for a fit.
    """
    counts = np.asarray(counts, dtype=float)
    seconds = np.asarray(seconds, dtype=float)
    terms = np.stack([1 / counts, np.ones_like(counts)], axis=1)  # (measurements, 2): what a and b are multiplied by
    try:
        (a, b), _ = nnls(terms / seconds[:, None], np.ones_like(seconds))
    except RuntimeError:  # it did not converge
        a, b = 0.0, 0.0
    if a + b == 0:
        raise ValueError('--extrapolate: these speeds are too far apart for a fit; leave out the records that are off')
    return float(a), float(b)


def extrapolated_rows(rows: pd.DataFrame, counts: list[int]) -> tuple[pd.DataFrame, str]:
    """Rows of one setting predicted for `counts` devices at the same batch, and a sentence that says from what.

    A number of devices that was measured on several numbers of nodes counts with the fewest nodes. Raises ValueError
    where the measured rows do not allow a prediction.
    """
    measured = rows[rows['reliable']]
    nodes = pd.to_numeric(measured['num_nodes'], errors='coerce')
    measured = measured.assign(nodes=nodes).sort_values(['num_devices', 'nodes']).drop_duplicates('num_devices')
    if len(measured) < 3:
        doubtful = ''
        if (rows['measured'] & ~rows['reliable']).any():
            doubtful = ', and those marked * do not count'
        raise ValueError('--extrapolate: a fit needs three numbers of GPUs measured in one setting, '
                         f'not {len(measured)}{doubtful}')
    batch = int(rows['batch_size'].iloc[0] or 1)  # a batch that is not stated cancels out, as long as it is fixed
    if 1 < batch < max(counts):
        raise ValueError(f'--extrapolate {max(counts)}: more GPUs than the {batch} images of a batch; '
                         'give fewer')
    a, b = fit_step_seconds(measured['num_devices'], batch / measured['images_per_sec'])

    new_counts = np.array(sorted(set(counts)))
    first_row_repeated = rows.iloc[np.zeros(len(new_counts), dtype=int)]
    predicted = first_row_repeated.assign(
        num_devices=new_counts, num_nodes='', images_per_sec=batch / (a / new_counts + b),
        status='complete', measured=False, reliable=False, doubt='', extrapolated='yes',
        notes=[note_on_prediction(rows.iloc[0], batch, count) for count in new_counts])

    residuals = batch / (a / measured['num_devices'] + b) / measured['images_per_sec'] - 1
    worst = residuals.abs().argmax()
    batch_in_words = 'one image'
    if batch > 1:
        batch_in_words = str(batch)
    fitted_on = ', '.join(map(str, measured['num_devices']))
    return predicted, (
        f'Extrapolated with step_seconds(n) = {a:.5g} / n + {b:.5g} for a batch of {batch_in_words}, fitted on '
        f'{fitted_on} GPUs; worst residual {residuals.iloc[worst]:+.1%} of the images/s, '
        f'on {counted(measured["num_devices"].iloc[worst], "GPU")}.')


def note_on_prediction(row: pd.Series, batch: int, count: int) -> str:
    """That a row is predicted, and whether so many GPUs have fewer images each than the microbatch it is predicted
    from."""
    microbatch = row['device_train_microbatch_size']
    if batch == 1 or not microbatch or batch / count >= int(microbatch):
        return 'extrapolated'
    return f'extrapolated; {batch / count:.3g} images a GPU: a smaller microbatch'
