"""Pictures in a grid, each with its prompt below."""
import math
import textwrap
from pathlib import Path

from diffusers.utils import make_image_grid
from PIL import Image, ImageDraw, ImageFont, ImageOps

SMALLEST_LETTERS = 10  # pixels
LETTERS_IN_HEIGHT = 32  # a picture is as high as so many lines of its prompt
MOST_LINES = 3
MARGIN = 2  # pixels
GAP = 8  # pixels between two pictures


def with_prompts(pictures: list[Image.Image], prompts: list[str]) -> list[Image.Image]:
    """The pictures, which have one size, each with its prompt in small letters on white below it.

    What is too long for three lines ends in dots. All are of one size.
    """
    import matplotlib
    width, height = pictures[0].size
    # Pillow's own font has no letters beyond ASCII
    file = Path(matplotlib.get_data_path(), 'fonts', 'ttf', 'DejaVuSans.ttf')
    font = ImageFont.truetype(file, max(SMALLEST_LETTERS, height // LETTERS_IN_HEIGHT))
    characters = max(1 + len(' …'), int(width / font.getlength('e')))  # in a line
    texts = [textwrap.fill(prompt, characters, max_lines=MOST_LINES, placeholder=' …') for prompt in prompts]
    lines = max(text.count('\n') + 1 for text in texts)
    below = lines * sum(font.getmetrics()) + 2 * MARGIN
    captioned = []
    for picture, text in zip(pictures, texts, strict=True):
        whole = Image.new('RGB', (width, height + below), 'white')
        whole.paste(picture)
        ImageDraw.Draw(whole).multiline_text((MARGIN, height + MARGIN), text, 'black', font, spacing=0)
        captioned.append(whole)
    return captioned


def with_gaps(pictures: list[Image.Image]) -> list[Image.Image]:
    """The pictures, which have one size, each with a thin white edge, so that in a grid each is seen to end."""
    return [ImageOps.expand(picture, GAP // 2, 'white') for picture in pictures]


def grid_of(pictures: list[Image.Image]) -> Image.Image:
    """The pictures, which have one size, in rows that make about a square; what is left of the last row is white."""
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    empty = Image.new('RGB', pictures[0].size, 'white')
    filled = [*pictures, *[empty] * (rows * columns - len(pictures))]
    return make_image_grid(filled, rows, columns)
