"""Make the tables of speeds and of scores, with efficiency, days, dollars and predictions for more GPUs."""
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from sdbench.costs import TRAINING_IMAGES, Prices, days_to_train, price_of
from sdbench.errors import UserError, plural
from sdbench.flags.commands import Report
from sdbench.records.expected import expected_of
from sdbench.records.metrics import RUN_METRICS
from sdbench.records.read import (
    EXTRAPOLATED,
    LOSS_SETTINGS,
    MEASURED,
    RESULT_METRICS,
    UNRELIABLE,
    WITH_FIGURES,
    joined_notes,
)
from sdbench.records.settings import SETTINGS
from sdbench.report.markdown import describe_settings, differing_settings

# Empty figures, for a row that is not about a run, such as a prediction or a plan
NO_RUN_METRICS = dict.fromkeys((*RUN_METRICS, *RESULT_METRICS, 'microbatch'), math.nan)


def speed_table(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return a row for each setting and GPU count, with days and dollars, and sentences below the table.

    With --compare there is a row for each training. With --learned the trainings with the lowest losses come first.
    """
    rows = records.assign(setting=setting_numbers(records))

    # A microbatch that was given is already a setting. A microbatch that the search found is shown as a figure.
    is_found = rows['device_train_microbatch_size'] == ''
    rows['microbatch'] = rows['microbatch'].where(is_found)

    sentences = []
    if settings.compare:
        rows = rows[rows['stage'] == 'train'].reset_index(drop=True)
        rows['run'] = [str(number) for number in range(1, len(rows) + 1)]
        rows['speed_over_first'] = ratio_to_first(rows, 'images_per_sec', ['model_name', 'image_size'])
    else:
        rows = merge_repeated_runs(rows)
        if settings.extrapolate:
            predicted, sentences = predict_speeds(rows, settings.extrapolate)
            rows = pd.concat([rows, predicted])
        rows = rows.sort_values(['setting', 'num_devices'], kind='stable', ignore_index=True)

    rows = add_forecasts(rows)
    rows, sentences_on_days = add_days_and_costs(rows, settings)
    sentences += sentences_on_days
    if settings.learned:
        rows = rows.sort_values([*LOSS_SETTINGS, 'eval_loss'], kind='stable', ignore_index=True)
        if rows['eval_batch'].nunique() > 1:
            sentences.append('The losses were evaluated after different batches (see "eval batch"). The figure of '
                             '--learned shows all losses over the images seen.')
    return rows, sentences


def add_forecasts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the forecast for their own flags, and its error if the speed of the row was measured."""
    expected = [expected_of(row['record'] | {'num_devices': row['num_devices']}).images_per_sec
                for _, row in rows.iterrows()]
    rows = rows.assign(forecast_images_per_sec=expected)
    is_measured = rows['status'].isin([MEASURED, UNRELIABLE])
    error = rows['forecast_images_per_sec'] / rows['images_per_sec'] - 1
    return rows.assign(forecast_error=error.where(is_measured))


def setting_numbers(rows: pd.DataFrame) -> pd.Series:
    """Return a number for each row, which rows with the same settings share.

    A run on one machine uses no network. If the runs with the same other settings use a single network, the run gets
    their number, because the efficiency on several machines is relative to one machine.
    """
    network = rows['network'].replace('', None)
    others = rows[SETTINGS].drop(columns='network')
    networks = network.groupby([others[key] for key in others], sort=False)
    only_network = networks.transform('first').where(networks.transform('nunique') == 1)
    return others.assign(network=network.fillna(only_network).fillna('')).groupby(SETTINGS, sort=False).ngroup()


def add_days_and_costs(rows: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows with efficiency, days, GPU-hours and dollars, and sentences that explain the days."""
    # Efficiency is shown only for settings that were measured on several GPU counts.
    sentences = []
    rows['images_per_sec_per_device'] = rows['images_per_sec'] / rows['num_devices']
    if not settings.compare:
        is_scaled = rows.groupby('setting')['num_devices'].transform('nunique') > 1
        rows['scaling_efficiency'] = ratio_to_first(rows, 'images_per_sec_per_device', ['setting']).where(is_scaled)

    # Encoding and loading have no days, because they train nothing. Nobody trains the tiny model for real.
    has_days = (rows['stage'] == 'train') & rows['status'].isin(WITH_FIGURES)
    if settings.training_images is None and (rows['model_name'] == 'tiny').any():
        has_days &= rows['model_name'] != 'tiny'
        sentences.append('The tiny model is for trying things out, so it has no days and no cost; --training_images '
                         'adds them.')
    images = settings.training_images or TRAINING_IMAGES
    days = days_to_train(rows['images_per_sec'], images).where(has_days)
    if days.notna().any():
        sentences.append(f'Days: for training on {images:,} images (--training_images).')

    # Prices come from --dollars_per_gpu_hour, or else from the record. A CPU has no GPU-hours.
    given = settings.dollars_per_gpu_hour
    prices = [price_of(device, given or own) for device, own in zip(rows['device'], rows['prices'], strict=True)]
    gpu_hours = (days * 24 * rows['num_devices']).where(~rows['on_cpu'])
    rows = rows.assign(days=days, total_gpu_hours=gpu_hours, price=prices, cost_usd=gpu_hours * prices)
    return rows, sentences


def merge_repeated_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Merge measured runs of the same setting, GPU count and number of machines into one row with their median figures.

    A training with a loss on --eval_remote keeps its own row, and so does each row that was not measured.
    """
    is_measured = rows['status'] == MEASURED
    evaluated_training = rows['training'].where(rows['eval_loss'].notna(), -1)
    merged = []
    for _, runs in rows[is_measured].groupby(['setting', 'num_devices', 'num_nodes', evaluated_training]):
        runs = runs.sort_values(['trained_batches', 'date', 'identity'], na_position='first')
        longest = runs.iloc[[-1]]  # the row whose settings and training result are shown
        row = longest.assign(**{key: runs[key].median() for key in RUN_METRICS})
        if len(runs) > 1:
            speeds = runs['images_per_sec']
            median = f'median of {len(runs)} runs, {speeds.min():,.1f} to {speeds.max():,.1f}'
            row['notes'] = joined_notes(median, *runs['notes'])
        if runs['microbatch'].nunique() > 1:  # the search did not always find the same one
            row['microbatch'] = math.nan
            row['record'] = [longest['record'].iloc[0] | {'device_train_microbatch_size': None}]
        merged.append(row)
    return pd.concat([*merged, rows[~is_measured]])


def ratio_to_first(rows: pd.DataFrame, key: str, group: list[str]) -> pd.Series:
    """Return a figure divided by the figure of the first measured row in the same group."""
    groups = [rows[name] for name in group]
    measured = rows[key].where(rows['status'] == MEASURED).groupby(groups).transform('first')
    return rows[key].where(rows['status'].isin(WITH_FIGURES)) / measured


def one_row_per_gpu_count(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return one row for each GPU count and value of `keys`, with the fewest GPUs first.

    If a GPU count has rows on several numbers of machines, the fewest machines are used. The row is the first of these
    rows, with their median images/s.
    """
    rows = rows.assign(nodes=pd.to_numeric(rows['num_nodes'])).sort_values(['num_devices', 'nodes'], kind='stable')
    speeds = rows.groupby([*keys, 'status', 'num_devices', 'num_nodes'])['images_per_sec'].transform('median')
    return rows.assign(images_per_sec=speeds).drop_duplicates([*keys, 'num_devices'])


def predict_speeds(rows: pd.DataFrame, counts: Sequence[int]) -> tuple[pd.DataFrame, list[str]]:
    """Extrapolate each setting to each GPU count in `counts`, at its measured batch size.

    A setting needs measurements on three GPU counts. If a GPU count was measured on several numbers of machines, the
    runs on the fewest machines are used. Returns the rows, and sentences about the fits. Raises UserError if no setting
    allows a prediction.
    """
    trained = rows[(rows['status'] == MEASURED) & (rows['stage'] == 'train')]
    trained = one_row_per_gpu_count(trained, ['setting'])
    differing = differing_settings(rows[rows['stage'] == 'train'], SETTINGS)
    counts = sorted(set(counts))
    predicted = []
    sentences = []
    too_few = []  # descriptions of settings with fewer GPU counts than the fit needs
    for _, runs in trained.groupby('setting'):
        setting = describe_settings(runs.iloc[0], differing)
        if len(runs) < 3:
            too_few.append(setting)
            continue

        # A batch cannot be divided among more GPUs than it has images. A record may not state its batch size.
        batch_size = runs['batch_size'].iloc[0]
        possible = [count for count in counts if not batch_size or count <= int(batch_size)]
        if len(possible) < len(counts):
            excluded = ' and '.join(str(count) for count in counts if count not in possible)
            sentences.append(f'{setting or "Extrapolated"}: not extrapolated to {excluded} GPUs, because a batch has '
                             f'only {plural(int(batch_size), "image")}.')
        fitted, sentence = fit_and_predict(runs, possible)
        predicted += fitted
        sentences.append(f'{setting or "Extrapolated"}: {sentence}')
    if too_few:
        sentences.append(f'Not extrapolated, because the fit needs three GPU counts: {"; ".join(too_few)}.')
    if not predicted:
        raise UserError(f'--extrapolate {max(counts)} needs complete and reliable measurements of one setting on three '
                        'GPU counts, and a batch_size (if stated) of at least as many images as GPUs')
    return pd.DataFrame(predicted), sentences


def fit_and_predict(runs: pd.DataFrame, counts: Sequence[int]) -> tuple[list[dict], str]:
    """Fit step_seconds(n) = a / n + b to the runs of one setting on n GPUs.

    Without a stated batch size, the seconds are per image instead of per batch. Returns a row for each GPU count in
    `counts`, and a sentence about the fit.
    """
    first = runs.iloc[0]
    batch = int(first['batch_size'] or 1)  # images in a step
    microbatch = int(first['device_train_microbatch_size'] or 0)

    # Minimize relative errors with a, b >= 0, because in absolute errors the long steps on few GPUs would dominate.
    seconds = (batch / runs['images_per_sec']).to_numpy()
    terms = np.stack([1 / runs['num_devices'].to_numpy(), np.ones(len(runs))], axis=1)  # (runs, 2)
    (a, b), _ = nnls(terms / seconds[:, None], np.ones(len(runs)))

    rows = []
    for count in counts:
        note = 'extrapolated'
        if first['batch_size'] and batch / count < microbatch:
            note += f'; {batch / count:.3g} images per GPU, a smaller microbatch'
        rows.append(first.to_dict() | NO_RUN_METRICS | {
            'num_devices': count, 'num_nodes': '', 'images_per_sec': batch / (a / count + b),
            'status': EXTRAPOLATED, 'notes': note,
            'record': first['record'] | dict.fromkeys(RUN_METRICS) | {'num_devices': count, 'extrapolated': True}})

    # Say how far the fit is from the measurements.
    residuals = batch / (a / runs['num_devices'] + b) / runs['images_per_sec'] - 1
    worst = residuals.abs().argmax()
    unit = f'a batch of {plural(batch, "image")}' if first['batch_size'] else 'each image'
    counts_fitted = ', '.join(map(str, runs['num_devices']))
    return rows, (f'step_seconds(n) = {a:.5g} / n + {b:.5g} for {unit}, fitted on {counts_fitted} GPUs; worst residual '
                  f'{residuals.iloc[worst]:+.1%} of the images/s, on {runs["num_devices"].iloc[worst]} GPUs.')


def score_table(evaluations: pd.DataFrame, prices: Prices) -> pd.DataFrame:
    """Return a row for each guidance scale of each evaluation, sorted by checkpoint, with the cost of the training."""
    rows = evaluations.sort_values(['model', 'trained_batches', 'guidance', 'identity'], ignore_index=True)
    rows = rows.assign(price=[price_of(device, prices) for device in rows['device']])
    if not prices:  # use the dollars in the record of the training, if it has any
        rows['price'] = (rows['dollars'] / rows['total_gpu_hours']).fillna(rows['price'])
    return rows.assign(cost_usd=rows['total_gpu_hours'] * rows['price'])
