"""Names of the text encoder's tensors: those of transformers 4 begin with a prefix that transformers 5 has removed.

A checkpoint or a pipeline of either generation is read by the other. What is read gets the names of the installed
generation; pipelines and hashes of weights have the older names, which both generations read.
"""
import functools
import re

import torch
from transformers import CLIPTextConfig, CLIPTextModel

PREFIX = 'text_model.'
OLDER_NAMES = {f'^(?!{re.escape(PREFIX)})': PREFIX}  # a key_mapping of from_pretrained: transformers 4 reads both


@functools.cache
def installed_prefix() -> str:
    """Return what the names of a CLIPTextModel begin with in the installed version of transformers."""
    with torch.device('meta'):
        text_encoder = CLIPTextModel(CLIPTextConfig(num_hidden_layers=0))
    return PREFIX if hasattr(text_encoder, 'text_model') else ''


def use_installed_names(model: dict[str, torch.Tensor]) -> None:
    """Rename the text encoder's tensors in the state of a StableDiffusion, in place, as transformers has them here."""
    for name in list(model):
        renamed = re.sub(rf'^text_encoder\.({re.escape(PREFIX)})?', f'text_encoder.{installed_prefix()}', name)
        model[renamed] = model.pop(name)


def save_older_names(text_encoder: CLIPTextModel) -> None:
    """Let a text encoder's `state_dict`, and so `save_pretrained`, have the names of transformers 4.

    Without it transformers 4 loads what transformers 5.23 saves with random weights and no error. A model that Composer
    saves cannot have it: torch looks up each name of the state in the model.
    """
    def rename(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: dict) -> None:
        for name in list(state):
            state[PREFIX + name.removeprefix(PREFIX)] = state.pop(name)
    text_encoder.register_state_dict_post_hook(rename)
