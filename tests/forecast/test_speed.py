"""The forecast: its arithmetic, what it counts of an operator, and that its constants are those of the fit."""
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import benchmark
from benchmarks import forecast
from sdbench.forecast.fake_step import trace_step, updater
from sdbench.forecast.memory import build_on_meta
from sdbench.forecast.operators import ATTENTION, AVERAGE, CONVOLUTIONS, NORMS, POINTWISE, PRODUCTS, UPDATE
from sdbench.forecast.speed import (
    CONSTANTS,
    IN_A_GRAPH,
    LARGEST_ERROR,
    TESTED,
    TESTED_IN_A_GRAPH,
    WAITING,
    BatchSplit,
    Bucket,
    Constants,
    StepWork,
    Work,
    seconds_by_kind,
    seconds_of,
    seconds_of_waiting,
)
from sdbench.forecast.step_counter import StepCounter
from sdbench.gpus import Card
from sdbench.models.loading import find_model
from tests.runs import settings_of

CARD = Card('round', tflops=100, gigabytes_per_sec=1000, gib=80, multiprocessors=100, gigahertz=1,
            link_gigabytes_per_sec=10)
ROUND = Constants(peak_share=0.5, bandwidth_share=1, bytes_a_cycle=20, seconds_a_kernel=1e-5)


def counted(call) -> StepCounter:
    """The work of a call on real tensors; none of the traced number of images is among their sizes."""
    counter = StepCounter([])
    with counter:
        call()
    return counter


def work_of_tiny(*flags: str, latents: bool = False, update=None) -> StepWork:
    settings = settings_of('--dry_run', '--model_name', 'tiny', '--image_size', '64', '--batch_size', '4', *flags)
    model = build_on_meta(settings, find_model('tiny'), latents, benchmark.build_model)
    _, work = trace_step(model, settings.precision, update, settings.attention)
    return work


def total(works: dict[str, Work]) -> Work:
    return sum(works.values(), Work())


# The arithmetic

def test_arithmetic_bytes_and_kernels_add_up_to_seconds():
    assert seconds_of(CARD, Work(flops=1e12, nbytes=3e9, kernels=7), ROUND) == pytest.approx(0.02 + 0.003 + 7e-5)


def test_multiprocessors_bound_the_bytes_of_a_card_with_fast_memory():
    fast = CARD._replace(gigabytes_per_sec=8000)
    assert seconds_of(fast, Work(nbytes=4e9), ROUND) == pytest.approx(0.002)


def test_a_step_is_its_microbatches_their_sums_and_one_update():
    step = StepWork({'a': Work(0, 5, 1)}, {'a': Work(2, 3, 0)}, {'b': Work(0, 7, 1)}, {'c': Work(0, 11, 1)})
    assert step.of_step(BatchSplit(microbatch=4, images=12)) == {'a': Work(24, 3 * 5 + 12 * 3, 3), 'b': Work(0, 14, 2),
                                                             'c': Work(0, 11, 1)}


# seconds of the backward pass that are left when each of three buckets of 10 GB is there: so long is an image's
LEFT = (0.9, 0.5, 0.0)


def step_of_buckets() -> StepWork:
    buckets = [Bucket(10**10, Work(), Work(nbytes=seconds * 1e12)) for seconds in LEFT]
    return StepWork({}, {'a': Work(nbytes=2e12)}, {}, {}, exchange={'b': Work(nbytes=1e11)}, buckets=buckets)


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
    assert seconds_by_kind(CARD, step_of_buckets(), layout, ROUND) == pytest.approx(
        {'a': 2 * layout.images, 'b': 0.1, WAITING: expected})


def test_one_gpu_exchanges_nothing():
    assert seconds_by_kind(CARD, step_of_buckets(), BatchSplit(1, 1), ROUND) == {'a': 2}


def test_buckets_hold_every_gradient_and_leave_ever_less_to_compute():
    model = benchmark.StableDiffusion('tiny', 64)
    work = work_of_tiny()
    assert sum(bucket.nbytes for bucket in work.buckets) == sum(weight.nbytes for weight in model.unet.parameters())
    left = [bucket.fixed.nbytes + bucket.per_image.nbytes for bucket in work.buckets]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 0.1 * (total(work.fixed) + total(work.per_image)).nbytes  # the first layers' come last


# What is counted of an operator

def test_a_product_is_its_multiply_adds_and_its_three_matrices():
    a, b = torch.zeros(4, 5), torch.zeros(5, 6)
    counter = counted(lambda: a @ b)
    assert counter.fixed == {PRODUCTS: Work(0, 4 * (20 + 30 + 24), 1)}
    assert sum(work.flops for work in counter.per_image.values()) * 1009 == pytest.approx(2 * 4 * 5 * 6)


def test_views_and_memory_without_content_are_no_work():
    image = torch.zeros(2, 3, 4)
    assert counted(lambda: (image.transpose(1, 2).view(2, 4, 3)[:1].detach(), torch.empty(5))).fixed == {}


def test_what_an_expanded_tensor_repeats_is_read_once():
    row = torch.zeros(1, 8).expand(4, 8)
    assert counted(lambda: row + 1).fixed == {POINTWISE: Work(0, 4 * (8 + 32), 1)}


