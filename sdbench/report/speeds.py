"""Make the tables of speeds and of scores, with what follows: efficiency, days, dollars, the speed of more GPUs."""
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from sdbench.costs import SECONDS_PER_DAY, TRAINING_IMAGES, Prices, days_to_train, price_of
from sdbench.errors import plural
from sdbench.flags.commands import Report
from sdbench.records.figures import OF_A_RUN
from sdbench.records.keys import FORECAST
from sdbench.records.read import COMPARABLE, EXTRAPOLATED, LEARNED, MEASURED, SETTINGS, WITH_FIGURES
from sdbench.report.markdown import differing, settings_in_words

UNKNOWN = dict.fromkeys((*OF_A_RUN, *LEARNED), math.nan)  # the figures of a row that no run has
TINY_NOTE = 'The model tiny is for trying things out and has no days and no cost; --training_images asks for them.'


def speed_table(records: pd.DataFrame, settings: Report) -> tuple[pd.DataFrame, list[str]]:
    """Return a row for each setting and number of devices, with all that follows from its speed; and sentences on them.

    With --compare there is a row for each training, and with --learned those that learned best come first.
    """
    # the rows, and which of them are of one setting
    rows = records.assign(setting=records.groupby(SETTINGS, sort=False).ngroup())
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

    # what follows from a speed: efficiency, and of a training days and dollars
    rows['images_per_sec_per_device'] = rows['images_per_sec'] / rows['num_devices']
    if not settings.compare:
        several = rows.groupby('setting')['num_devices'].transform('nunique') > 1
        rows['scaling_efficiency'] = over_first(rows, 'images_per_sec_per_device', ['setting']).where(several)
    has_days = (rows['stage'] == 'train') & rows['status'].isin(WITH_FIGURES)
    if settings.training_images is None and (rows['model_name'] == 'tiny').any():
        has_days &= rows['model_name'] != 'tiny'
        sentences.append(TINY_NOTE)
    images = settings.training_images or TRAINING_IMAGES
    days = days_to_train(rows['images_per_sec'], images).where(has_days)
    if days.notna().any():
        sentences.append(f'Days: those of {images:,} images (--training_images).')
    if settings.days is not None:
        rows['images_in_days'] = (rows['images_per_sec'] * settings.days * SECONDS_PER_DAY).where(has_days)
        sentences.append(f'The last column is how many images {settings.days:g} days buy.')

    # which training learned best, of each several whose losses can be compared
    judged = rows[rows['eval_loss'].notna()]
    for _, runs in judged.groupby(COMPARABLE, sort=False):
        if len(runs) > 1:
            best = runs.loc[runs['eval_loss'].idxmin()]
            which = settings_in_words(best, differing(judged, COMPARABLE))
            how = settings_in_words(best, differing(runs, SETTINGS))
            where = best['record'].get('save_folder')
            samples = best['record'].get('eval_samples')  # few tell little
            on_samples = f' on {plural(samples, "sample")}' if samples else ''
            sentences.append(f'Lowest eval loss{which and f" ({which})"}: {best["eval_loss"]:.4g}{on_samples} after '
                             f'{best["trained_batches"]:,.0f} batches{how and ", with " + how}'
                             f'{f", in {where}" if where else ""}.')

    # what the days cost, where they are those of GPUs
    hours = (days * 24 * rows['num_devices']).where(~rows['on_cpu'])
    dollars = rows['device'].map(lambda device: price_of(device, settings.dollars_per_gpu_hour))
    rows = rows.assign(days=days, total_gpu_hours=hours, cost_usd=hours * dollars)
    if settings.learned:
        rows = rows.sort_values([*COMPARABLE, 'eval_loss'], kind='stable', ignore_index=True)
    return rows, sentences


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row with the median of the measured runs of each setting on so many devices and nodes.

    What was learned is that of the run that went furthest. Each other record has a row of its own.
    """
    is_measured = rows['status'] == MEASURED
    merged = []
    for _, runs in rows[is_measured].groupby(['setting', 'num_devices', 'num_nodes']):
        runs = runs.sort_values('trained_batches', kind='stable', na_position='first')
        row = runs.iloc[[-1]].assign(**{key: runs[key].median() for key in OF_A_RUN})
        if len(runs) > 1:
            speeds = runs['images_per_sec']
            row['notes'] = f'median of {len(runs)} runs, {speeds.min():,.1f} to {speeds.max():,.1f}'
        merged.append(row)
    return pd.concat([*merged, rows[~is_measured]])


def over_first(rows: pd.DataFrame, key: str, group: list[str]) -> pd.Series:
    """Return a figure of the rows over that of the first that was measured in the same group, or else forecast."""
    groups = [rows[name] for name in group]
    bases = rows[key].where(rows['status'] == MEASURED).groupby(groups).transform('first')
    forecasts = rows[key].where(rows['status'] == FORECAST).groupby(groups).transform('first')
    bases = bases.fillna(forecasts)
    return rows[key].where(rows['status'].isin(WITH_FIGURES)) / bases


def predictions(rows: pd.DataFrame, counts: Sequence[int]) -> tuple[pd.DataFrame, list[str]]:
    """Return rows for `counts` GPUs at the same batch in each setting that allows it, and sentences that say from what.

    A number of GPUs that was measured on several numbers of nodes counts with the fewest. Raises ValueError if no
    setting allows a prediction.
    """
    counts = sorted(set(counts))
    predicted = []
    sentences = []
    # one run of each setting on so many GPUs
    trained = rows[(rows['status'] == MEASURED) & (rows['stage'] == 'train')]
    trained = trained.sort_values(['num_devices', 'num_nodes'], key=pd.to_numeric).drop_duplicates(
        ['setting', 'num_devices'])
    different = differing(rows[rows['stage'] == 'train'], SETTINGS)  # tell a setting from the others
    for _, runs in trained.groupby('setting'):
        first = runs.iloc[0]
        batch = int(first['batch_size'] or 1)  # a batch that is not stated cancels out, as long as it is fixed
        if len(runs) < 3 or 1 < batch < counts[-1]:
            continue

        # the a, b >= 0 for which a / n + b is closest to the seconds of a step on n devices: closest by relative
        # errors, since the long steps on few devices would outweigh all others in absolute ones
        seconds = (batch / runs['images_per_sec']).to_numpy()
        terms = np.stack([1 / runs['num_devices'].to_numpy(), np.ones(len(runs))], axis=1)  # (measurements, 2)
        (a, b), _ = nnls(terms / seconds[:, None], np.ones(len(runs)))

        # a row for each of `counts`
        for count in counts:
            note = 'extrapolated'
            if batch > 1 and batch / count < int(first['device_train_microbatch_size'] or 1):
                note += f'; {batch / count:.3g} images a GPU: a smaller microbatch'
            predicted.append(first.to_dict() | UNKNOWN | {
                'num_devices': count, 'num_nodes': '', 'images_per_sec': batch / (a / count + b),
                'status': EXTRAPOLATED, 'notes': note, 'record': first['record'] | {'extrapolated': True}})

        # how well the fit meets what was measured
        words = settings_in_words(first, different)
        residuals = batch / (a / runs['num_devices'] + b) / runs['images_per_sec'] - 1
        worst = residuals.abs().argmax()
        sentences.append(
            f'{words or "Extrapolated"}: step_seconds(n) = {a:.5g} / n + {b:.5g} for a batch of '
            f'{plural(batch, "image")}, fitted on {", ".join(map(str, runs["num_devices"]))} GPUs; worst residual '
            f'{residuals.iloc[worst]:+.1%} of the images/s, on {runs["num_devices"].iloc[worst]} GPUs.')
    if not predicted:
        raise ValueError(f'--extrapolate {counts[-1]} needs complete and reliable trainings of one setting on three '
                         'numbers of GPUs, and a batch of as many images as GPUs')
    return pd.DataFrame(predicted), sentences


def score_table(evaluations: pd.DataFrame, prices: Prices) -> pd.DataFrame:
    """Return a row for each guidance scale of each evaluation, checkpoints in order, and what the training took."""
    rows = evaluations.sort_values(['model', 'trained_batches', 'guidance'], kind='stable', ignore_index=True)
    return rows.assign(cost_usd=rows['total_gpu_hours'] * rows['device'].map(lambda device: price_of(device, prices)))
