"""The search finds the largest microbatch that fits on every rank, and leaves nothing behind."""
import json
import re
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

import benchmark
from benchmark import StableDiffusion, build_optimizer, main
from sdbench.complete import complete
from sdbench.training import microbatch
from sdbench.training.microbatch import with_found_microbatch
from tests.forked_runs import run_ranks
from tests.runs import SMALLEST, TINY, assert_same_training, one_error_line, settings_of


def run_out_of_memory_above(limit: int, model: StableDiffusion, where: str) -> list[int]:
    """Make passes with more than `limit` images fail inside of the UNet; return a list that collects tried sizes."""
    tried = []

    def fail(*_):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB')

    def in_forward(module, inputs, output):
        if tried[-1:] != [len(output)]:  # once for both batches of a trial
            tried.append(len(output))
        if len(output) > limit and where == 'forward':
            fail()
        if len(output) > limit and where == 'backward':
            output.register_hook(fail)

    model.unet.up_blocks[0].register_forward_hook(in_forward)
    return tried


@pytest.mark.parametrize('where', ['forward', 'backward'])
def test_the_largest_microbatch_is_found_with_one_trial_per_size_and_trials_free_their_memory(where):
    activations = []  # size and weak reference for each pass

    def note(module, inputs, output):
        assert not [size for size, tensor in activations if size != len(output) and tensor() is not None]
        cycle = [output]
        cycle.append(cycle)  # like an error and the frame that holds it
        activations.append((len(output), weakref.ref(output)))

    model = StableDiffusion(SMALLEST, 16)
    model.unet.up_blocks[0].register_forward_hook(note)
    tried = run_out_of_memory_above(3, model, where)
    settings = settings_of('--use_synth_data', *TINY, '--batch_size', '12')  # 1, 2, 3, 4, 6 and 12 divide it
    found = with_found_microbatch(replace(settings, device_train_microbatch_size='auto'), model,
                                  partial(build_optimizer, model, settings))
    assert found.device_train_microbatch_size == 3
    assert tried == [1, 4, 3]
    assert not [size for size, tensor in activations if tensor() is not None]


@pytest.mark.parametrize('words, size, fitting', [
    ('CUDA error: out of memory', 1, False),
    ('upsample_nearest2d only supports output tensors with less than INT_MAX elements, but got [1, 2]', 4, False),
    ('CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`', 4, False),
    ('CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`', 1, None),  # another cause
    ('expected scalar type Half but found Float', 4, None)])
def test_cuda_errors_about_too_little_memory_are_recognized(words, size, fitting, monkeypatch):
    def fail(*_):
        raise RuntimeError(words)
    monkeypatch.setattr(microbatch, 'train_twice', fail)
    arguments = (torch.nn.Linear(1, 1), size, 'fp32', 0, None)
    if fitting is None:
        with pytest.raises(RuntimeError, match=re.escape(words)):
            microbatch.fits(*arguments)
    else:
        assert microbatch.fits(*arguments) == fitting


def search_on_a_cpu(patch: pytest.MonkeyPatch, limit: int, where: str = 'backward') -> None:
    """Make main() search as on a GPU with memory for `limit` images."""
    def complete_with_auto(settings, index):
        return replace(complete(settings, index), device_train_microbatch_size='auto')

    def build_limited_model(*args, **options):
        model = build_model(*args, **options)
        run_out_of_memory_above(limit, model, where)
        return model

    build_model = benchmark.build_model
    patch.setattr(benchmark, 'complete', complete_with_auto)
    patch.setattr(benchmark, 'build_model', build_limited_model)


def test_if_not_even_one_image_fits_the_error_names_the_changes_that_were_not_made(monkeypatch, capfd):
    search_on_a_cpu(monkeypatch, limit=0)
    line = one_error_line(['--use_synth_data', *TINY, '--image_size', '128', '--use_ema'], capfd)
    assert 'not even one image of --image_size 128 fits into the memory of this device; use --gradient' in line
    assert 'without --use_ema, or --image_size 64, or latents (encode.py); --dry_run with the same flags says' in line
    made = ['--gradient_checkpointing', '--image_size', '64', '--use_synth_latents']
    assert one_error_line([*TINY, *made], capfd).endswith('device; use a GPU with more memory')


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
