"""Make a resumed training equal to one that was never interrupted, in this program and in programs of your own."""
from typing import Any

import numpy as np
import torch
from composer import Callback
from composer.utils import dist

from sdbench.inputs.stream import VerifiedDataset


class ExactResume(Callback):
    """Resumes the noise, the data and the optimizer of a training exactly.

    Composer restores the random state in the middle of an epoch only if it iterates over the skipped batches itself,
    which it does not do with StreamingDataLoader. Therefore every batch gets a seed from run, batch and rank.

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def before_load(self, state, logger) -> None:
        for optimizer in state.optimizers:
            optimizer.register_load_state_dict_pre_hook(keep_arguments)

    def fit_start(self, state, logger) -> None:
        """Continue the data at the right sample, and bring the optimizer state into the right memory layout."""
        dataset = state.train_dataloader.dataset
        if state.timestamp.batch.value and isinstance(dataset, VerifiedDataset):
            dataset.resume_at(state.timestamp.epoch.value, state.timestamp.sample_in_epoch.value)

        # A checkpoint has the moments in the memory format of its run. A fused optimizer needs them in the format of
        # the weights, because it pairs both by their position in memory.
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
    """Return the saved state of an optimizer with the arguments of the new optimizer, such as `fused`.

    Without this, a resumed optimizer would have all arguments of the saved one, whatever the flags are now. Only the
    learning rate comes from the saved state, because the schedule has changed it.
    """
    groups = []
    for group, saved in zip(optimizer.param_groups, state['param_groups'], strict=True):
        groups.append({**saved, **group, 'params': saved['params'], 'lr': saved['lr']})
    return {**state, 'param_groups': groups}
