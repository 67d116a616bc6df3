"""The search finds the largest microbatch that fits on every rank, and leaves nothing behind."""
import json
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

import benchmark
from benchmark import StableDiffusion, build_optimizer, main
from sdbench.complete import complete
from sdbench.training.microbatch import is_too_large, with_found_microbatch
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


@pytest.mark.parametrize('words, size, too_large', [
    ('CUDA error: out of memory', 1, True),
    ('upsample_nearest2d only supports output tensors with less than INT_MAX elements, but got [1, 2]', 4, True),
    ('CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`', 4, True),
    ('CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`', 1, False),  # another cause
    ('expected scalar type Half but found Float', 4, False)])
def test_cuda_errors_about_too_little_memory_are_recognized(words, size, too_large):
    assert is_too_large(RuntimeError(words), size) == too_large


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


def test_a_one_line_error_says_that_not_even_one_image_fits(monkeypatch, capfd):
    search_on_a_cpu(monkeypatch, limit=0)
    line = one_error_line(['--use_synth_data', *TINY], capfd)
    assert 'not even one image of --image_size 16 fits into the memory of this device; none of these alone is' in line


@pytest.mark.parametrize('flags, room, advice', [
    ('', 27, 'each of these alone is enough: --gradient_checkpointing; --image_size 64; latents (encode.py)'),
    ('--gradient_checkpointing', 19, 'each of these alone is enough: --image_size 64; latents (encode.py)'),
    ('--gradient_checkpointing --use_ema', 25, 'each of these alone is enough: without --use_ema; latents (encode.py)'),
    ('--use_ema --gradient_checkpointing', 9, 'none of these alone is enough: without --use_ema; --image_size 64; '
     'latents (encode.py); combine them, or use a GPU with more memory'),
    ('--gradient_checkpointing --image_size 64 --use_synth_latents', 0, 'device; use a GPU with more memory')])
def test_if_not_even_one_image_fits_the_error_names_the_changes_that_help_and_were_not_made(monkeypatch, capfd, flags,
                                                                                            room, advice):
    def fits(model, size, precision, copies, build_optimizer):
        activations = model.image_size // (16 if model.unet.is_gradient_checkpointing else 8)
        return 10 * copies + 12 * (model.vae is not None) + activations <= room

    search_on_a_cpu(monkeypatch, limit=0)
    monkeypatch.setattr('sdbench.training.microbatch.fits', fits)
    source = [] if 'latents' in flags else ['--use_synth_data']
    line = one_error_line([*source, *TINY, '--image_size', '128', *flags.split()], capfd)
    assert line.endswith(advice), line


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
