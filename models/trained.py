"""The parts of a trained model, from the weights that a checkpoint holds, without a second copy of them."""
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from models.loading import ModelFiles


def unet_of(files: ModelFiles, weights: dict[str, torch.Tensor], sample_size: int | None) -> UNet2DConditionModel:
    """The UNet with `weights`, which are not copied. Raises RuntimeError if they do not fit.

    Args:
        files: of the model.
        weights: by their names in the UNet.
        sample_size: height and width of the latents that it draws by default; None is the model's own.
    """
    config = dict(files.configs['unet'])
    if sample_size:
        config['sample_size'] = sample_size
    with torch.device('meta'):
        unet = UNet2DConditionModel.from_config(config)
    return with_weights(unet, weights)


def vae_of(files: ModelFiles, weights: dict[str, torch.Tensor]) -> AutoencoderKL:
    """The VAE with `weights`, which are not copied. Raises RuntimeError if they do not fit."""
    with torch.device('meta'):
        vae = AutoencoderKL.from_config(files.configs['vae'])
    return with_weights(vae, weights)


def text_encoder_of(files: ModelFiles, weights: dict[str, torch.Tensor]) -> CLIPTextModel:
    """The text encoder with `weights`, which are not copied. Raises RuntimeError if they do not fit."""
    with init_empty_weights(include_buffers=False):  # its positions are no weights
        text_encoder = CLIPTextModel(CLIPTextConfig(**files.configs['text_encoder']))
    return with_weights(text_encoder, weights)


def with_weights(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The module, made without memory, with `weights` in float32 for its parameters."""
    module.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return module.requires_grad_(False).eval()
