"""Keep facts about a model in its checkpoints, compare them when weights are loaded, and omit the frozen networks.

A VAE or text encoder whose weights are in the folder of the model is not in a checkpoint. The checkpoint has its hash
and the name of the model, and a program that loads it takes the weights from there. Random networks exist nowhere else,
so they are in the checkpoint. The text encoder of `tiny` is one of them: its random weights are not the same in each
version of transformers. Checkpoints of earlier versions have all networks, perhaps rounded to half precision.
"""
import json
from collections.abc import Mapping
from typing import Any

import torch

from sdbench.errors import UserError
from sdbench.models.loading import RANDOM, ModelFiles

FROZEN = ('vae', 'text_encoder')
EXTRA_STATE = '_extra_state'  # torch's key for the result of `get_extra_state`

# Keys of network configurations that do not change the computation, and keys of schedulers that do: only these affect
# the noise and the target in training.
WITHOUT_EFFECT = {'sample_size', 'dtype', 'torch_dtype', 'architectures', 'transformers_version'}
SCHEDULER_KEYS = ('num_train_timesteps', 'beta_start', 'beta_end', 'beta_schedule', 'trained_betas',
                  'rescale_betas_zero_snr', 'prediction_type')


class Mismatch(UserError):
    """The checkpoint is from another run or model than the one that loads it."""


def facts_of_model(files: ModelFiles, image_size: int, unet: Any, text_encoder: Any, scheduler: Any) -> dict:
    """Return the facts about a model that a checkpoint keeps besides the weights, in plain types."""
    configs = comparable(unet=unet.config, text_encoder=text_encoder.config.to_dict(), scheduler=scheduler.config)
    return {'model_name': files.name, 'image_size': image_size, 'vae_sha256': files.vae_sha256,
            'text_encoder_sha256': files.text_encoder_sha256, 'scaling_factor': files.scaling_factor,
            'configs': configs}


def comparable(**configs: Mapping[str, Any]) -> dict[str, dict]:
    """Return the settings in configurations that change the computation, by part, converted to JSON types.

    Take each configuration from the network or the scheduler and not from its file, which may lack defaults.
    """
    kept = {}
    for part, config in configs.items():
        kept[part] = {}
        for name, value in config.items():
            matters = name in SCHEDULER_KEYS if part == 'scheduler' else name not in WITHOUT_EFFECT
            if matters and not name.startswith('_'):
                kept[part][name] = value
    return json.loads(json.dumps(kept, default=str))


def difference_of_models(before: dict, now: dict) -> str | None:
    """Describe the first difference between the model that weights were trained as and another one; None if equal.

    Only facts and settings that both sides have are compared, because each version of diffusers and transformers knows
    other settings. Both are from `facts_of_model`.
    """
    for part, config in now['configs'].items():
        trained = before.get('configs', {}).get(part, {})
        for name in sorted(config.keys() & trained.keys()):
            if trained[name] != config[name]:
                return f'{name} of its {part} was {json.dumps(trained[name])}, and is {json.dumps(config[name])} now'
    for key, name in (('vae_sha256', 'hash of its vae'), ('text_encoder_sha256', 'hash of its text_encoder'),
                      ('scaling_factor', 'scaling_factor of its vae')):
        if key in before and key in now and before[key] != now[key]:
            return f'{name} was {str(before[key])[:12]}, and is {str(now[key])[:12]} now'
    return None


def is_in_checkpoint(part: str, facts: dict) -> bool:
    """Tell whether a checkpoint with these facts has the weights of a frozen network, and not only their hash."""
    return facts.get(f'{part}_sha256', RANDOM) == RANDOM


def omit_networks_of_folder(model: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: dict) -> None:
    """Remove the networks of a StableDiffusion whose weights come from files from its state; a hook of torch."""
    for part in FROZEN:
        if not is_in_checkpoint(part, model.facts):
            for name in [name for name in state if name.startswith(f'{prefix}{part}.')]:
                del state[name]


def add_missing_networks(model: torch.nn.Module, state: dict[str, Any], prefix: str = '', *_) -> None:
    """Add whatever a checkpoint lacks to the state that a StableDiffusion loads, in place; a hook of torch.

    The model then compares the facts of the checkpoint with its own in `set_extra_state`, among them the hashes. A
    network without a hash is that of the checkpoint, which the model then keeps in its own checkpoints, unless it is a
    copy of the one in the folder, whose weights are not rounded.
    """
    facts = state.setdefault(f'{prefix}{EXTRA_STATE}', {})  # the first versions did not save any facts
    for part in FROZEN:
        network = getattr(model, part)
        weights = {} if network is None else network.state_dict()
        saved = {name.removeprefix(f'{prefix}{part}.'): tensor for name, tensor in state.items()
                 if name.startswith(f'{prefix}{part}.')}
        is_kept = is_in_checkpoint(part, facts) or is_in_checkpoint(part, model.facts)
        if network is not None and saved and is_kept and not is_copy(saved, weights):
            if f'{part}_sha256' not in facts:
                model.facts.pop(f'{part}_sha256', None)
            continue
        for name in saved:
            del state[f'{prefix}{part}.{name}']
        state |= {f'{prefix}{part}.{name}': tensor for name, tensor in weights.items()}


def is_copy(saved: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> bool:
    """Tell whether the tensors that a checkpoint has of a network are its weights, perhaps rounded."""
    return saved.keys() == weights.keys() and all(torch.equal(tensor, weights[name].to(tensor))
                                                  for name, tensor in saved.items())
