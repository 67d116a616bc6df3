"""Docker gives containers 64 MB of shared memory: fewer loader processes than cores are never chosen in silence."""
import os

import numpy as np
import pytest

from cli import checks, defaults
from cli.checks import refuse_bad_loading
from inputs.sample_size import CAPTION_BYTES, bytes_of_sample
from tests.runs import settings_of
from tests.samples import encoded, picture, write_shards

MIB = 2 ** 20


@pytest.fixture(scope='module')
def mixed(tmp_path_factory) -> str:
    """Images of two sizes, whose batches are brought to the training's: 6 MiB for 8 images of 512 pixels."""
    samples = [{'jpg': encoded(picture(i, side, side)), 'caption': str(i)} for i, side in enumerate((64, 64, 80, 80))]
    return write_shards(tmp_path_factory.mktemp('mixed') / 'shards', samples, size_limit=3000)


def parsed(shared_bytes: int, remote: str, monkeypatch, *flags: str):
    """The flags of a run in batches of 8 images of 512 pixels, on four cores with so much free shared memory."""
    monkeypatch.setattr(defaults, 'free_bytes', lambda: shared_bytes)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0, 1, 2, 3})
    return settings_of('--remote', remote, '--batch_size', '8', *flags)


@pytest.mark.parametrize('shared_mib, workers', [(64, 4), (60, 3), (31, 1), (12, 0)])
def test_fewer_workers_than_cores_are_said_in_one_line_with_the_remedy(mixed, shared_mib, workers, monkeypatch, capfd):
    assert parsed(shared_mib * MIB, mixed, monkeypatch).num_workers == workers
    out, err = capfd.readouterr()
    assert out == ''
    if workers == 4:
        assert err == ''
        return
    assert err.count('\n') == 1 and err.startswith('warning: ')
    assert f'--num_workers is {workers} instead of 4' in err and '/dev/shm' in err and 'docker run --shm-size' in err


def test_only_rank_0_says_so(mixed, monkeypatch, capfd):
    monkeypatch.setattr(checks.dist, 'get_global_rank', lambda: 1)
    assert parsed(12 * MIB, mixed, monkeypatch).num_workers == 0
    assert capfd.readouterr().err == ''


def test_a_number_that_the_user_gave_needs_no_warning(mixed, monkeypatch, capfd):
    assert parsed(12 * MIB, mixed, monkeypatch, '--num_workers', '0').num_workers == 0
    assert capfd.readouterr().err == ''


def test_small_images_and_latents_are_counted_as_what_they_are(shards, tmp_path, monkeypatch, capfd):
    """Images that are stored at 64 pixels travel so, and latents of 512 pixels are a twelfth of the image."""
    latents = str(tmp_path / 'latents')
    columns = {'moments': 'ndarray:float16:8,64,64', 'caption': 'str'}
    write_shards(latents, [{'moments': np.zeros((8, 64, 64), np.float16), 'caption': 'x'}], columns)
    index = tmp_path / 'latents' / 'index.json'
    index.write_text(index.read_text()[:-1] + ', "latents": {}}')
    assert bytes_of_sample(shards, 512) == 3 * 64 ** 2 + CAPTION_BYTES
    assert bytes_of_sample(latents, 512) == 8 * 64 * 64 * 2 + CAPTION_BYTES
    for remote in (shards, latents):
        assert parsed(12 * MIB, remote, monkeypatch).num_workers == 4
        refuse_bad_loading(parsed(12 * MIB, remote, monkeypatch, '--num_workers', '4'), 512, 8)
    assert capfd.readouterr().err == ''


def test_more_workers_than_fit_are_refused(mixed, monkeypatch):
    data = parsed(31 * MIB, mixed, monkeypatch, '--num_workers', '4')
    with pytest.raises(ValueError, match='--num_workers 4 may fill the shared memory.* use at most 1, or make it'):
        refuse_bad_loading(data, 512, 8)
