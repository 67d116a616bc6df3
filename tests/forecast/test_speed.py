"""The forecast: its arithmetic, what it counts of an operator, and that its constants are those of the fit."""
import functools
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import benchmark
from benchmarks.forecast import fit
from benchmarks.forecast import points as published
from sdbench.forecast.count import ATTENTION, StepCounter
from sdbench.forecast.speed import (
    CONSTANTS,
    IN_A_GRAPH,
    LARGEST_ERROR,
    TESTED,
    WAITING,
    WORK,
    BatchSplit,
    Constants,
    StepWork,
    seconds_by_kind,
    seconds_of_waiting,
)
from sdbench.forecast.trace import build_on_meta, trace_step, work_by_kind
from sdbench.gpus import Card
from tests.runs import settings_of

CARD = Card('round', tflops=100, gigabytes_per_sec=1000, gib=80, multiprocessors=100, gigahertz=1,
            link_gigabytes_per_sec=10)
ROUND = Constants(peak_share=0.5, bandwidth_share=1, bytes_a_cycle=20, seconds_a_kernel=1e-5)


def bytes_moved(call) -> float:
    """The bytes of a call on real tensors; none of the traced number of images is among their sizes."""
    counter = StepCounter([])
    with counter:
        call()
    return work_by_kind(work for _, *work in counter.work)['other_bytes'].sum()


@functools.cache
def work_of(model_name: str, attention: str = 'sdpa') -> StepWork:
    settings = settings_of('--dry_run', '--model_name', model_name, '--image_size', '16', '--batch_size', '4')
    model = build_on_meta(settings, benchmark.build_model)
    _, work = trace_step(model, settings.precision, attention=attention)
    return work


# The arithmetic

# seconds of the backward pass that are left when each of three buckets of 10 GB is there: so long is an image's
LEFT = (0.9, 0.5, 0.0)


def step_of_buckets() -> StepWork:
    return StepWork(work_by_kind([('a', 0, 2e12, 0, 0)]), exchange=work_by_kind([('b', 0, 0, 1e11, 0)]),
                    buckets=pd.DataFrame([[10**10, 0, seconds * 1e12, 0, 0] for seconds in LEFT],
                                         columns=['sent', *WORK]))


def waiting_by_the_clock(images: int, seconds_a_bucket: float) -> float:
    """The end of an exchange that sends bucket after bucket, beyond the end of the backward pass."""
    backward = images * LEFT[0]
    now = 0.0
    for left in LEFT:
        now = max(now, backward - images * left) + seconds_a_bucket
    return now - backward


@pytest.mark.parametrize('devices, over_link', [(2, 1.0), (4, 1.5), (8, 1.75)])
@pytest.mark.parametrize('precision, share', [('fp32', 1), ('bf16', 0.5)])
@pytest.mark.parametrize('images', [1, 4])
def test_a_step_waits_for_what_is_left_of_the_exchange_after_the_last_backward_pass(devices, over_link, precision,
                                                                                    share, images):
    layout = BatchSplit(microbatch=8, images=24 + images, num_devices=devices, allreduce_precision=precision)
    expected = waiting_by_the_clock(images, over_link * share * 10e9 / 10e9)
    assert seconds_of_waiting(CARD, step_of_buckets(), layout, ROUND) == pytest.approx(expected)
    assert seconds_by_kind(CARD, step_of_buckets(), layout, ROUND).to_dict() == pytest.approx(
        {'a': 2 * layout.images, 'b': 0.1, WAITING: expected})


# What is counted of an operator

def test_attention_math_writes_and_reads_its_matrix(smallest_with_attention):
    queries = torch.zeros(1, 2, 64, 8)
    matrix = 4 * 2 * 64 * 64
    with sdpa_kernel(SDPBackend.MATH):
        moved = bytes_moved(lambda: torch.nn.functional.scaled_dot_product_attention(queries, queries, queries))
    # it is written by a product, read and written twice by the softmax, read to look for masked rows, read by a product
    assert moved == pytest.approx(7 * matrix, rel=0.15)  # and queries, keys and values
    fused, math = (work_of(smallest_with_attention, name).model['image_bytes'].sum() for name in ('sdpa', 'math'))
    assert math > 1.02 * fused


def test_arithmetic_of_a_step_is_that_of_the_model_and_attention(smallest_with_attention):
    work = work_of(smallest_with_attention)
    with torch.device('meta'):
        model = benchmark.StableDiffusion(smallest_with_attention, 16)
    vae = model.flops_per_image.pop('vae')
    assert work.encoder['image_flops'].sum() == pytest.approx(vae)
    counted_by_torch = sum(model.flops_per_image.values())
    # fused attention computes its scores again in the backward pass, which torch's counter sees on no meta device
    flops = work.model['image_flops']
    assert counted_by_torch < flops.sum() < counted_by_torch + flops[ATTENTION] / 6


# The fit

def test_the_points_that_are_fitted_are_what_is_tested_and_each_other_has_its_reason():
    points = published.read_points()
    assert len(points) == 65
    fitted = points[points['left_out'] == '']
    eager, compiled = fitted[fitted['compile'] == 'no'], fitted[fitted['compile'] != 'no']
    assert (len(eager), eager['device'].nunique()) == (32, 5)
    assert (len(compiled), compiled['by'].nunique()) == (11, 5)
    assert published.tested_layouts(fitted) == TESTED


IN_CODE = fit.Fitted(CONSTANTS, IN_A_GRAPH)


@pytest.mark.long
@pytest.mark.parametrize('reason', [published.NO_DEVICES, published.NO_MICROBATCH])
def test_speeds_whose_sources_leave_something_open_are_met_with_what_is_likely(reason):
    points = published.read_points()
    points = points[points['left_out'] == reason]
    assert len(points) > 3
    assert fit.predict(points, IN_CODE) == pytest.approx(points['measured'].to_numpy(), rel=LARGEST_ERROR)


@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith('2.7.'), reason='other versions trace other operators')
def test_constants_and_largest_error_are_those_of_the_fit():
    judged, fitted = fit.judge(published.read_points())
    assert fitted == IN_CODE
    is_eager = judged['compile'] == 'no'
    assert judged[is_eager]['unseen_error'].abs().max() == pytest.approx(LARGEST_ERROR, abs=0.005)
    assert judged[~is_eager]['unseen_error'].abs().max() < LARGEST_ERROR / 2
    worse = fit.Fitted(replace(CONSTANTS, peak_share=CONSTANTS.peak_share * 1.1), IN_A_GRAPH)
    errors = (fit.predict(judged, worse) / judged['measured'] - 1).abs()
    assert errors.mean() > judged['error'].abs().mean()
