"""The identity of a training: a random id, and the name under which its curves and generated images are kept.

A training gets its id when it starts from random weights or from --load_weights. Its checkpoints carry the id, so a
resume has the same one, and each of its records has it. Records with the same id are one training.
"""
import os
import re
import secrets
import sys
from typing import NamedTuple

from composer import Callback

from sdbench.errors import redacted
from sdbench.flags.train import Run
from sdbench.training.checkpoints import RUN_NAME, callback_state, load_checkpoint, write_text_in


class Identity(NamedTuple):
    """Which training a run belongs to.

    Attributes:
        training_id: 12 random hexadecimal digits.
        beginning: the readable part of the name, in front of the id.
        load_weights: the --load_weights that the training started from, without passwords; None for random weights.
    """
    training_id: str
    beginning: str
    load_weights: str | None

    @property
    def name(self) -> str:
        """Return the name of the training's curves and of its folder of generated images. No two trainings share it."""
        return f'{self.beginning}-{self.training_id}'


def identify_training(settings: Run, checkpoint: str | None) -> Identity:
    """Return the identity in a checkpoint, or a new one, whose name is written to --save_folder for people to read.

    The name begins as in the checkpoint, or else with the last part of --save_folder.

    Args:
        settings: the settings of the run.
        checkpoint: the path of the checkpoint to resume from; None if the training is new.

    Raises OSError if the name cannot be written.
    """
    # A resumed training keeps its identity. Characters that a folder name should not have become hyphens.
    kept = {}
    if checkpoint:
        kept = callback_state(load_checkpoint(checkpoint)['state'], 'training_id')
    beginning = kept.get('beginning') or os.path.abspath(settings.save_folder or 'run')
    beginning = re.sub(r'[^\w.-]+', '-', os.path.basename(beginning.rstrip('/'))).strip('-.')
    origin = redacted(settings.load_weights) if settings.load_weights else None
    identity = Identity(kept.get('training_id') or secrets.token_hex(6), beginning or 'run',
                        kept.get('load_weights', origin))  # an earlier version did not keep it
    if identity.load_weights != origin and settings.load_weights:
        print(f'warning: --load_weights {origin} has no effect, because this resumes a training from '
              f'{identity.load_weights or "random weights"}', file=sys.stderr)
    if settings.save_folder and not kept:
        write_text_in(settings.save_folder, RUN_NAME, f'{identity.name}\n')
    return identity


class IdentityKeeper(Callback):
    """Keeps the identity of a training in its checkpoints and in its record."""

    def __init__(self, identity: Identity):
        self.identity = identity

    def state_dict(self) -> dict:
        return self.identity._asdict()

    def figures(self, all_ranks: bool) -> dict:
        """Return the id and the origin of the training, also if a resume was given another --load_weights."""
        return {'training_id': self.identity.training_id, 'load_weights': self.identity.load_weights}