@pytest.mark.parametrize('memory_format, copies', [(torch.channels_last, 0), (torch.contiguous_format, 2)])
def test_a_convolution_in_channels_first_copies_what_it_reads_and_writes(memory_format, copies):
    image = torch.zeros(2, 8, 4, 4).to(memory_format=memory_format)
    convolution = torch.nn.Conv2d(8, 8, 3, padding=1, bias=False).to(memory_format=memory_format)
    with torch.no_grad():
        work = counted(lambda: convolution(image)).fixed[CONVOLUTIONS]
    pixels = 4 * image.numel()
    assert work == Work(0, 2 * pixels + 4 * 8 * 8 * 9 + 2 * copies * pixels, 1 + copies)


@pytest.mark.parametrize('memory_format, copies', [(torch.channels_last, 2), (torch.contiguous_format, 0)])
def test_a_group_norm_in_channels_last_copies_what_it_reads_and_writes(memory_format, copies):
    image = torch.zeros(2, 8, 4, 4).to(memory_format=memory_format)
    norm = torch.nn.GroupNorm(2, 8)
    with torch.no_grad():
        work = counted(lambda: norm(image)).fixed[NORMS]
    assert work.kernels == 2 + copies
    assert work.nbytes == pytest.approx(4 * image.numel() * (3 + 2 * copies), rel=0.1)  # and few statistics


def test_attention_math_writes_and_reads_its_matrix():
    queries = torch.zeros(1, 2, 64, 8)
    matrix = 4 * 2 * 64 * 64
    with sdpa_kernel(SDPBackend.MATH):
        work = total(counted(lambda: torch.nn.functional.scaled_dot_product_attention(queries, queries, queries)).fixed)
    # it is written by a product, read and written twice by the softmax, read to look for masked rows, read by a product
    assert work.nbytes == pytest.approx(7 * matrix, rel=0.15)  # and queries, keys and values
    fused, math = (total(work_of_tiny(*flags).per_image).nbytes for flags in ([], ['--attention', 'math']))
    assert math > 1.02 * fused


def test_arithmetic_of_a_step_is_that_of_the_model_and_attention():
    work = work_of_tiny()
    model = benchmark.StableDiffusion('tiny', 64)
    counted_by_torch = sum(model.flops_per_image.values())
    # fused attention computes its scores again in the backward pass, which torch's counter sees on no meta device
    assert counted_by_torch < total(work.per_image).flops < counted_by_torch + work.per_image[ATTENTION].flops / 6


def test_an_update_reads_and_writes_weights_moments_gradients_and_average():
    model = benchmark.StableDiffusion('tiny', 64)
    weights = sum(weight.nbytes for weight in model.unet.parameters())
    update = work_of_tiny(update=updater(fused=True, use_ema=True)).update
    # four are read, and all of them written: a GradScaler may change the gradients
    assert update[UPDATE].nbytes == pytest.approx(8 * weights, rel=0.01)
    assert update[AVERAGE].nbytes == pytest.approx(3 * weights, rel=0.01)


def test_half_precision_norms_and_latents_move_less():
    given, half, latents = (total(work.per_image).nbytes for work in (
        work_of_tiny(), work_of_tiny('--half_precision_norms'), work_of_tiny(latents=True)))
    assert half < 0.95 * given
    assert latents < 0.8 * given


# The fit

def test_the_points_that_are_fitted_are_what_is_tested_and_each_other_has_its_reason():
    points = forecast.read_points()
    eager, compiled = forecast.eager_points(points), forecast.compiled_points(points)
    assert len(points) == 61
    assert (len(eager), eager['device'].nunique()) == (31, 5)
    assert (len(compiled), compiled['by'].nunique()) == (8, 4)
    assert forecast.tested_layouts(eager) == TESTED
    assert forecast.tested_layouts(compiled) == TESTED_IN_A_GRAPH


@pytest.mark.long
def test_speeds_of_several_gpus_over_pcie_and_nvlink_are_met_although_their_number_is_not_stated():
    points = forecast.read_points()
    points = points[points['left_out'] == forecast.NO_DEVICES]
    assert sorted(set(points['device'])) == ['H100 80GB HBM3', 'L40S']
    assert forecast.predict(points, CONSTANTS) == pytest.approx(points['measured'].to_numpy(), rel=0.1)


@pytest.mark.long
def test_constants_and_largest_error_are_those_of_the_fit():
    judged, constants = forecast.judge_eager(forecast.read_points())
    assert constants == CONSTANTS
    assert judged['unseen_error'].abs().max() == pytest.approx(LARGEST_ERROR, abs=0.005)
    worse = replace(CONSTANTS, peak_share=CONSTANTS.peak_share * 1.1)
    errors = (forecast.predict(judged, worse) / judged['measured'] - 1).abs()
    assert errors.mean() > judged['error'].abs().mean()


@pytest.mark.long
def test_compiled_steps_of_sources_that_are_left_out_are_met_within_a_third_of_the_range_that_is_stated():
    judged, constants = forecast.judge_compiled(forecast.read_points())
    assert constants == IN_A_GRAPH
    assert judged['unseen_error'].abs().max() < LARGEST_ERROR / 3
