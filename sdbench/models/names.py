"""Convert the names of the text encoder's tensors: in transformers 4 they have a prefix that transformers 5 removed.

Checkpoints and pipelines from either version can be read with the other one. Tensors get the installed version's names
when they are loaded. Saved pipelines and hashes of weights use the older names, which both versions read.
"""
import functools
import re

import torch
from transformers import CLIPTextConfig, CLIPTextModel

PREFIX = 'text_model.'
OLDER_NAMES = {f'^(?!{re.escape(PREFIX)})': PREFIX}  # key_mapping for from_pretrained: adds the prefix if it is missing


@functools.cache
def installed_prefix() -> str:
    """Return the prefix of tensor names in a CLIPTextModel of the installed transformers: PREFIX or ''."""
    with torch.device('meta'):
        text_encoder = CLIPTextModel(CLIPTextConfig(num_hidden_layers=0))
    return PREFIX if hasattr(text_encoder, 'text_model') else ''


def use_installed_names(model: dict[str, torch.Tensor]) -> None:
    """Rename the text encoder's tensors in the state of a StableDiffusion, in place, for the installed transformers."""
    for name in list(model):
        renamed = re.sub(rf'^text_encoder\.({re.escape(PREFIX)})?', f'text_encoder.{installed_prefix()}', name)
        model[renamed] = model.pop(name)


def save_older_names(text_encoder: CLIPTextModel) -> None:
    """Make a text encoder's `state_dict`, and therefore `save_pretrained`, use the names of transformers 4.

    Without this, transformers 4 loads a folder saved by transformers 5.23 without an error, but leaves the weights
    random. Do not use this on a model that Composer saves, because the names in Composer's state must be the names of
    the model itself.
    """
    def rename(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: dict) -> None:
        for name in list(state):
            state[PREFIX + name.removeprefix(PREFIX)] = state.pop(name)
    text_encoder.register_state_dict_post_hook(rename)
