"""Random augmentation of batches: captions are dropped, and images mirrored."""
import numpy as np
import torch
from composer.core import Algorithm, Event, State
from composer.utils import dist

from sdbench.flags.train import Train
from sdbench.inputs.images import FLIP
from sdbench.models.loading import ModelFiles, build_fitting_tokenizer


class RandomBatchTransform(Algorithm):
    """Changes a random share of the samples of each batch.

    The choice depends on the seed, the number of the batch, and the position in the batch over all ranks. So a resumed
    run makes the same choice, and each epoch another. The noise of the batch does not change.

    Args:
        probability: that a sample is changed, 0 to 1.
        seed: of the run.
    """
    stream: int  # of random numbers, apart from that of the noise

    def __init__(self, probability: float, seed: int):
        self.probability = probability
        self.seed = seed

    def __repr__(self) -> str:  # Composer keeps it in checkpoints
        return f'{type(self).__name__}(probability={self.probability})'

    def match(self, event: Event, state: State) -> bool:
        return event == Event.BATCH_START

    def chosen(self, state: State) -> torch.Tensor:
        """Choose the samples to change of this rank's share of the batch: bool (B,)."""
        device_batch_size = len(state.batch['caption'])
        seeds = np.random.SeedSequence((self.seed, state.timestamp.batch.value), spawn_key=(self.stream,))
        drawn = np.random.default_rng(seeds).random(device_batch_size * dist.get_world_size())  # of all ranks
        first = device_batch_size * dist.get_global_rank()
        return torch.from_numpy(drawn[first:first + device_batch_size] < self.probability)


class CaptionDrop(RandomBatchTransform):
    """Replaces a random share of the captions by the empty one, for classifier-free guidance.

    So the model also learns to draw without a caption (Ho and Salimans 2022).

    Args:
        probability: that a caption is replaced, 0 to 1.
        seed: of the run.
        empty_caption: int64 (77,), the token ids of the empty caption.
    """
    stream = 1

    def __init__(self, probability: float, seed: int, empty_caption: torch.Tensor):
        super().__init__(probability, seed)
        self.empty_caption = empty_caption

    def apply(self, event: Event, state: State, logger) -> None:
        captions = state.batch['caption']  # (B, 77); not changed in place: synthetic data is one batch for all steps
        drop = self.chosen(state).to(captions.device)  # (B,)
        empty_caption = self.empty_caption.to(captions.device)
        state.batch = {**state.batch, 'caption': torch.where(drop[:, None], empty_caption, captions)}


class RandomFlip(RandomBatchTransform):
    """Chooses the images to mirror, each with probability 0.5; `inputs.images.normalize` mirrors them on the device.

    Args:
        seed: of the run.
    """
    stream = 2

    def __init__(self, seed: int):
        super().__init__(0.5, seed)

    def apply(self, event: Event, state: State, logger) -> None:
        """Add `flip` bool (B,) to the batch."""
        state.batch = {**state.batch, FLIP: self.chosen(state)}


def build_augmentation(settings: Train, files: ModelFiles | None = None) -> list[Algorithm]:
    """Build what a run changes in its batches; `files` are those of its model, for the tokens of the empty caption."""
    algorithms = []
    if settings.caption_drop:
        tokenizer = build_fitting_tokenizer(settings.tokenizer, files)
        empty_caption = torch.tensor(tokenizer.encode('').ids)  # (77,)
        algorithms.append(CaptionDrop(settings.caption_drop, settings.seed, empty_caption))
    if settings.random_flip:
        algorithms.append(RandomFlip(settings.seed))
    return algorithms
