"""Fit the constants of the forecast to published speeds, and show how far it is off where it has seen nothing.

    python -m benchmarks.forecast [PICTURE]     # such as docs/forecast.png; some minutes, no GPU

It traces a step of Stable Diffusion 2 as each source ran it, and fits the constants of sdbench/forecast/speed.py: four
to the eager steps, and then one to the compiled ones. It fits them once more without each source, which is whoever
measured, and prints every point with both predictions, and the constants, which are those in the code. The points are
in published.csv (the original's program) and in benchmarks/published_speeds.csv (the same at more microbatches, and
others' programs for the same work).
"""
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.published_steps import ROOT, layout_of, work_of
from sdbench.forecast.speed import (
    COMPILED,
    CONSTANTS,
    IN_A_GRAPH,
    TESTED,
    TESTED_IN_A_GRAPH,
    Constants,
    images_per_sec,
)
from sdbench.gpus import CARDS, Card

# What published.csv does not say of the original's program, since it had no such flags
ORIGINAL = {'precision': 'amp_fp16', 'encoder_precision': 'fp32', 'half_precision_norms': 'no', 'compile': 'no'}
AMBIGUOUS_CARDS = {'A100-SXM4-40GB or 80GB': 'A100-SXM4-40GB'}  # the card of the same authors' other benchmark
UNSTATED_DEVICES = 4  # of milabench's runs on several GPUs, by their speed over that of one
# AMD Instinct MI325X datasheet. Its points are judged to see whether the constants hold for AMD's compute units.
AMD = Card('AMD Instinct MI325X', 1307.4, 6000, 256, 304, 2.1)
NO_DEVICES = 'the number of GPUs is not stated'
NOT_NVIDIAS = 'the GPU is not NVIDIA\'s'
START = Constants(peak_share=0.5, bandwidth_share=1.0, bytes_a_cycle=10.0, seconds_a_kernel=1e-5)  # of the fit


class Judged(NamedTuple):
    """What a fit says.

    Attributes:
        points: with `predicted` by all of them and `unseen`, by those of other sources, and the errors of both.
        constants: that are fitted to all, rounded as they stand in the code.
    """
    points: pd.DataFrame
    constants: Constants


def read_points() -> pd.DataFrame:
    """Read all published points.

    Columns are added: `by`, who measured; `measured`, images/s per GPU; `left_out`, why it is not fitted, or ''.
    """
    published = pd.read_csv(ROOT / 'published.csv').assign(**ORIGINAL)
    published = published[published['extrapolated'] == 'no']
    points = pd.concat([published, pd.read_csv(ROOT / 'benchmarks/published_speeds.csv')], ignore_index=True)
    points['by'] = [who_measured(source) for source in points['source']]
    points['device'] = points['device'].replace(AMBIGUOUS_CARDS)
    points['left_out'] = ''
    points.loc[points['device_train_microbatch_size'].isna(), 'left_out'] = 'the microbatch is not stated'
    points.loc[points['device'].str.startswith('AMD'), 'left_out'] = NOT_NVIDIAS

    # of several GPUs, each of whose steps is one microbatch
    unstated = points['num_devices'].isna()
    points.loc[unstated, 'left_out'] = NO_DEVICES
    points.loc[unstated, 'num_devices'] = UNSTATED_DEVICES
    points.loc[unstated, 'batch_size'] = UNSTATED_DEVICES * points['device_train_microbatch_size']
    points['measured'] = points['images_per_sec'] / points['num_devices']
    return points


def who_measured(source: str) -> str:
    """Return the repository of a source; of MLPerf's results, which many submit to, the submitter."""
    repository, name, *_ = source.split()
    return f'MLPerf, {name}' if repository.startswith('mlcommons') else repository


