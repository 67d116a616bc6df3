"""Keep the frozen VAE and text encoder out of checkpoints, if the folder of the model has their weights.

A checkpoint then has the hashes of both and the name of the model, and whoever loads it takes the full weights from
there. Random networks exist nowhere else, so they are in the checkpoint. The text encoder of `tiny` is one of them: its
random weights are not the same in each version of transformers.
"""
from typing import Any

import torch

from sdbench.models.loading import RANDOM
from sdbench.training.ranks import print_on_rank_0

FROZEN = ('vae', 'text_encoder')
EXTRA_STATE = '_extra_state'  # torch's key for the result of `get_extra_state`


def omit_networks_of_folder(model: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: dict) -> None:
    """Remove the networks of a StableDiffusion whose weights come from files from its state; a hook of torch."""
    for part in FROZEN:
        if model.facts.get(f'{part}_sha256', RANDOM) != RANDOM:
            for name in [name for name in state if name.startswith(f'{prefix}{part}.')]:
                del state[name]


def add_missing_networks(model: torch.nn.Module, state: dict[str, Any], prefix: str = '', *_) -> None:
    """Add whatever a checkpoint lacks to the state that a StableDiffusion loads, in place; a hook of torch.

    The model then compares the facts of the checkpoint with its own in `set_extra_state`, among them the hashes.

    Checkpoints of earlier versions have all networks, perhaps rounded to half precision. If they are the ones from the
    folder of the model, the full weights are kept. Otherwise the model takes those of the checkpoint, and keeps them in
    its own checkpoints.
    """
    facts = state.setdefault(f'{prefix}{EXTRA_STATE}', {})  # the first versions did not save any facts
    for part in FROZEN:
        network = getattr(model, part)
        key = f'{part}_sha256'
        saved = {name.removeprefix(f'{prefix}{part}.'): tensor for name, tensor in state.items()
                 if name.startswith(f'{prefix}{part}.')}
        if network is None:
            continue
        weights = network.state_dict()
        if saved and model.facts.get(key, RANDOM) == RANDOM:
            continue
        if not saved or are_same_weights(saved, weights):
            state |= {f'{prefix}{part}.{name}': tensor for name, tensor in weights.items()}
        elif key not in facts:
            print_on_rank_0(f'warning: the {part} in the checkpoint is another one than that of --model_name '
                            f'{model.facts["model_name"]}; the run keeps the one in the checkpoint')
            del model.facts[key]


def are_same_weights(saved: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> bool:
    """Tell whether two networks have the same tensors under the same names, apart from rounding to half precision."""
    if saved.keys() != ours.keys():
        return False
    for name, other in ours.items():
        one = saved[name]  # on the GPU if a resume has added it before torch calls the hook
        if one.shape != other.shape or not torch.allclose(one.cpu().float(), other.cpu().float(), rtol=0.01, atol=1e-6):
            return False
    return True
