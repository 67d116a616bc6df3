"""What moves the weights beside the optimizer: the learning rate's schedule and the clipping of gradients."""
from composer.algorithms import GradientClipping
from composer.core import Event, State
from composer.optim import (
    ComposerScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
)

from training.safeguard import gradients_are_finite

SCHEDULES = {  # without a warm-up, and after one
    'constant': (ConstantScheduler, ConstantWithWarmupScheduler),
    'cosine': (CosineAnnealingScheduler, CosineAnnealingWithWarmupScheduler),
    'linear': (LinearScheduler, LinearWithWarmupScheduler),
}


class FiniteGradientClipping(GradientClipping):
    """Composer's own clipping by the norm, which leaves gradients alone whose norm is not finite.

    Composer runs algorithms before callbacks. Without this: clipping to the share 1 / inf makes zeros of gradients
    that are finite themselves but have too large a norm, and Safeguard finds nothing wrong with them.
    Test: test_gradients_of_an_infinite_norm_are_not_clipped_to_nothing.

    Args:
        norm: of all gradients together, at most.
    """

    def __init__(self, norm: float):
        super().__init__('norm', norm)

    def __repr__(self) -> str:  # Composer keeps it in checkpoints
        return f'FiniteGradientClipping(norm={self.clipping_threshold})'

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_TRAIN_BATCH and bool(gradients_are_finite(state))


def build_schedule(name: str, warmup: str | None) -> ComposerScheduler:
    """The learning rate over time, as a share of --learning_rate: a warm-up or none, then to the end.

    Args:
        name: one of SCHEDULES.
        warmup: a time, such as 10000ba.
    """
    plain, with_warmup = SCHEDULES[name]
    if warmup:
        return with_warmup(warmup)
    return plain()
