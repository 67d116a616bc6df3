"""Make the tables of speeds and of scores, with efficiency, days, dollars and predictions for more GPUs."""
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from sdbench.costs import TRAINING_IMAGES, Prices, cost_of, days_to_train, price_of
from sdbench.errors import UserError, plural
from sdbench.flags.commands import Report
from sdbench.flags.train import TINY_MODEL
from sdbench.records.expected import expected_of
from sdbench.records.metrics import RUN_METRICS
from sdbench.records.read import EXTRAPOLATED, MEASURED, UNRELIABLE, WITH_SPEED, Row
from sdbench.records.settings import EVALUATION_SETTINGS, LOSS_SETTINGS, SETTINGS
from sdbench.report.tables import Table, line_labels, shared_settings
from sdbench.report.trainings import grouped, median_row


def gpu_count(row: Row) -> int:
    return row.metrics['num_devices']


def speed_table(rows: Sequence[Row], settings: Report) -> Table:
    """Return the table with a row for each setting and GPU count, with days and dollars.

    With --compare there is a row for each training. With --learned the trainings with the lowest losses come first.
    """
    number_settings(rows)
    keys = [*SETTINGS, 'num_nodes']
    sentences = []
    if settings.compare:
        rows = [row for row in rows if row.stage == 'train']
        if not rows:
            raise UserError('--compare needs records of a training, and there are none')
        for number, row in enumerate(rows, start=1):
            row.settings['run'] = str(number)
        keys = ['run', *keys, 'date', 'git_commit']
    else:
        order = {setting: number for number, setting in enumerate(dict.fromkeys(row.setting for row in rows))}
        rows = merge_repeated_runs(rows)
        if settings.extrapolate:
            predicted, sentences = predict_speeds(rows, settings.extrapolate)
            rows += predicted
        rows.sort(key=lambda row: (order[row.setting], gpu_count(row)))
    sentences += add_metrics(rows, settings)
    if settings.learned:
        rows.sort(key=lambda row: ([str(row.settings[key] or '') for key in LOSS_SETTINGS],
                                   row.metrics.get('eval_loss', math.inf)))
        if len({row.metrics['eval_batch'] for row in rows if 'eval_batch' in row.metrics}) > 1:
            sentences.append('The losses were evaluated after different batches (see "eval batch"). The figure of '
                             '--learned shows all losses over the images seen.')
    return Table('Speeds, days and dollars', rows, keys, shared_settings(rows, keys) + sentences)


def number_settings(rows: Sequence[Row]) -> None:
    """Set `setting` of each row to its settings.

    A run on one machine uses no network. If the runs with the same other settings use a single network, the run counts
    to that network, because the efficiency on several machines is relative to one machine.
    """
    others = [key for key in SETTINGS if key != 'network']
    for runs in grouped((tuple(row.settings[key] for key in others), row) for row in rows).values():
        networks = {row.settings['network'] for row in runs} - {None}
        only = networks.pop() if len(networks) == 1 else None
        for row in runs:
            settings = row.settings | {'network': row.settings['network'] or only}
            row.setting = tuple(settings[key] for key in SETTINGS)


def merge_repeated_runs(rows: Sequence[Row]) -> list[Row]:
    """Return measured runs of the same setting, GPU count and number of machines as one row with their median metrics.

    A training with a loss on --eval_remote keeps its own row, and so does each row that was not measured.
    """
    merged = []
    measured = [row for row in rows if row.status == MEASURED]
    same = grouped(((row.setting, gpu_count(row), row.settings['num_nodes'],
                     row.training if 'eval_loss' in row.metrics else None), row) for row in measured)
    for runs in same.values():
        # The longest training is the one whose result is shown.
        runs.sort(key=lambda row: (row.metrics.get('trained_batches', 0), row.date, row.identity))
        merged.append(median_row(runs))
    return merged + [row for row in rows if row.status != MEASURED]


