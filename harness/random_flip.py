"""Images that are mirrored by chance, left to right."""
import torch
from composer.core import Algorithm, Event, State

from harness.caption_drop import draws_of_batch
from inputs.images import FLIP

DRAWS = 2  # a stream of random numbers beside those of the noise and the captions


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
        drawn = draws_of_batch(self.seed, state.timestamp.batch.value, DRAWS, len(state.batch['caption']))
        state.batch = {**state.batch, FLIP: torch.from_numpy(drawn < 0.5)}
