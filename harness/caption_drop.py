"""Captions that are left out, so that the model also learns to draw without one (classifier-free guidance)."""
import numpy as np
import torch
from composer.core import Algorithm, Event, State
from composer.utils import dist

DRAWS = 1  # a stream of random numbers beside that of the noise


class CaptionDrop(Algorithm):
    """Puts the empty caption in the place of a share of the captions.

    Which ones depends on the seed, the number of the batch and the place in it, over all ranks, so that a run that is
    resumed leaves out the same. The noise of the batch stays what it was.

    Args:
        share: of the captions, 0 to 1.
        seed: of the run.
        empty_caption: int64 (77,), the token ids of no words.
    """

    def __init__(self, share: float, seed: int, empty_caption: torch.Tensor):
        self.share = share
        self.seed = seed
        self.empty_caption = empty_caption

    def __repr__(self) -> str:  # Composer keeps it in checkpoints
        return f'CaptionDrop(share={self.share})'

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BATCH_START

    def apply(self, event: Event, state: State, logger) -> None:
        captions = state.batch['caption']  # (B, 77); a synthetic batch is one for all steps, so it is not written to
        drop = self.dropped(state.timestamp.batch.value, len(captions)).to(captions.device)  # (B,)
        empty_caption = self.empty_caption.to(captions.device)
        state.batch = {**state.batch, 'caption': torch.where(drop[:, None], empty_caption, captions)}

    def dropped(self, batch: int, device_batch: int) -> torch.Tensor:
        """Which captions of this rank's part of a batch are left out, bool (device_batch,)."""
        return torch.from_numpy(draws_of_batch(self.seed, batch, DRAWS, device_batch) < self.share)


def draws_of_batch(seed: int, batch: int, stream: int, device_batch: int) -> np.ndarray:
    """A number from 0 to 1 for each sample of this rank's part of a batch, float64 (device_batch,).

    Args:
        seed: of the run.
        batch: its number.
        stream: draws of different streams have nothing to do with each other.
        device_batch: samples a device.
    """
    seeds = np.random.SeedSequence((seed, batch), spawn_key=(stream,))
    drawn = np.random.default_rng(seeds).random(device_batch * dist.get_world_size())  # of all ranks
    first = device_batch * dist.get_global_rank()
    return drawn[first:first + device_batch]
