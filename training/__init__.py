"""A training, what keeps it alive and what shows it: ranks, checkpoints, safeguards, evaluations, drawings, loggers."""
from training.augmentation import CaptionDrop, RandomFlip
from training.checkpoints import (
    WholeCheckpoints,
    checkpoints_in,
    load_checkpoint,
    newest_checkpoint,
    saving_alone,
    written_whole,
)
from training.evaluation import METRIC, Evaluations, build_evaluator, open_held_out
from training.loggers import build_loggers
from training.optimization import build_schedule
from training.progress import Progress
from training.ranks import join_ranks, leave_ranks, on_rank_0, wait_at_most
from training.run import conclude, is_over, noting_how_it_ends, resuming, say_how_it_begins, say_what_is_built
from training.safeguard import Safeguard, flags_to_keep
from training.sampling import Sampling
from training.signals import StopAtSignal
from training.weights import load_initial_weights, read_trained, trained_pipeline

__all__ = [
    'METRIC', 'CaptionDrop', 'Evaluations', 'Progress', 'RandomFlip', 'Safeguard', 'Sampling', 'StopAtSignal',
    'WholeCheckpoints', 'build_evaluator', 'build_loggers', 'build_schedule', 'checkpoints_in', 'conclude',
    'flags_to_keep', 'is_over', 'join_ranks', 'leave_ranks', 'load_checkpoint', 'load_initial_weights',
    'newest_checkpoint', 'noting_how_it_ends', 'on_rank_0', 'open_held_out', 'read_trained', 'resuming',
    'saving_alone', 'say_how_it_begins', 'say_what_is_built', 'trained_pipeline', 'wait_at_most', 'written_whole',
]
