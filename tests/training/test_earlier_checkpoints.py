"""Checkpoints that earlier versions have saved resume, are exported, and start a second phase.

Each file in tests/earlier_checkpoints is named after the commit that has saved it. docs/extending.md says how to add
one.
"""
import lzma
import os
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmark import main
from export import main as export
from sdbench.training.checkpoints import load_checkpoint
from tests.runs import assert_equal, one_error_line

EARLIER = Path(__file__).parent.parent / 'earlier_checkpoints'
RUN = ['--use_synth_data', '--use_ema', '--model_name', 'model', '--pretrained', '--image_size', '16', '--batch_size',
       '2', '--warmup_batches', '1', '--results', '-', '--max_duration']
ENCODERS = ('vae/diffusion_pytorch_model', 'text_encoder/model')


@pytest.fixture(autouse=True)
def model(tmp_path) -> None:
    """Make the folder of the model that all checkpoints here name."""
    with tarfile.open(EARLIER / 'model.tar.xz') as tar:
        tar.extractall(tmp_path, filter='data')


@pytest.fixture(params=sorted(path.name.removesuffix('.pt.xz') for path in EARLIER.glob('*.pt.xz')))
def earlier(request, tmp_path) -> Path:
    """Return a checkpoint after 4 batches in the folder kept."""
    kept = tmp_path / 'kept' / 'ep0-ba4-rank0.pt'
    kept.parent.mkdir()
    kept.write_bytes(lzma.decompress((EARLIER / f'{request.param}.pt.xz').read_bytes()))
    return kept


def encoders_of(folder: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(f'{folder}/{part}.safetensors') for part in ENCODERS]


def test_a_checkpoint_of_an_earlier_version_resumes_is_exported_and_starts_a_second_phase(earlier, capfd):
    state = load_checkpoint(earlier)['state']
    has_facts = '_extra_state' in state['model']  # which name its model
    export([str(earlier), 'out', '--model_name', 'model'])
    main([*RUN, '1ba', '--load_weights', str(earlier)])
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*Its state will not be restored')  # of callbacks with other names
        record = main([*RUN, '6ba', '--save_folder', 'kept', '--autoresume', '--save_num_checkpoints_to_keep', '1'])
    assert (record['first_batch'], record['skipped_batches']) == (4, 0)
    assert record['ema_half_life'] == ('1ba' if has_facts else '1000ba')  # the default of the first versions
    assert not earlier.exists()  # the resumed run knows that the earlier one has written it
    identity = state['callbacks'].get('IdentityKeeper', {})
    assert record['training_id'] == identity.get('training_id', record['training_id'])
    assert record['gpu_hours'] > state['callbacks'].get('Spending', {}).get('gpu_hours', 0)
    assert record['gpu_hours_by_device'] == {'CPU': record['gpu_hours']}
    export(['kept', 'resumed'])
    # Networks that a GPU has rounded are exported in full.
    for folder in ['out', 'resumed'] if has_facts else ['resumed']:
        for ours, theirs in zip(encoders_of(folder), encoders_of('model'), strict=True):
            assert_equal(ours, theirs)
    assert 'Traceback' not in capfd.readouterr().err


@pytest.mark.parametrize('earlier', ['3b081097'], indirect=True)
def test_a_text_encoder_that_the_folder_no_longer_has_stays_that_of_the_checkpoint(earlier):
    """Checkpoints of earlier versions hold it, and have no hash of it."""
    before = load_checkpoint(earlier)['state']['model']
    path = Path('model/text_encoder/model.safetensors')
    path.write_bytes(path.read_bytes()[:-4000] + bytes(os.urandom(1) * 4000))
    main([*RUN, '6ba', '--save_folder', 'kept', '--autoresume'])
    after = load_checkpoint('kept/ep0-ba6-rank0.pt')['state']['model']
    export(['kept', 'out'])
    _, exported = encoders_of('out')
    for name, tensor in exported.items():
        saved = next(value for key, value in before.items() if key.endswith(name.removeprefix('text_model.')))
        assert torch.equal(tensor, saved.float())
    assert any(name.startswith('text_encoder.') for name in after)


def test_a_network_that_the_folder_has_no_longer_is_named_by_its_hash_and_its_model(capfd):
    argv = ['--save_folder', 'kept', '--autoresume']
    main([*RUN, '2ba', *argv])
    path = Path('model/text_encoder/model.safetensors')
    content = path.read_bytes()
    path.write_bytes(content[:-4000] + bytes(4000))
    for program, words in ((main, [*RUN, '3ba', *argv]), (export, ['kept', 'out'])):
        line = one_error_line(words, capfd, program)
        assert 'hash of its text_encoder' in line and '--model_name' in line
    path.write_bytes(content)
    Path('model').rename('elsewhere')
    assert '--model_name model' in one_error_line(['kept', 'out'], capfd, export)
    export(['kept', 'out', '--model_name', 'elsewhere'])
