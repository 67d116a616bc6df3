"""Find a model by its name, and make its frozen parts: a folder of this package, a diffusers folder, or the hub's."""
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import CLIPTextConfig, CLIPTextModel

from sdbench.errors import UserError, one_line
from sdbench.flags.train import SD2_BASE, TINY_MODEL
from sdbench.hub import find_or_download
from sdbench.inputs.tokenizer import CAPTION_LENGTH, build_tokenizer
from sdbench.models.names import OLDER_NAMES

# Random weights train as fast. These folders hold none, but those of tiny's VAE.
BUILT_IN = {SD2_BASE: Path(__file__).parent / 'stable-diffusion-2-base', TINY_MODEL: Path(__file__).parent / 'tiny'}
CONFIG_FILES = {'unet': 'config.json', 'vae': 'config.json', 'text_encoder': 'config.json',
                'scheduler': 'scheduler_config.json'}
# Samplers that draw from a model that DDPM trains, but for those of flows (use_flow_sigmas) and of continuous times
SAMPLERS = [name for name in DDPMScheduler._compatibles if name != 'EDMEulerScheduler']
SAMPLERS += ['DDPMParallelScheduler', 'DDIMParallelScheduler']
# What Stable Diffusion has in these files, the first where the key is missing
STABLE_DIFFUSION = {
    'unet': {'_class_name': ['UNet2DConditionModel'], 'in_channels': [4], 'out_channels': [4],
             'class_embed_type': [None], 'num_class_embeds': [None], 'addition_embed_type': [None, 'text'],
             'encoder_hid_dim': [None], 'encoder_hid_dim_type': [None]},
    'vae': {'_class_name': ['AutoencoderKL'], 'in_channels': [3], 'out_channels': [3], 'latent_channels': [4],
            'shift_factor': [None, 0], 'latents_mean': [None], 'latents_std': [None]},
    'text_encoder': {'model_type': ['clip_text_model']},
    'scheduler': {'_class_name': SAMPLERS, 'prediction_type': ['epsilon', 'v_prediction'], 'use_flow_sigmas': [False],
                  'timestep_type': ['discrete']},
}
LORA = 'pytorch_lora_weights.safetensors'  # as diffusers calls the file in a folder
# such as model.safetensors, diffusion_pytorch_model.fp16.bin, model-00001-of-00002.safetensors
WEIGHTS = re.compile(r'(diffusion_pytorch_|pytorch_)?model(\.\w+)?(-\d+-of-\d+)?(\.\w+)?\.(safetensors|bin)')
PRETRAINED_PARTS = ('vae', 'text_encoder')  # whose weights --pretrained takes
DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}  # of --encoder_precision
AUTOCAST_DTYPES = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}  # of --precision, where it has autocast
RANDOM = 'random'  # in the place of a hash of weights


@dataclass(frozen=True)
class ModelFiles:
    """The folder of a model in diffusers' layout, and what its configuration files say.

    Attributes:
        name: as the user gave it.
        folder: with the folders unet, vae, text_encoder and scheduler.
        configs: the content of each part's configuration file.
        pretrained: whether the VAE and the text encoder have the weights of the model, or random ones.
    """
    name: str
    folder: Path
    configs: dict[str, dict]
    pretrained: bool

    @property
    def tokenizer(self) -> str | None:
        """The folder of the model's own tokenizer; None: it has none, and CLIP's own fits."""
        folder = self.folder / 'tokenizer'
        return str(folder) if folder.is_dir() else None

    @property
    def vocab_size(self) -> int:
        """How many token ids the text encoder knows."""
        return CLIPTextConfig(**self.configs['text_encoder']).vocab_size

    @property
    def scaling_factor(self) -> float:
        """What a latent of the VAE is multiplied with, which brings it to unit variance."""
        return self.configs['vae'].get('scaling_factor', 0.18215)  # Stable Diffusion's

    def latent_size(self, image_size: int) -> int:
        """Return height and width of the latents of an image of so many: the VAE's blocks but the first halve them."""
        blocks = self.configs['vae'].get('block_out_channels', (64,))  # as AutoencoderKL has it
        return image_size // 2 ** (len(blocks) - 1)

    def origin_of_latents(self, image_size: int) -> dict:
        """Return what latents depend on: encode.py keeps it in their index.json, and a training on them compares it."""
        return {'image_size': image_size, 'vae_sha256': self.vae_sha256, 'scaling_factor': self.scaling_factor}

    @cached_property
    def vae_sha256(self) -> str:
        """A hash that tells the VAE from others, RANDOM where its weights are drawn.

        It is of the weights as float16, to which a variant in fp16 was rounded: both have the same, in any files.
        """
        if not self.pretrained:
            return RANDOM
        return hash_of_weights(build_vae(self, 'fp16'))


