"""A checkpoint becomes a pipeline of diffusers that draws with what was trained, or nothing at all."""
import contextlib
import io
import re
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

import export as export_module
from benchmark import main
from export import main as export
from export import new_folder
from inputs.captions import build_tokenizer
from tests.runs import TINY
from training.checkpoints import load_checkpoint

CAPTIONS = ['a cat', '', '!', "Wow! it's 2024", '!!! ???', '!§ !x', 'naïve café 中文 🎉 naÃ¯ve', 'word ' * 100,
            'the end <|endoftext|> is not here', 'a\x00b \u200b c']


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory, model_folder) -> str:
    """Of a run with an average, from a folder whose VAE and text encoder have weights, in half precision."""
    folder = tmp_path_factory.mktemp('run')
    main(['--use_synth_data', '--use_ema', *TINY, '--model_name', model_folder, '--pretrained', '--results',
          str(folder / 'results'), '--encoder_precision', 'bf16', '--save_folder', str(folder / 'kept'),
          '--save_interval', '2ba'])
    return str(folder / 'kept')


@pytest.fixture(scope='module')
def latent_checkpoints(tmp_path_factory) -> str:
    """Of a run on latents, without an average."""
    folder = tmp_path_factory.mktemp('latents')
    main(['--use_synth_latents', *TINY, '--save_folder', str(folder / 'kept'), '--results', str(folder / 'results')])
    return str(folder / 'kept')


@pytest.fixture(scope='module')
def exported(tmp_path_factory, checkpoints) -> str:
    out = str(tmp_path_factory.mktemp('exported') / 'new' / 'out')
    export([checkpoints, out])
    return out


@pytest.fixture(scope='module')
def exported_latents(tmp_path_factory, latent_checkpoints, model_folder) -> dict[str | None, SimpleNamespace]:
    """By the model folder that the VAE and the tokenizer are taken from, None for none: where the pipeline of the run
    on latents is, its `out`, and what was printed."""
    pipelines = {}
    for folder in (None, model_folder):
        flags = ['--model_name', folder, '--pretrained', '--tokenizer', folder] if folder else []
        out = tmp_path_factory.mktemp('latents') / 'out'
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            export([latent_checkpoints, str(out), *flags])
        pipelines[folder] = SimpleNamespace(out=out, output=output.getvalue(), errors=errors.getvalue())
    return pipelines


