"""Tables with captions for images: find their columns, read their rows, and match each row with an image.

The rule is that of Hugging Face's ImageFolder: the column `file_name` holds the path of an image, relative to the
folder of its table. Names of columns and paths must match exactly. A row that does not match is skipped with a reason,
and a table that cannot be read, or whose columns are not known, is refused.
"""
import csv
import functools
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from sdbench.datasets.names import CAPTION_SUFFIXES, split_name
from sdbench.errors import UserError, one_line
from sdbench.inputs.batches import ONE_CAPTION, Named

# Names of the tables that are found in SOURCE. The first three are the names in Hugging Face's ImageFolder.
TABLES = ('metadata.csv', 'metadata.jsonl', 'metadata.parquet', 'captions.csv')
USUAL_PATH_COLUMNS = ('file_name', 'filename')
USUAL_CAPTION_COLUMNS = ('text', 'caption')
COCO = '.json'  # suffix of the tables that are read in the layout of COCO
MISSING_CAPTIONS = ('nan', 'NaN', 'None', '<NA>')  # what pandas writes for a missing value in a column of text


class Columns(NamedTuple):
    """The values of --image_column and --caption_column."""
    image: str | None = None  # column with the images or their paths; None means the usual names
    captions: tuple[str, ...] = ()  # columns with captions, and suffixes of caption files; () means the usual names

    def name_of(self, given: str | None) -> str:
        """Return the caption name: the column or suffix itself if --caption_column gives several, else ONE_CAPTION."""
        if given is not None and len(self.captions) > 1:
            return given
        return ONE_CAPTION

    @property
    def suffixes(self) -> list[str]:
        """The suffixes of caption files that --caption_column gives, such as .txt."""
        return [given for given in self.captions if given in CAPTION_SUFFIXES]

    def find(self, path: str, names: Sequence[str], usual_images: Sequence[str]) -> tuple[str, dict[str, str]]:
        """Return the image column of a table or Parquet file, and a dict of its caption columns by caption name.

        `names` are its columns. Raises UserError if it lacks a column, or has two columns that could be it.
        """
        def find_one(flag: str, given: str | None, usual: Sequence[str]) -> str:
            wanted = usual if given is None else [given]
            found = [name for name in names if name in wanted]
            if len(found) != 1:
                raise UserError(f'{path} has the columns {", ".join(names)}; exactly one of them must be called '
                                f'{" or ".join(wanted)} (see {flag})')
            return found[0]

        captions = [given for given in self.captions if given not in self.suffixes] or [None]
        return (find_one('--image_column', self.image, usual_images),
                {self.name_of(given): find_one('--caption_column', given, USUAL_CAPTION_COLUMNS) for given in captions})


USUAL_COLUMNS = Columns()


class Row(NamedTuple):
    """A row of a table."""
    table: str  # path of the table
    number: int  # line in the file where the row ends, counted from 1; in Parquet and COCO the row, counted from 0
    image: str  # path of the image that the row names, with links in its folders resolved; for COCO the end of the path
    cells: dict[str, Any]  # cells with captions, by caption name


class CaptionTables:
    """The captions for images from all tables of SOURCE: call `add` for each table, then `match`.

    Paths are compared after links in their folders are resolved, so a row may reach a folder by any of its names.

    `skip` is called with a table's path, a reason and a row number for each row, or caption in a row, that is not used.
    """

    def __init__(self, columns: Columns, skip: Callable[[str, str, int], None]):
        self.columns = columns
        self.skip = skip
        self.real_folder = functools.cache(os.path.realpath)
        self.read: set[str] = set()  # paths of all tables that were read
        self.rows: list[Row] = []
        self.captions: dict[str, tuple[str, Named]] = {}  # by path of an image: its first table, and its captions

    def path_of(self, path: str) -> str:
        """Return a path after links in its folders are resolved. The file itself may be a link."""
        folder, name = os.path.split(path)
        return os.path.join(self.real_folder(folder), name)

    def add(self, path: str) -> None:
        """Read the rows of a table, unless it was read before.

        Raises UserError if the table cannot be read to its end or its columns are not known. If the table were skipped
        instead, its images would get other captions.
        """
        path = os.path.abspath(path)
        real_path = self.path_of(path)
        if real_path in self.read:
            return
        self.read.add(real_path)
        rows = read_rows(path)
        names = next(rows)
        try:
            image_column, caption_columns = self.columns.find(path, names, USUAL_PATH_COLUMNS)
        except UserError as error:
            raise UserError(f'the table of captions {error}; rename the file if it is something else') from None

        # Keep the rows that name an image. `match` finds the images after all folders have been searched.
        for number, values in rows:
            if values is None:
                self.skip(path, 'row with a wrong number of cells: put quotes around a cell that contains a comma',
                          number)
                continue
            image = values.get(image_column)
            if not isinstance(image, str) or not image.strip() or '\0' in image:
                self.skip(path, f'no path in a row: column {image_column} is empty or not text', number)
                continue
            if not is_coco(path):
                image = self.path_of(os.path.join(os.path.dirname(real_path), image))
            cells = {caption_name: values.get(column) for caption_name, column in caption_columns.items()}
            self.rows.append(Row(path, number, image, cells))

    def match(self, images: Set[str]) -> Counter[str]:
        """Give each image the captions in its rows, and skip the rows without an image.

        An image gets the captions in all its rows of one table. If two tables name it, the first one decides. COCO does
        not say in which folder its images are, so its row names the only image whose path ends with that name.

        Returns the number of rows that gave a caption, by path of the table. `images` are the paths of the images in
        SOURCE, with the links of their folders resolved.
        """
        images_by_name = defaultdict(list)
        for image in images:
            images_by_name[os.path.basename(image)].append(image)
        rows_with_caption = Counter()
        for table, number, image, cells in self.rows:
            # Skip the row if it names no image, or an image that an earlier table has named.
            found = [path for path in images_by_name[os.path.basename(image)]
                     if path == image or (is_coco(table) and path.endswith(f'/{image}'))]
            if len(found) != 1:
                count = 'no' if not found else f'{len(found)} images called'
                self.skip(table, f'no image for a row: SOURCE has {count} {image}', number)
                continue
            first, captions = self.captions.setdefault(found[0], (table, {name: [] for name in cells}))
            if first != table:
                self.skip(table, f'already captioned: {first} names {image} first', number)
                continue

            # Take the captions in its cells.
            texts_in_row = 0
            for name, cell in cells.items():
                texts, problems = captions_in(cell)
                captions[name] += texts
                texts_in_row += len(texts)
                for problem in problems:
                    self.skip(table, f'{with_name(problem, name)} for {image}', number)
            rows_with_caption[table] += texts_in_row > 0
        return rows_with_caption

    def captions_of(self, path: str) -> Named | None:
        """Return the captions that a table has for the image at this path; None if no table names the image."""
        path = self.path_of(path)
        return self.captions[path][1] if path in self.captions else None