def add_metrics(rows: Sequence[Row], settings: Report) -> list[str]:
    """Add forecast, ratios, days, GPU-hours and dollars to the metrics of rows. Returns a sentence about the days."""
    for row in rows:
        speed = row.metrics.get('images_per_sec')
        expected = expected_of(row.record | {'num_devices': gpu_count(row)}).images_per_sec
        if not math.isnan(expected):
            row.metrics['forecast_images_per_sec'] = expected
            if row.status in (MEASURED, UNRELIABLE):
                row.metrics['forecast_error'] = expected / speed - 1
        if speed is None:
            continue
        row.metrics['images_per_sec_per_device'] = speed / gpu_count(row)

        # Encoding and loading have no days, because they train nothing. Nobody trains the tiny model for real.
        is_tiny = row.settings['model_name'] == TINY_MODEL
        if row.stage == 'train' and row.status in WITH_SPEED and (settings.training_images or not is_tiny):
            add_days(row, settings)

    # Efficiency is shown only for settings that were measured on several GPU counts.
    if settings.compare:
        same = grouped(((row.settings['model_name'], row.settings['image_size']), row) for row in rows)
        add_ratio_to_first(same.values(), 'images_per_sec', 'speed_over_first')
    else:
        same = grouped((row.setting, row) for row in rows)
        scaled = [runs for runs in same.values() if len({*map(gpu_count, runs)}) > 1]
        add_ratio_to_first(scaled, 'images_per_sec_per_device', 'scaling_efficiency')

    if any('days' in row.metrics for row in rows):
        return [f'Days: for training on {settings.training_images or TRAINING_IMAGES:,} images (--training_images) of '
                'the size in the row, without encoding latents. plan.py plans all phases of a training.']
    return []


def add_days(row: Row, settings: Report) -> None:
    """Add the days of a whole training at the speed of a row, and its GPU-hours and dollars unless it ran on a CPU."""
    row.metrics['days'] = days_to_train(row.metrics['images_per_sec'], settings.training_images or TRAINING_IMAGES)
    if not row.on_cpu:
        row.metrics['total_gpu_hours'] = row.metrics['days'] * 24 * gpu_count(row)
        add_cost(row, settings.dollars_per_gpu_hour or row.prices)


def add_cost(row: Row, prices: Prices) -> None:
    """Add the dollars of a row's GPU-hours at some prices, unless there is none for its GPU."""
    price = price_of(row.device, prices)
    if not math.isnan(price):
        row.metrics['cost_usd'] = row.metrics['total_gpu_hours'] * price


def add_ratio_to_first(groups: Iterable[Sequence[Row]], key: str, ratio: str) -> None:
    """Add a metric divided by the metric of the first measured row in the same group."""
    for runs in groups:
        measured = [row.metrics[key] for row in runs if row.status == MEASURED]
        for row in runs:
            if measured and row.status in WITH_SPEED:
                row.metrics[ratio] = row.metrics[key] / measured[0]


def one_row_per_gpu_count(runs: Sequence[Row]) -> list[Row]:
    """Return one row for each GPU count, the fewest GPUs first.

    A measured row comes before an extrapolated one. If a GPU count was measured on several numbers of machines, the
    row has the median of the runs on the fewest machines.
    """
    found = []
    for _, same in sorted(grouped((gpu_count(row), row) for row in runs).items()):
        by_preference = grouped(((row.status != MEASURED, row.settings['num_nodes'] or 0), row) for row in same)
        found.append(median_row(by_preference[min(by_preference)]))
    return found


