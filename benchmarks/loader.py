"""Time the streamed loader in one process, on 256 px JPEGs for training at 512 px, against the original's way.

    python -m benchmarks.loader [FOLDER_OF_MDS_SHARDS]     # default: made here, 20 KB an image

The original's way: Pillow decodes, resizes to 512 px and ToTensor makes floats on the CPU, and the slow tokenizer is
called once a sample. Both run on one thread, in turn; the ratio comes last.

docs/speed.md has the ratio of 2026-11-20, on two cores of an Intel Xeon with torch 2.7.0.
"""
import io
import statistics
import sys
import tempfile
import time

import numpy as np
import torch
from PIL import Image
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from torchvision import transforms
from transformers import CLIPTokenizer

from benchmarks.photographs import photograph
from data import StreamingLAIONDataset, build_loader
from sdbench.inputs.shards import MDS_COLUMNS
from sdbench.inputs.tokenizer import build_tokenizer, clip_tokenizer

IMAGE_SIZE = 512  # pixels to train at
BATCH_SIZE = 32
NUM_SAMPLES = 512
PICTURES = 512  # that differ


class OriginalDataset(StreamingDataset):
    """Samples as mosaicml/diffusion-benchmark reads them."""

    def __init__(self, local: str, tokenizer: CLIPTokenizer):
        super().__init__(local=local, batch_size=BATCH_SIZE)
        self.tokenizer = tokenizer
        self.transform = transforms.Compose([transforms.Resize((IMAGE_SIZE, IMAGE_SIZE)), transforms.ToTensor()])

    def __getitem__(self, index: int) -> dict:
        sample = super().__getitem__(index)
        image = self.transform(Image.open(io.BytesIO(sample['jpg'])).convert('RGB'))
        ids = self.tokenizer(sample['caption'], padding='max_length', max_length=77, truncation=True)['input_ids']
        return {'image': image, 'caption': torch.tensor(ids)}


def write_photographs(folder: str, num_samples: int) -> None:
    """Write shards of photographs with captions of 14 words; of many samples each picture comes several times."""
    random = np.random.default_rng(0)
    pictures = [photograph(random) for _ in range(min(num_samples, PICTURES))]
    words = 'a photo of the old red house by sea with two dogs and their small boat under grey sky'.split()
    with MDSWriter(out=folder, columns=MDS_COLUMNS) as writer:
        for number in range(num_samples):
            caption = ' '.join(random.choice(words, 14))
            writer.write({'jpg': pictures[number % len(pictures)], 'caption': caption})


def images_per_sec(loader) -> float:
    """Time one epoch of a loader; return images a second."""
    start = time.perf_counter()
    images = sum(len(batch['image']) for batch in loader)
    return images / (time.perf_counter() - start)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        # the samples
        shards = sys.argv[1] if len(sys.argv) > 1 else f'{folder}/shards'
        if len(sys.argv) == 1:
            write_photographs(shards, NUM_SAMPLES)

        # the two loaders, in turn
        clip_tokenizer().model.save(folder)  # vocab.json and merges.txt
        slow = CLIPTokenizer.from_pretrained(folder, pad_token='!')
        original = StreamingDataLoader(OriginalDataset(shards, slow), batch_size=BATCH_SIZE)
        ours = build_loader(StreamingLAIONDataset(shards, image_size=IMAGE_SIZE, batch_size=BATCH_SIZE), BATCH_SIZE, 0,
                            build_tokenizer()).dataloader
        speeds = [(images_per_sec(original), images_per_sec(ours)) for _ in range(5)]
    their_median, our_median = (statistics.median(column) for column in zip(*speeds, strict=True))
    print(f'the original\'s way {their_median:.0f} images/s   ours {our_median:.0f} images/s')
    print(f'loader ratio {our_median / their_median:.1f}')


if __name__ == '__main__':
    main()
