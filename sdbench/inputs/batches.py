"""What a batch passes through from its samples to the model: they are collated, and bad ones named and counted."""
import math
import sys

import torch
from tokenizers import Tokenizer

from sdbench.errors import DataError
from sdbench.inputs.images import stack_images
from sdbench.inputs.shards import MOMENTS

NOISE = 'noise'  # float32 (B, 8, H/8, W/8): 4 channels for the draw of the latents, and 4 to be added to them
TIMESTEP = 'timestep'  # int64 (B,)


def collate(samples: list[dict], tokenizer: Tokenizer, image_size: int) -> dict[str, torch.Tensor]:
    """Return a batch: `image` uint8 (B, 3, H, H) or `moments`, `caption` int64 (B, 77), and any `bad_samples`.

    An evaluation's has its draws as well: `noise` float32 (B, 8, H/8, W/8) and `timestep` int64 (B,).
    """
    # images or moments, and captions
    if MOMENTS in samples[0]:
        batch = {MOMENTS: torch.stack([sample[MOMENTS] for sample in samples])}
    else:
        batch = {'image': stack_images([sample['image'] for sample in samples], image_size)}
    tokenizer.encode_special_tokens = True  # else "!" is padding: pickling loses it, as for a loader's process on macOS
    captions = tokenizer.encode_batch([sample['caption'] for sample in samples])
    batch['caption'] = torch.tensor([caption.ids for caption in captions])

    # what an evaluation has drawn, and the samples that others stand in for
    for name in (NOISE, TIMESTEP):
        if name in samples[0]:
            batch[name] = torch.stack([sample[name] for sample in samples])
    bad_samples = [entry for sample in samples for entry in sample.get('bad', ())]
    if bad_samples:
        batch['bad_samples'] = bad_samples
    return batch


def bad_sample_line(index: int, reason: str) -> str:
    return f'bad sample {index} is left out: {reason}'


class BadSamples:
    """Names each bad sample once, and ends the run where too many are bad.

    By chance more than the limit can be bad among few samples: up to three standard deviations more are accepted.

    Args:
        limit: the share of samples that may be bad.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.read = 0  # samples so far
        self.found: set[int] = set()  # the bad ones

    def __call__(self, batch: dict) -> dict:
        """Return the batch without its `bad_samples`. Raises DataError if too many are bad."""
        self.read += len(batch['caption'])
        for index, reason in batch.pop('bad_samples', ()):
            if index not in self.found:
                self.found.add(index)
                print(bad_sample_line(index, reason), file=sys.stderr)
        expected = self.limit * self.read
        if len(self.found) > math.ceil(expected + 3 * math.sqrt(expected)):
            raise DataError(f'{len(self.found):,} of {self.read:,} samples are bad, more than --max_bad_samples '
                            f'{self.limit:g} of them; mend the data or raise it')
        return batch
