"""A second phase starts from the weights of the first, and weights that do not fit are refused."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from composer import Callback, Trainer
from composer.algorithms.ema import ema as composers

from benchmark import StableDiffusion, main
from data import SyntheticImageCaptionDataset, build_loader
from sdbench.models.loading import find_model
from sdbench.training.checkpoints import checkpoints_in, load_checkpoint
from sdbench.training.weights import load_initial_weights, read_trained_model
from tests.runs import SMALLEST, TINY, assert_equal, change_weights, final_state
from tests.samples import Hostile


@pytest.fixture(scope='module')
def first_phase(tmp_path_factory) -> Path:
    """Return a folder with checkpoints after 2 and 4 batches at 16 pixels."""
    folder = tmp_path_factory.mktemp('first')
    main(['--use_synth_data', '--use_ema', '--ema_half_life', '2ba', *TINY, '--save_folder', str(folder / 'kept'),
          '--save_interval', '2ba', '--results', '-'])
    return folder / 'kept'


def unet_and_ema(state: dict) -> tuple[dict, dict]:
    unet = {name: tensor for name, tensor in state['model'].items() if name.startswith('unet.')}
    return unet, dict(state['algorithms'])['EMA']['ema_model']['named_parameters_dict']


def test_a_second_phase_starts_from_the_weights_and_the_ema_and_everything_else_is_new(first_phase, shards):
    at_start = {}

    class Witness(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch.value == 0:
                [optimizer], [ema] = state.optimizers, state.algorithms
                at_start['unet'] = {f'unet.{name}': p.clone() for name, p in state.model.unet.state_dict().items()}
                at_start['ema'] = {name: p.clone() for name, p in ema.ema_model.named_parameters()}
                at_start['optimizer'] = len(optimizer.state)

    argv = ['--remote', shards, *TINY, '--image_size', '32', '--use_ema', '--ema_half_life', '1000ba', '--save_folder',
            'kept', '--num_workers', '0', '--load_weights']
    record = main([*argv, str(first_phase), '--max_duration', '2ba', '--save_interval', '1ba'], [Witness()])
    unet, ema_weights = unet_and_ema(final_state(first_phase))
    assert_equal(at_start, {'unet': unet, 'ema': dict(ema_weights), 'optimizer': 0})
    assert (record['first_batch'], record['load_weights']) == (0, str(first_phase))
    resumed = main([*argv, 'another', '--autoresume', '--max_duration', '3ba'])
    assert resumed['load_weights'] == str(first_phase)  # where the training began
    weights, ema_after = unet_and_ema(load_checkpoint('kept/ep0-ba1-rank0.pt')['state'])
    for name, before in ema_weights.items():
        moved = before + (weights[name] - before) * (1 - 2 ** (-1 / 1000))
        torch.testing.assert_close(ema_after[name], moved, atol=1e-7, rtol=1e-6)


def fresh_model() -> StableDiffusion:
    torch.manual_seed(18)
    return StableDiffusion(SMALLEST, 16)


def test_load_weights_takes_a_file_a_folder_a_unet_a_pipeline_or_a_store(first_phase, tmp_path, s3):
    paths = checkpoints_in(str(first_phase))
    state = load_checkpoint(paths[-1])['state']
    expected, ema_weights = unet_and_ema(state)
    trained = StableDiffusion(SMALLEST, 16)
    trained.load_state_dict(state['model'])
    trained.unet.save_pretrained(tmp_path / 'alone')
    trained.unet.save_pretrained(tmp_path / 'pipeline' / 'unet')
    trained.scheduler.save_pretrained(tmp_path / 'pipeline' / 'scheduler')
    for path in paths:
        s3.client.upload_file(path, 'bucket', f'runs/1/{Path(path).name}')
    cut = shutil.copytree(first_phase, tmp_path / 'cut', symlinks=True) / 'ep0-ba9-rank0.pt'
    cut.write_bytes(Path(paths[-1]).read_bytes()[:1000])  # a truncated copy
    of_checkpoints = [paths[-1], str(first_phase), str(first_phase / 'latest-rank0.pt'), str(cut.parent),
                      's3://bucket/runs/1', 's3://bucket/runs/1/ep0-ba4-rank0.pt']
    for place in (*of_checkpoints, 'alone', 'pipeline'):
        model = fresh_model()
        found, data = load_initial_weights(place, model, find_model(SMALLEST))
        unet = {f'unet.{name}': weight for name, weight in model.unet.state_dict().items()}
        assert_equal(unet, expected)
        if place in of_checkpoints:
            assert_equal(dict(model.text_encoder.state_dict()), dict(trained.text_encoder.state_dict()))  # random
            assert_equal(dict(found['ema_model']['named_parameters_dict']), dict(ema_weights))
            assert data == []  # random images do not count
        else:
            assert (found, data) == (None, [{}])  # unknown data
    assert cut.exists()


def test_weights_that_do_not_fit_are_a_one_line_error(first_phase):
    """The test makes files that do not fit, in an empty folder."""
    checkpoint = load_checkpoint(checkpoints_in(str(first_phase))[-1])
    model = checkpoint['state']['model']
    torch.save({'state': Hostile('ran')}, 'hostile.pt')
    torch.save({'some': 'tensors'}, 'other.pt')
    bias = model.pop('unet.conv_in.bias')
    torch.save(checkpoint, 'less.pt')
    model |= {'unet.conv_in.bias': bias, 'unet.foreign': bias}
    torch.save(checkpoint, 'more.pt')
    del model['unet.foreign']
    model['_extra_state']['configs']['scheduler']['prediction_type'] = 'v_prediction'
    torch.save(checkpoint, 'v.pt')
    fresh_model().unet.save_config('pickled')
    torch.save({'conv_in.bias': Hostile('ran')}, 'pickled/diffusion_pytorch_model.bin')
    fresh_model().unet.save_pretrained('groups')
    config = Path('groups/config.json')
    config.write_text(json.dumps(json.loads(config.read_text()) | {'norm_num_groups': 2}))
    for place, words in (
            ('hostile.pt', 'could run code'), ('other.pt', 'is not a checkpoint of a training'),
            ('less.pt', 'conv_in.bias'), ('more.pt', 'foreign'), ('pickled', 'holds no UNet'),
            ('groups', 'norm_num_groups of its unet was 2, and is 4 now'),
            ('v.pt', 'prediction_type of its scheduler was "v_prediction", and is "epsilon" now')):
        with pytest.raises(ValueError) as error:
            load_initial_weights(place, fresh_model(), find_model(SMALLEST))
        line = str(error.value)
        assert line.startswith(f'--load_weights {place}') and words in line and '\n' not in line
    assert not Path('ran').exists()


@pytest.mark.parametrize('part, file', [('vae', 'diffusion_pytorch_model'), ('text_encoder', 'model')])
def test_a_pipeline_with_another_vae_or_text_encoder_is_refused_and_a_copy_is_not(
        smallest_model, tmp_path, part, file):
    pipeline = shutil.copytree(smallest_model, tmp_path / 'pipeline')
    fresh_model().unet.save_pretrained(pipeline / 'unet')
    files = find_model(smallest_model, pretrained=True)
    model = StableDiffusion(smallest_model, 16, pretrained=True)
    load_initial_weights(str(pipeline), model, files)
    change_weights(pipeline / part / f'{file}.safetensors', lambda weights: next(iter(weights.values())).add_(1))
    with pytest.raises(ValueError, match=f'hash of its {part} was'):
        load_initial_weights(str(pipeline), model, files)
    load_initial_weights(str(pipeline / 'unet'), fresh_model(), find_model(SMALLEST))  # nothing can be compared
    shutil.rmtree(pipeline / part)
    shutil.rmtree(pipeline / 'scheduler')
    load_initial_weights(str(pipeline), model, files)


def test_a_checkpoint_of_composers_own_ema_is_refused_in_one_line_only_if_its_weights_are_swapped(smallest_model):
    model = StableDiffusion(smallest_model, image_size=16)
    Trainer(model=model, train_dataloader=build_loader(SyntheticImageCaptionDataset(16, num_samples=64), 2, 0),
            optimizers=torch.optim.AdamW(model.unet.parameters()), algorithms=composers.EMA('2ba'), max_duration='2ba',
            device='cpu', progress_bar=False, save_folder='kept').fit()
    [path] = checkpoints_in('kept')
    with pytest.raises(ValueError, match="Composer's own EMA saved this checkpoint"):
        read_trained_model('kept', 'CHECKPOINT')

    # It does not save a half-life. With several devices, the names of its weights begin with a prefix.
    checkpoint = load_checkpoint(path)
    ema = dict(checkpoint['state']['algorithms'])['EMA']
    ema['ema_weights_active'] = False
    weights = ema['ema_model']['named_parameters_dict']
    ema['ema_model']['named_parameters_dict'] = {f'module.{name}': tensor + 1 for name, tensor in weights.items()}
    torch.save(checkpoint, 'raw.pt')  # not the file to which its tensors are mapped
    trained = read_trained_model('raw.pt', 'CHECKPOINT')
    assert torch.equal(trained.ema['conv_in.bias'], weights['unet.conv_in.bias'] + 1)
