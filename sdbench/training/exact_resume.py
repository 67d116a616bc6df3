"""What makes a run that resumes equal to one that never stopped, in this program and in those of others."""
from typing import Any

import numpy as np
import torch
from composer import Callback
from composer.utils import dist

from sdbench.inputs.stream import VerifiedDataset


class ExactResume(Callback):
    """Lets a training that resumes go on exactly: its noise, its data and its optimizer.

    Composer restores the random state in the middle of an epoch only where it spins the loader itself, so every batch
    has a seed of its own, by run, batch and rank.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def before_load(self, state, logger) -> None:
        for optimizer in state.optimizers:
            optimizer.register_load_state_dict_pre_hook(keep_arguments)

    def fit_start(self, state, logger) -> None:
        """Let the data and the optimizer go on where the weights are."""
        dataset = state.train_dataloader.dataset
        if state.timestamp.batch.value and isinstance(dataset, VerifiedDataset):
            dataset.resume_at(state.timestamp.epoch.value, state.timestamp.sample_in_epoch.value)

        # A checkpoint has moments in the memory format of its run, and a fused optimizer pairs weights and moments as
        # they lie in memory.
        for optimizer in state.optimizers:
            for parameter, moments in optimizer.state.items():
                for name, moment in moments.items():
                    if isinstance(moment, torch.Tensor) and moment.shape == parameter.shape:
                        moments[name] = torch.empty_like(parameter, dtype=moment.dtype).copy_(moment)

    def batch_start(self, state, logger) -> None:
        """Seed the batch's noise and timesteps."""
        seeds = np.random.SeedSequence((self.seed, state.timestamp.batch.value, dist.get_global_rank()))
        torch.manual_seed(int(seeds.generate_state(1)[0]))


def keep_arguments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state that an optimizer loads with the arguments that it was made with, such as `fused`.

    The learning rate is that of the state: the schedule has brought it there. Without this a resumed optimizer has all
    arguments of the one that was saved, whatever the flags say now.
    """
    groups = []
    for group, saved in zip(optimizer.param_groups, state['param_groups'], strict=True):
        groups.append({**saved, **group, 'params': saved['params'], 'lr': saved['lr']})
    return {**state, 'param_groups': groups}
