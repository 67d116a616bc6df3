"""Repositories of the Hugging Face hub."""
import os
from pathlib import Path

from sdbench.errors import UserError, one_line

CLIP_MODEL = 'openai/clip-vit-large-patch14'  # the usual one for CLIP scores


def find_or_download(flag: str, name: str, patterns: list[str]) -> Path:
    """Return the folder `name` if it exists; else download that repository of the Hugging Face hub, once.

    Args:
        flag: its name in error messages.
        name: a folder of this machine, or a repository such as stabilityai/stable-diffusion-2-base.
        patterns: which files of the repository are downloaded.

    Raises UserError, with the hub's own reason, if there is neither, and OSError if a disk or HF_HOME is the reason.
    """
    if os.path.isdir(name):
        return Path(name)
    if '/' not in name:  # not a repository
        raise UserError(f'{flag} {name} is no folder here; to download a model into it, see "Get the weights" in '
                        'docs/training.md')
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError as error:
        raise UserError(f'{flag} {name} is gated on the hub ({one_line(error, 300)}); accept its terms on its page '
                        'there, and log in: hf auth login') from None
    except Exception as error:  # wrong names, missing repositories, no network, a disk
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__:  # which says that nothing is in the cache
            error = error.__cause__
        if isinstance(error, OSError) and error.filename:  # of the cache on this machine
            raise OSError(f'{flag} {name} cannot be downloaded: {one_line(error)}; free some of the disk, or let '
                          'HF_HOME name a folder that can be written to') from None
        raise UserError(f'{flag} {name} is no folder here, and the hub does not give a repository of that name '
                        f'({one_line(error, 300)}); check the name and the network') from None
