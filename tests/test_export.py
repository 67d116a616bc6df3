"""export.py makes a diffusers pipeline with the trained weights of a checkpoint, or leaves nothing behind."""
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors import SafetensorError
from safetensors.torch import load_file

from benchmark import main
from evaluate import load_model
from export import main as export
from sdbench.inputs.tokenizer import build_tokenizer
from sdbench.models.loading import build_vae, find_model
from sdbench.training.checkpoints import load_checkpoint
from tests.runs import SMALLEST, TINY, assert_equal, one_error_line

CAPTIONS = ['a cat', '', '!', "Wow! it's 2024", '!!! ???', '!§ !x', 'naïve café 中文 🎉 naÃ¯ve', 'word ' * 100,
            'the end <|endoftext|> is not here', 'a\x00b \u200b c']


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory, model_folder) -> str:
    """Return checkpoints of a run with EMA, whose pretrained VAE and text encoder are in half precision."""
    folder = tmp_path_factory.mktemp('run')
    main(['--use_synth_data', '--use_ema', *TINY, '--model_name', model_folder, '--pretrained', '--results',
          str(folder / 'results'), '--encoder_precision', 'bf16', '--save_folder', str(folder / 'kept'),
          '--save_interval', '2ba'])
    return str(folder / 'kept')


@pytest.fixture(scope='module')
def latent_checkpoints(tmp_path_factory, smallest_with_attention) -> str:
    """Return checkpoints of a run without EMA on latents of a pretrained VAE."""
    folder = tmp_path_factory.mktemp('latents')
    main(['--use_synth_latents', *TINY, '--model_name', smallest_with_attention, '--pretrained', '--save_folder',
          str(folder / 'kept'), '--results', '-'])
    return str(folder / 'kept')


@pytest.fixture(scope='module')
def exported(tmp_path_factory, checkpoints) -> str:
    out = str(tmp_path_factory.mktemp('exported') / 'new' / 'out')
    export([checkpoints, out])
    return out


