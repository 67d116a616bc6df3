"""Find a model by its name (built in, a diffusers folder, or a repository of the hub) and build its networks."""
import contextlib
import hashlib
import json
import os
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
from sdbench.flags.train import TINY_MODEL
from sdbench.inputs.tokenizer import CAPTION_LENGTH, build_tokenizer
from sdbench.models.folders import BUILT_IN, CONFIG_FILES, find_or_download
from sdbench.models.names import OLDER_NAMES, save_older_names

# Schedulers that can sample from a model trained with DDPM. EDMEulerScheduler has continuous timesteps.
SAMPLERS = [name for name in DDPMScheduler._compatibles if name != 'EDMEulerScheduler']
SAMPLERS += ['DDPMParallelScheduler', 'DDIMParallelScheduler']
# Values in the configuration files of a Stable Diffusion. If a key is missing, it has the first one.
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
LORA = 'pytorch_lora_weights.safetensors'  # diffusers' name of the file
PRETRAINED_PARTS = ('vae', 'text_encoder')  # --pretrained loads the weights of these
DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}  # for --encoder_precision
AUTOCAST_DTYPES = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}  # for --precision; fp32 has no autocast
RANDOM = 'random'  # replaces the hash of random weights


@dataclass(frozen=True)
class ModelFiles:
    """The folder of a model in diffusers' layout, and the contents of its configuration files."""
    name: str  # as the user gave it
    folder: Path  # with the subfolders unet, vae, text_encoder and scheduler
    configs: dict[str, dict]  # the content of the configuration file in each subfolder
    pretrained: bool  # whether the VAE and the text encoder have trained weights, or random ones

    @property
    def tokenizer(self) -> str | None:
        """The folder of the model's own tokenizer; None if there is none, and CLIP's own is used."""
        folder = self.folder / 'tokenizer'
        return str(folder) if folder.is_dir() else None

    @property
    def vocab_size(self) -> int:
        return CLIPTextConfig(**self.configs['text_encoder']).vocab_size

    @property
    def scaling_factor(self) -> float:
        """The factor that brings the VAE's latents to unit variance."""
        return self.configs['vae'].get('scaling_factor', 0.18215)  # the default of AutoencoderKL

    def latent_size(self, image_size: int) -> int:
        """Return height and width of the latents for an image size: each block of the VAE after the first halves it."""
        blocks = self.configs['vae'].get('block_out_channels', (64,))  # the default of AutoencoderKL
        return image_size // 2 ** (len(blocks) - 1)

    def origin_of_latents(self, image_size: int) -> dict:
        """Return the facts that latents depend on. encode.py saves them in index.json, and a training compares them."""
        return {'image_size': image_size, 'vae_sha256': self.vae_sha256, 'scaling_factor': self.scaling_factor}

    @cached_property
    def vae_sha256(self) -> str:
        """The hash of the VAE's weights in float16, or RANDOM for random weights.

        A variant in fp16 was rounded from the full weights, so both have the same hash, whatever files they are in.
        """
        if not self.pretrained:
            return RANDOM
        return hash_of_weights(build_vae(self, 'fp16'))

    @cached_property
    def text_encoder_sha256(self) -> str:
        """The hash of the text encoder's weights, as `vae_sha256`; those of `tiny` are always random."""
        if not self.pretrained or self.name == TINY_MODEL:
            return RANDOM
        text_encoder = build_text_encoder(self, 'fp16')
        save_older_names(text_encoder)
        return hash_of_weights(text_encoder)


def find_model(name: str, pretrained: bool = False) -> ModelFiles:
    """Find the files of a model: built in, in the folder `name`, or downloaded once from the hub repository `name`.

    Raises UserError if there is no such model, or if it lacks weights that `pretrained` needs.
    """
    # Download only the configurations, the tokenizer, and the weights that are needed, but never the UNet's weights.
    require_no_single_file(name, f'--model_name {name}')
    with_weights = PRETRAINED_PARTS if pretrained and name != TINY_MODEL else ()
    if name in BUILT_IN and not with_weights:
        folder = BUILT_IN[name]
    else:
        patterns = [f'{part}/{file}' for part, file in CONFIG_FILES.items()] + ['tokenizer/*']
        patterns += [f'{part}/*.safetensors*' for part in with_weights]
        folder = find_or_download('--model_name', name, patterns)

    # Check the files now, because building the networks takes longer.
    configs = read_configs(folder, f'--model_name {name}')
    for part in with_weights:
        if not weight_files(folder / part):
            raise UserError(f'--model_name {name} has no weights in its folder {part}; complete its download, or give '
                            '--no-pretrained to measure the speed with random weights')
    return ModelFiles(name, folder, configs, pretrained)


