"""Fit the constants of the forecast to published speeds, to all and to all but those of each source."""
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
    """The constants of all points: of eager steps, and of compiled ones, which all ran within a CUDA graph.

    The latter differ in two things: nothing is launched, and what is bound by memory is bound by the memory alone.
    """
    eager: Constants
    in_a_graph: Constants


# From which the search starts: shares of peak and bandwidth, bytes a cycle, seconds of a kernel launched and in a graph
START = (0.5, 1.0, 10.0, 1e-5, 3e-6)


def fitted_of(values: tuple[float, ...]) -> Fitted:
    """Return the constants for values in the order of START."""
    *eager, seconds_in_a_graph = values
    eager = Constants(*eager)
    return Fitted(eager, replace(eager, bytes_a_cycle=math.inf, seconds_a_kernel=seconds_in_a_graph))


def steps_of(points: pd.DataFrame) -> list[tuple[Card, StepWork, BatchSplit, bool]]:
    """Return the steps whose speeds the points are, and whether each is eager."""
    return [(card_of(point), work_of(point), layout_of(point), point['compile'] == 'no')
            for _, point in points.iterrows()]


def speeds_of(steps: list[tuple[Card, StepWork, BatchSplit, bool]], fitted: Fitted) -> np.ndarray:
    """Return images/s per GPU (steps,)."""
    speeds = []
    for card, work, layout, is_eager in steps:
        constants = fitted.eager if is_eager else fitted.in_a_graph
        speeds.append(images_per_sec(card, work, layout, constants) / layout.num_devices)
    return np.array(speeds)


def predict(points: pd.DataFrame, fitted: Fitted) -> np.ndarray:
    """Return images/s per GPU (points,)."""
    return speeds_of(steps_of(points), fitted)


def fit(points: pd.DataFrame, start: np.ndarray | tuple = START) -> np.ndarray:
    """Return the values whose predictions are nearest, in the order of START.

    It is by least squares of the logarithms: relative errors count alike.

    Args:
        points: that are met.
        start: from which the search starts.
    """
    steps = steps_of(points)
    measured = points['measured'].to_numpy()

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        return np.log(speeds_of(steps, fitted_of(start * np.exp(logarithms))) / measured)

    return start * np.exp(least_squares(residuals, np.zeros(len(START)), diff_step=1e-4).x)


def judge(points: pd.DataFrame) -> tuple[pd.DataFrame, Fitted]:
    """Fit the constants to all points that are not left out, and to all but those of each source in turn.

    Returns these points, with `predicted` by all of them and `unseen`, by those of other sources, and the errors of
    both; and the constants that are fitted to all, rounded as they stand in the code.
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
