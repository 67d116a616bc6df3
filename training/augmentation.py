"""What is changed by chance in a batch: captions that are left out, images that are mirrored."""
import numpy as np
import torch
from composer.core import Algorithm, Event, State
from composer.utils import dist

from inputs.images import FLIP

# streams of random numbers beside that of the noise
DRAWS_OF_CAPTION_DROP = 1
DRAWS_OF_FLIP = 2


class CaptionDrop(Algorithm):
    """Puts the empty caption in the place of a share of the captions, as classifier-free guidance needs it.

    The model so learns to draw without a caption as well (Ho and Salimans 2022).
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
        return torch.from_numpy(draws_of_batch(self.seed, batch, DRAWS_OF_CAPTION_DROP, device_batch) < self.share)


class RandomFlip(Algorithm):
    """Says of each image, with a chance of one half, that it is to be mirrored; `data.normalize` does it on the device.

    Which ones depends on the seed, the number of the batch and the place in it, over all ranks, so that a run that is
    resumed mirrors the same, and each epoch others. The noise of the batch stays what it was.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def __repr__(self) -> str:  # Composer keeps it in checkpoints
        return 'RandomFlip()'

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BATCH_START

    def apply(self, event: Event, state: State, logger) -> None:
        """Add `flip` bool (B,) to the batch."""
        drawn = draws_of_batch(self.seed, state.timestamp.batch.value, DRAWS_OF_FLIP, len(state.batch['caption']))
        state.batch = {**state.batch, FLIP: torch.from_numpy(drawn < 0.5)}


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
