"""Fit the constants of the forecast to published speeds, and show how far it is off where it has seen nothing.

    python -m benchmarks.forecast [PICTURE]     # such as docs/forecast.png; a minute, no GPU

It traces a step of Stable Diffusion 2 as each source ran it, fits the constants of sdbench/forecast/speed.py to all
points, and then once more without each source, which is whoever measured. It prints every point with both predictions,
and the constants, which are those in the code. The points are in published.csv (the original's program) and in
benchmarks/published_speeds.csv (the same at more microbatches, and others' programs for the same work).
"""
import sys
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from composer import ComposerModel
from composer.algorithms.ema.ema import compute_ema as composers_compute_ema
from scipy.optimize import least_squares

from benchmark import build_model
from sdbench.flags.parser import parse
from sdbench.flags.train import Train
from sdbench.forecast.fake_step import trace_step
from sdbench.forecast.memory import build_on_meta
from sdbench.forecast.operators import UPDATE
from sdbench.forecast.speed import CONSTANTS, TESTED, Constants, Layout, StepWork, images_per_sec
from sdbench.gpus import CARDS
from sdbench.models.layers import DIVISORS, NoDivision
from sdbench.models.loading import SD2_BASE, find_model
from sdbench.training.resolve import resolve_defaults

ROOT = Path(__file__).parent.parent
# What published.csv does not say of the original's program, since it had no such flags
ORIGINAL = {'precision': 'amp_fp16', 'encoder_precision': 'fp32', 'half_precision_norms': 'no'}
AMBIGUOUS_CARDS = {'A100-SXM4-40GB or 80GB': 'A100-SXM4-40GB'}  # the card of the same authors' other benchmark
LOOPED_OPTIMIZER = 'mosaicml/diffusion-benchmark'  # torch 1 updated each weight by kernels of its own
SHARDED_OPTIMIZER = 'mosaicml/diffusion'  # a share of each weight on each GPU: too little to count, as its exchange is
UNSTATED_DEVICES = 4  # of milabench's runs on several GPUs, by their speed over that of one
NO_DEVICES = 'the number of GPUs is not stated'
START = (0.5, 1.0, 10.0, 1e-5)  # of the fit


def read_points() -> pd.DataFrame:
    """All published points with `measured`, images/s per GPU, and `left_out`, why one is not predicted, or ''."""
    published = pd.read_csv(ROOT / 'published.csv').assign(**ORIGINAL)
    published = published[published['extrapolated'] == 'no']
    points = pd.concat([published, pd.read_csv(ROOT / 'benchmarks/published_speeds.csv')], ignore_index=True)
    points['by'] = points['source'].str.split().str[0]
    points['device'] = points['device'].replace(AMBIGUOUS_CARDS)
    points['measured'] = points['images_per_sec'] / points['num_devices']
    points['left_out'] = ''
    points.loc[points['device_train_microbatch_size'].isna(), 'left_out'] = 'the microbatch is not stated'
    points.loc[points['num_devices'].isna(), 'left_out'] = NO_DEVICES
    points.loc[points['by'].str.startswith('mlcommons'), 'left_out'] = 'compiled, which is not counted'
    return points


@cache
def trace(latents: bool, image_size: int, precision: str, encoder_precision: str | None, half_precision_norms: bool,
          by: str, use_ema: bool) -> StepWork:
    """The work of a step as this source ran it: images in channels first."""
    argv = ['--dry_run', '1', '--image_size', str(image_size), '--precision', precision, '--no-channels_last']
    if encoder_precision:
        argv += ['--encoder_precision', encoder_precision]
    if half_precision_norms:
        argv.append('--half_precision_norms')
    settings = resolve_defaults(parse(Train, '', argv, 'benchmark.py'))
    outline = build_on_meta(settings, find_model(SD2_BASE), latents, build_model)
    divide_by_one(outline)
    _, work = trace_step(outline, precision, their_update(by, use_ema))
    return work


def divide_by_one(network: torch.nn.Module) -> None:
    """Let a network of this repository divide by 1.0 again, as diffusers has it."""
    for module in network.modules():
        for name in DIVISORS:
            if isinstance(getattr(module, name, None), NoDivision):
                setattr(module, name, 1.0)


def their_update(by: str, use_ema: bool) -> Callable | None:
    """For `trace_step`: AdamW of the time, and Composer's average, which took the frozen encoders along."""
    if by == SHARDED_OPTIMIZER:
        return None

    def prepare(model: ComposerModel) -> dict[str, Callable]:
        optimizer = torch.optim.AdamW(model.unet.parameters(), foreach=by != LOOPED_OPTIMIZER)

        def update() -> None:
            optimizer.step()
            if use_ema:
                composers_compute_ema(model, model, 0.999)  # of itself: the same work
        return {UPDATE: update}
    return prepare


