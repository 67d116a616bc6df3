"""Rename the tensors of a Stable Diffusion 1.5 or 2 to the original names, which AUTOMATIC1111 and ComfyUI read.

diffusers converts only from the original names to its own. Its conversion checks here, for each model, that the names
below are right, so the two cannot disagree.
"""
import inspect
import re
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.loaders.single_file_utils import (
    convert_ldm_clip_checkpoint,
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
)

from sdbench.errors import UserError
from sdbench.inputs.tokenizer import CLIP_VOCABULARY

OPENAI_CLIP = 'quick_gelu'  # the activation in the text encoder of Stable Diffusion 1.5
OPEN_CLIP = 'gelu'          # the activation in the text encoder of Stable Diffusion 2
BLOCKS = ('CrossAttnDownBlock2D', 'DownBlock2D', 'UpBlock2D', 'CrossAttnUpBlock2D', 'DownEncoderBlock2D',
          'UpDecoderBlock2D')
# Keys of a configuration that the tensors show, or that change the precision only
SIZES = ('sample_size', 'block_out_channels', 'layers_per_block', 'down_block_types', 'up_block_types',
         'cross_attention_dim', 'attention_head_dim', 'use_linear_projection', 'upcast_attention', 'force_upcast')
# Patterns of diffusers' names, and the original names in their place, applied in this order
RESNET = {r'\.norm1\.': '.in_layers.0.', r'\.conv1\.': '.in_layers.2.', r'\.time_emb_proj\.': '.emb_layers.1.',
          r'\.norm2\.': '.out_layers.0.', r'\.conv2\.': '.out_layers.3.', r'\.conv_shortcut\.': '.skip_connection.'}
UNET = {r'^conv_in\.': 'input_blocks.0.0.', r'^conv_norm_out\.': 'out.0.', r'^conv_out\.': 'out.2.',
        r'^time_embedding\.linear_1\.': 'time_embed.0.', r'^time_embedding\.linear_2\.': 'time_embed.2.',
        r'^mid_block\.resnets\.0\.': 'middle_block.0.', r'^mid_block\.attentions\.0\.': 'middle_block.1.',
        r'^mid_block\.resnets\.1\.': 'middle_block.2.'}
VAE = {r'_blocks\.(\d+)\.resnets\.': r'.\1.block.', r'down_blocks\.(\d+)\.downsamplers\.0\.': r'down.\1.downsample.',
       r'up_blocks\.(\d+)\.upsamplers\.0\.': r'up.\1.upsample.', r'mid_block\.resnets\.0\.': 'mid.block_1.',
       r'mid_block\.resnets\.1\.': 'mid.block_2.', r'mid_block\.attentions\.0\.': 'mid.attn_1.',
       r'group_norm\.': 'norm.', r'to_([qkv])\.': r'\1.', r'to_out\.0\.': 'proj_out.',
       'conv_shortcut': 'nin_shortcut', 'conv_norm_out': 'norm_out'}
TEXT = {r'^text_model\.embeddings\.position_embedding\.weight': 'positional_embedding',
        r'^text_model\.embeddings\.token_embedding\.': 'token_embedding.',
        r'^text_model\.final_layer_norm\.': 'ln_final.', r'^text_model\.encoder\.layers\.': 'transformer.resblocks.',
        r'\.layer_norm([12])\.': r'.ln_\1.', r'\.fc1\.': '.c_fc.', r'\.fc2\.': '.c_proj.', r'\.self_attn\.': '.attn.'}


