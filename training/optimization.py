"""The learning rate over time."""
from composer import optim

SCHEDULES = {  # without a warm-up, and after one
    'constant': (optim.ConstantScheduler, optim.ConstantWithWarmupScheduler),
    'cosine': (optim.CosineAnnealingScheduler, optim.CosineAnnealingWithWarmupScheduler),
    'linear': (optim.LinearScheduler, optim.LinearWithWarmupScheduler),
}


def build_schedule(name: str, warmup: str | None) -> optim.ComposerScheduler:
    """The learning rate over time, as a share of --learning_rate: a warm-up or none, then to the end.

    Args:
        name: one of SCHEDULES.
        warmup: a time, such as 10000ba.
    """
    plain, with_warmup = SCHEDULES[name]
    if warmup:
        return with_warmup(warmup)
    return plain()
