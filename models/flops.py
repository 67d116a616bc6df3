"""How much arithmetic an image takes, what a device can do at most, and the share of it that was reached."""
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel

from models.peaks import peak_of

PARTS = ('unet', 'text_encoder', 'vae')


def flops_of_an_image(unet_config: dict, text_config: CLIPTextConfig, vae_config: dict | None,
                      image_size: int) -> dict[str, int]:
    """FLOPs (1 multiply-add = 2) of an image of this side: the UNet forward and backward, the VAE's encoder (None: 0),
    and the text encoder. To count takes seconds, so that each configuration is counted once and kept.
    """
    def count() -> dict[str, int]:
        flops = training_flops(unet_config, text_config, image_size // 8)
        flops['vae'] = 0 if vae_config is None else encoding_flops(vae_config, image_size)
        return flops

    settings = [stated(unet_config), stated(text_config.to_dict()), vae_config and stated(vae_config), image_size]
    return kept('training', settings, PARTS, count)


def flops_of_a_picture(unet_config: dict, text_config: CLIPTextConfig, vae_config: dict,
                       image_size: int) -> dict[str, int]:
    """FLOPs (1 multiply-add = 2) of what draws a picture of this side: a pass of the UNet, the VAE's decoder, and the
    text encoder. Counted once and kept.
    """
    settings = [stated(unet_config), stated(text_config.to_dict()), stated(vae_config), image_size]
    return kept('drawing', settings, PARTS,
                lambda: drawing_flops(unet_config, text_config, vae_config, image_size))


def flops_of_latents(vae_config: dict, image_size: int) -> int:
    """FLOPs (1 multiply-add = 2) of the VAE's encoder for an image of this side. Counted once and kept."""
    settings = [stated(vae_config), image_size]
    return kept('encoding', settings, ('vae',), lambda: {'vae': encoding_flops(vae_config, image_size)})['vae']


def stated(config: dict) -> dict:
    """What a configuration says of the model; what libraries note beside it is in another order in each process."""
    return {key: value for key, value in config.items() if not key.startswith('_')}


def kept(kind: str, settings: list, parts: Sequence[str], count: Callable[[], dict[str, int]]) -> dict[str, int]:
    """What was counted before of that kind with these settings by the same code, or else what `count` counts, which is
    kept from then on, where it can be.

    Args:
        kind: of the count.
        settings: that it depends on, as JSON can hold them.
        parts: of the model, which it has a number for each.
        count: counts them.
    """
    try:
        folder = kept_folder()
    except RuntimeError:  # a user without a home
        return count()
    counted_by = [torch.__version__, diffusers.__version__, transformers.__version__, Path(__file__).read_text()]
    key = json.dumps([kind, settings, counted_by], sort_keys=True, default=str)
    path = folder / f'{hashlib.sha256(key.encode()).hexdigest()}.json'
    with contextlib.suppress(OSError, ValueError, RecursionError):  # it is not there, or not whole
        found = json.loads(path.read_text())
        if is_count(found, parts):
            return found
    counted = count()
    with contextlib.suppress(OSError):  # a home that is read-only or full
        keep_count(path, counted)
    return counted


def is_count(found: object, parts: Sequence[str]) -> bool:
    """Whether what was kept is a number of FLOPs for each part."""
    if not isinstance(found, dict) or set(found) != set(parts):
        return False
    return all(type(flops) is int and flops >= 0 for flops in found.values())


def keep_count(path: Path, counted: dict[str, int]) -> None:
    """Write a count, which appears whole, since other ranks may read it now. Raises OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'{path.name}.{secrets.token_hex(8)}.tmp')
    try:
        unfinished.write_text(json.dumps(counted))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def kept_folder() -> Path:
    """Where counts are kept: in the user's folder for caches. Raises RuntimeError where the user has no home."""
    caches = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(caches) / 'diffusion-benchmark' / 'flops'


def training_flops(unet_config: dict, text_config: CLIPTextConfig, latent_side: int) -> dict[str, int]:
    """FLOPs (1 multiply-add = 2) of one image: the UNet forward and backward, and the text encoder forward.

    Counted by torch on the meta device, so that nothing is computed. `latent_side` is image_size / 8.
    """
    with torch.device('meta'):
        unet = UNet2DConditionModel.from_config(unet_config)
        text_encoder = CLIPTextModel(text_config)
        latents = torch.empty(1, unet.config.in_channels, latent_side, latent_side)
        caption = torch.empty(1, text_config.max_position_embeddings, dtype=torch.long)
        timestep = torch.empty(1, dtype=torch.long)
    with torch.no_grad():
        text_flops, output = count_flops(lambda: text_encoder(caption))
    unet_flops, _ = count_flops(lambda: unet(latents, timestep, output[0]).sample.sum().backward())
    return {'unet': unet_flops, 'text_encoder': text_flops}


def drawing_flops(unet_config: dict, text_config: CLIPTextConfig, vae_config: dict, image_size: int) -> dict[str, int]:
    """FLOPs (1 multiply-add = 2) of one forward pass each of the UNet, the text encoder and the VAE's decoder, for one
    picture. Counted on the meta device.
    """
    with torch.device('meta'), torch.no_grad():
        unet = UNet2DConditionModel.from_config(unet_config)
        text_encoder = CLIPTextModel(text_config)
        vae = AutoencoderKL.from_config(vae_config)
        latents = torch.empty(1, unet.config.in_channels, image_size // 8, image_size // 8)
        caption = torch.empty(1, text_config.max_position_embeddings, dtype=torch.long)
        text_flops, output = count_flops(lambda: text_encoder(caption))
        unet_flops, _ = count_flops(lambda: unet(latents, torch.empty(1, dtype=torch.long), output[0]))
        decoder_flops, _ = count_flops(lambda: vae.decode(latents))
    return {'unet': unet_flops, 'text_encoder': text_flops, 'vae': decoder_flops}


def encoding_flops(vae_config: dict, image_size: int) -> int:
    """FLOPs (1 multiply-add = 2) of the VAE's encoder for one image, counted on the meta device."""
    with torch.device('meta'), torch.no_grad():
        vae = AutoencoderKL.from_config(vae_config)
        image = torch.empty(1, 3, image_size, image_size)
        flops, _ = count_flops(lambda: vae.encode(image))
    return flops


def count_flops(call: Callable[[], Any]) -> tuple[int, Any]:
    """FLOPs of a call by torch's own counter, and what the call returned."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


def peak_tflops(precision: str) -> float | None:
    """Dense peak of this GPU; None where it is not known, or for fp32."""
    if not torch.cuda.is_available():
        return None
    return peak_of(torch.cuda.get_device_name(), precision)


def utilization(images_per_sec_per_device: float, flops_per_image: int, precision: str,
                device: str) -> dict[str, float | None]:
    """TFLOPs of an image, TFLOP/s of a device, and its share of the peak of the `device` of that name; None where that
    is not known.
    """
    tflops_per_sec = images_per_sec_per_device * flops_per_image / 1e12
    peak = peak_of(device, precision)
    return {'tflops_per_image': flops_per_image / 1e12,
            'tflops_per_sec_per_device': tflops_per_sec,
            'mfu': tflops_per_sec / peak if peak else None}
