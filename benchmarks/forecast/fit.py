"""Fit the constants of the forecast to published speeds, of all sources and without each source in turn."""
from dataclasses import astuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.forecast.steps import layout_of, work_of
from sdbench.forecast.speed import BatchSplit, Constants, StepWork, images_per_sec
from sdbench.gpus import CARDS, Card

START = Constants(peak_share=0.5, bandwidth_share=1.0, bytes_a_cycle=10.0, seconds_a_kernel=1e-5,
                  seconds_in_a_graph=3e-6)

Runs = list[tuple[Card, StepWork, BatchSplit, bool | str]]  # the last one is the mode of --compile


def runs_of(points: pd.DataFrame) -> Runs:
    """Return for each point what a forecast of its speed needs."""
    return [(CARDS[f'NVIDIA {point["device"]}'], work_of(point), layout_of(point), point['compile'])
            for _, point in points.iterrows()]


def speeds_of(runs: Runs, constants: Constants) -> np.ndarray:
    """Return the forecast images/s per GPU of runs, (runs,)."""
    return np.array([images_per_sec(card, work, layout, constants.for_mode(mode)) / layout.num_devices
                     for card, work, layout, mode in runs])


def predict(points: pd.DataFrame, constants: Constants) -> np.ndarray:
    """Return the forecast images/s per GPU of points, (points,)."""
    return speeds_of(runs_of(points), constants)


def fit(points: pd.DataFrame, start: Constants = START) -> Constants:
    """Return the constants with the smallest sum of squared errors on these points, searched from `start`.

    Errors are differences of logarithms, so relative errors count equally for slow and fast points.
    """
    runs = runs_of(points)
    measured = points['measured'].to_numpy()

    def constants_at(logarithms: np.ndarray) -> Constants:
        return Constants(*(astuple(start) * np.exp(logarithms)).tolist())

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        return np.log(speeds_of(runs, constants_at(logarithms)) / measured)

    return constants_at(least_squares(residuals, np.zeros(len(astuple(start))), diff_step=1e-4).x)


def judge(points: pd.DataFrame) -> tuple[pd.DataFrame, Constants]:
    """Fit the constants to all points without a reason in `left_out`, and then without each source in turn.

    Returns these points with the columns `predicted`, by constants from all points, `unseen`, by constants from the
    points of other sources, and the errors of both predictions. Also returns the constants from all points, rounded
    as in the code.
    """
    points = points[points['left_out'] == '']
    nearest = fit(points)
    rounded = Constants(*(float(f'{value:.3g}') for value in astuple(nearest)))  # three significant digits
    points = points.assign(predicted=predict(points, rounded))
    for by in points['by'].unique():
        theirs = points['by'] == by
        points.loc[theirs, 'unseen'] = predict(points[theirs], fit(points[~theirs], nearest))
    points['error'] = points['predicted'] / points['measured'] - 1
    points['unseen_error'] = points['unseen'] / points['measured'] - 1
    return points, rounded