def find_model(name: str, pretrained: bool = False) -> ModelFiles:
    """Find the files of a model: built in, in the folder `name`, or downloaded once from the hub's repository `name`.

    Raises UserError if there is no such model, or it lacks the weights that `pretrained` asks for.
    """
    # the folder, with the weights that are needed
    require_no_single_file(name, f'--model_name {name}')
    with_weights = PRETRAINED_PARTS if pretrained and name != TINY_MODEL else ()
    if name in BUILT_IN and not with_weights:
        folder = BUILT_IN[name]
    else:
        patterns = [f'{part}/{file}' for part, file in CONFIG_FILES.items()] + ['tokenizer/*']
        patterns += [f'{part}/*.safetensors*' for part in with_weights]
        folder = find_or_download('--model_name', name, patterns)

    # what its files say
    configs = read_configs(folder, f'--model_name {name}')
    for part in with_weights:
        if not weight_files(folder / part):
            raise UserError(f'--model_name {name} has no weights in its folder {part}; leave out --pretrained for '
                            'random ones')
    return ModelFiles(name, folder, configs, pretrained)


def require_no_single_file(path: str, label: str) -> None:
    """Raise UserError, which begins with `label`, if `path` is a file or a LoRA where a model folder is expected."""
    is_lora = os.path.exists(os.path.join(path, LORA))
    if path.endswith('.safetensors') and os.path.isfile(path):
        with contextlib.suppress(SafetensorError), safe_open(path, 'pt') as tensors:
            is_lora = any('lora' in name for name in tensors.keys())
    if is_lora:
        raise UserError(f'{label} is a LoRA, which changes a model and is none itself; put it into its model FOLDER: '
                        f'python -c "from diffusers import StableDiffusionPipeline as P; p = P.from_pretrained('
                        f"'FOLDER'); p.load_lora_weights('{path}'); p.fuse_lora(); p.unload_lora_weights(); "
                        'p.save_pretrained(\'fused\')" and give fused')
    if os.path.isfile(path):
        raise UserError(f'{label} is a single file, and no folder of a model in the layout of diffusers; if it holds '
                        'the weights of a Stable Diffusion, make one: python -c "from diffusers import '
                        f"StableDiffusionPipeline as P; P.from_single_file('{path}').save_pretrained('model')\" and "
                        'give model')


def read_configs(folder: Path, label: str) -> dict[str, dict]:
    """Return the content of each part's configuration file in a folder of diffusers.

    Raises UserError, in one line with `label` and the file, if it is no Stable Diffusion that is trained here.
    """
    # the files
    configs = {}
    for part, file in CONFIG_FILES.items():
        try:
            configs[part] = dict(json.loads((folder / part / file).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f'{label} is not a diffusers model ({one_line(error, 300)}); it needs the '
                            'folders unet, vae, text_encoder and scheduler') from None

    # classes, channels and the conditions of the UNet; a key that is missing has the value of diffusers or transformers
    def require(part: str, key: str, value: Any, allowed: Sequence) -> None:
        if value not in allowed:
            raise UserError(f'{label}: {part}/{CONFIG_FILES[part]} has {key} {value}, where Stable Diffusion has '
                            f'{" or ".join(map(str, allowed))}; no other is trained here')
    for part, keys in STABLE_DIFFUSION.items():
        for key, allowed in keys.items():
            require(part, key, configs[part].get(key, allowed[0]), allowed)
    text_config = CLIPTextConfig(**configs['text_encoder'])
    widths = configs['unet'].get('cross_attention_dim', 1280)  # also one for each block
    for width in widths if isinstance(widths, list) else [widths]:
        require('unet', 'cross_attention_dim', width, [text_config.hidden_size])
    if text_config.max_position_embeddings < CAPTION_LENGTH:
        require('text_encoder', 'max_position_embeddings', text_config.max_position_embeddings, [CAPTION_LENGTH])

    # the schedule of noise
    try:
        scheduler = DDPMScheduler.from_config(configs['scheduler'])
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f'{label}: scheduler/{CONFIG_FILES["scheduler"]} has no schedule of noise that is trained '
                        f'here ({one_line(error, 300)})') from None
    require('scheduler', 'trained_betas of length', len(scheduler.betas), [len(scheduler)])
    if scheduler.config.rescale_betas_zero_snr and scheduler.config.prediction_type == 'epsilon':
        raise UserError(f'{label}: scheduler/{CONFIG_FILES["scheduler"]} has rescale_betas_zero_snr true and '
                        'prediction_type epsilon: at the last timestep there is noise alone, of which the noise says '
                        'nothing, and only NaN can be generated; use v_prediction, or rescale_betas_zero_snr false')
    return configs


def weight_files(folder: Path) -> dict[str | None, list[Path]]:
    """Return the files of weights in a folder by their variant, such as fp16, or None where their names have none."""
    found = {}
    for path in folder.glob('*'):
        match = WEIGHTS.fullmatch(path.name)
        if match:
            variant = match[2] or match[4]
            found.setdefault(variant and variant[1:], []).append(path)
    return found