def with_name(problem: str, name: str) -> str:
    """Put the caption's name into the kind of a reason, because skips are counted by kind."""
    return problem if name == ONE_CAPTION else f'no caption called {name}: {problem.removeprefix("no caption: ")}'


def captions_in(cell: Any) -> tuple[list[str], list[str]]:
    """Return the captions in a cell, which holds a text or a list of texts, and a reason for each item without a text.

    A text that is a JSON list counts as a list. A list as Python writes it, ['a', 'b'], is skipped, because NumPy
    writes nearly the same, ['a' 'b'], which Python would read as a single text.
    """
    if isinstance(cell, str) and cell.strip().startswith('['):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            if re.match(r"""\s*\[\s*["'].*["']\s*\]\s*$""", cell, re.DOTALL):
                return [], [f'no caption: the row has a list that is not JSON, {cell!r:.50}']
    texts = []
    problems = []
    for item in cell if isinstance(cell, list) and cell else [cell]:
        if isinstance(item, str) and item.strip() and item.strip() not in MISSING_CAPTIONS:
            texts.append(item)
        else:
            problems.append(f'no caption: the row has {item!r:.50}')
    return texts, problems


def is_coco(path: str) -> bool:
    return split_name(path)[1].lower() == COCO


def read_rows(path: str) -> Iterator:
    """Yield the list of a table's column names, then (number, row) for each row.

    A row is a dict by column, or None if it has a wrong number of cells. `Row.number` explains the number.

    Raises UserError if the table cannot be read to its end.
    """
    read, layout = READERS.get(split_name(path)[1].lower(), READERS['.csv'])
    number = 0
    try:
        rows = read(path)
        yield next(rows)
        for number, row in rows:
            yield number, row
    except Exception as error:  # each library has its own errors for a file that is damaged or something else
        raise UserError(f'the table of captions {path} cannot be read after row {number} ({one_line(error)}); it must '
                        f'be {layout}') from None


# Other readers lose captions without an error. pandas 3.1 fills a row that is too short, and if the first row is too
# long, it takes the paths as an index and shifts all columns. In pyarrow a quote that is not closed makes all later
# rows part of its caption, and one row whose text is a number or a list makes a whole file of JSON lines unreadable.
def read_csv(path: str) -> Iterator:
    csv.field_size_limit(sys.maxsize)  # a column that nobody uses may have megabytes in a cell
    with open(path, encoding='utf-8-sig', newline='') as file:
        reader = csv.DictReader(file, strict=True, skipinitialspace=True)
        yield reader.fieldnames or []
        for row in reader:
            is_whole = None not in row and None not in row.values()
            yield reader.line_num, row if is_whole else None


def read_json_lines(path: str) -> Iterator:
    rows = []
    with open(path, encoding='utf-8-sig') as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    rows.append((number, dict(json.loads(line).items())))
                except Exception as error:
                    raise ValueError(f'line {number}: {error}') from None
    yield list({name: None for _, row in rows for name in row})  # a row may lack a key, as an image without a caption
    yield from rows


def read_coco(path: str) -> Iterator:
    with open(path, encoding='utf-8-sig') as file:
        content = json.load(file)
    names = {image['id']: image['file_name'] for image in content['images']}
    yield ['file_name', 'caption']
    for number, entry in enumerate(content['annotations']):
        yield number, {'file_name': names.get(entry['image_id']), 'caption': entry['caption']}


def read_parquet_table(path: str) -> Iterator:
    from pyarrow.parquet import ParquetFile  # importing it takes a third of a second
    with ParquetFile(path) as parquet:
        yield parquet.schema_arrow.names
        batches = parquet.iter_batches(use_threads=False)
        yield from enumerate(row for batch in batches for row in batch.to_pylist())


READERS = {'.csv': (read_csv, 'a CSV in UTF-8 with commas between its columns and both quotes around a cell'),
           '.jsonl': (read_json_lines, 'a file in UTF-8 with one JSON object per line'),
           '.parquet': (read_parquet_table, 'a Parquet file'),
           COCO: (read_coco, 'in the layout of COCO, with the keys images and annotations, or a .csv, .jsonl or '
                  '.parquet')}
