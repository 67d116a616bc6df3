"""Write a figure of images with their captions."""
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image

CAPTION_WIDTH = 18  # characters per line


def save_captioned(figure: Path, pictures: Sequence[Image.Image], captions: Sequence[str], columns: int,
                   framed: Collection[str] = ()) -> None:
    """Write a figure with rows of images, the caption below each, and a black frame around each caption in `framed`."""
    rows = -(-len(pictures) // columns)
    width, height = pictures[0].size
    fig, axes = plt.subplots(rows, columns, figsize=(1.1 * columns, rows * (1.1 * height / width + 0.4)))
    for ax, picture, caption in zip(axes.flat, pictures, captions, strict=True):
        ax.imshow(picture, interpolation='nearest')
        ax.set(xticks=[], yticks=[])
        ax.set_xlabel(textwrap.fill(caption, CAPTION_WIDTH), fontsize=7)
        ax.spines[:].set(visible=caption in framed, linewidth=2)
    fig.tight_layout(pad=0.4)
    fig.savefig(figure, dpi=100)
    plt.close(fig)
