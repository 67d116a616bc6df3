"""Tables of images: which columns are read, and the captions that a table beside images has."""
import csv
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# how a table beside images may be called: the first two by Hugging Face's ImageFolder
METADATA = ('metadata.csv', 'metadata.jsonl', 'captions.csv')
IMAGE_COLUMNS = ('file_name', 'filename')  # of paths of images
CAPTION_COLUMNS = ('text', 'caption')


class Columns(NamedTuple):
    """The columns of images and of captions that the flags name; None: those that are usual."""
    image: str | None = None
    caption: str | None = None

    def find(self, names: list[str], usual_images: Sequence[str]) -> tuple[str, str]:
        """The two columns of a table that has `names`. Raises ValueError, which tells them, if one is not there."""
        images = [self.image] if self.image else usual_images
        among = f'among its columns {", ".join(names)}'
        image = next((name for name in images if name in names), None)
        if image is None:
            raise ValueError(f'no {" or ".join(images)} for --image_column {among}')
        others = [name for name in names if name != image]
        wanted = [self.caption] if self.caption else CAPTION_COLUMNS
        for caption in wanted:
            if caption in others:
                return image, caption
        if not self.caption and len(others) == 1:
            return image, others[0]
        raise ValueError(f'no {" or ".join(wanted)} for --caption_column {among}')


USUAL_COLUMNS = Columns()


class Row(NamedTuple):
    """A row of a table beside images."""
    number: int  # counted from 0
    image: str  # a path, relative to the folder of the table
    caption: str


def read_captions(path: str, columns: Columns) -> list[Row]:
    """The rows of a CSV, or of JSON lines where the name ends in .jsonl.

    Raises ValueError if it is no such table, or has not the columns.
    """
    rows = []
    try:
        for number, values in enumerate(read_rows(path)):
            if number == 0:
                image, caption = columns.find(list(values), IMAGE_COLUMNS)
            text = values.get(caption)
            if not isinstance(text, str):  # such as nothing, or a list
                text = ''
            rows.append(Row(number, str(values.get(image)), text))
    except UnicodeError:
        raise ValueError('it is not UTF-8; save it as that') from None
    except (json.JSONDecodeError, csv.Error, AttributeError, TypeError) as error:
        raise ValueError(f'row {len(rows)} cannot be read ({error})') from None
    return rows


def read_rows(path: str) -> Iterator[dict]:
    """Each row by the names of its columns."""
    with open(path, encoding='utf-8-sig', newline='') as file:
        if path.lower().endswith('.jsonl'):
            yield from map(json.loads, filter(str.strip, file))
        else:
            header = file.readline()
            file.seek(0)
            separator = max(',;\t', key=header.count)  # programs of tables write what their country uses
            yield from csv.DictReader(file, delimiter=separator)