def require_no_single_file(path: str, label: str) -> None:
    """Raise UserError, which begins with `label`, if `path` is a file or a LoRA where a model folder is expected."""
    is_lora = os.path.exists(os.path.join(path, LORA))
    if path.endswith('.safetensors') and os.path.isfile(path):
        with contextlib.suppress(SafetensorError), safe_open(path, 'pt') as tensors:
            is_lora = any('lora' in name for name in tensors.keys())
    if is_lora:
        raise UserError(f'{label} is a LoRA, which changes a model and is not a model itself; merge it into its model '
                        f'FOLDER: python -c "from diffusers import StableDiffusionPipeline as P; p = P.from_pretrained('
                        f"'FOLDER'); p.load_lora_weights('{path}'); p.fuse_lora(); p.unload_lora_weights(); "
                        'p.save_pretrained(\'fused\')" and give fused')
    if os.path.isfile(path):
        raise UserError(f'{label} is a single file, and not a model folder in the layout of diffusers; if it holds '
                        'the weights of a Stable Diffusion, convert it: python -c "from diffusers import '
                        f"StableDiffusionPipeline as P; P.from_single_file('{path}').save_pretrained('model')\" and "
                        'give model')


def read_configs(folder: Path, label: str) -> dict[str, dict]:
    """Return the contents of the configuration files in a folder of diffusers, keyed by subfolder.

    Raises UserError, which names `label` and the file, if it is not a Stable Diffusion that can be trained here.
    """
    configs = {}
    for part, file in CONFIG_FILES.items():
        try:
            configs[part] = dict(json.loads((folder / part / file).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f'{label} is not a diffusers model ({one_line(error, 300)}); it needs the '
                            'folders unet, vae, text_encoder and scheduler') from None

    # Refuse other architectures: other classes, other numbers of channels, or other conditions of the UNet.
    def require(part: str, key: str, value: Any, allowed: Sequence) -> None:
        if value not in allowed:
            raise UserError(f'{label}: {part}/{CONFIG_FILES[part]} has {key} {value}, but Stable Diffusion has '
                            f'{" or ".join(map(str, allowed))}; give a model with that value')
    for part, keys in STABLE_DIFFUSION.items():
        for key, allowed in keys.items():
            require(part, key, configs[part].get(key, allowed[0]), allowed)
    text_config = CLIPTextConfig(**configs['text_encoder'])
    widths = configs['unet'].get('cross_attention_dim', 1280)  # a number, or a list with one for each block
    for width in widths if isinstance(widths, list) else [widths]:
        require('unet', 'cross_attention_dim', width, [text_config.hidden_size])
    if text_config.max_position_embeddings < CAPTION_LENGTH:
        require('text_encoder', 'max_position_embeddings', text_config.max_position_embeddings, [CAPTION_LENGTH])

    # Refuse noise schedules that DDPM cannot train.
    try:
        scheduler = DDPMScheduler.from_config(configs['scheduler'])
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f'{label}: scheduler/{CONFIG_FILES["scheduler"]} has a noise schedule that DDPM cannot train '
                        f'({one_line(error, 300)}); give another model') from None
    require('scheduler', 'trained_betas of length', len(scheduler.betas), [len(scheduler)])
    if scheduler.config.rescale_betas_zero_snr and scheduler.config.prediction_type == 'epsilon':
        raise UserError(f'{label}: scheduler/{CONFIG_FILES["scheduler"]} has rescale_betas_zero_snr true and '
                        'prediction_type epsilon: the last timestep is pure noise, so a prediction of the noise says '
                        'nothing about the image, and samples would be NaN; use v_prediction, or '
                        'rescale_betas_zero_snr false')
    return configs


def weight_files(folder: Path) -> list[Path]:
    return [*folder.glob('*.safetensors'), *folder.glob('*.bin')]


