"""encode.py --compile: one graph for all batches, however many of their images are good."""
import functools

import numpy as np
import pytest
import torch

import encode
from settings.commands import Encode
from settings.flags import parse
from settings.here import encoding_here
from data import StreamingLAIONDataset
from inputs.shards import index_hash, read_index
from parts.output import Output, join_parts, write_index
from parts.work import Part
from tests.samples import write_shards


@pytest.fixture
def graphs(monkeypatch) -> list[torch.fx.GraphModule]:
    """The graphs that a backend is given, which then run as they are."""
    given = []

    def backend(graph, inputs):
        given.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_with = functools.partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(torch.nn.Module, 'compile', compile_with)
    yield given
    torch._dynamo.reset()


def encoded_moments(remote: str, out, model_folder: str, *flags: str) -> list[np.ndarray]:
    """Encode in batches of 4, in this process; the moments that were stored."""
    args = parse(Encode, '', ['--remote', remote, '--out', str(out), '--model_name', model_folder,
                                         '--pretrained', '--image_size', '64', '--batch_size', '4', '--num_workers',
                                         '0', *flags])
    flags = encoding_here(args)
    index = read_index(remote)
    output = Output(str(out), '--out')
    parts = [Part(str(number), [number]) for number in range(len(index['shards']))]
    with output.begun({'program': 'encode.py'}):
        encode.encode_parts(flags, output, index_hash(index), parts)
        write_index(output, join_parts(output, [part.name for part in parts]), latents={})
    stored = StreamingLAIONDataset(str(out), image_size=64, batch_size=1)
    return [stored[index]['moments'].numpy() for index in range(stored.num_samples)]


@pytest.mark.long
def test_batches_with_any_number_of_good_images_share_one_graph(graphs, tmp_path, samples, model_folder):
    damaged = [dict(sample) for sample in samples[:18]]  # 4 good images, then 3, 2, 1, 0, and a last batch of 2
    for index in (4, 8, 9, 12, 13, 14, 16, 17):
        damaged[index]['jpg'] = b'no image'
    damaged.extend(dict(sample, jpg=b'no image') for sample in samples[18:20])
    damaged.extend(samples[20:22])
    remote = write_shards(tmp_path / 'images', damaged, size_limit=1 << 30)
    plain = encoded_moments(remote, tmp_path / 'plain', model_folder)
    assert not graphs
    compiled = encoded_moments(remote, tmp_path / 'compiled', model_folder, '--compile')
    assert len(graphs) == 1
    assert len(plain) == len(compiled) == 12
    for one, other in zip(plain, compiled, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3, rtol=2e-3)
