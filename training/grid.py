"""One picture of many: a grid with a label under each."""
import math
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FONT_SIZE = 12  # pixels
LINE_HEIGHT = 15
MARGIN = 6
LEAST_WIDTH = 128  # of a cell, so that its label can be read
MOST_LINES = 3  # of a label; longer ones are cut


def labelled_grid(pictures: list[Image.Image], labels: list[str], title: str,
                  columns: int | None = None) -> Image.Image:
    """The pictures, which have one size, in rows, each over its label, under a title.

    Args:
        pictures: at least one.
        labels: one for each.
        title: of the whole, one line.
        columns: pictures in a row; default: as many as make the grid about square.
    """
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    width, height = pictures[0].size
    cell_width = max(width, LEAST_WIDTH) + MARGIN
    cell_height = height + MOST_LINES * LINE_HEIGHT + MARGIN
    top = LINE_HEIGHT + 2 * MARGIN
    font = font_of_labels()
    whole_width = max(columns * cell_width, math.ceil(font.getlength(title)) + MARGIN) + MARGIN
    grid = Image.new('RGB', (whole_width, top + rows * cell_height), 'white')
    draw = ImageDraw.Draw(grid)
    draw.text((MARGIN, MARGIN), title, 'black', font)
    for index, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        left = MARGIN + index % columns * cell_width
        upper = top + index // columns * cell_height
        grid.paste(picture, (left, upper))
        draw.text((left, upper + height), wrapped(label, cell_width, font), 'black', font)
    return grid


def font_of_labels() -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib: Pillow's own font has no letters beyond ASCII, and draws boxes."""
    import matplotlib
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / 'fonts' / 'ttf' / 'DejaVuSans.ttf', FONT_SIZE)


def wrapped(label: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    """A label in lines that are no wider than `width` pixels, as many as a cell has room for."""
    letters = int(width / font.getlength('n'))
    return '\n'.join(textwrap.wrap(label, letters, max_lines=MOST_LINES, placeholder=' ...'))