def load_weights(cls: type, folder: str | os.PathLike, label: str) -> Any:
    """Load a network of diffusers or transformers with its weights: on the CPU, in float32, frozen, in eval mode.

    The folder has the configuration and the weights, in one file or in shards, as safetensors or pickled tensors. The
    libraries read only tensors from pickled files, so no code runs. The variant fp16 is loaded if there is no other.

    Raises UserError, which begins with `label`, if the weights do not load, or if some are missing or unexpected:
    diffusers and transformers would use random numbers for missing weights and ignore unexpected ones.
    """
    files = weight_files(Path(folder))
    if not files:  # diffusers would name a file that the user has never heard of
        raise UserError(f'{label}: {folder} holds no {cls.__name__} with weights; complete its download')
    variant = 'fp16' if all('.fp16' in path.name for path in files) else None
    names = {'key_mapping': OLDER_NAMES} if cls is CLIPTextModel else {}
    try:
        with torch.device('cpu'):  # while a run builds its model, transformers would load to the GPU
            network, loading = cls.from_pretrained(folder, variant=variant, local_files_only=True,
                                                   output_loading_info=True, **names)
    except Exception as error:  # the libraries raise many kinds for missing, damaged or wrong files
        raise UserError(f'{label}: {folder} holds no {cls.__name__} that loads ({one_line(error, 300)}); give '
                        'another model') from None
    wrong = sorted(map(str, {*loading['missing_keys'], *loading['unexpected_keys']}))
    if wrong:
        raise UserError(f'{label}: {folder} holds the weights of another model: {len(wrong)} are missing or '
                        f'unexpected, first {wrong[0]}; give a model whose weights fit its configuration')
    return frozen(network, 'fp32')


def hash_of_weights(*networks: torch.nn.Module) -> str:
    """Return the SHA-256 of all tensors in the networks, in hexadecimal."""
    digest = hashlib.sha256()
    for network in networks:
        for name, tensor in sorted(network.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().cpu().numpy())
    return digest.hexdigest()


def build_vae(files: ModelFiles, precision: str) -> AutoencoderKL:
    """Build the VAE, frozen, in eval mode, with weights in `precision`, a key of DTYPES."""
    if files.pretrained:
        vae = load_weights(AutoencoderKL, files.folder / 'vae', f'--model_name {files.name}')
    else:
        vae = AutoencoderKL.from_config(files.configs['vae'])
    return frozen(vae, precision)


def build_unet(files: ModelFiles) -> UNet2DConditionModel:
    """Build the UNet with random weights."""
    try:
        return UNet2DConditionModel.from_config(files.configs['unet'])
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f'--model_name {files.name}: unet/{CONFIG_FILES["unet"]} does not describe a UNet '
                        f'({one_line(error, 300)}); restore the original file') from None


def build_text_encoder(files: ModelFiles, precision: str) -> CLIPTextModel:
    """Build the CLIP text encoder, frozen, in eval mode, with weights in `precision`, a key of DTYPES."""
    config = CLIPTextConfig(**files.configs['text_encoder'])
    if not files.pretrained:
        text_encoder = CLIPTextModel(config)
    elif files.name == TINY_MODEL:
        text_encoder = random_text_encoder(config)
    else:
        text_encoder = load_weights(CLIPTextModel, files.folder / 'text_encoder', f'--model_name {files.name}')
    return frozen(text_encoder, precision)


def random_text_encoder(config: CLIPTextConfig) -> CLIPTextModel:
    """Build a text encoder with random weights on the CPU, which are the same each time.

    Weights in a file would take 6 MB. The embeddings of positions, and of the start, end and padding tokens that every
    caption has, are zero. Therefore the states after the last word are the sum of the words at full scale. Otherwise
    they would be nearly equal for all captions.
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
    """Freeze a module, put it into eval mode and convert it to `precision`, in place, and return it."""
    module.requires_grad_(False).eval()
    torch.nn.Module.to(module, DTYPES[precision])  # diffusers' own `to` prints warnings about modules kept in fp32
    return module


def build_fitting_tokenizer(name: str | None, files: ModelFiles) -> Tokenizer:
    """Build the tokenizer of --tokenizer, or else the model's own, because models pad with different tokens."""
    name = name or files.tokenizer
    tokenizer = build_tokenizer(name)
    if tokenizer.get_vocab_size() > files.vocab_size:
        raise UserError(f'--tokenizer {name} has {tokenizer.get_vocab_size()} tokens, but the text encoder of '
                        f'--model_name {files.name} knows only {files.vocab_size}; give the tokenizer of that model')
    return tokenizer
