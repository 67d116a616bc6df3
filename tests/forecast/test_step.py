"""A stored step gives the same forecast as a full trace, and forecasts are monotone where they must be."""
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.forecast.traces import setups
from sdbench.flags.train import SD2_BASE
from sdbench.forecast.compiling import compiled_memory
from sdbench.forecast.forecast import DoesNotFit, forecast
from sdbench.forecast.step import ITEMS, Step, StepMemory
from sdbench.forecast.stored import hash_of_code, hash_of_model, name_of, read_packaged, traced_now
from sdbench.gpus import CARDS
from sdbench.setup import Setup

amounts = st.integers(0, 6)  # few values, so that several operators reach the same peak
rows = st.lists(st.tuples(st.lists(amounts, min_size=2 * len(ITEMS), max_size=2 * len(ITEMS)), st.booleans()),
                min_size=1, max_size=12)


@given(rows, amounts, st.booleans(), st.sampled_from([None, False, True]))
def test_the_operators_that_are_kept_give_the_peak_of_all_for_every_microbatch(rows, gradients, checkpointing, blocks):
    alive = np.array([numbers for numbers, _ in rows], dtype=np.int64).reshape(-1, 2, len(ITEMS))
    in_encoder = np.array([False] + [is_inside for _, is_inside in rows[1:]])
    full = StepMemory(alive, in_encoder, gradients)
    kept = full.rows_of_peaks()
    setup = Setup(gradient_checkpointing=checkpointing, compile_blocks=blocks)
    if blocks is not None:
        kept |= compiled_memory(full, setup).rows_of_peaks()
    reduced = full.at(kept)
    if blocks is not None:
        full, reduced = compiled_memory(full, setup), compiled_memory(reduced, setup)
    for microbatch in range(1, 40):
        for accumulated in (False, True):
            for latents in (False, True):
                assert reduced.peak(microbatch, accumulated, latents) == full.peak(microbatch, accumulated, latents)


several = st.sampled_from([1, 2, 8, 16, 64, 256])
any_setup = st.builds(
    Setup, num_devices=several, network_gbits=st.sampled_from([None, 25.0, 100.0, 400.0]), latents=st.booleans(),
    batch_size=st.sampled_from([256, 2048]), microbatch=st.none(), image_size=st.sampled_from([256, 512]),
    compile=st.sampled_from([False, True, 'reduce-overhead']), gradient_checkpointing=st.booleans(),
    use_ema=st.booleans(), half_precision_norms=st.booleans(), fused_optimizer=st.booleans())
any_card = st.sampled_from(sorted(CARDS.values()))


@settings(max_examples=30, deadline=None)
@given(any_setup, any_card, st.floats(1, 3))
def test_a_better_machine_is_never_worse(setup, card, factor):
    try:
        found = forecast(setup, card)
    except DoesNotFit as error:
        assert error.gib_needed > card.gib
        return
    assert found.gib <= card.gib
    if not math.isnan(found.images_per_sec):
        assert sum(found.seconds.values()) * found.images_per_sec == pytest.approx(found.setup.batch_size)
    more_memory = forecast(setup, card._replace(gib=card.gib * factor))
    assert more_memory.setup.microbatch >= found.setup.microbatch
    for better in (forecast(replace(setup, network_gbits=(setup.network_gbits or 1e9) * factor), card),
                   forecast(setup, card._replace(tflops=card.tflops * factor)),
                   forecast(setup, card._replace(gigabytes_per_sec=card.gigabytes_per_sec * factor))):
        assert not better.images_per_sec < found.images_per_sec * (1 - 1e-9)


def test_a_step_is_stored_without_loss():
    for stored in list(read_packaged()['steps'].values())[:3]:
        assert json.loads(Step.of_json(stored).to_json()) == stored


def test_the_steps_in_the_package_are_of_this_code_and_this_model():
    """If this fails, run python -m benchmarks.forecast.traces."""
    packaged = read_packaged()
    assert packaged['identity'] == [hash_of_model(SD2_BASE), hash_of_code()]
    needed = [setup for setup in setups() if setup.precision == 'amp_bf16' and setup.image_size > 128]
    assert {*map(name_of, needed)} <= packaged['steps'].keys()


@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith('2.7.'), reason='other versions trace other operators')
@pytest.mark.parametrize('setup', [each for each in setups() if name_of(each) in read_packaged()['steps']][::40],
                         ids=name_of)
def test_a_new_trace_finds_the_step_in_the_package(setup):
    assert json.loads(traced_now(setup).to_json()) == read_packaged()['steps'][name_of(setup)]
