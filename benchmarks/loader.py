"""Compare the speed of the streamed loader with the original loader, on 256 px JPEGs for training at 512 px.

    python -m benchmarks.loader     # on generated images, 20 KB each

In the original loader Pillow decodes and resizes images to 512 px, ToTensor converts them to floats on the CPU, and the
slow tokenizer is called for each sample. Both loaders run in one process with one thread and take turns. The ratio
comes last.

docs/speed.md has the ratio from 2026-11-20, on two cores of an Intel Xeon with torch 2.7.0.
"""
import io
import tempfile
from collections import deque

import numpy as np
import torch
from PIL import Image
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from torchvision import transforms
from transformers import CLIPTokenizer

from benchmarks.ema_update import medians_in_turn
from data import StreamingLAIONDataset, build_loader
from sdbench.inputs.shards import MDS_COLUMNS
from sdbench.inputs.tokenizer import build_tokenizer, clip_tokenizer

IMAGE_SIZE = 512  # pixels, of the training
BATCH_SIZE = 32
NUM_SAMPLES = 512
MOST_DIFFERENT_IMAGES = 512  # more samples repeat these images
SIDE = 256  # pixels of a stored image


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


def photograph(random: np.random.Generator) -> bytes:
    """Return a JPEG of about 20 KB with the detail of a photograph: noise at all scales, the coarsest strongest."""
    picture = np.zeros((SIDE, SIDE, 3))
    for size in (4, 16, 64, 256):
        noise = Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8))
        picture += np.asarray(noise.resize((SIDE, SIDE), Image.BICUBIC), float) / size ** 0.5
    buffer = io.BytesIO()
    Image.fromarray(np.uint8((picture - picture.min()) * 255 / np.ptp(picture))).save(buffer, 'JPEG', quality=88)
    return buffer.getvalue()


def write_photographs(folder: str, num_samples: int) -> None:
    """Write shards of images with captions of 14 words. If there are many samples, images repeat."""
    random = np.random.default_rng(0)
    pictures = [photograph(random) for _ in range(min(num_samples, MOST_DIFFERENT_IMAGES))]
    words = 'a photo of the old red house by sea with two dogs and their small boat under grey sky'.split()
    with MDSWriter(out=folder, columns=MDS_COLUMNS) as writer:
        for number in range(num_samples):
            caption = ' '.join(random.choice(words, 14))
            writer.write({'jpg': pictures[number % len(pictures)], 'caption': caption})


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shards = f'{folder}/shards'
        write_photographs(shards, NUM_SAMPLES)

        # Time an epoch of each loader, in turn.
        clip_tokenizer().model.save(folder)  # vocab.json and merges.txt
        slow = CLIPTokenizer.from_pretrained(folder, pad_token='!')
        original = StreamingDataLoader(OriginalDataset(shards, slow), batch_size=BATCH_SIZE)
        ours = build_loader(StreamingLAIONDataset(shards, image_size=IMAGE_SIZE, batch_size=BATCH_SIZE), BATCH_SIZE, 0,
                            build_tokenizer()).dataloader
        their_seconds, our_seconds = medians_in_turn(lambda: deque(original, 0), lambda: deque(ours, 0))
        images = len(original.dataset)
    print(f'original {images / their_seconds:.0f} images/s   here {images / our_seconds:.0f} images/s')
    print(f'loader ratio {their_seconds / our_seconds:.1f}')


if __name__ == '__main__':
    main()