def work_of(point: pd.Series) -> StepWork:
    encoder_precision = point['encoder_precision'] if isinstance(point['encoder_precision'], str) else None
    precision = 'amp_fp16' if point['precision'] == 'fp16' else point['precision']
    return trace(point['encoders'] != 'in_loop', int(point['image_size']), precision, encoder_precision,
                 point['half_precision_norms'] == 'yes', point['by'], point['use_ema'] == 'yes')


def layout_of(point: pd.Series) -> Layout:
    devices = int(point['num_devices'])
    images = int(point['batch_size'] / devices)
    exchanging = 1 if point['by'] == SHARDED_OPTIMIZER else devices
    return Layout(int(point['device_train_microbatch_size']), images, exchanging)


def predict(points: pd.DataFrame, constants: Constants) -> np.ndarray:
    """Images/s per GPU (points,)."""
    predicted = []
    for _, point in points.iterrows():
        card = CARDS[f'NVIDIA {point["device"]}']
        predicted.append(images_per_sec(card, work_of(point), layout_of(point), constants))
    return np.array(predicted)


def fit(points: pd.DataFrame) -> Constants:
    """The constants whose predictions are nearest, by least squares of the logarithms: relative errors count alike."""
    def residuals(logarithms: np.ndarray) -> np.ndarray:
        constants = Constants(*(np.exp(logarithms) * START))
        return np.log(predict(points, constants) / points['measured'].to_numpy())

    found = least_squares(residuals, np.zeros(len(START)), diff_step=1e-4)
    return Constants(*(np.exp(found.x) * START))


def rounded(constants: Constants) -> Constants:
    """With three significant digits, as they stand in the code."""
    return Constants(*(float(f'{value:.3g}') for value in astuple(constants)))


def judge(points: pd.DataFrame) -> tuple[pd.DataFrame, Constants]:
    """Points with `predicted` by all of them and `unseen`, by those of other sources, and the errors of both; and the
    constants that are fitted to all, rounded."""
    constants = rounded(fit(points))
    points = points.assign(predicted=predict(points, constants))
    for by in points['by'].unique():
        theirs = points['by'] == by
        points.loc[theirs, 'unseen'] = predict(points[theirs], fit(points[~theirs]))
    points['error'] = points['predicted'] / points['measured'] - 1
    points['unseen_error'] = points['unseen'] / points['measured'] - 1
    return points, constants


def tested_layouts(points: pd.DataFrame) -> dict[str, list[tuple[int, int]]]:
    """Return TESTED of forecast/speed.py: GPUs and images a step on each, of the points that no other one covers."""
    tested = {}
    for device, runs in points.groupby('device'):
        images = (runs['batch_size'] / runs['num_devices']).astype(int)
        layouts = sorted(set(zip(runs['num_devices'].astype(int), images, strict=True)))
        edges = []
        for devices, fewest in layouts:
            covered = [other for other in layouts
                       if other != (devices, fewest) and other[0] >= devices and other[1] <= fewest]
            if not covered:
                edges.append((devices, fewest))
        tested[f'NVIDIA {device}'] = edges
    return tested