def load_weights(cls: type, folder: str | os.PathLike, label: str) -> Any:
    """Load a network of diffusers or transformers with its weights: on the CPU, in float32, frozen, in eval mode.

    Args:
        cls: its class, such as UNet2DConditionModel.
        folder: with its configuration and its weights, whole or in shards, as safetensors or as tensors that torch has
            pickled. Where there is none but a variant, such as fp16, that is taken.
        label: in error messages, the model that it is a part of: a flag with its value.

    Raises UserError if the weights do not load, or are not those of the network: diffusers and transformers go on
    with random numbers in the place of what is missing, and without what is foreign.
    """
    files = weight_files(Path(folder))
    variant = min(files, default=None, key=str) if None not in files else None
    is_safe = any(path.suffix == '.safetensors' for path in files.get(variant, ()))
    names = {'key_mapping': OLDER_NAMES} if cls is CLIPTextModel else {}
    try:
        # of what is pickled diffusers and transformers read tensors alone, and say much about it unless they are asked
        network, loading = cls.from_pretrained(folder, use_safetensors=is_safe, variant=variant, local_files_only=True,
                                               output_loading_info=True, **names)
    except Exception as error:  # of nearly any kind, for files that are not there, damaged, or make no sense
        raise UserError(f'{label}: {folder} holds no {cls.__name__} that loads ({one_line(error, 300)}); give '
                        'another model') from None
    wrong = sorted(map(str, {*loading['missing_keys'], *loading['unexpected_keys']}))
    if wrong:
        raise UserError(f'{label}: {folder} holds the weights of another model: {len(wrong)} are missing or foreign, '
                        f'first {wrong[0]}; give one that is whole')
    return network.float().requires_grad_(False).eval()


def hash_of_weights(*networks: torch.nn.Module) -> str:
    """Return a SHA-256 of all tensors of networks, in hex."""
    digest = hashlib.sha256()
    for network in networks:
        for name, tensor in sorted(network.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().cpu().numpy())
    return digest.hexdigest()


def build_vae(files: ModelFiles, precision: str) -> AutoencoderKL:
    """Build the VAE, frozen, in eval mode, and held in `precision`, one of DTYPES.

    Raises UserError if its weights do not load.
    """
    if files.pretrained:
        vae = load_weights(AutoencoderKL, files.folder / 'vae', f'--model_name {files.name}')
    else:
        vae = AutoencoderKL.from_config(files.configs['vae'])
    return frozen(vae, precision)


def build_unet(files: ModelFiles) -> UNet2DConditionModel:
    """Build the UNet with random weights. Raises UserError if diffusers cannot make it of its configuration."""
    try:
        return UNet2DConditionModel.from_config(files.configs['unet'])
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f'--model_name {files.name}: unet/{CONFIG_FILES["unet"]} makes no UNet '
                        f'({one_line(error, 300)}); change it back') from None


def build_text_encoder(files: ModelFiles, precision: str) -> CLIPTextModel:
    """Build the CLIP text encoder, frozen, in eval mode, and held in `precision`, one of DTYPES.

    Raises UserError if its weights do not load.
    """
    config = CLIPTextConfig(**files.configs['text_encoder'])
    if not files.pretrained:
        text_encoder = CLIPTextModel(config)
    elif files.name == TINY_MODEL:
        text_encoder = random_text_encoder(config)
    else:
        text_encoder = load_weights(CLIPTextModel, files.folder / 'text_encoder', f'--model_name {files.name}')
    return frozen(text_encoder, precision)


def random_text_encoder(config: CLIPTextConfig) -> CLIPTextModel:
    """Build a text encoder with random weights, on the CPU, the same each time.

    They take 6 MB as a file. Nothing is added for a token's position, nor for the tokens that every caption has, its
    padding among them. So what follows a caption's words has their sum as its state, at full scale; else it would be
    nearly the same for all captions.
    """
    with torch.device('cpu'), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(17)
        text_encoder = CLIPTextModel(config)
        for name, weight in text_encoder.named_parameters():
            if name.endswith('position_embedding.weight'):
                weight.zero_()
            elif name.endswith('token_embedding.weight'):
                weight[build_tokenizer().encode('').ids] = 0
        return text_encoder


def frozen(module: torch.nn.Module, precision: str) -> torch.nn.Module:
    """Freeze a module in eval mode and in `precision`, in place, and return it."""
    module.requires_grad_(False).eval()
    torch.nn.Module.to(module, DTYPES[precision])  # diffusers' own `to` warns of parts that stay in fp32
    return module


def build_fitting_tokenizer(name: str | None, files: ModelFiles) -> Tokenizer:
    """Build the tokenizer of --tokenizer, or else of the model: models pad with different tokens.

    Raises UserError if there is none that loads, or if the text encoder lacks its tokens.
    """
    name = name or files.tokenizer
    tokenizer = build_tokenizer(name)
    if tokenizer.get_vocab_size() > files.vocab_size:
        raise UserError(f'--tokenizer {name} has {tokenizer.get_vocab_size()} tokens, more than the '
                        f'{files.vocab_size} of the text encoder of --model_name {files.name}')
    return tokenizer
