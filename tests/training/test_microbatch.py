"""The search finds the largest microbatch that fits on every rank, and leaves nothing behind."""
import json
import re
import weakref
from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest
import torch

import benchmark
from benchmark import StableDiffusion, build_optimizer, main
from sdbench.complete import complete
from sdbench.training.microbatch import with_found_microbatch
from tests.forked_runs import run_ranks
from tests.runs import SMALLEST, TINY, assert_same_training, one_error_line, settings_of

OUT_OF_MEMORY = torch.OutOfMemoryError, 'CUDA out of memory. Tried to allocate 20.00 GiB'
NO_HANDLE = RuntimeError, 'CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`'
TOO_MANY = RuntimeError, 'upsample_nearest2d only supports output tensors with less than INT_MAX elements, but got [1]'
WRONG_TYPE = RuntimeError, 'expected scalar type Half but found Float'


def fail_above(limit: int, model: StableDiffusion, where: str = 'backward', error=OUT_OF_MEMORY) -> None:
    """Make passes with more than `limit` images fail inside of the UNet, in the forward or the backward pass."""
    def fail(*_):
        kind, words = error
        raise kind(words)

    def in_forward(module, inputs, output):
        if len(output) > limit and where == 'forward':
            fail()
        elif len(output) > limit:
            output.register_hook(fail)

    model.unet.up_blocks[0].register_forward_hook(in_forward)


def microbatch_for(model: StableDiffusion) -> int:
    """Search the microbatch for a batch of 12 images."""
    settings = settings_of('--use_synth_data', *TINY, '--batch_size', '12')
    optimizer = partial(build_optimizer, model, settings)
    settings = with_found_microbatch(replace(settings, device_train_microbatch_size='auto'), model, optimizer)
    return settings.device_train_microbatch_size


@pytest.mark.parametrize('where, error', [
    ('forward', OUT_OF_MEMORY), ('backward', OUT_OF_MEMORY), ('backward', (RuntimeError, 'CUDA error: out of memory')),
    ('forward', TOO_MANY), ('forward', NO_HANDLE)])
def test_the_largest_microbatch_is_found_with_one_trial_per_size_and_trials_free_their_memory(where, error):
    activations = []  # size and weak reference for each pass

    def note(module, inputs, output):
        assert not [size for size, tensor in activations if size != len(output) and tensor() is not None]
        cycle = [output]
        cycle.append(cycle)  # like an error and the frame that holds it
        activations.append((len(output), weakref.ref(output)))

    model = StableDiffusion(SMALLEST, 16)
    model.unet.up_blocks[0].register_forward_hook(note)
    fail_above(3, model, where, error)
    assert microbatch_for(model) == 3
    assert [size for size, _ in groupby(size for size, _ in activations)] == [1, 4, 3]
    assert not [size for size, tensor in activations if tensor() is not None]


@pytest.mark.parametrize('limit, error', [(3, WRONG_TYPE), (0, NO_HANDLE)])  # one image is not too many
def test_an_error_with_another_cause_than_memory_ends_the_search(limit, error):
    model = StableDiffusion(SMALLEST, 16)
    fail_above(limit, model, error=error)
    with pytest.raises(RuntimeError, match=re.escape(error[1])):
        microbatch_for(model)


def search_on_a_cpu(patch: pytest.MonkeyPatch, limit: int, where: str = 'backward') -> None:
    """Make main() search as on a GPU with memory for `limit` images."""
    def complete_with_auto(settings, index):
        return replace(complete(settings, index), device_train_microbatch_size='auto')

    def build_limited_model(*args, **options):
        model = build_model(*args, **options)
        fail_above(limit, model, where)
        return model

    build_model = benchmark.build_model
    patch.setattr(benchmark, 'complete', complete_with_auto)
    patch.setattr(benchmark, 'build_model', build_limited_model)


def test_if_not_even_one_image_fits_the_error_names_the_changes_that_were_not_made(monkeypatch, capfd):
    search_on_a_cpu(monkeypatch, limit=0)
    line = one_error_line(['--use_synth_data', *TINY, '--image_size', '128', '--use_ema'], capfd)
    for named in ('--image_size 128', '--gradient_checkpointing', '--no-use_ema', '--image_size 64', 'encode.py'):
        assert named in line
    made = ['--gradient_checkpointing', '--image_size', '64', '--use_synth_latents']
    assert one_error_line([*TINY, *made], capfd).endswith('use a GPU with more memory')


def searching_rank(limit: int, where: str, argv: list[str]) -> None:
    """Train in a separate process that has memory for `limit` images."""
    search_on_a_cpu(pytest.MonkeyPatch(), limit, where)
    main(argv)


@pytest.mark.long
def test_ranks_with_different_limits_agree_and_train_as_with_that_microbatch(tmp_path, server, results):
    argv = ['--use_synth_data', *TINY, '--use_ema', '--batch_size', '16', '--results', str(results), '--save_folder']
    searched = [*argv, str(tmp_path / 'searched')]
    told = [*argv, str(tmp_path / 'told'), '--device_train_microbatch_size', '2']
    logs = [tmp_path / 'log'] * 2
    assert run_ranks(server, logs, searching_rank, [(4, 'forward', searched), (2, 'backward', searched)]) == [0, 0]
    assert run_ranks(server, logs, main, [(told,)] * 2) == [0, 0], logs[0].read_text()
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [record['device_train_microbatch_size'] for record in records] == [2, 2]
    assert ['device_train_microbatch_size' in record['by_default'] for record in records] == [True, False]
    assert_same_training(tmp_path / 'searched', tmp_path / 'told')
