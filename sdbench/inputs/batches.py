"""What a batch passes through on its way from the shards to the model: its samples, the bad ones, and its scale."""
import math
import sys
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from sdbench.errors import BadSample, DataError, UserError
from sdbench.inputs.captions import CAPTIONS, ONE_CAPTION, from_columns
from sdbench.inputs.images import resize
from sdbench.inputs.shards import MOMENTS

NOISE = 'noise'  # float32 (B, 8, H/8, W/8): 4 channels for the draw of the latents, and 4 to be added to them
TIMESTEP = 'timestep'  # int64 (B,)


def decode_sample(columns: Mapping, is_counted: bool, decode: Callable[[bytes], torch.Tensor]) -> dict:
    """Return `image` uint8 (3, H, W) or `moments` float16 (8, H/8, H/8), the first `caption`, and all `captions`.

    Args:
        columns: of the sample in its shard.
        is_counted: as `from_columns` takes it.
        decode: makes an image of the bytes of its file.

    Raises UserError if the sample is bad.
    """
    if not columns[ONE_CAPTION].strip():
        raise BadSample('no caption')
    captions = {ONE_CAPTION: columns[ONE_CAPTION], CAPTIONS: from_columns(columns, is_counted)}
    if MOMENTS in columns:
        return {MOMENTS: torch.from_numpy(columns[MOMENTS].copy()), **captions}
    return {'image': decode(columns['jpg']), **captions}


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


def stack_images(images: list[torch.Tensor], image_size: int) -> torch.Tensor:
    """Stack images into uint8 (B, 3, H, H). H is their size if all have the same; else all become `image_size`."""
    if len({image.shape for image in images}) > 1:
        images = [resize(image, image_size) for image in images]
    # decoders lay pixels out as (H, W, 3): copying them in that order is 6 times as fast as turning them here
    return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)


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


def normalize(batch: dict[str, torch.Tensor], image_size: int | None = None) -> dict[str, torch.Tensor]:
    """Bring a batch's images as stored, uint8 (B, 3, H, H), to float32 (B, 3, image_size, image_size) in [-1, 1].

    Without `image_size` they keep their size. Images that are floats are in [-1, 1] already, and stay so. A batch of
    moments stays as it is. All stay on their device.

    Raises UserError if the images are whole numbers of another type, so that nothing says what is black and what is
    white.
    """
    if 'image' not in batch:
        return batch
    images = batch['image']
    is_bytes = images.dtype == torch.uint8
    if is_bytes:
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
    elif not images.is_floating_point():
        raise UserError(f'images of {images.dtype}; give bytes (uint8), or floats in [-1, 1]')
    if image_size is not None and images.shape[-1] != image_size:
        images = F.interpolate(images, size=(image_size, image_size), mode='bilinear')
    if is_bytes:
        images = images / 127.5 - 1
    return {**batch, 'image': images}
