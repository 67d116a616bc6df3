"""What is changed by chance in a batch: captions that are left out, images that are mirrored."""
import numpy as np
import torch
from composer.core import Algorithm, Event, State
from composer.utils import dist

from sdbench.inputs.images import FLIP


class RandomBatchTransform(Algorithm):
    """Changes a share of the samples of each batch.

    Which ones depends on the seed, the number of the batch and the place in it, over all ranks, so that a run that is
    resumed changes the same, and each epoch others. The noise of the batch stays what it was.

    Args:
        probability: of the samples, 0 to 1.
        seed: of the run.
    """
    stream: int  # of random numbers, beside that of the noise

    def __init__(self, probability: float, seed: int):
        self.probability = probability
        self.seed = seed

    def __repr__(self) -> str:  # Composer keeps it in checkpoints
        return f'{type(self).__name__}(probability={self.probability})'

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BATCH_START

    def chosen(self, state: State) -> torch.Tensor:
        """Which samples of this rank's part of the batch are changed, bool (B,)."""
        device_batch = len(state.batch['caption'])
        seeds = np.random.SeedSequence((self.seed, state.timestamp.batch.value), spawn_key=(self.stream,))
        drawn = np.random.default_rng(seeds).random(device_batch * dist.get_world_size())  # of all ranks
        first = device_batch * dist.get_global_rank()
        return torch.from_numpy(drawn[first:first + device_batch] < self.probability)


class CaptionDrop(RandomBatchTransform):
    """Puts the empty caption in the place of a share of the captions, as classifier-free guidance needs it.

    The model so learns to draw without a caption as well (Ho and Salimans 2022).

    Args:
        probability: of the captions, 0 to 1.
        seed: of the run.
        empty_caption: int64 (77,), the token ids of no words.
    """
    stream = 1

    def __init__(self, probability: float, seed: int, empty_caption: torch.Tensor):
        super().__init__(probability, seed)
        self.empty_caption = empty_caption

    def apply(self, event: Event, state: State, logger) -> None:
        captions = state.batch['caption']  # (B, 77); a synthetic batch is one for all steps, so it is not written to
        drop = self.chosen(state).to(captions.device)  # (B,)
        empty_caption = self.empty_caption.to(captions.device)
        state.batch = {**state.batch, 'caption': torch.where(drop[:, None], empty_caption, captions)}


class RandomFlip(RandomBatchTransform):
    """Says of each image, with a chance of one half, that it is to be mirrored; `data.normalize` does it on the device.

    Args:
        seed: of the run.
    """
    stream = 2

    def __init__(self, seed: int):
        super().__init__(0.5, seed)

    def apply(self, event: Event, state: State, logger) -> None:
        """Add `flip` bool (B,) to the batch."""
        state.batch = {**state.batch, FLIP: self.chosen(state)}
