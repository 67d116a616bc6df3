"""Folders of models and tokenizers: on this machine, or from the hub."""
import os
from pathlib import Path

TINY = 'tiny'  # a small model of the same kind, also built in
SD2_BASE = 'stabilityai/stable-diffusion-2-base'  # whose architecture is built in
# where evaluate.py tells people to get the networks that it judges with; it fetches nothing itself
INCEPTION_WEIGHTS = ('https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/'
                     'weights-inception-2015-12-05-6726825d.pth')
CLIP_MODEL = 'openai/clip-vit-large-patch14'


def refuse_impossible_model(name: str, pretrained: bool) -> None:
    """Raises ValueError if --model_name has no weights to take, or can be neither a folder nor a name of the hub."""
    if os.path.isdir(name):
        return
    if name == TINY and pretrained:
        raise ValueError('--model_name tiny has no weights; leave out --pretrained, or give --no-pretrained after a '
                         'recipe that has it, or name a diffusers folder')
    if '/' not in name and name != TINY:
        raise ValueError(f'--model_name {name} is no folder here, and a name of the hub has its owner before a slash; '
                         f'built in are {TINY} and {SD2_BASE}')


def local_folder(flag: str, name: str, patterns: list[str]) -> Path:
    """The folder `name`, or what matches `patterns` of the hub's repository, downloaded once.

    Raises ValueError if there is neither; it names `flag`.
    """
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # wrong names, missing repositories, no network, no access
        raise ValueError(f'{flag} {name} is not a folder, and the hub gave nothing ({type(error).__name__}): check the '
                         'name and the network, or give a local folder') from None