def loaded(out, *without: str) -> StableDiffusionPipeline:
    """The pipeline, without the parts that a test does not look at."""
    pipeline = StableDiffusionPipeline.from_pretrained(str(out), **dict.fromkeys(without))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def refused(argv: list, capfd) -> str:
    """Export what must be refused; the one line that it leaves, beside the one of what it reads."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        export([str(argument) for argument in argv])
    error = re.sub('^reading .*\n', '', capfd.readouterr().err)
    assert exit.value.code in (1, 2) and error.count('\n') == 1, error
    return error


def test_the_pipeline_has_the_averaged_unet_or_the_live_one(checkpoints, exported, tmp_path):
    export([f'{checkpoints}/latest-rank0.pt', str(tmp_path / 'live'), '--live'])
    state = load_checkpoint(f'{checkpoints}/ep0-ba4-rank0.pt')['state']
    averages = dict(state['algorithms'])['EMA']['ema_model']['named_parameters_dict']
    for out, expected in ((exported, averages), (tmp_path / 'live', state['model'])):
        for name, parameter in loaded(out, 'vae', 'text_encoder', 'tokenizer').unet.named_parameters():
            assert torch.equal(parameter, expected[f'unet.{name}'])
    assert any(not torch.equal(average, state['model'][name]) for name, average in averages.items())


def test_the_pipeline_has_the_encoders_the_scheduler_and_the_size_of_the_run(checkpoints, exported):
    pipeline = loaded(exported)
    state = load_checkpoint(f'{checkpoints}/ep0-ba4-rank0.pt')['state']['model']
    for part in ('vae', 'text_encoder'):
        for name, parameter in getattr(pipeline, part).named_parameters():
            assert parameter.dtype == torch.float32 and torch.equal(parameter, state[f'{part}.{name}'].float())
    assert pipeline.scheduler.config.prediction_type == 'v_prediction'
    assert pipeline.scheduler.config.beta_schedule == 'scaled_linear'
    assert pipeline.safety_checker is None and pipeline.feature_extractor is None
    image = pipeline('a cat', num_inference_steps=2).images[0]
    assert image.size == (64, 64) and np.asarray(image).std() > 0


@pytest.mark.parametrize('tokenizer', [None, 'model_folder'])
def test_the_pipeline_tokenizes_as_training_does(exported_latents, tokenizer, request):
    if tokenizer:
        tokenizer = request.getfixturevalue(tokenizer)
    out = exported_latents[tokenizer].out
    in_training = build_tokenizer(tokenizer)
    in_pipeline = loaded(out, 'unet', 'vae', 'text_encoder').tokenizer
    again_in_training = build_tokenizer(str(out))
    for caption in CAPTIONS:
        ids = in_pipeline(caption, padding='max_length', max_length=in_pipeline.model_max_length, truncation=True)
        assert ids.input_ids == in_training.encode(caption).ids, caption
        assert ids.input_ids == again_in_training.encode(caption).ids, caption


def test_a_run_on_latents_takes_the_vae_of_the_model_folder(exported_latents, latent_checkpoints, model_folder):
    of_random = exported_latents[None]
    assert 'cannot decode; tiny has no other; what draws is trained with --model_name FOLDER' in of_random.errors
    assert of_random.errors.count('\n') == 2 and of_random.errors.startswith(f'reading {latent_checkpoints}')
    assert 'live (there is no average)' in of_random.output
    pretrained = exported_latents[model_folder]
    assert pretrained.errors.count('\n') == 1
    from diffusers import AutoencoderKL
    saved = AutoencoderKL.from_pretrained(model_folder, subfolder='vae').state_dict()
    vae = loaded(pretrained.out, 'unet', 'text_encoder', 'tokenizer').vae
    assert all(torch.equal(saved[name], tensor) for name, tensor in vae.state_dict().items())


def test_an_exported_model_is_trained_further(exported, tmp_path):
    record = main(['--use_synth_data', '--use_ema', *TINY, '--model_name', exported, '--pretrained', '--tokenizer',
                   exported, '--load_weights', exported, '--results', str(tmp_path / 'results')])
    assert record['status'] == 'complete' and 0 < record['loss'] < 5


@pytest.mark.long
def test_a_checkpoint_in_s3_is_exported(s3, latent_checkpoints, tmp_path):
    for key in ('runs/1/ep0-ba4-rank0.pt', 'runs/1/deeper/ep0-ba9-rank0.pt'):
        s3.client.upload_file(f'{latent_checkpoints}/ep0-ba4-rank0.pt', 'bucket', key)
    live = load_checkpoint(f'{latent_checkpoints}/ep0-ba4-rank0.pt')['state']['model']
    for index, name in enumerate(('s3://bucket/runs/1', 's3://bucket/runs/1/ep0-ba4-rank0.pt')):
        export([name, str(tmp_path / str(index))])
        for name, parameter in loaded(tmp_path / str(index)).unet.named_parameters():
            assert torch.equal(parameter, live[f'unet.{name}'])


def test_the_newest_whole_checkpoint_is_taken_and_none_is_removed(checkpoints, tmp_path, capfd):
    kept = tmp_path / 'kept'
    shutil.copytree(checkpoints, kept, symlinks=True)
    newest = kept / 'ep0-ba4-rank0.pt'
    newest.write_bytes(newest.read_bytes()[:1000])  # a run is about to write it
    export([str(kept), str(tmp_path / 'out')])
    assert 'after 2 batches' in capfd.readouterr().out and newest.exists()


def export_for_ever(out: Path, ready) -> None:
    """An export that has written half of OUT."""
    def half(args):
        with new_folder(args.out) as folder:
            Path(folder, 'half.safetensors').touch()
            ready()
            signal.pause()

    export_module.export = half
    export(['/dev/null', str(out)])


def test_a_disk_that_fills_leaves_nothing(checkpoints, tmp_path, capfd):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # bytes: the largest file that can be written
    try:
        line = refused([checkpoints, tmp_path / 'out'], capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 'could not be written' in line and not list(tmp_path.iterdir())
