"""Make the tables of speeds and of scores, with what follows: efficiency, days, dollars, the speed of more GPUs."""
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from sdbench.costs import TRAINING_IMAGES, Prices, days_to_train, price_of
from sdbench.errors import UserError, plural
from sdbench.flags.commands import Report
from sdbench.records.figures import RUN_FIGURES
from sdbench.records.read import EXTRAPOLATED, LOSS_SETTINGS, MEASURED, RESULT_FIGURES, WITH_FIGURES
from sdbench.records.setup import SETTINGS
from sdbench.records.status import FORECAST
from sdbench.report.markdown import differing, settings_in_words

UNKNOWN = dict.fromkeys((*RUN_FIGURES, *RESULT_FIGURES, 'microbatch'), math.nan)  # the figures of a row that no run has


def speed_table(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return a row for each setting and number of devices, with all that follows from its speed; and sentences on them.

    With --compare there is a row for each training, and with --learned those that learned best come first.
    """
    # the rows, of forecasts that agree in all settings the newest, and which of them are of one setting
    newest = records.sort_values('date', kind='stable').drop_duplicates(
        ['status', *SETTINGS, 'num_devices', 'num_nodes'], keep='last')
    rows = records[(records['status'] != FORECAST) | records.index.isin(newest.index)]
    rows = rows.assign(setting=numbers_of_settings(rows))
    is_found = rows['device_train_microbatch_size'] == ''
    rows['microbatch'] = rows['microbatch'].where(is_found)  # else it is a setting
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

    # what follows from a speed
    rows, of_days = with_days(rows, settings)
    sentences += of_days
    if settings.learned:
        rows = rows.sort_values([*LOSS_SETTINGS, 'eval_loss'], kind='stable', ignore_index=True)
        if rows['eval_batch'].nunique() > 1:
            sentences.append('The losses were evaluated after different batches ("eval batch"); the picture compares '
                             'them at the same images.')
    return rows, sentences


def numbers_of_settings(rows: pd.DataFrame) -> pd.Series:
    """Return a number for each setting. Runs on one machine, without a network, count with those over one network."""
    network = rows['network'].replace('', None)
    others = rows[SETTINGS].drop(columns='network')
    alike = network.groupby([others[key] for key in others], sort=False)
    only_one = alike.transform('first').where(alike.transform('nunique') == 1)
    return others.assign(network=network.fillna(only_one).fillna('')).groupby(SETTINGS, sort=False).ngroup()


def with_days(rows: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows with what follows from their speed, and sentences on that: efficiency, days and dollars."""
    # the speed of each device, and of trainings on several numbers of them the efficiency
    sentences = []
    rows['images_per_sec_per_device'] = rows['images_per_sec'] / rows['num_devices']
    if not settings.compare:
        several = rows.groupby('setting')['num_devices'].transform('nunique') > 1
        rows['scaling_efficiency'] = over_first(rows, 'images_per_sec_per_device', ['setting']).where(several)

    # the days of a training, or what some days buy
    has_days = (rows['stage'] == 'train') & rows['status'].isin(WITH_FIGURES)
    if settings.training_images is None and (rows['model_name'] == 'tiny').any():
        has_days &= rows['model_name'] != 'tiny'
        sentences.append('The model tiny is for trying things out and has no days and no cost; --training_images asks '
                         'for them.')
    images = settings.training_images or TRAINING_IMAGES
    days = days_to_train(rows['images_per_sec'], images).where(has_days)
    if days.notna().any():
        sentences.append(f'Days: to train on {images:,} images (--training_images).')

    # what they cost, where they are those of GPUs: by the prices that the report is given, or else by the record's
    given = settings.dollars_per_gpu_hour
    prices = [price_of(device, given or own) for device, own in zip(rows['device'], rows['prices'], strict=True)]
    hours = (days * 24 * rows['num_devices']).where(~rows['on_cpu'])
    rows = rows.assign(days=days, total_gpu_hours=hours, price=prices, cost_usd=hours * prices)
    return rows, sentences


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row with the median of the measured runs of each setting on so many devices and nodes.

    A training with a loss on --eval_remote has a row of its own, and so has each record that was not measured.
    """
    is_measured = rows['status'] == MEASURED
    trained = rows['training'].where(rows['eval_loss'].notna(), -1)
    merged = []
    for _, runs in rows[is_measured].groupby(['setting', 'num_devices', 'num_nodes', trained]):
        runs = runs.sort_values('trained_batches', kind='stable', na_position='first')
        row = runs.iloc[[-1]].assign(**{key: runs[key].median() for key in RUN_FIGURES})  # what went furthest
        if len(runs) > 1:
            speeds = runs['images_per_sec']
            row['notes'] = f'median of {len(runs)} runs, {speeds.min():,.1f} to {speeds.max():,.1f}'
        if runs['microbatch'].nunique() > 1:
            row['microbatch'] = math.nan
        merged.append(row)
    return pd.concat([*merged, rows[~is_measured]])


def over_first(rows: pd.DataFrame, key: str, group: list[str]) -> pd.Series:
    """Return a figure of the rows over that of the first that was measured in the same group, or else forecast."""
    groups = [rows[name] for name in group]
    bases = rows[key].where(rows['status'] == MEASURED).groupby(groups).transform('first')
    forecasts = rows[key].where(rows['status'] == FORECAST).groupby(groups).transform('first')
    bases = bases.fillna(forecasts)
    return rows[key].where(rows['status'].isin(WITH_FIGURES)) / bases


def one_of_each_number(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return one row of each number of GPUs of those that agree in some keys, with the fewest GPUs first.

    It is the first of those on the fewest machines, with the median of their images/s.
    """
    rows = rows.assign(nodes=pd.to_numeric(rows['num_nodes'])).sort_values(['num_devices', 'nodes'], kind='stable')
    speeds = rows.groupby([*keys, 'status', 'num_devices', 'num_nodes'])['images_per_sec'].transform('median')
    return rows.assign(images_per_sec=speeds).drop_duplicates([*keys, 'num_devices'])


def predictions(rows: pd.DataFrame, counts: Sequence[int]) -> tuple[pd.DataFrame, list[str]]:
    """Return rows for `counts` GPUs at the same batch in each setting that allows it, and sentences that say from what.

    A number of GPUs that was measured on several numbers of nodes counts with the fewest. Raises UserError if no
    setting allows a prediction.
    """
    predicted = []
    sentences = []
    too_few = []  # settings with fewer counts than the fit needs
    # one run of each setting on so many GPUs
    trained = rows[(rows['status'] == MEASURED) & (rows['stage'] == 'train')]
    trained = one_of_each_number(trained, ['setting'])
    different = differing(rows[rows['stage'] == 'train'], SETTINGS)  # tell a setting from the others
    for _, runs in trained.groupby('setting'):
        first = runs.iloc[0]
        which = settings_in_words(first, different)
        if len(runs) < 3:
            too_few.append(which)
            continue

        # Without a stated batch size the seconds below are those of one image, and no count is too large.
        batch = int(first['batch_size'] or 1)
        possible = sorted(set(counts))
        if first['batch_size']:
            possible = [count for count in possible if count <= batch]
        if len(possible) < len(set(counts)):
            more = ' and '.join(str(count) for count in sorted(set(counts)) if count not in possible)
            sentences.append(f'{which or "Extrapolated"}: not to {more} GPUs, which are more than the '
                             f'{plural(batch, "image")} of a batch.')

        # the a, b >= 0 for which a / n + b is closest to the seconds of a step on n devices: closest by relative
        # errors, since the long steps on few devices would outweigh all others in absolute ones
        seconds = (batch / runs['images_per_sec']).to_numpy()
        terms = np.stack([1 / runs['num_devices'].to_numpy(), np.ones(len(runs))], axis=1)  # (measurements, 2)
        (a, b), _ = nnls(terms / seconds[:, None], np.ones(len(runs)))
        for count in possible:
            note = 'extrapolated'
            if first['batch_size'] and batch / count < int(first['device_train_microbatch_size'] or 0):
                note += f'; {batch / count:.3g} images a GPU: a smaller microbatch'
            predicted.append(first.to_dict() | UNKNOWN | {
                'num_devices': count, 'num_nodes': '', 'images_per_sec': batch / (a / count + b),
                'status': EXTRAPOLATED, 'notes': note, 'record': first['record'] | {'extrapolated': True}})

        # how well the fit meets what was measured
        residuals = batch / (a / runs['num_devices'] + b) / runs['images_per_sec'] - 1
        worst = residuals.abs().argmax()
        of_what = f'a batch of {plural(batch, "image")}' if first['batch_size'] else 'each image'
        sentences.append(
            f'{which or "Extrapolated"}: step_seconds(n) = {a:.5g} / n + {b:.5g} for {of_what}, '
            f'fitted on {", ".join(map(str, runs["num_devices"]))} GPUs; worst residual '
            f'{residuals.iloc[worst]:+.1%} of the images/s, on {runs["num_devices"].iloc[worst]} GPUs.')
    if too_few:
        sentences.append(f'Not extrapolated, since the fit needs three GPU counts: {"; ".join(too_few)}.')
    if not predicted:
        raise UserError(f'--extrapolate {max(counts)} needs complete and reliable measurements of one setting on three '
                        'GPU counts, and a batch_size, where it is stated, of as many images as GPUs')
    return pd.DataFrame(predicted), sentences


def score_table(evaluations: pd.DataFrame, prices: Prices) -> pd.DataFrame:
    """Return a row for each guidance scale of each evaluation, checkpoints in order, and what the training took."""
    rows = evaluations.sort_values(['model', 'trained_batches', 'guidance'], kind='stable', ignore_index=True)
    rows = rows.assign(price=[price_of(device, prices) for device in rows['device']])
    if not prices:  # what the training has cost by its own
        rows['price'] = (rows['dollars'] / rows['total_gpu_hours']).fillna(rows['price'])
    return rows.assign(cost_usd=rows['total_gpu_hours'] * rows['price'])
