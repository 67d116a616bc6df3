"""Find a model by its name, and make its frozen parts: a folder of this package, a diffusers folder, or the hub's."""
import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from inputs.errors import one_line
from inputs.hub import SD2_BASE, local_folder, refuse_impossible_model

# These folders hold no weights: random ones train as fast.
BUILT_IN = {SD2_BASE: Path(__file__).parent / 'stable-diffusion-2-base', 'tiny': Path(__file__).parent / 'tiny'}
CONFIG_FILES = {'unet': 'config.json', 'vae': 'config.json', 'text_encoder': 'config.json',
                'scheduler': 'scheduler_config.json'}
VAE_WEIGHTS = 'vae/diffusion_pytorch_model.safetensors'
WEIGHT_FILES = [VAE_WEIGHTS, 'text_encoder/model.safetensors']
LATENT_CHANNELS = 4
CAPTION_LENGTH = 77  # tokens
PIXELS = 64  # along each side of an image that a model is tried with
MOST_LAYERS = 1000  # of a part: made one by one, more would take hours
MOST_CHANNELS = 10_000_000  # or tokens, or pixels
SCALING_FACTOR = 0.18215  # brings the latents to unit variance, where the VAE's configuration is silent
DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}


@dataclass(frozen=True)
class ModelFiles:
    """The folder of a model in diffusers' layout, and what its configuration files say.

    Attributes:
        name: as the user gave it.
        folder: with the folders unet, vae, text_encoder and scheduler.
        configs: the content of each part's configuration file.
        pretrained: whether the VAE and the text encoder take their weights from `folder`, or random ones.
    """
    name: str
    folder: Path
    configs: dict[str, dict]
    pretrained: bool

    @property
    def vocab_size(self) -> int:
        """How many token ids the text encoder knows."""
        return self.configs['text_encoder'].get('vocab_size', CLIPTextConfig().vocab_size)

    @property
    def scaling_factor(self) -> float:
        """What a latent of the VAE is multiplied with."""
        return self.configs['vae'].get('scaling_factor', SCALING_FACTOR)

    def vae_sha256(self) -> str:
        """A hash of the VAE's weights, 'random' where they are drawn."""
        if not self.pretrained:
            return 'random'
        with open(self.folder / VAE_WEIGHTS, 'rb') as file:
            return hashlib.file_digest(file, 'sha256').hexdigest()


def find_model(name: str, pretrained: bool = False) -> ModelFiles:
    """The files of a model: built in, in the folder `name`, or downloaded once from the hub's repository `name`.

    Raises ValueError if there is no such model, it lacks the weights that `pretrained` asks for, or does not work.
    """
    files = files_of_model(name, pretrained)
    if files.folder not in BUILT_IN.values():
        require_working_model(name, json.dumps(files.configs))
    return files


def files_of_model(name: str, pretrained: bool) -> ModelFiles:
    """Those of `find_model`, without trying whether the model works: for workers of a command that has done so."""
    refuse_impossible_model(name, pretrained)
    if name in BUILT_IN and not pretrained:
        folder = BUILT_IN[name]
    else:
        patterns = [f'{part}/{file}' for part, file in CONFIG_FILES.items()]
        if pretrained:
            patterns += WEIGHT_FILES
        folder = local_folder('--model_name', name, patterns)
    configs = read_configs(name, folder)
    if pretrained:
        for file in WEIGHT_FILES:
            if not (folder / file).is_file():
                raise ValueError(f'--model_name {name} lacks {file}; leave out --pretrained for random weights')
    return ModelFiles(name, folder, configs, pretrained)


def read_configs(name: str, folder: Path) -> dict[str, dict]:
    """The configuration of each part of the model in `folder`. Raises ValueError if one is missing, or is none."""
    configs = {}
    for part, file in CONFIG_FILES.items():
        try:
            config = json.loads((folder / part / file).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f'--model_name {name} is not a diffusers model ({one_line(error)[:300]}); it needs the '
                             'folders unet, vae, text_encoder and scheduler') from None
        if not isinstance(config, dict):
            raise ValueError(f'--model_name {name} is not a diffusers model: its {part}/{file} holds no JSON object')
        configs[part] = config
    return configs


