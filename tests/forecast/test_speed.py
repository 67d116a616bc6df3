"""The forecast: its arithmetic, what it counts of an operator, and that its constants are those of the fit."""
from dataclasses import replace

import pandas as pd
import pytest
import torch

import benchmark
from benchmarks.forecast import fit
from benchmarks.forecast import points as published
from sdbench.forecast import speed
from sdbench.forecast.count import ATTENTION
from sdbench.forecast.trace import build_on_meta, trace_step, work_by_kind
from sdbench.gpus import Card
from tests.runs import settings_of

CARD = Card('round', tflops=100, gigabytes_per_sec=1000, gib=80, multiprocessors=100, gigahertz=1,
            link_gigabytes_per_sec=10)
ROUND = speed.Constants(peak_share=0.5, bandwidth_share=1, bytes_a_cycle=20, seconds_a_kernel=1e-5)

# seconds of the backward pass that are left when each of three buckets of 10 GB is there: so long is an image's
LEFT = (0.9, 0.5, 0.0)


def waiting_by_the_clock(images: int, seconds_a_bucket: float) -> float:
    """The end of an exchange that sends bucket after bucket, beyond the end of the backward pass."""
    backward = images * LEFT[0]
    now = 0.0
    for left in LEFT:
        now = max(now, backward - images * left) + seconds_a_bucket
    return now - backward


@pytest.mark.parametrize('devices, precision, seconds_a_bucket', [
    (2, 'fp32', 1.0), (4, 'fp32', 1.5), (8, 'fp32', 1.75), (8, 'bf16', 0.875)])
@pytest.mark.parametrize('images', [1, 4])
def test_a_step_waits_for_what_is_left_of_the_exchange_after_the_last_backward_pass(devices, precision,
                                                                                    seconds_a_bucket, images):
    buckets = [[10**10, 0, seconds * 1e12, 0, 0] for seconds in LEFT]
    step = speed.StepWork(work_by_kind([('a', 0, 2e12, 0, 0)]), exchange=work_by_kind([('b', 0, 0, 1e11, 0)]),
                          buckets=pd.DataFrame(buckets, columns=['sent', *speed.WORK]))
    layout = speed.BatchSplit(microbatch=8, images=24 + images, num_devices=devices, allreduce_precision=precision)
    expected = {'a': 2 * layout.images, 'b': 0.1, speed.WAITING: waiting_by_the_clock(images, seconds_a_bucket)}
    assert speed.seconds_by_kind(CARD, step, layout, ROUND).to_dict() == pytest.approx(expected)


def test_arithmetic_of_a_step_is_that_of_the_model_and_attention(smallest_with_attention):
    settings = settings_of('--dry_run', '--model_name', smallest_with_attention, '--image_size', '16')
    _, work = trace_step(build_on_meta(settings, benchmark.build_model), settings.precision)
    with torch.device('meta'):
        model = benchmark.StableDiffusion(smallest_with_attention, 16)
    vae = model.flops_per_image.pop('vae')
    assert work.encoder['image_flops'].sum() == pytest.approx(vae)
    counted_by_torch = sum(model.flops_per_image.values())
    # fused attention computes its scores again in the backward pass, which torch's counter sees on no meta device
    flops = work.model['image_flops']
    assert counted_by_torch < flops.sum() < counted_by_torch + flops[ATTENTION] / 6


def test_the_points_that_are_fitted_are_what_is_tested_and_each_other_has_its_reason():
    points = published.read_points()
    assert len(points) == 65
    fitted = points[points['left_out'] == '']
    eager, compiled = fitted[fitted['compile'] == 'no'], fitted[fitted['compile'] != 'no']
    assert (len(eager), eager['device'].nunique()) == (32, 5)
    assert (len(compiled), compiled['by'].nunique()) == (11, 5)
    assert published.tested_layouts(fitted) == speed.TESTED


IN_CODE = fit.Fitted(speed.CONSTANTS, speed.IN_A_GRAPH)


@pytest.mark.long
@pytest.mark.parametrize('reason', [published.NO_DEVICES, published.NO_MICROBATCH])
def test_speeds_whose_sources_leave_something_open_are_met_with_what_is_likely(reason):
    points = published.read_points()
    points = points[points['left_out'] == reason]
    assert len(points) > 3
    assert fit.predict(points, IN_CODE) == pytest.approx(points['measured'].to_numpy(), rel=speed.LARGEST_ERROR)


@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith('2.7.'), reason='other versions trace other operators')
def test_constants_and_largest_error_are_those_of_the_fit():
    judged, fitted = fit.judge(published.read_points())
    assert fitted == IN_CODE
    is_eager = judged['compile'] == 'no'
    assert judged[is_eager]['unseen_error'].abs().max() == pytest.approx(speed.LARGEST_ERROR, abs=0.005)
    assert judged[~is_eager]['unseen_error'].abs().max() < speed.LARGEST_ERROR / 2
    worse = IN_CODE._replace(eager=replace(speed.CONSTANTS, peak_share=speed.CONSTANTS.peak_share * 1.1))
    errors = (fit.predict(judged, worse) / judged['measured'] - 1).abs()
    assert errors.mean() > judged['error'].abs().mean()
