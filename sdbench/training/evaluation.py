"""Samples that are held out for an evaluation, and what a run says and keeps of each evaluation on them."""
import math
import sys

import numpy as np
import torch
from composer import Callback
from composer.utils import dist
from torch.utils.data import Dataset
from tqdm import tqdm

LABEL = 'eval'  # of Composer's Evaluator; its loss is logged as metrics/eval/MeanSquaredError
METRIC = 'MeanSquaredError'
NOISE = 'noise'  # float32 (B, 8, H/8, W/8): 4 channels for the draw of the latents, and 4 to be added to them
TIMESTEP = 'timestep'  # int64 (B,)


class HeldOutSamples(Dataset):
    """The samples of a dataset by index, each with a noise and a timestep that depend on its index and the seed alone.

    So the loss on them is the same on any number of ranks, in microbatches of any size, at any time of a training. A
    sample that does not decode is replaced by another.

    Args:
        samples: a StreamingLAIONDataset.
        latent_size: height and width of the latents that are trained on.
        num_timesteps: of the noise schedule.
        seed: of the noise and of the timesteps.
        is_known: whether the training is known to have none of them.
    """

    def __init__(self, samples, latent_size: int, num_timesteps: int, seed: int, is_known: bool = True):
        self.samples = samples
        self.image_size = samples.image_size
        self.latent_size = latent_size
        self.num_timesteps = num_timesteps
        self.seed = seed
        self.is_known = is_known

    def __len__(self) -> int:
        return self.samples.num_samples

    def __getitem__(self, index: int) -> dict:
        """Return a sample with its `noise`, float32 (8, H/8, W/8), and its `timestep`, int64 ()."""
        seeds = np.random.SeedSequence((self.seed, index))
        generator = torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))
        side = self.latent_size
        draws = {NOISE: torch.randn(8, side, side, generator=generator),
                 TIMESTEP: torch.randint(self.num_timesteps, (), generator=generator)}
        return self.samples.good_sample(index) | draws


class Evaluations(Callback):
    """Says each evaluation's loss on rank 0, and remembers what the record says of those of this process."""

    def __init__(self):
        self.found = {'evaluations': [], 'eval_loss': None, 'eval_batch': None, 'eval_samples': None,
                      'eval_held_out': None}

    def eval_end(self, state, logger) -> None:
        # what the record has, which all ranks know
        loss = float(state.eval_metrics[LABEL][METRIC].compute())  # over all ranks
        batch = state.timestamp.batch.value
        samples = state.dataloader.dataset
        is_known = getattr(samples, 'is_known', False)  # a program's own may be any dataset
        kept = loss if math.isfinite(loss) else None
        self.found['evaluations'].append([state.timestamp.sample.value, kept])
        self.found |= {'eval_loss': kept, 'eval_batch': batch, 'eval_samples': len(samples),
                       'eval_held_out': is_known}

        # what people see, over the bar
        which = 'the held-out samples'
        if not is_known:
            which = 'samples that are not known to be held out'
        if dist.get_global_rank() == 0:
            tqdm.write(f'batch {batch}: loss {loss:.4g} on {which}', file=sys.stderr)

    def figures(self, all_ranks: bool) -> dict:
        return self.found
