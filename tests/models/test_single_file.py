"""export.py --single_file writes Stable Diffusion 1.5 and 2 in the original key layout, and no other models."""
import functools

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, infer_diffusers_model_type
from safetensors.torch import load_file
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from benchmark import main
from export import main as export
from sdbench.errors import UserError
from sdbench.flags.train import SD2_BASE
from sdbench.inputs.tokenizer import clip_tokenizer, pipeline_tokenizer
from sdbench.models.generation import build_pipeline
from sdbench.models.loading import find_model
from sdbench.models.single_file import original_tensors, original_unet
from tests.runs import one_error_line

# Changed configurations, whose tensors have the same shapes but compute something else, or do not fit the layout
REFUSED = [
    (dict(unet={'attention_head_dim': 4}), 'UNet has attention_head_dim [4, 4] instead of [8, 8]'),
    (dict(unet={'norm_num_groups': 16}), 'UNet has norm_num_groups 16 instead of 32'),
    (dict(vae={'scaling_factor': 0.5}), 'VAE has scaling_factor 0.5 instead of 0.18215'),
    (dict(text_encoder={'num_attention_heads': 2}), 'text encoder has num_attention_heads 2 instead of 1'),
    (dict(text_encoder={'hidden_act': 'gelu_new'}), 'text encoder has hidden_act gelu_new instead of quick_gelu'),
    (dict(scheduler={'num_train_timesteps': 500}), 'scheduler has num_train_timesteps 500 instead of 1000'),
    (dict(scheduler={'beta_end': 0.02}), 'scheduler has beta_end 0.02 instead of 0.012'),
    (dict(tokenizer={'pad_token': '!'}), 'tokenizer has pad_token_id 0 instead of 49407'),
    (dict(unet={'layers_per_block': (1, 1)}), 'UNet2DConditionModel has other blocks'),
    (dict(unet={'down_block_types': ('CrossAttnDownBlock2D', 'AttnDownBlock2D')}), "other down_block_types ['AttnDown"),
    (dict(version=2, text_encoder={'num_hidden_layers': 24}), 'CLIPTextModel has other blocks')]


@functools.cache
def tokenizer_of(is_2: bool, pad_token: str = '<|endoftext|>'):
    if is_2:
        return pipeline_tokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=clip_tokenizer(), model_max_length=77, pad_token=pad_token)


def stable_diffusion(version: int = 1, unet=(), vae=(), text_encoder=(), scheduler=(), tokenizer=()
                     ) -> StableDiffusionPipeline:
    """Build a small Stable Diffusion of this version, with random weights and with changes in its configurations."""
    torch.manual_seed(0)
    is_2 = version == 2
    width = 128 if is_2 else 64
    unet = {'sample_size': 8, 'block_out_channels': (64, 128), 'layers_per_block': 1, 'cross_attention_dim': width,
            'down_block_types': ('CrossAttnDownBlock2D', 'DownBlock2D'), 'use_linear_projection': is_2,
            'up_block_types': ('UpBlock2D', 'CrossAttnUpBlock2D'), 'attention_head_dim': [1, 2] if is_2 else 8,
            **dict(unet)}
    vae = {'block_out_channels': (32, 32), 'down_block_types': ('DownEncoderBlock2D',) * 2,
           'up_block_types': ('UpDecoderBlock2D',) * 2, **dict(vae)}
    text_encoder = {'hidden_size': width, 'intermediate_size': 64, 'num_hidden_layers': 2,
                    'num_attention_heads': width // 64, 'hidden_act': 'gelu' if is_2 else 'quick_gelu',
                    **dict(text_encoder)}
    scheduler = {'beta_schedule': 'scaled_linear', 'beta_start': 0.00085, 'beta_end': 0.012,
                 'prediction_type': 'v_prediction' if is_2 else 'epsilon', **dict(scheduler)}
    return build_pipeline(UNet2DConditionModel(**unet), AutoencoderKL(**vae), DDPMScheduler(**scheduler).config,
                          CLIPTextModel(CLIPTextConfig(**text_encoder)), tokenizer_of(is_2, **dict(tokenizer)))


@pytest.mark.parametrize('version, type_of_text_encoder', [
    pytest.param(1, 'cond_stage_model.transformer.text_model.', marks=pytest.mark.long),
    (2, 'cond_stage_model.model.transformer.resblocks.')])
def test_diffusers_reads_the_file_and_generates_the_image_of_the_exported_folder(
        version, type_of_text_encoder, tmp_path, capfd):
    stable_diffusion(version, scheduler={'rescale_betas_zero_snr': version == 2}).save_pretrained('model')
    main(['--use_synth_data', '--model_name', 'model', '--pretrained', '--image_size', '16', '--batch_size', '2',
          '--max_duration', '1ba', '--save_folder', 'run', '--results', '-'])
    export(['run', 'folder'])
    capfd.readouterr()
    export(['run', 'file.safetensors', '--single_file'])
    output = capfd.readouterr().out
    for words in ('v_prediction', 'zero terminal SNR'):  # what the user must set, because the file does not say it
        assert (words in output) == (version == 2)
    assert (tmp_path / 'file.safetensors').stat().st_mode == (tmp_path / 'folder/export.json').stat().st_mode
    assert any(name.startswith(type_of_text_encoder) for name in load_file('file.safetensors'))
    images = []
    for pipeline in (StableDiffusionPipeline.from_pretrained('folder'), StableDiffusionPipeline.from_single_file(
            'file.safetensors', config='folder', local_files_only=True)):
        pipeline.set_progress_bar_config(disable=True)
        [image] = pipeline('a cat!', num_inference_steps=2, generator=torch.Generator().manual_seed(1)).images
        images.append(np.asarray(image))
    assert images[0].std() > 10
    assert np.array_equal(*images)

    # The file of the user stays, and a folder and a file are not mistaken for each other.
    for out, flags, words in (('file.safetensors', ['--single_file'], 'already exists'),
                              ('other.safetensors', [], '--single_file'),
                              ('other', ['--single_file'], '--single_file')):
        assert words in one_error_line(['run', out, *flags], capfd, export)


def test_diffusers_takes_the_names_for_those_of_stable_diffusion_2_and_reads_each_tensor_under_its_own_name():
    with torch.device('meta'):
        unet = UNet2DConditionModel.from_config(find_model(SD2_BASE).configs['unet'])
    tensors = unet.state_dict()
    original = {f'model.diffusion_model.{name}': tensor for name, tensor in
                original_unet(tensors, unet.config).items()}
    assert infer_diffusers_model_type(original) == 'v2'
    read = convert_ldm_unet_checkpoint(original, unet.config)
    assert len(original) == 686
    assert {name: id(tensor) for name, tensor in read.items()} == {name: id(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize('changed, words', REFUSED)
def test_a_model_that_readers_of_the_layout_would_take_for_another_one_is_refused(changed, words):
    with pytest.raises(UserError, match='omit --single_file') as error:
        original_tensors(stable_diffusion(**changed), 'CHECKPOINT run')
    assert words in str(error.value)
