"""The constants of the speed forecast agree with their fit, and the tested setups with the published points."""
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.forecast import fit
from benchmarks.forecast import points as published
from sdbench.forecast import speed
from sdbench.gpus import CARDS


def test_an_all_reduce_takes_half_as_long_in_bf16_as_in_float32():
    h100 = CARDS['NVIDIA H100 80GB HBM3']
    step = speed.StepWork({}, buckets=np.array([[1e9, 0, 0, 0, 0]]))
    exact, rounded = (speed.seconds_of_waiting(h100, step, speed.BatchSplit(8, 8, 8, precision), speed.CONSTANTS)
                      for precision in ('fp32', 'bf16'))
    assert exact == pytest.approx(1.75 / h100.link_gigabytes_per_sec)  # each of 8 GPUs sends 7/8 of the gradients twice
    assert rounded == exact / 2
    over_network = speed.seconds_of_waiting(h100, step, speed.BatchSplit(8, 8, 16, 'fp32', 11.5), speed.CONSTANTS)
    assert over_network == pytest.approx(1.875 / 11.5)  # once through the network of each machine


def test_the_tested_setups_are_the_published_points_and_every_point_that_is_not_fitted_has_a_reason():
    points = published.read_points()
    assert len(points) == 61
    fitted = points[points['left_out'] == '']
    is_compiled = fitted['compile'].astype(bool)
    eager, compiled = fitted[~is_compiled], fitted[is_compiled]
    assert (len(eager), eager['device'].nunique()) == (32, 5)
    assert (len(compiled), compiled['by'].nunique()) == (11, 5)
    assert set(points['left_out']) == {'', published.JUDGED, published.NO_DEVICES, published.NO_MICROBATCH}
    assert published.tested_layouts(points) == speed.TESTED


@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith('2.7.'), reason='other versions trace other operators')
def test_constants_and_largest_error_agree_with_the_fit_and_likely_settings_explain_incomplete_sources():
    points = published.read_points()
    judged, fitted = fit.judge(points)
    assert fitted == speed.CONSTANTS
    unseen = points[points['left_out'] == published.JUDGED]
    errors = [*judged['unseen_error'], *(fit.predict(unseen, speed.CONSTANTS) / unseen['measured'] - 1)]
    assert len(errors) == 48
    assert speed.LARGEST_ERROR - 0.01 < np.abs(errors).max() <= speed.LARGEST_ERROR  # rounded up to a whole percent
    worse = replace(speed.CONSTANTS, peak_share=speed.CONSTANTS.peak_share * 1.1)
    errors = (fit.predict(judged, worse) / judged['measured'] - 1).abs()
    assert errors.mean() > judged['error'].abs().mean()
    for reason in (published.NO_DEVICES, published.NO_MICROBATCH):
        likely = points[points['left_out'] == reason]
        assert len(likely) > 3
        errors = fit.predict(likely, speed.CONSTANTS) / likely['measured'] - 1
        assert errors.abs().max() <= speed.LARGEST_ERROR
