"""Write a figure of emojis and of the images that a model generates from their names.

    python -m benchmarks.emojis emojis-pipeline package/img/google/64 docs/emojis.png

The walk on a laptop in the documentation makes the model and the folder. Each cell of the figure has the emoji above
the generated image. The emojis in the last row were held out from the training.
"""
import argparse
import csv
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import make_image_grid
from PIL import Image

from benchmarks.captioned import save_captioned

SIDE = 64  # pixels
TRAINED = ('smiling face with open mouth', 'beating heart', 'money with wings', 'gorilla', 'factory',
           'vertical traffic light', 'south sudan flag', 'woman running', 'japan flag', 'slice of pizza',
           'watermelon', 'dog face', 'penguin', 'cactus', 'soccer ball', 'automobile')
HELD_OUT = ('persevering face', 'woman bowing', 'cook', 'horse face', 'romania flag', 'sweden flag', 'red apple',
            'teddy bear')


def read_emojis(folder: Path) -> dict[str, Image.Image]:
    """Return the emojis in a folder on a white background, by the names in its captions.csv."""
    emojis = {}
    with open(folder / 'captions.csv', newline='') as file:
        for row in csv.DictReader(file):
            picture = Image.open(folder / row['file_name']).convert('RGBA')
            white = Image.new('RGBA', picture.size, 'white')
            emojis[row['text']] = Image.alpha_composite(white, picture).convert('RGB').resize((SIDE, SIDE))
    return emojis


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', type=Path, help='folder with a pipeline')
    parser.add_argument('emojis', type=Path, help='folder with PNG images and captions.csv')
    parser.add_argument('figure', type=Path, help='PNG file to write')
    parser.add_argument('--guidance', type=float, default=2.0, help='guidance scale (default: 2.0)')
    args = parser.parse_args()

    emojis = read_emojis(args.emojis)
    pipeline = StableDiffusionPipeline.from_pretrained(args.model)
    cells = []
    for names in (TRAINED, HELD_OUT):
        generated = pipeline([*names], height=SIDE, width=SIDE, guidance_scale=args.guidance,
                             generator=torch.Generator().manual_seed(3)).images
        for name, picture in zip(names, generated, strict=True):
            cells.append(make_image_grid([emojis[name], picture], rows=2, cols=1))
    save_captioned(args.figure, cells, TRAINED + HELD_OUT, columns=len(HELD_OUT))


if __name__ == '__main__':
    main()
