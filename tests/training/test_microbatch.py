"""The search for the largest microbatch: it finds what fits on every rank, and leaves no trace."""
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
    """Let every pass of more than `limit` images fail in the middle of the UNet; return the list of the sizes tried."""
    tried = []

    def fail(*_):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB')

    def in_forward(module, inputs, output):
        if tried[-1:] != [len(output)]:  # once for both batches of a try
            tried.append(len(output))
        if len(output) > limit and where == 'forward':
            fail()
        if len(output) > limit and where == 'backward':
            output.register_hook(fail)

    model.unet.up_blocks[0].register_forward_hook(in_forward)
    return tried


@pytest.mark.parametrize('where', ['forward', 'backward'])
def test_the_largest_that_fits_is_found_with_a_try_of_each_size_and_nothing_of_a_try_alive_at_the_next(where):
    activations = []  # of each pass, its size and a reference

    def note(module, inputs, output):
        assert not [size for size, tensor in activations if size != len(output) and tensor() is not None]
        cycle = [output]
        cycle.append(cycle)  # as an error and the frame that keeps it can be
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
    ('CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`', 1, False),  # it does not start
    ('expected scalar type Half but found Float', 4, False)])
def test_what_cuda_says_of_too_little_memory_means_that_it_does_not_fit(words, size, too_large):
    assert is_too_large(RuntimeError(words), size) == too_large


def search_on_a_cpu(patch: pytest.MonkeyPatch, limit: int, where: str = 'backward') -> None:
    """Let main() search as it does on a GPU, with memory for `limit` images at once."""
    def complete_but_for_a_search(settings, index):
        return replace(complete(settings, index), device_train_microbatch_size='auto')

    def build_limited_model(*args, **options):
        model = build_model(*args, **options)
        run_out_of_memory_above(limit, model, where)
        return model

    build_model = benchmark.build_model
    patch.setattr(benchmark, 'complete', complete_but_for_a_search)
    patch.setattr(benchmark, 'build_model', build_limited_model)


def test_where_not_even_one_image_fits_one_line_says_so(monkeypatch, capfd):
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
def test_where_not_even_one_image_fits_what_was_not_given_is_tried_and_what_is_enough_is_said(monkeypatch, capfd, flags,
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
    """Train on a rank of its own, whose memory ends there."""
    search_on_a_cpu(pytest.MonkeyPatch(), limit, where)
    main(argv)


@pytest.mark.long
def test_ranks_that_run_out_at_different_sizes_agree_and_train_as_told(tmp_path, server, results):
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
