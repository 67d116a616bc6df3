"""Folders of models and tokenizers: on this machine, or from the hub."""
import difflib
import os
from pathlib import Path

SD2_BASE = 'stabilityai/stable-diffusion-2-base'  # whose architecture is built in
# where evaluate.py tells people to get the networks that it judges with; it fetches nothing itself
INCEPTION_WEIGHTS = ('https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/'
                     'weights-inception-2015-12-05-6726825d.pth')
CLIP_MODEL = 'openai/clip-vit-large-patch14'


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
        meant = ': check the name and the network, or give a local folder'
        nearest = difflib.get_close_matches(name, (SD2_BASE, 'tiny'), n=1)
        if nearest and flag == '--model_name':
            meant = f'; did you mean {nearest[0]}?'
        raise ValueError(f'{flag} {name} is not a folder, and the hub gave nothing ({type(error).__name__}){meant}'
                         ) from None
