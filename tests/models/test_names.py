"""A text encoder from transformers 4 or 5 is read with the other version, although the names of its tensors differ."""
import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from benchmark import main
from evaluate import load_model
from export import main as export
from sdbench.models.loading import build_text_encoder, find_model, hash_of_weights
from sdbench.models.names import PREFIX, installed_prefix
from sdbench.training.checkpoints import load_checkpoint
from tests.runs import TINY, assert_equal, final_state, one_error_line

TRAINING = ['--use_synth_data', '--use_ema', *TINY, '--save_folder', 'kept', '--autoresume', '--max_duration']
OTHER_PREFIX = '' if installed_prefix() else PREFIX


def in_other_names(tensors: dict, part: str = '') -> dict:
    """Rename tensors as the version of transformers that is not installed would name them."""
    return {name.replace(f'{part}{installed_prefix()}', f'{part}{OTHER_PREFIX}', 1) if name.startswith(part) else name:
            tensor for name, tensor in tensors.items()}


@pytest.fixture(scope='module')
def saved_once(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp('run') / 'kept'
    main([*TRAINING, '2ba', '--save_folder', str(folder), '--results', '-'])
    path = folder / 'ep0-ba2-rank0.pt'
    checkpoint = torch.load(path, weights_only=False)
    state = checkpoint['state']
    assert f'text_encoder.{installed_prefix()}final_layer_norm.weight' in state['model']
    state['model'] = in_other_names(state['model'], 'text_encoder.')
    shadow = dict(state['algorithms'])['EMA']['ema_model']
    shadow['named_buffers_dict'] = in_other_names(shadow['named_buffers_dict'], 'text_encoder.')
    assert f'text_encoder.{OTHER_PREFIX}final_layer_norm.weight' in state['model']
    torch.save(checkpoint, path)
    return str(folder)


@pytest.fixture
def as_saved_by_the_other(saved_once) -> Path:
    """Return a checkpoint as the other version of transformers saves it, including the names of buffers in the EMA."""
    return shutil.copytree(saved_once, Path('kept'), symlinks=True) / 'ep0-ba2-rank0.pt'


def text_encoder_of(model: dict) -> dict:
    return {name: tensor for name, tensor in model.items() if name.startswith('text_encoder.')}


@pytest.mark.parametrize('flags', [['--max_duration', '3ba'], ['--save_folder', 'second', '--load_weights', 'kept']],
                         ids=['a resume', 'a second phase'])
def test_a_training_keeps_the_random_text_encoder_from_the_other_version(as_saved_by_the_other, flags):
    before = text_encoder_of(load_checkpoint(as_saved_by_the_other)['state']['model'])
    main([*TRAINING, '1ba', '--seed', '17', *flags])
    after = final_state('second' if 'second' in flags else 'kept')
    assert after['timestamp']['Timestamp']['batch'] == (1 if 'second' in flags else 3)
    assert_equal(text_encoder_of(after['model']), before)
    assert len(before) > 10


@pytest.mark.parametrize('change', ['Missing key', 'Unexpected key'])
def test_a_resume_from_a_checkpoint_with_missing_or_unexpected_tensors_is_refused(as_saved_by_the_other, change, capfd):
    checkpoint = torch.load(as_saved_by_the_other, weights_only=False)
    model = checkpoint['state']['model']
    if change == 'Unexpected key':
        model['text_encoder.unexpected'] = torch.zeros(1)
    else:
        del model[f'text_encoder.{OTHER_PREFIX}final_layer_norm.bias']
    torch.save(checkpoint, as_saved_by_the_other)
    assert f'{change}(s) in state_dict: "text_encoder.' in one_error_line([*TRAINING, '3ba'], capfd)


def test_an_exported_pipeline_has_the_older_names_and_the_same_hash_for_both_versions(as_saved_by_the_other):
    here = load_checkpoint(as_saved_by_the_other)
    torch.save(here, 'here.pt')
    for checkpoint, out in ((as_saved_by_the_other, 'other'), ('here.pt', 'here')):
        export([str(checkpoint), out])
        weights = load_file(f'{out}/text_encoder/model.safetensors')
        assert all(name.startswith(PREFIX) for name in weights)
        loaded = CLIPTextModel.from_pretrained(f'{out}/text_encoder').state_dict()
        for name, tensor in text_encoder_of(here['state']['model']).items():
            assert torch.equal(loaded[name.removeprefix('text_encoder.')], tensor)
        digest = hashlib.sha256()
        for name, tensor in sorted(weights.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        evaluated, about = load_model(out)
        assert hash_of_weights(evaluated.text_encoder) == digest.hexdigest()
        assert about['trained_batches'] == 2  # from export.json, because the hash is the same


@pytest.mark.parametrize('prefix', [PREFIX, ''])
def test_a_model_folder_from_either_version_gives_its_text_encoder(prefix, smallest_model, tmp_path):
    folder = shutil.copytree(smallest_model, tmp_path / 'model')
    file = folder / 'text_encoder/model.safetensors'
    weights = {prefix + name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, {'format': 'pt'})
    built = build_text_encoder(find_model(str(folder), pretrained=True), 'fp32').state_dict()
    assert len(built) == len(weights)
    for name, tensor in built.items():
        assert torch.equal(tensor, weights[prefix + name.removeprefix(PREFIX)])
