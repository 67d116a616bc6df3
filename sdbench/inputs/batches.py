"""Turn samples from shards into batches: choose captions, decode, collate, count bad samples, and scale the images."""
import math
import sys
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from tokenizers import Tokenizer

from sdbench.errors import BadSample, DataError, UserError
from sdbench.inputs.shards import MOMENTS
from sdbench.inputs.tokenizer import token_ids

ONE_CAPTION = 'caption'  # column with the first caption of an image, and the name of captions that have no other name
CAPTIONS = 'captions'  # column with all captions by name, and the key in index.json that counts the captions by name
MDS_CAPTION_COLUMNS = {ONE_CAPTION: 'str', CAPTIONS: 'json'}

Named = dict[str, list[str]]  # the captions of an image, by name: {'short': ['a cat'], 'long': [...]}

# An evaluation's batch also has:
NOISE = 'noise'  # float32 (B, 8, H/8, W/8): 4 channels to sample the latents with, and 4 channels to add to the latents
TIMESTEP = 'timestep'  # int64 (B,)


def to_columns(captions: Named) -> dict:
    """Return the MDS columns for an image's captions. CAPTIONS is empty for a single caption called ONE_CAPTION."""
    captions = {name: texts for name, texts in captions.items() if texts}
    [first, *_] = [text for texts in captions.values() for text in texts]
    if captions == {ONE_CAPTION: [first]}:
        captions = {}
    return {ONE_CAPTION: first, CAPTIONS: captions}


def from_columns(columns: Mapping, is_ours: bool) -> Named:
    """Return the captions of an image, by name, from the MDS columns of its sample.

    `is_ours` tells whether index.json has the key CAPTIONS, which only our converter writes. In shards of another
    program a column named `captions` may hold anything, so it is ignored.
    """
    if is_ours and columns.get(CAPTIONS):
        return columns[CAPTIONS]
    return {ONE_CAPTION: [columns[ONE_CAPTION]]}


def require_names(wanted: Iterable[str], index: dict, flag: str, data: str) -> None:
    """Raise UserError, which names `flag` and `data`, if a dataset has no captions with one of the wanted names."""
    names = index.get(CAPTIONS, [ONE_CAPTION])
    for name in wanted:
        if name not in names:
            raise UserError(f'{flag} {name}: {data} has no captions of that name; it has {", ".join(names)}')


def choose_caption(captions: Named, weights: Mapping[str, float], generator: np.random.Generator) -> str:
    """Choose one of an image's captions at random.

    The weight of a name is divided equally among the captions with that name. Every caption has the same chance if
    there are no weights, or if none of the image's captions has a weight.
    """
    texts = [text for texts_with_name in captions.values() for text in texts_with_name]
    chances = np.array([weights.get(name, 0) / len(texts_with_name)
                        for name, texts_with_name in captions.items() for _ in texts_with_name], dtype=float)
    return texts[generator.choice(len(texts), p=chances / chances.sum() if chances.any() else None)]


def decode_sample(columns: Mapping, is_ours: bool, decode: Callable[[bytes], torch.Tensor]) -> dict:
    """Return `image` uint8 (3, H, W) or `moments` float16 (8, H/8, H/8), the first `caption`, and all `captions`.

    `decode` decodes the bytes of an image file; `from_columns` explains `is_ours`.

    Raises BadSample if the sample has no caption or its image does not decode.
    """
    if not columns[ONE_CAPTION].strip():
        raise BadSample('no caption')
    captions = {ONE_CAPTION: columns[ONE_CAPTION], CAPTIONS: from_columns(columns, is_ours)}
    if MOMENTS in columns:
        return {MOMENTS: torch.from_numpy(columns[MOMENTS].copy()), **captions}
    return {'image': decode(columns['jpg']), **captions}


def collate(samples: list[dict], tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Return a batch: `image` uint8 (B, 3, H, H) or `moments` float16 (B, 8, H/8, H/8), and `caption` int64 (B, 77).

    An evaluation's batch also has `noise` float32 (B, 8, H/8, W/8) and `timestep` int64 (B,). If samples were bad and
    were replaced, `bad_samples` lists the (index, reason) of each of them.
    """
    if MOMENTS in samples[0]:
        batch = {MOMENTS: torch.stack([sample[MOMENTS] for sample in samples])}
    else:
        batch = {'image': stack_images([sample['image'] for sample in samples])}
    batch['caption'] = torch.tensor(token_ids(tokenizer, [sample['caption'] for sample in samples]))

    # Pass on the noise and timesteps of an evaluation, and the list of bad samples.
    for name in (NOISE, TIMESTEP):
        if name in samples[0]:
            batch[name] = torch.stack([sample[name] for sample in samples])
    bad_samples = [entry for sample in samples for entry in sample.get('bad', ())]
    if bad_samples:
        batch['bad_samples'] = bad_samples
    return batch


def stack_images(images: list[torch.Tensor]) -> torch.Tensor:
    """Stack images of one size into uint8 (B, 3, H, H)."""
    # Stack in the memory layout of the decoders, (H, W, 3), which copies 6 times as fast as converting the layout here.
    return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)


def bad_sample_line(index: int, reason: str) -> str:
    return f'bad sample {index} is skipped: {reason}'


class BadSamples:
    """Print each bad sample once, and end the run if more than the fraction `limit` of the samples is bad.

    Among few samples, more than the limit can be bad by chance. Therefore up to three standard deviations more are
    accepted.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.samples_read = 0
        self.found: set[int] = set()  # indices of the bad samples so far

    def __call__(self, batch: dict) -> dict:
        """Return the batch without its `bad_samples`. Raises DataError if too many are bad."""
        self.samples_read += len(batch['caption'])
        for index, reason in batch.pop('bad_samples', ()):
            if index not in self.found:
                self.found.add(index)
                print(bad_sample_line(index, reason), file=sys.stderr)
        expected = self.limit * self.samples_read
        if len(self.found) > math.ceil(expected + 3 * math.sqrt(expected)):
            raise DataError(f'{len(self.found):,} of {self.samples_read:,} samples are bad, more than the fraction '
                            f'--max_bad_samples {self.limit:g}; fix the data or raise the flag')
        return batch


def normalize(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scale a batch's images, uint8 (B, 3, H, H), to float32 in [-1, 1], on their device.

    Float images are taken to be in [-1, 1] already. They and a batch of moments are returned unchanged.

    Raises UserError if the images are integers of another type, because their range of values is unknown.
    """
    if 'image' not in batch or batch['image'].is_floating_point():
        return batch
    if batch['image'].dtype != torch.uint8:
        raise UserError(f'images have the type {batch["image"].dtype}; give bytes (uint8), or floats in [-1, 1]')
    images = batch['image'].to(torch.float32, memory_format=torch.contiguous_format)
    return {**batch, 'image': images / 127.5 - 1}