@functools.cache
def require_working_model(name: str, configs_as_json: str) -> None:
    """Raises ValueError if the parts cannot be made as they are configured, do not fit each other, or are no model for
    images.

    They are made and run without memory, on the meta device, once a process: that finds what no list of keys and types
    would. It takes 3 s for a model of the size of Stable Diffusion 2.
    """
    configs = json.loads(configs_as_json)
    require_reasonable_numbers(name, configs)
    with described(name, 'scheduler'):
        require_noise(configs['scheduler'])
    with torch.device('meta'), torch.no_grad():
        with described(name, 'vae'):
            vae = AutoencoderKL.from_config(configs['vae'])
            moments = vae.encode(torch.empty(1, 3, PIXELS, PIXELS)).latent_dist.parameters  # (1, 8, H/8, W/8)
            if moments.shape[1] != 2 * LATENT_CHANNELS:
                raise ValueError(f'its latents have {moments.shape[1] // 2} channels, not {LATENT_CHANNELS}')
            scaling_factor = configs['vae'].get('scaling_factor', SCALING_FACTOR)
            if not isinstance(scaling_factor, int | float) or not 0 < scaling_factor < float('inf'):
                raise ValueError(f'scaling_factor {scaling_factor!r} is not a number above 0')
        with described(name, 'text_encoder'):
            text_config = CLIPTextConfig(**configs['text_encoder'])
            if text_config.vocab_size < 1:
                raise ValueError(f'vocab_size {text_config.vocab_size} is not above 0')
            text_encoder = CLIPTextModel(text_config)
            text = text_encoder(torch.zeros(1, CAPTION_LENGTH, dtype=torch.long))[0]  # (1, 77, D)
        with described(name, 'unet'):
            unet = UNet2DConditionModel.from_config(configs['unet'])
            if unet.config.in_channels != LATENT_CHANNELS or unet.config.out_channels != LATENT_CHANNELS:
                raise ValueError(f'it takes {unet.config.in_channels} channels and gives {unet.config.out_channels}, '
                                 f'where latents have {LATENT_CHANNELS}')
            width = unet.config.cross_attention_dim
            if isinstance(width, int) and width != text.shape[-1]:
                raise ValueError(f'cross_attention_dim is {width}, and the text encoder gives states of '
                                 f'{text.shape[-1]}')
            latents = moments[:, :LATENT_CHANNELS]  # (1, 4, H/8, W/8)
            prediction = unet(latents, torch.zeros(1, dtype=torch.long), text).sample
            if prediction.shape != latents.shape:
                raise ValueError(f'for latents {tuple(latents.shape)} it predicts {tuple(prediction.shape)}')


def require_reasonable_numbers(name: str, configs: dict[str, dict]) -> None:
    """Raises ValueError if a model of so many layers or channels would take hours, or all memory, only to be made."""
    for part, config in configs.items():
        for key, value in config.items():
            most = MOST_LAYERS if 'layers' in key else MOST_CHANNELS
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and number > most:
                    raise ValueError(f'--model_name {name}: {part}/{CONFIG_FILES[part]} has {key} '
                                     f'{str(number)[:20]}, more than {most}')
            if isinstance(value, list) and len(value) > MOST_LAYERS:
                raise ValueError(f'--model_name {name}: {part}/{CONFIG_FILES[part]} has {len(value)} values of '
                                 f'{key}, more than {MOST_LAYERS}')


def require_noise(config: dict) -> None:
    """Raises ValueError if the scheduler's noise is no number, or does not grow from timestep to timestep."""
    with torch.device('cpu'):
        scheduler = DDPMScheduler.from_config(config)
    signal = scheduler.alphas_cumprod  # (timesteps,): the share of the image's variance
    falls = bool((signal[1:] <= signal[:-1]).all())
    if not len(signal) or not falls or not 0 <= float(signal[-1]) <= float(signal[0]) <= 1:
        raise ValueError('its betas make no noise that grows from timestep to timestep')


@contextlib.contextmanager
def described(name: str, part: str) -> Iterator[None]:
    """What goes wrong while a part is made and run becomes a ValueError of one line, which names its file."""
    try:
        yield
    except Exception as error:  # diffusers, transformers and torch raise nearly anything for a wrong configuration
        reason = one_line(error)[:300] or type(error).__name__
        raise ValueError(f'--model_name {name}: {part}/{CONFIG_FILES[part]} describes no {part} that can be '
                         f'trained with here ({reason}); mend it, or give another model') from None


def build_vae(files: ModelFiles, precision: str) -> AutoencoderKL:
    """The VAE, frozen, in eval mode, and held in `precision`, one of DTYPES.

    Raises ValueError if its weights do not load.
    """
    if not files.pretrained:
        return frozen(AutoencoderKL.from_config(files.configs['vae']), precision)
    with described(files.name, 'vae'):
        return frozen(AutoencoderKL.from_pretrained(files.folder / 'vae', use_safetensors=True), precision)


def build_text_encoder(files: ModelFiles, precision: str) -> CLIPTextModel:
    """The CLIP text encoder, frozen, in eval mode, and held in `precision`, one of DTYPES.

    Raises ValueError if its weights do not load.
    """
    if not files.pretrained:
        return frozen(CLIPTextModel(CLIPTextConfig(**files.configs['text_encoder'])), precision)
    with described(files.name, 'text_encoder'):
        text_encoder = CLIPTextModel.from_pretrained(files.folder / 'text_encoder', use_safetensors=True)
        return frozen(text_encoder, precision)


def frozen(module: torch.nn.Module, precision: str) -> torch.nn.Module:
    """The module itself, without gradients, in eval mode and in `precision`."""
    module.requires_grad_(False).eval()
    torch.nn.Module.to(module, DTYPES[precision])  # diffusers' own `to` warns of parts that stay in fp32
    return module
