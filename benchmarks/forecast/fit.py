"""Fit the constants of the forecast to published speeds, to all and to all but those of each source."""
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.forecast.points import card_of
from benchmarks.forecast.steps import layout_of, work_of
from sdbench.forecast.speed import Constants, images_per_sec


class Fitted(NamedTuple):
    """The constants of all points: of eager steps, and of compiled ones, which all ran within a CUDA graph.

    The latter differ in two things: nothing is launched, and what is bound by memory is bound by the memory alone.
    """
    eager: Constants
    in_a_graph: Constants


class Judged(NamedTuple):
    """What a fit says.

    Attributes:
        points: with `predicted` by all of them and `unseen`, by those of other sources, and the errors of both.
        fitted: constants that are fitted to all, rounded as they stand in the code.
    """
    points: pd.DataFrame
    fitted: Fitted


# From which the search starts: shares of peak and bandwidth, bytes a cycle, seconds of a kernel launched and in a graph
START = (0.5, 1.0, 10.0, 1e-5, 3e-6)


def fitted_of(values: tuple[float, ...]) -> Fitted:
    """Return the constants for values in the order of START."""
    *eager, seconds_in_a_graph = values
    eager = Constants(*eager)
    return Fitted(eager, replace(eager, bytes_a_cycle=math.inf, seconds_a_kernel=seconds_in_a_graph))


def predict(points: pd.DataFrame, fitted: Fitted) -> np.ndarray:
    """Return images/s per GPU (points,)."""
    predicted = []
    for _, point in points.iterrows():
        constants = fitted.eager if point['compile'] == 'no' else fitted.in_a_graph
        layout = layout_of(point)
        predicted.append(images_per_sec(card_of(point), work_of(point), layout, constants) / layout.num_devices)
    return np.array(predicted)


def fit(points: pd.DataFrame) -> np.ndarray:
    """Return the values whose predictions are nearest, in the order of START.

    It is by least squares of the logarithms: relative errors count alike.
    """
    def residuals(logarithms: np.ndarray) -> np.ndarray:
        return np.log(predict(points, fitted_of(START * np.exp(logarithms))) / points['measured'].to_numpy())

    return START * np.exp(least_squares(residuals, np.zeros(len(START)), diff_step=1e-4).x)


def judge(points: pd.DataFrame) -> Judged:
    """Fit the constants to all points that are not left out, and to all but those of each source in turn."""
    points = points[points['left_out'] == '']
    fitted = fitted_of([float(f'{value:.3g}') for value in fit(points)])  # three significant digits
    points = points.assign(predicted=predict(points, fitted))
    for by in points['by'].unique():
        theirs = points['by'] == by
        points.loc[theirs, 'unseen'] = predict(points[theirs], fitted_of(fit(points[~theirs])))
    points['error'] = points['predicted'] / points['measured'] - 1
    points['unseen_error'] = points['unseen'] / points['measured'] - 1
    return Judged(points, fitted)
