"""Find the folder of a model: built in, on this machine, or downloaded from the hub. Nothing here needs torch."""
import os
from pathlib import Path

from sdbench.errors import UserError, one_line
from sdbench.flags.train import SD2_BASE, TINY_MODEL

# Configurations without weights, because random ones are as fast. Only tiny has a trained VAE.
BUILT_IN = {SD2_BASE: Path(__file__).parent / 'stable-diffusion-2-base', TINY_MODEL: Path(__file__).parent / 'tiny'}
CONFIG_FILES = {'unet': 'config.json', 'vae': 'config.json', 'text_encoder': 'config.json',
                'scheduler': 'scheduler_config.json'}
CLIP_MODEL = 'openai/clip-vit-large-patch14'  # the usual one for CLIP scores


def find_or_download(flag: str, name: str, patterns: list[str]) -> Path:
    """Return the folder `name` if it exists, else the folder of the hub's repository `name`, downloaded if not cached.

    `patterns` are glob patterns of the files to download.

    Raises UserError, with `flag` and the reason, if there is no such folder and the repository cannot be downloaded.
    """
    if os.path.isdir(name):
        return Path(name)
    if '/' not in name:  # it cannot be a repository
        raise UserError(f'{flag} {name} is not a folder here; to download a model into it, see "Get the weights" in '
                        'docs/training.md')
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # wrong names, missing or gated repositories, a network or a disk that fails
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__:  # only its cause says what failed
            error = error.__cause__
        remedy = 'check the name and the network'
        if isinstance(error, GatedRepoError):
            remedy = 'accept its terms on its page there, and log in: hf auth login'
        elif isinstance(error, OSError) and error.filename:  # a file of the cache
            remedy = 'free some of the disk, or set HF_HOME to a folder that can be written to'
        raise UserError(f'{flag} {name} is not a folder here, and cannot be downloaded from the hub '
                        f'({one_line(error, 300)}); {remedy}') from None