def eager_points(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points of eager steps that are fitted."""
    return points[(points['left_out'] == '') & (points['compile'] == 'no')]


def compiled_points(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points of compiled steps that are fitted: all ran within a CUDA graph."""
    return points[(points['left_out'] == '') & (points['compile'] != 'no')]


def predict(points: pd.DataFrame, constants: Constants) -> np.ndarray:
    """Return images/s per GPU (points,)."""
    predicted = []
    for _, point in points.iterrows():
        card = AMD if point['device'] == AMD.name else CARDS[f'NVIDIA {point["device"]}']
        predicted.append(images_per_sec(card, work_of(point), layout_of(point), constants))
    return np.array(predicted)


def fit(points: pd.DataFrame, start: Constants, names: tuple[str, ...]) -> Constants:
    """Return the constants whose predictions are nearest.

    It is by least squares of the logarithms: relative errors count alike.

    Args:
        points: that are to be met.
        start: the constants from which the search starts.
        names: of those that are fitted; the others stay.
    """
    def constants_at(logarithms: np.ndarray) -> Constants:
        fitted = {}
        for name, logarithm in zip(names, logarithms, strict=True):
            fitted[name] = getattr(start, name) * float(np.exp(logarithm))
        return replace(start, **fitted)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        return np.log(predict(points, constants_at(logarithms)) / points['measured'].to_numpy())

    return constants_at(least_squares(residuals, np.zeros(len(names)), diff_step=1e-4).x)


def judge(points: pd.DataFrame, start: Constants, names: tuple[str, ...]) -> Judged:
    """Fit the constants of these names to all points, and to all but those of each source in turn."""
    constants = fit(points, start, names)
    rounded = {name: float(f'{getattr(constants, name):.3g}') for name in names}  # three significant digits
    constants = replace(constants, **rounded)
    points = points.assign(predicted=predict(points, constants))
    for by in points['by'].unique():
        theirs = points['by'] == by
        points.loc[theirs, 'unseen'] = predict(points[theirs], fit(points[~theirs], start, names))
    points['error'] = points['predicted'] / points['measured'] - 1
    points['unseen_error'] = points['unseen'] / points['measured'] - 1
    return Judged(points, constants)


def judge_eager(points: pd.DataFrame) -> Judged:
    """Fit all four constants to eager steps."""
    return judge(eager_points(points), START, ('peak_share', 'bandwidth_share', 'bytes_a_cycle', 'seconds_a_kernel'))


def judge_compiled(points: pd.DataFrame) -> Judged:
    """Fit the seconds of a kernel to compiled steps; the other constants are those of eager steps, as in COMPILED."""
    return judge(compiled_points(points), COMPILED, ('seconds_a_kernel',))


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


def table(points: pd.DataFrame) -> str:
    """Return points as text: who measured what on which GPUs, and what is predicted."""
    columns = {'by': 'source', 'device': 'GPU', 'num_devices': 'GPUs', 'device_train_microbatch_size': 'microbatch',
               'use_ema': 'EMA', 'compile': 'compiled', 'measured': 'images/s each', 'predicted': 'forecast',
               'error': 'error', 'unseen': 'without source', 'unseen_error': 'its error'}
    formats = {'num_devices': '{:.0f}', 'device_train_microbatch_size': '{:.0f}', 'measured': '{:.2f}',
               'predicted': '{:.2f}', 'unseen': '{:.2f}', 'error': '{:+.1%}', 'unseen_error': '{:+.1%}'}
    cells = points[[key for key in columns if key in points]].copy()
    cells['compile'] = ['no' if compile == 'no' else 'yes' for compile in cells['compile']]
    for key, template in formats.items():
        if key in cells:
            cells[key] = [template.format(value) for value in cells[key]]
    return cells.rename(columns=columns).to_string(index=False)


def errors_in_words(errors: pd.Series) -> str:
    """Return the mean and the largest of relative errors."""
    return f'mean error {errors.abs().mean():.1%}, worst {errors.abs().max():.1%}'


def print_points_that_are_not_fitted(points: pd.DataFrame, constants: Constants) -> None:
    """Print why points are not fitted, and of those whose microbatch is stated how far the forecast is off."""
    for reason, others in points[points['left_out'] != ''].groupby('left_out'):
        print(f'\n{len(others)} points are not fitted: {reason}')
        if others['device_train_microbatch_size'].isna().any():
            continue
        if reason == NO_DEVICES:
            print(f'taken for {UNSTATED_DEVICES}:')
        others = others.assign(predicted=predict(others, constants))
        others['error'] = others['predicted'] / others['measured'] - 1
        print(table(others))


def main() -> None:
    points = read_points()
    eager, compiled = judge_eager(points), judge_compiled(points)

    # the points, and their errors
    print(table(pd.concat([eager.points, compiled.points])))
    for kind, judged in (('eager', eager.points), ('compiled', compiled.points)):
        print(f'{len(judged)} {kind} points of {judged["device"].nunique()} GPUs')
        print(f'  fitted to all: {errors_in_words(judged["error"])}')
        print(f'  without its source: {errors_in_words(judged["unseen_error"])}')
    launched = predict(compiled.points, COMPILED) / compiled.points['measured'] - 1
    print(f'  if each kernel were launched as in an eager step: {errors_in_words(launched)}')
    print_points_that_are_not_fitted(points, eager.constants)

    # what stands in the code
    print()
    stands = {'CONSTANTS': (eager.constants, CONSTANTS), 'IN_A_GRAPH': (compiled.constants, IN_A_GRAPH),
              'TESTED': (tested_layouts(eager.points), TESTED),
              'TESTED_IN_A_GRAPH': (tested_layouts(compiled.points), TESTED_IN_A_GRAPH)}
    for name, (found, in_code) in stands.items():
        print(f'{name} {found}: {"as in the code" if found == in_code else f"the code has {in_code}"}')
    if len(sys.argv) > 1:
        from benchmarks.forecast_picture import draw
        draw([eager, compiled], sys.argv[1])


if __name__ == '__main__':
    main()
