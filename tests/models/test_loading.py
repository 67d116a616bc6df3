"""Models have the published sizes and FLOPs, and diffusers folders load completely and without running their code."""
import contextlib
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torchvision.transforms.functional import to_tensor
from transformers import AutoTokenizer, CLIPTextModel

from benchmark import StableDiffusion, build_data
from sdbench.complete import index_of_data
from sdbench.flags.train import SD2_BASE
from sdbench.inputs.tokenizer import build_tokenizer
from sdbench.models.generation import load_pipeline
from sdbench.models.loading import build_text_encoder, build_vae, find_model, load_weights
from tests.runs import SMALLEST, TINY, assert_equal, change_weights, settings_of
from tests.samples import picture


def change_config(file: Path, **changes) -> None:
    """Change values in a configuration, in place."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_stable_diffusion_2_base_has_the_published_sizes_and_flops_per_image():
    with torch.device('meta'):
        sd2_base = StableDiffusion(SD2_BASE, image_size=512)
    gigaflops = {part: flops / 1e9 for part, flops in sd2_base.flops_per_image.items()}
    assert gigaflops == pytest.approx({'unet': 2408.7, 'vae': 1116.7, 'text_encoder': 45.1}, abs=0.1)
    sizes = {part: sum(parameter.numel() for parameter in getattr(sd2_base, part).parameters()) for part in gigaflops}
    assert sizes == {'unet': 865_910_724, 'vae': 83_653_863, 'text_encoder': 340_387_840}
    blocks = [*sd2_base.unet.down_blocks[:3], sd2_base.unet.mid_block]
    assert [block.attentions[0].transformer_blocks[0].attn1.heads for block in blocks] == [5, 10, 20, 20]
    assert sd2_base.vae.config.scaling_factor == 0.18215
    betas = torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000) ** 2
    alphas = StableDiffusion('tiny', 64).scheduler.alphas_cumprod
    torch.testing.assert_close(alphas, torch.cumprod(1 - betas, dim=0), atol=1e-6, rtol=0)


def test_a_model_folder_gives_its_architecture_weights_and_tokenizer(shards, samples, model_folder):
    settings = settings_of('--remote', shards, *TINY, '--model_name', model_folder, '--pretrained', '--num_workers',
                           '0')
    tokenizer = AutoTokenizer.from_pretrained(f'{model_folder}/tokenizer')
    captions = tokenizer([sample['caption'] for sample in samples], padding='max_length')['input_ids']
    files = find_model(model_folder, pretrained=True)
    batch = next(iter(build_data(settings, files, index_of_data(settings)).dataloader))
    assert len(batch['caption']) == 4
    assert all(ids in captions for ids in batch['caption'].tolist())
    model = StableDiffusion(model_folder, 64, pretrained=True)
    assert model.prediction_type == 'v_prediction'
    for kind, part in ((AutoencoderKL, 'vae'), (CLIPTextModel, 'text_encoder')):
        saved = kind.from_pretrained(model_folder, subfolder=part)
        assert_equal(dict(getattr(model, part).state_dict()), dict(saved.state_dict()))
    saved = UNet2DConditionModel.from_pretrained(model_folder, subfolder='unet')
    assert not torch.equal(saved.conv_in.weight, model.unet.conv_in.weight)  # the UNet starts from random weights


def test_the_vae_of_tiny_reconstructs_an_image_with_its_trained_weights_and_not_with_random_ones():
    original = to_tensor(picture(1))[None]  # (1, 3, 64, 64) from 0 to 1
    psnr = {}
    for pretrained in (True, False):
        vae = build_vae(find_model('tiny', pretrained), 'fp32')
        latents = vae.encode(original * 2 - 1).latent_dist.mean
        decoded = vae.decode(latents).sample / 2 + 0.5
        psnr[pretrained] = -10 * torch.log10((decoded.clamp(0, 1) - original).square().mean()).item()
    assert psnr[True] > 17 > 12 > psnr[False], psnr


def test_the_text_encoder_of_tiny_is_always_the_same_and_its_last_state_tells_captions_apart():
    torch.manual_seed(1)
    text_encoder = build_text_encoder(find_model('tiny', pretrained=True), 'fp32')
    next_number = torch.randn(1)
    other = StableDiffusion('tiny', 64, pretrained=True).text_encoder
    assert_equal(dict(other.state_dict()), dict(text_encoder.state_dict()))
    torch.manual_seed(1)
    assert torch.equal(torch.randn(1), next_number)  # building it uses no random numbers of the run
    ids = torch.tensor([encoding.ids for encoding in build_tokenizer().encode_batch(['red apple', 'gorilla', ''])])
    apple, gorilla, nothing = text_encoder(ids)[0][:, -1]  # (3, 64)
    assert torch.cosine_similarity(apple, gorilla, dim=0) < 0.9
    assert not nothing.any()


def test_code_in_a_model_folder_is_not_run_and_the_user_is_not_asked_about_it(tmp_path, model_folder, monkeypatch):
    asked = []
    monkeypatch.setattr('builtins.input', lambda question='': asked.append(question) or 'n')
    folder, trace = tmp_path / 'model', tmp_path / 'ran'
    shutil.copytree(model_folder, folder)
    names = dict.fromkeys(['AutoModel', 'AutoConfig'], 'hostile.Hostile')
    names['AutoTokenizer'] = ['hostile.Hostile', None]  # the slow and the fast tokenizer
    for part in ('unet', 'vae', 'text_encoder', 'tokenizer'):
        (folder / part / 'hostile.py').write_text(f'open({str(trace)!r}, "w")\nclass Hostile: pass\n')
        for file in (folder / part).glob('*config.json'):
            change_config(file, auto_map=names)
    for load in (partial(StableDiffusion, str(folder), 64, pretrained=True), partial(build_tokenizer, str(folder))):
        with contextlib.suppress(ValueError):
            load()
    change_config(folder / 'tokenizer/tokenizer_config.json', tokenizer_class='Hostile')
    with pytest.raises(ValueError, match='tokenizer that does not load'):
        load_pipeline(str(folder), 'MODEL')
    assert not asked
    assert not trace.exists()


@pytest.mark.parametrize('part', ['unet', 'vae', 'text_encoder'])
def test_missing_or_unexpected_weights_are_refused_with_the_name_of_their_folder(tmp_path, model_folder, part):
    def change(weights: dict) -> None:
        del weights[sorted(weights)[5]]
        weights['an_unexpected.weight'] = torch.ones(3)

    folder = shutil.copytree(model_folder, tmp_path / 'model')
    [file] = (folder / part).glob('*.safetensors')
    change_weights(file, change)
    loads = [partial(load_pipeline, str(folder), 'MODEL X')]
    if part != 'unet':  # the UNet of a training starts from random weights
        loads.append(partial(StableDiffusion, str(folder), 64, pretrained=True))
    for load in loads:
        with pytest.raises(ValueError, match=f'{folder}/{part} .*: 2 are missing .*an_unexpected.weight'):
            load()


@pytest.mark.parametrize('kind', ['in fp16', 'in shards', 'pickled'])
def test_weights_of_variants_shards_and_pickled_tensors_load_and_the_vae_is_the_same(tmp_path, kind, smallest_model):
    original = find_model(smallest_model, pretrained=True)
    folder = shutil.copytree(smallest_model, tmp_path / 'model')
    for part, build, name in (('vae', build_vae, 'diffusion_pytorch_model.bin'),
                              ('text_encoder', build_text_encoder, 'pytorch_model.bin')):
        [weights] = (folder / part).glob('*.safetensors')
        weights.unlink()
        network = build(original, 'fp32')
        if kind == 'in fp16':
            network.half().save_pretrained(folder / part, variant='fp16')
        elif kind == 'in shards':
            network.save_pretrained(folder / part, max_shard_size='1KB')
        else:
            torch.save(network.state_dict(), folder / part / name)
    here = find_model(str(folder), pretrained=True)
    assert here.vae_sha256 == original.vae_sha256
    for build in (build_vae, build_text_encoder):
        for one, other in zip(build(here, 'fp32').parameters(), build(original, 'fp32').parameters(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0.001 if kind == 'in fp16' else 0)


def test_a_folder_without_weights_or_with_a_broken_configuration_is_a_one_line_error(tmp_path, smallest_model):
    folder = shutil.copytree(smallest_model, tmp_path / 'model', ignore=shutil.ignore_patterns('*.safetensors'))
    with pytest.raises(ValueError, match='no weights in its folder vae; complete its download'):
        find_model(str(folder), pretrained=True)
    with pytest.raises(ValueError, match='vae holds no AutoencoderKL with weights; complete its download'):
        load_weights(AutoencoderKL, folder / 'vae', '--load_weights')
    for content in ('', 'null', '{"a":'):
        (folder / 'unet/config.json').write_text(content)
        with pytest.raises(ValueError, match='--model_name .* is not a diffusers model'):
            find_model(str(folder))


@pytest.mark.parametrize('part, change', [
    ('scheduler', {'_class_name': 'FlowMatchEulerDiscreteScheduler'}), ('scheduler', {'_class_name': 'LCMScheduler'}),
    ('scheduler', {'_class_name': 'EDMEulerScheduler'}), ('scheduler', {'prediction_type': 'sample'}),
    ('scheduler', {'_class_name': 'EulerDiscreteScheduler', 'timestep_type': 'continuous'}),
    ('scheduler', {'_class_name': 'UniPCMultistepScheduler', 'use_flow_sigmas': True}),
    ('scheduler', {'trained_betas': [0.01] * 10}), ('scheduler', {'beta_schedule': 'cosine'}),
    ('scheduler', {'rescale_betas_zero_snr': True}),  # with prediction_type epsilon
    ('vae', {'_class_name': 'AutoencoderTiny'}), ('vae', {'latent_channels': 16}), ('vae', {'shift_factor': 0.1}),
    ('unet', {'in_channels': 9}), ('unet', {'out_channels': 8}), ('unet', {'addition_embed_type': 'text_time'}),
    ('unet', {'class_embed_type': 'timestep'}), ('unet', {'cross_attention_dim': [16, 100]}),
    ('text_encoder', {'model_type': 't5'}), ('text_encoder', {'max_position_embeddings': 64})])
def test_another_architecture_is_refused_with_the_file_and_the_fix(tmp_path, part, change):
    folder = shutil.copytree(SMALLEST, tmp_path / 'model')
    file = folder / part / ('scheduler_config.json' if part == 'scheduler' else 'config.json')
    if change == {'_class_name': 'AutoencoderTiny'}:
        file.write_text('{}')
    change_config(file, **change)
    for find, label in ((partial(find_model, str(folder)), f'--model_name {folder}'),
                        (partial(load_pipeline, str(folder), 'MODEL'), 'MODEL')):
        with pytest.raises(ValueError, match=f'^{label}: {part}/{file.name} has .*; (give a|use v_prediction).*$'):
            find()


@pytest.mark.parametrize('sampler', ['PNDMScheduler', 'DDIMParallelScheduler', 'EulerDiscreteScheduler',
                                     'UniPCMultistepScheduler'])
def test_a_scheduler_that_can_sample_from_a_ddpm_model_is_accepted(tmp_path, sampler):
    folder = shutil.copytree(SMALLEST, tmp_path / 'model')
    change_config(folder / 'scheduler/scheduler_config.json', _class_name=sampler, use_flow_sigmas=False)
    assert find_model(str(folder)).configs['scheduler']['_class_name'] == sampler