def predict_speeds(rows: Sequence[Row], counts: Sequence[int]) -> tuple[list[Row], list[str]]:
    """Return rows with predicted speeds on some GPU counts, and sentences about the fits.

    Each setting that was measured on at least three GPU counts is fitted by itself.
    """
    trained = [row for row in rows if row.stage == 'train' and row.status == MEASURED]
    settings = grouped((row.setting, row) for row in trained).values()
    names = line_labels([runs[0] for runs in settings], SETTINGS)
    predicted = []
    sentences = []
    too_few = []  # descriptions of settings with fewer GPU counts than the fit needs
    for runs, name in zip(settings, names, strict=True):
        runs = one_row_per_gpu_count(runs)
        if len(runs) < 3:
            too_few.append(name)
            continue
        # A batch cannot be divided among more GPUs than it has images. A record may not state its batch size.
        batch_size = runs[0].settings['batch_size'] or math.inf
        fitted, sentence = fit_and_predict(runs, sorted(count for count in {*counts} if count <= batch_size))
        predicted += fitted
        if batch_size < max(counts):
            sentence += f' Not extrapolated to more GPUs than a batch has images ({batch_size:,}).'
        sentences.append(f'{name or "Extrapolated"}: {sentence}')
    if too_few:
        sentences.append(f'Not extrapolated, because the fit needs three GPU counts: {"; ".join(too_few)}.')
    if not predicted:
        raise UserError(f'--extrapolate {max(counts)} needs complete and reliable measurements of one setting on three '
                        'GPU counts, and a batch_size (if stated) of at least as many images as GPUs')
    return predicted, sentences


def fit_and_predict(runs: Sequence[Row], counts: Sequence[int]) -> tuple[list[Row], str]:
    """Fit step_seconds(n) = a / n + b to the runs of one setting on n GPUs.

    Without a stated batch size, the seconds are per image instead of per batch. Returns a row for each GPU count in
    `counts`, and a sentence about the fit.
    """
    first = runs[0]
    batch = first.settings['batch_size'] or 1  # images in a step
    microbatch = first.settings['device_train_microbatch_size'] or 0

    # Minimize relative errors with a, b >= 0, because in absolute errors the long steps on few GPUs would dominate.
    fitted = np.array([gpu_count(row) for row in runs])
    speeds = np.array([row.metrics['images_per_sec'] for row in runs])
    seconds = batch / speeds
    terms = np.stack([1 / fitted, np.ones(len(runs))], axis=1)  # (runs, 2)
    (a, b), _ = nnls(terms / seconds[:, None], np.ones(len(runs)))

    rows = []
    for count in counts:
        note = 'extrapolated'
        if batch > 1 and batch / count < microbatch:
            note += f'; {batch / count:.3g} images per GPU, a smaller microbatch'
        record = {key: value for key, value in first.record.items() if key not in RUN_METRICS}
        rows.append(replace(
            first, record=record | {'num_devices': count, 'extrapolated': True}, status=EXTRAPOLATED, notes=note,
            settings=first.settings | {'num_nodes': None},
            metrics={'num_devices': count, 'images_per_sec': float(batch / (a / count + b))}))

    # Say how far the fit is from the measurements.
    residuals = batch / (a / fitted + b) / speeds - 1
    worst = abs(residuals).argmax()
    unit = f'a batch of {plural(batch, "image")}' if first.settings['batch_size'] else 'each image'
    return rows, (f'step_seconds(n) = {a:.5g} / n + {b:.5g} for {unit}, fitted on {", ".join(map(str, fitted))} GPUs; '
                  f'worst residual {residuals[worst]:+.1%} of the images/s, on {fitted[worst]} GPUs.')


def score_table(rows: Sequence[Row], prices: Prices) -> Table:
    """Return the table of scores, sorted by checkpoint, with the cost of the training up to it."""
    for row in rows:
        if 'total_gpu_hours' in row.metrics and (prices or 'cost_usd' not in row.metrics):
            row.metrics.pop('cost_usd', None)
            cost = cost_of(row.record['training'], prices)
            if not math.isnan(cost):
                row.metrics['cost_usd'] = cost
    rows = sorted(rows, key=lambda row: (str(row.settings['model']), row.metrics.get('trained_batches', 0),
                                         row.metrics['guidance'], row.identity))
    return Table('Scores', rows, EVALUATION_SETTINGS, shared_settings(rows, EVALUATION_SETTINGS))
