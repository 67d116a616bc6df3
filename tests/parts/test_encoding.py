"""A worker that encodes: on GPUs it starts from nothing, and what it lacks is one line."""
import pytest
import torch

import encode
from settings.commands import Encode
from settings.flags import parse
from settings.here import encoding_here
from inputs.errors import DataError
from inputs.shards import read_index
from parts.claims import claim
from parts.encoding import Encoder
from parts.engine import Part
from parts.output import open_output


def parsed(remote: str, out, model_folder: str, *flags: str) -> Encode:
    args = parse(Encode, '', ['--remote', remote, '--out', str(out), '--model_name', model_folder,
                                         '--pretrained', '--image_size', '64', '--batch_size', '4', '--num_workers',
                                         '0', *flags])
    return encoding_here(args)


@pytest.mark.parametrize('gpus, start_method', [(0, 'forkserver'), (2, 'spawn')])
def test_no_worker_on_a_gpu_is_a_fork_of_a_process_that_has_asked_cuda(gpus, start_method, tmp_path, shards,
                                                                        model_folder, monkeypatch):
    flags = parsed(shards, tmp_path / 'latents', model_folder)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    workers = encode.open_workers(flags, open_output(flags.out, '--out'), read_index(shards), 3)
    assert workers.context.get_start_method() == start_method
    assert workers.places() == max(1, gpus)


def test_a_batch_that_does_not_fit_into_memory_is_one_line_that_names_its_size(tmp_path, shards, model_folder,
                                                                               monkeypatch):
    flags = parsed(shards, tmp_path / 'latents', model_folder)
    output = open_output(flags.out, '--out')
    claim(output, {'program': 'encode.py'})
    encoder = Encoder(output, encode.settings_of(flags, read_index(shards)), 0)

    def out_of_memory(*arguments):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')
    monkeypatch.setattr(torch.nn.Conv2d, 'forward', out_of_memory)
    with pytest.raises(DataError, match='^out of memory at --batch_size 4; use a smaller one$'):
        encoder([Part(0, [])])