@pytest.fixture(scope='module')
def epsilon_folder(tmp_path_factory, model_folder) -> str:
    """Return a copy of the model folder with prediction_type epsilon and another VAE."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp('epsilon') / 'model')
    config = folder / 'scheduler' / 'scheduler_config.json'
    config.write_text(config.read_text().replace('v_prediction', 'epsilon'))
    build_vae(find_model(SMALLEST), 'fp32').save_pretrained(folder / 'vae')
    return str(folder)


@pytest.fixture(scope='module')
def exported_latents(tmp_path_factory, latent_checkpoints, smallest_with_attention, model_folder) -> str:
    """Return the pipeline of the run on latents, exported with another folder of its model."""
    folder = tmp_path_factory.mktemp('latents')
    # The folder has the same VAE, but in fp16, and a tokenizer that the run did not use.
    moved = shutil.copytree(smallest_with_attention, folder / 'moved')
    shutil.copytree(f'{model_folder}/tokenizer', moved / 'tokenizer')
    shutil.rmtree(moved / 'vae')
    vae = build_vae(find_model(smallest_with_attention, pretrained=True), 'fp16')
    vae.save_pretrained(moved / 'vae', variant='fp16')
    export([latent_checkpoints, str(folder / 'out'), '--model_name', str(moved)])
    return str(folder / 'out')


def loaded(out, *without: str) -> StableDiffusionPipeline:
    """Load a pipeline without the parts that a test does not need."""
    pipeline = StableDiffusionPipeline.from_pretrained(str(out), **dict.fromkeys(without))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_an_error_about_a_moved_model_folder_names_the_checkpoint_and_the_flag(checkpoints, capfd):
    checkpoint = load_checkpoint(f'{checkpoints}/ep0-ba4-rank0.pt')
    checkpoint['state']['model']['_extra_state']['model_name'] = 'model'
    torch.save(checkpoint, 'kept.pt')
    line = one_error_line(['kept.pt', 'out'], capfd, export)
    assert 'CHECKPOINT kept.pt' in line and '--model_name of export.py' in line


def test_the_pipeline_has_the_ema_or_the_raw_weights_also_from_a_store(checkpoints, exported, tmp_path, s3):
    for name in ('ep0-ba2-rank0.pt', 'ep0-ba4-rank0.pt'):
        s3.client.upload_file(f'{checkpoints}/{name}', 'bucket', f'runs/1/{name}')
    export(['s3://bucket/runs/1', 'raw', '--raw_weights'])  # its newest checkpoint
    state = load_checkpoint(f'{checkpoints}/ep0-ba4-rank0.pt')['state']
    ema = dict(state['algorithms'])['EMA']['ema_model']['named_parameters_dict']
    for out, expected in ((exported, ema), (tmp_path / 'raw', state['model'])):
        for name, parameter in loaded(out, 'vae', 'text_encoder', 'tokenizer').unet.named_parameters():
            assert torch.equal(parameter, expected[f'unet.{name}'])
    assert any(not torch.equal(tensor, state['model'][name]) for name, tensor in ema.items())


def test_the_pipeline_has_the_scheduler_the_size_and_every_bit_of_the_encoders_of_the_run(
        checkpoints, exported, model_folder):
    """The run kept the encoders in bf16. They are not in the checkpoint, because the folder of the model has them."""
    pipeline = loaded(exported)
    state = load_checkpoint(f'{checkpoints}/ep0-ba4-rank0.pt')['state']['model']
    assert {name.split('.')[0] for name in state} == {'unet', '_extra_state'}
    for part in ('vae/diffusion_pytorch_model', 'text_encoder/model'):
        ours, theirs = (load_file(f'{folder}/{part}.safetensors') for folder in (exported, model_folder))
        assert_equal(ours, theirs)
        assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    assert pipeline.scheduler.config.prediction_type == 'v_prediction'
    assert pipeline.scheduler.config.beta_schedule == 'scaled_linear'
    assert pipeline.safety_checker is pipeline.feature_extractor is None
    image = pipeline('a cat', num_inference_steps=2).images[0]
    assert image.size == (16, 16)
    assert np.asarray(image).std() > 0


def test_the_pipeline_tokenizes_like_the_training(exported, exported_latents, model_folder):
    """It does so even if the folder of its VAE has another tokenizer, which pads with another token."""
    for out, tokenizer in ((exported, model_folder), (exported_latents, None)):
        in_pipeline = loaded(out, 'unet', 'vae', 'text_encoder').tokenizer
        for in_training in (build_tokenizer(tokenizer), build_tokenizer(out)):
            for caption in CAPTIONS:
                ids = in_pipeline(caption, padding='max_length', max_length=in_pipeline.model_max_length,
                                  truncation=True)
                assert ids.input_ids == in_training.encode(caption).ids, caption


def test_a_run_on_latents_is_exported_with_the_vae_that_encoded_them_even_if_it_has_moved(
        exported_latents, latent_checkpoints, smallest_with_attention, capfd):
    export([latent_checkpoints, 'out'])
    assert 'raw weights' in capfd.readouterr().out
    evaluated, _ = load_model(latent_checkpoints)
    pipelines = [evaluated, *(loaded(out, 'unet', 'text_encoder', 'tokenizer') for out in ('out', exported_latents))]
    vae = build_vae(find_model(smallest_with_attention, pretrained=True), 'fp32').state_dict()
    for pipeline in pipelines:
        assert_equal(dict(pipeline.vae.state_dict()), dict(vae))


@pytest.mark.parametrize('known', [True, False])
def test_a_run_on_latents_whose_vae_is_unknown_or_random_is_neither_exported_nor_evaluated(tmp_path, capfd, known):
    main(['--use_synth_latents', *TINY, '--save_folder', 'kept'])
    checkpoint = load_checkpoint('kept/latest-rank0.pt')
    if not known:
        del checkpoint['state']['model']['_extra_state']  # as in a checkpoint from another program
    torch.save(checkpoint, 'run.pt')
    assert 'holds no VAE' in one_error_line(['run.pt', 'out', '--model_name', SMALLEST], capfd, export)
    assert not (tmp_path / 'out').exists()
    with pytest.raises(ValueError, match='VAE|does not name'):
        load_model('run.pt')


@pytest.mark.parametrize('source, flags, words', [
    ('OTHER', [], '--model_name'), ('OTHER', ['--model_name', 'tiny'], 'holds no VAE'),
    ('RUN', ['--model_name', 'EPSILON'], 'prediction_type of its scheduler was "v_prediction", and is "epsilon" now'),
    ('LATENTS', ['--model_name', 'EPSILON'], 'hash of its vae was'),
    ('LATENTS', ['--tokenizer', 'MODEL'], 'another tokenizer')])
def test_another_model_or_tokenizer_than_the_trained_one_is_refused(
        checkpoints, latent_checkpoints, model_folder, epsilon_folder, tmp_path, capfd, source, flags, words):
    other = tmp_path / 'other.pt'
    torch.save({'state': {'model': {'weights': torch.zeros(2)}}}, other)
    places = {'OTHER': other, 'RUN': checkpoints, 'LATENTS': latent_checkpoints, 'EPSILON': epsilon_folder,
              'MODEL': model_folder}
    argv = [places.get(word, word) for word in [source, 'out', *flags]]
    assert words in one_error_line(argv, capfd, export)
    assert list(tmp_path.iterdir()) == [other]


def test_exports_of_a_young_ema_and_of_random_encoders_print_warnings(capfd):
    """An EMA is young for four half-lives. An EMA that continues a young one stays young, and a later one never is."""
    with_young_ema = []
    for folder, half_life, *flags in (('young', '2ba'), ('old', '1ba'), ('late', '2ba', '--ema_start', '3ba'),
                                      ('after old', '1000ba', '--load_weights', 'old'),
                                      ('after young', '1000ba', '--load_weights', 'young')):
        main(['--use_synth_data', *TINY, '--max_duration', '4ba', '--use_ema', '--ema_half_life', half_life, *flags,
              '--save_folder', folder])
        export([folder, f'{folder} out'])
        warnings = capfd.readouterr().err
        assert 'random weights' in warnings.partition('trained without --pretrained')[2]
        if 'EMA weights are still near' in warnings:
            assert f'half-life is {half_life}' in warnings and '--raw_weights' in warnings
            with_young_ema.append(folder)
    assert with_young_ema == ['young', 'after young']


def test_an_export_into_an_existing_one_does_nothing_or_renames_the_older_one(checkpoints, tmp_path, capfd):
    first, second = (f'{checkpoints}/ep0-ba{batch}-rank0.pt' for batch in (2, 4))
    for number, (source, words) in enumerate(((first, ''), (first, 'done already'), (second, 'out-1'))):
        export([source, 'out'])
        assert words in capfd.readouterr().out
        (tmp_path / 'out' / f'mine-{number}').touch()
    assert sorted(path.parent.name for path in tmp_path.glob('*/mine-*')) == ['out', 'out-1', 'out-1']
    for out, source in (('out-1', first), ('out', second)):
        ema = dict(load_checkpoint(source)['state']['algorithms'])['EMA']['ema_model']['named_parameters_dict']
        unet = loaded(out, 'vae', 'text_encoder', 'tokenizer').unet
        assert torch.equal(unet.conv_in.weight, ema['unet.conv_in.weight'])


def test_the_permissions_of_every_exported_file_follow_the_umask(checkpoints):
    before = os.umask(0o027)
    try:
        export([checkpoints, 'out'])
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path('out').rglob('*') if path.is_file()}
    assert 'model.safetensors' in modes
    assert set(modes.values()) == {0o640}, modes


@pytest.mark.parametrize('trouble', ['a full disk', 'SIGTERM'])
def test_an_interrupted_export_leaves_nothing(checkpoints, tmp_path, capfd, monkeypatch, trouble):
    def end_in_the_middle(pipeline, folder, **_):
        pipeline.scheduler.save_pretrained(folder)
        if trouble == 'SIGTERM':
            os.kill(os.getpid(), signal.SIGTERM)
        raise SafetensorError('No space left on device')

    monkeypatch.setattr(StableDiffusionPipeline, 'save_pretrained', end_in_the_middle)
    with pytest.raises(SystemExit) as exit:
        export([checkpoints, 'out'])
    line = capfd.readouterr().err.splitlines()[-1]
    assert exit.value.code == (130 if trouble == 'SIGTERM' else 1)
    assert 'is complete or does not exist' in line
    assert list(tmp_path.iterdir()) == []