def with_devices(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points whose number of GPUs is not stated, taken for UNSTATED_DEVICES, and each microbatch a step."""
    points = points[points['left_out'] == NO_DEVICES].copy()
    points['num_devices'] = UNSTATED_DEVICES
    points['batch_size'] = UNSTATED_DEVICES * points['device_train_microbatch_size']
    points['measured'] = points['images_per_sec'] / UNSTATED_DEVICES
    return points


def table(points: pd.DataFrame) -> str:
    columns = {'by': 'source', 'device': 'GPU', 'num_devices': 'GPUs', 'device_train_microbatch_size': 'microbatch',
               'use_ema': 'EMA', 'measured': 'images/s each', 'predicted': 'fitted', 'error': 'error',
               'unseen': 'without source', 'unseen_error': 'its error'}
    formats = {'num_devices': '{:.0f}', 'device_train_microbatch_size': '{:.0f}', 'measured': '{:.2f}',
               'predicted': '{:.2f}', 'unseen': '{:.2f}', 'error': '{:+.1%}', 'unseen_error': '{:+.1%}'}
    cells = points[list(columns)].copy()
    for key, template in formats.items():
        cells[key] = [template.format(value) for value in cells[key]]
    return cells.rename(columns=columns).to_string(index=False)


def draw(points: pd.DataFrame, constants: Constants, path: str) -> None:
    """Writes a picture: left the speed over the microbatch, right what is predicted without a source."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 5.2), layout='constrained')
    over_microbatch, unseen = figure.subplots(1, 2)
    markers = dict(zip(points['by'].unique(), 'os^D', strict=False))
    colors = {device: f'C{number}' for number, device in enumerate(points['device'].unique())}

    # a line for each card and source, of its run on the fewest GPUs; other numbers of GPUs are on the right
    for (by, device), runs in points.groupby(['by', 'device'], sort=False):
        first = runs[runs['num_devices'] == runs['num_devices'].min()]
        first = first[first['use_ema'] == first['use_ema'].iloc[0]]
        sizes = np.geomspace(1, 64, 25)
        whole = first['batch_size'].iloc[0] / first['num_devices'].iloc[0] > 64  # of several microbatches
        work = work_of(first.iloc[0])
        speeds = []
        for size in sizes:
            layout = layout_of(first.iloc[0])._replace(microbatch=size, images=size * (16 if whole else 1))
            speeds.append(images_per_sec(CARDS[f'NVIDIA {device}'], work, layout, constants))
        over_microbatch.plot(sizes, speeds, color=colors[device], linewidth=1, alpha=0.7)
        over_microbatch.plot(first['device_train_microbatch_size'], first['measured'], markers[by],
                             color=colors[device], label=f'{device}, {by}')
        unseen.plot(runs['measured'], runs['unseen'], markers[by], color=colors[device])
    over_microbatch.set(xscale='log', xlabel='microbatch', ylabel='images/s per GPU', ylim=(0, 80),
                        title='Measured (points) and forecast (lines)')
    over_microbatch.set_xticks([1, 2, 4, 8, 16, 32, 64], ['1', '2', '4', '8', '16', '32', '64'], minor=False)
    over_microbatch.minorticks_off()
    over_microbatch.legend(frameon=False, fontsize=8, loc='upper left')

    limits = np.array([4, 70])
    unseen.plot(limits, limits, color='black', linewidth=1)
    worst = points['unseen_error'].abs().max()
    unseen.fill_between(limits, limits / (1 + worst), limits * (1 + worst), color='black', alpha=0.08)
    unseen.set(xscale='log', yscale='log', xlim=limits, ylim=limits, xlabel='measured images/s per GPU',
               ylabel='forecast without its source', title=f'Each source left out in turn; the band is {worst:.0%}')
    for axis in (unseen.xaxis, unseen.yaxis):
        axis.set_ticks([5, 10, 20, 40, 60], ['5', '10', '20', '40', '60'])
    unseen.minorticks_off()
    for axes in (over_microbatch, unseen):
        axes.spines[['top', 'right']].set_visible(False)
    figure.savefig(path, dpi=140)


def main() -> None:
    points = read_points()
    judged, constants = judge(points[points['left_out'] == ''])
    print(table(judged))
    for name, key in (('fitted to all', 'error'), ('without its source', 'unseen_error')):
        errors = judged[key].abs()
        print(f'{len(judged)} points of {judged["device"].nunique()} GPUs, {name}: mean error {errors.mean():.1%}, '
              f'worst {errors.max():.1%}')
    for reason, others in points[points['left_out'] != ''].groupby('left_out'):
        print(f'{len(others)} points are left out: {reason}')
    unstated = with_devices(points)
    for (_, point), predicted in zip(unstated.iterrows(), predict(unstated, constants), strict=True):
        microbatch = int(point['device_train_microbatch_size'])
        print(f'{point["by"]}, {UNSTATED_DEVICES} {point["device"]} if that is their number, {microbatch} images each: '
              f'{point["measured"]:.2f} images/s each, the forecast is {predicted:.2f}, '
              f'{predicted / point["measured"] - 1:+.1%}')
    compiled = points[points['left_out'].str.startswith('compiled')]
    for (_, point), predicted in zip(compiled.iterrows(), predict(compiled, constants), strict=True):
        print(f'{point["source"]}, {point["device"]}: {point["measured"]:.1f} images/s each, '
              f'{point["measured"] / predicted:.2f} times the forecast without compiling, {predicted:.1f}')
    print(constants)
    print('as in the code' if constants == CONSTANTS else f'the code has {CONSTANTS}')
    tested = tested_layouts(judged)
    print('tested, as in the code' if tested == TESTED else f'tested: {tested}')
    if len(sys.argv) > 1:
        draw(judged, constants, sys.argv[1])


if __name__ == '__main__':
    main()
