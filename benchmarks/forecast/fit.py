"""Fit the constants of the forecast to published speeds, of all sources and without each source in turn."""
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.forecast.points import card_of
from benchmarks.forecast.steps import layout_of, work_of
from sdbench.forecast.speed import BatchSplit, Constants, StepWork, images_per_sec
from sdbench.gpus import Card


class Fitted(NamedTuple):
    """The fitted constants for eager steps, and for compiled steps, which all ran in a CUDA graph.

    Compiled steps have another time per kernel, because a graph launches nothing, and no limit on the bytes per clock
    cycle of a multiprocessor.
    """
    eager: Constants
    in_a_graph: Constants


# Start of the search: fractions of peak and bandwidth, bytes per cycle, seconds per kernel when eager and in a graph
START = (0.5, 1.0, 10.0, 1e-5, 3e-6)


def fitted_of(values: tuple[float, ...]) -> Fitted:
    """Return the constants from values in the order of START."""
    *eager, seconds_in_a_graph = values
    eager = Constants(*eager)
    return Fitted(eager, replace(eager, bytes_a_cycle=math.inf, seconds_a_kernel=seconds_in_a_graph))


def steps_of(points: pd.DataFrame) -> list[tuple[Card, StepWork, BatchSplit, bool]]:
    """Return for each point the card, the work, how its batch was split, and whether the step is eager."""
    return [(card_of(point), work_of(point), layout_of(point), point['compile'] == 'no')
            for _, point in points.iterrows()]


def speeds_of(steps: list[tuple[Card, StepWork, BatchSplit, bool]], fitted: Fitted) -> np.ndarray:
    """Return the forecast images/s per GPU of steps, (steps,)."""
    speeds = []
    for card, work, layout, is_eager in steps:
        constants = fitted.eager if is_eager else fitted.in_a_graph
        speeds.append(images_per_sec(card, work, layout, constants) / layout.num_devices)
    return np.array(speeds)


def predict(points: pd.DataFrame, fitted: Fitted) -> np.ndarray:
    """Return the forecast images/s per GPU of points, (points,)."""
    return speeds_of(steps_of(points), fitted)


def fit(points: pd.DataFrame, start: np.ndarray | tuple = START) -> np.ndarray:
    """Return the values, in the order of START, with the smallest sum of squared errors.

    Errors are differences of logarithms, so relative errors count equally for slow and fast points.

    Args:
        points: the points to fit.
        start: values at the start of the search.
    """
    steps = steps_of(points)
    measured = points['measured'].to_numpy()

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        return np.log(speeds_of(steps, fitted_of(start * np.exp(logarithms))) / measured)

    return start * np.exp(least_squares(residuals, np.zeros(len(START)), diff_step=1e-4).x)


def judge(points: pd.DataFrame) -> tuple[pd.DataFrame, Fitted]:
    """Fit the constants to all points without a reason in `left_out`, and then without each source in turn.

    Returns these points with the columns `predicted`, by constants from all points, `unseen`, by constants from the
    points of other sources, and the errors of both predictions. Also returns the constants from all points, rounded
    as in the code.
    """
    points = points[points['left_out'] == '']
    nearest = fit(points)
    fitted = fitted_of([float(f'{value:.3g}') for value in nearest])  # three significant digits
    points = points.assign(predicted=predict(points, fitted))
    for by in points['by'].unique():
        theirs = points['by'] == by
        points.loc[theirs, 'unseen'] = predict(points[theirs], fitted_of(fit(points[~theirs], nearest)))
    points['error'] = points['predicted'] / points['measured'] - 1
    points['unseen_error'] = points['unseen'] / points['measured'] - 1
    return points, fitted