def original_tensors(pipeline: StableDiffusionPipeline, label: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a pipeline, keyed by their original names, in the original shapes.

    Raises UserError, which begins with `label`, if the original layout cannot hold this model.
    """
    different = difference_from_original(pipeline)
    if different:
        raise UserError(f'{label}: --single_file cannot hold this model: a single file has no configuration, and the '
                        f'{different}; omit --single_file to export a folder')

    # Rename, and convert back with diffusers. The layout fits if that returns each tensor under its own name.
    networks = [(pipeline.unet, 'model.diffusion_model.', original_unet, convert_ldm_unet_checkpoint),
                (pipeline.vae, 'first_stage_model.', original_vae, convert_ldm_vae_checkpoint)]
    if pipeline.text_encoder.config.hidden_act == OPEN_CLIP:
        networks.append((pipeline.text_encoder, 'cond_stage_model.model.', original_open_clip,
                         lambda tensors, _: convert_open_clip_checkpoint(pipeline.text_encoder, tensors)))
    else:
        networks.append((pipeline.text_encoder, 'cond_stage_model.transformer.', lambda tensors, _: tensors,
                         lambda tensors, _: convert_ldm_clip_checkpoint(tensors)))
    originals = {}
    for network, prefix, rename, convert in networks:
        tensors = network.state_dict()
        try:
            original = {prefix + name: tensor.contiguous() for name, tensor in rename(tensors, network.config).items()}
            read = convert(original, network.config)
        except (AttributeError, KeyError, TypeError):  # for example because layers_per_block is a list
            read = {}
        if tensors.keys() != read.keys() or not all(torch.equal(tensors[name], read[name]) for name in read):
            raise UserError(f'{label}: --single_file cannot hold this model: its {type(network).__name__} '
                            'has other blocks than Stable Diffusion 1.5 and 2; omit --single_file to export a folder')
        originals |= original
    return originals


def difference_from_original(pipeline: StableDiffusionPipeline) -> str | None:
    """Return in words what a program that reads the original layout would compute otherwise; None if there is nothing.

    Such programs assume what Stable Diffusion 1.5 and 2 have in common, which are diffusers' defaults, and choose
    between the two by the names of the text encoder's tensors. The prediction type and a noise schedule rescaled
    to zero terminal SNR are not compared, because a user can set them in such a program.
    """
    # Compare the values in which the two versions differ.
    text_encoder = pipeline.text_encoder.config
    is_version_2 = text_encoder.hidden_act == OPEN_CLIP
    blocks = pipeline.unet.config.block_out_channels
    expected_heads = [8 for _ in blocks]
    if is_version_2:
        expected_heads = [channels // 64 for channels in blocks]
    heads = pipeline.unet.config.attention_head_dim  # diffusers' name for the number of heads in this UNet
    if isinstance(heads, int):  # the same number in each block
        heads = [heads for _ in blocks]
    heads = list(heads)
    schedule = pipeline.scheduler.config
    rows = [
        ('text encoder', 'hidden_act', text_encoder.hidden_act, OPEN_CLIP if is_version_2 else OPENAI_CLIP),
        ('text encoder', 'num_attention_heads', text_encoder.num_attention_heads, text_encoder.hidden_size // 64),
        ('UNet', 'attention_head_dim', heads, expected_heads),
        ('tokenizer', 'vocabulary size', len(pipeline.tokenizer), CLIP_VOCABULARY),
        ('tokenizer', 'pad_token_id', pipeline.tokenizer.pad_token_id, 0 if is_version_2 else CLIP_VOCABULARY - 1),
        ('scheduler', 'num_train_timesteps', schedule.num_train_timesteps, 1000),
        ('scheduler', 'trained_betas', schedule.trained_betas, None),
        ('scheduler', 'beta_schedule', schedule.beta_schedule, 'scaled_linear'),
        ('scheduler', 'beta_start', schedule.beta_start, 0.00085),
        ('scheduler', 'beta_end', schedule.beta_end, 0.012)]

    # Compare what both versions share: the kinds of their blocks, and diffusers' defaults. The tensors show the sizes.
    for label, network in (('UNet', pipeline.unet), ('VAE', pipeline.vae)):
        for kind in ('down_block_types', 'up_block_types'):
            types = [name for name in network.config[kind] if name not in BLOCKS]
            rows.append((label, f'other {kind}', types, []))
        for name, parameter in inspect.signature(type(network)).parameters.items():
            if name not in SIZES:
                rows.append((label, name, network.config[name], parameter.default))
    for label, name, value, expected in rows:
        if value != expected and not (isinstance(expected, tuple) and list(value) == list(expected)):
            return f'{label} has {name} {value} instead of {expected}'
    return None


def renamed(name: str, patterns: dict[str, str]) -> str:
    for pattern, original in patterns.items():
        name = re.sub(pattern, original, name)
    return name


def original_unet(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a UNet by their original names, which number all resnets and samplers of one direction."""
    per_block = config.layers_per_block + 1
    originals = {}
    for name, tensor in tensors.items():
        original = renamed(name, UNET)
        match = re.match(r'(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.', name)
        if match:
            direction = match[1]
            block = int(match[2])
            kind = match[3]
            layer = int(match[4])
            # A downsampler is a separate layer. An upsampler comes last in the layer of the last resnet.
            part = {'resnets': '0', 'attentions': '1', 'downsamplers': '0.op', 'upsamplers': '1.conv'}[kind]
            if kind == 'upsamplers' and f'up_blocks.{block}.attentions.0.norm.weight' in tensors:
                part = '2.conv'
            if kind in ('downsamplers', 'upsamplers'):
                layer = config.layers_per_block
            number = per_block * block + layer + (1 if direction == 'down' else 0)
            place = f'{"input" if direction == "down" else "output"}_blocks.{number}.{part}.'
            original = place + name[match.end():].removeprefix('conv.')
        if '.resnets.' in name:
            original = renamed(original, RESNET)
        originals[original] = tensor
    return originals


def original_vae(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a VAE by their original names, with its attention as convolutions of 1 x 1."""
    last = len(config.up_block_types) - 1
    originals = {}
    for name, tensor in tensors.items():
        # The original decoder counts its blocks from the one with the largest images.
        counted = re.sub(r'up_blocks\.(\d+)', lambda match: f'up_blocks.{last - int(match[1])}', name)
        original = renamed(counted, VAE)
        if '.attentions.' in name and tensor.ndim == 2:
            tensor = tensor[:, :, None, None]
        originals[original] = tensor
    return originals


def original_open_clip(tensors: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a text encoder by OpenCLIP's names, with query, key and value in one matrix."""
    originals = {}
    for name, tensor in tensors.items():
        original = renamed(name, TEXT)
        if '.q_proj.' in name:
            parts = [tensors[name.replace('.q_proj.', f'.{part}_proj.')] for part in 'qkv']
            originals[original.replace('.q_proj.', '.in_proj_')] = torch.cat(parts)
        elif '.k_proj.' not in name and '.v_proj.' not in name:
            originals[original] = tensor
    return originals
