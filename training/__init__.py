"""A training, what keeps it alive and what shows it: ranks, checkpoints, safeguards, evaluations, drawings, loggers."""
from training.augmentation import CaptionDrop, RandomFlip
from training.checkpoints import (
    WholeCheckpoints,
    checkpoints_in,
    load_checkpoint,
    newest_checkpoint,
    saving_alone,
    tensors_alone_are_loaded,
)
from training.evaluation import LABEL, METRIC, Evaluations
from training.loggers import build_loggers
from training.optimization import build_schedule
from training.progress import Progress
from training.ranks import join_ranks, leave_ranks
from training.run import RunFailed, conclude, is_over, noting_how_it_ends, say_how_it_begins, say_what_is_built
from training.safeguard import DATASET, Safeguard
from training.sampling import Sampling
from training.signals import StopAtSignal
from training.weights import load_initial_weights, read_trained, trained_pipeline

__all__ = [
    'DATASET', 'LABEL', 'METRIC', 'CaptionDrop', 'Evaluations', 'Progress', 'RandomFlip', 'RunFailed', 'Safeguard',
    'Sampling', 'StopAtSignal', 'WholeCheckpoints', 'build_loggers', 'build_schedule', 'checkpoints_in', 'conclude',
    'is_over', 'join_ranks', 'leave_ranks', 'load_checkpoint', 'load_initial_weights',
    'newest_checkpoint', 'noting_how_it_ends', 'read_trained', 'saving_alone', 'say_how_it_begins',
    'say_what_is_built', 'tensors_alone_are_loaded', 'trained_pipeline',
]
