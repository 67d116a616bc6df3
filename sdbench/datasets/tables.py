"""Tables with captions for images: find their columns, read their rows, and match each row with an image.

The rule is that of Hugging Face's ImageFolder: the column `file_name` holds the path of an image, relative to the
folder of its table. Names of columns and paths must match exactly. Whatever does not match is skipped with a reason.
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
from sdbench.inputs.captions import ONE_CAPTION, Named

OWN_TABLE = 'captions.csv'  # this name promises captions, so convert.py exits with status 1 if the columns are missing
# Names of the tables that are found in SOURCE. The first three are the names in Hugging Face's ImageFolder.
TABLES = ('metadata.csv', 'metadata.jsonl', 'metadata.parquet', OWN_TABLE)
NO_TABLE = 'not a table of captions'  # prefix of the reason for tables without the columns
USUAL_PATH_COLUMNS = ('file_name', 'filename')
USUAL_CAPTION_COLUMNS = ('text', 'caption')
COCO = '.json'  # suffix of the tables that are read in the layout of COCO
MISSING_CAPTIONS = ('nan', 'NaN', 'None', '<NA>')  # what pandas writes for a missing value in a column of text


class SkipReason(str):
    """The reason why a file, a row or a caption is skipped. It takes the place of the content."""


class NoSuchColumn(UserError):
    """A table lacks a column, so it may be a table of something else."""


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
        """Return the image column of a table, and a dict of its caption columns by caption name.

        Args:
            path: path of the table, for errors.
            names: names of all columns in the table.
            usual_images: usual names of the image column.

        Raises NoSuchColumn if a column is missing, and UserError if two columns match.
        """
        image = find_column(path, names, '--image_column', self.image, usual_images)
        wanted = [given for given in self.captions if given not in self.suffixes]
        captions = {self.name_of(given): find_column(path, names, '--caption_column', given, USUAL_CAPTION_COLUMNS)
                    for given in wanted or [None]}
        return image, captions


USUAL_COLUMNS = Columns()


def find_column(path: str, names: Sequence[str], flag: str, given: str | None, usual: Sequence[str]) -> str:
    """Return the column that a flag names or, if `given` is None, the column with a usual name.

    Raises NoSuchColumn if no column matches, and UserError if two columns match.
    """
    wanted = usual if given is None else [given]
    found = [name for name in names if name in wanted]
    if not found:
        advice = f'give {flag} NAME' if given is None else f'which {flag} gives'
        if len(names) == 1:
            advice += '; a CSV needs commas between its columns'
        raise NoSuchColumn(f'it has no column {" or ".join(wanted)}; its columns are '
                           f'{", ".join(name or "(no name)" for name in names) or "(none)"}; {advice}')
    if len(found) > 1:
        raise UserError(f'the table {path} has the columns {" and ".join(found)}; name one of them with {flag}, or '
                        'rename all but one')
    return found[0]


class Table(NamedTuple):
    """A table of captions."""
    path: str
    columns: str  # names of its caption columns, with commas between them


class Row(NamedTuple):
    """A row of a table."""
    table: Table
    number: int  # line in the file where the row ends, counted from 1; in Parquet and COCO the row, counted from 0
    image: str  # path of the image that the row names, with links in its folders resolved; for COCO the end of the path
    cells: dict[str, Any]  # cells with captions, by caption name


class CaptionTables:
    """The captions for images from all tables of SOURCE: call `add` for each table, then `match`.

    Paths are compared after links in their folders are resolved, so a row may reach a folder by any of its names.

    Args:
        columns: the columns that the flags name.
        skip: function that is called with a table's path, a reason and a row number (None: the whole table) for
            everything that does not become a caption.
    """

    def __init__(self, columns: Columns, skip: Callable[[str, str, int | None], None]):
        self.columns = columns
        self.skip = skip
        self.real_folder = functools.cache(os.path.realpath)
        self.captions_table: str | None = None  # path of the table of --captions, once it is read
        self.read: set[str] = set()  # paths of all tables that were read, whether they have captions or not
        self.rows: list[Row] = []  # rows of all tables; the rows of --captions are first
        self.captions: dict[str, tuple[Table, Named]] = {}  # by path of an image: its first table, and its captions

    def path_of(self, folder: str, name: str) -> str:
        """Return the path of a file. Links in its folders are resolved, but the file itself may be a link."""
        folder, name = os.path.split(os.path.join(folder, name))
        return os.path.join(self.real_folder(folder), name)

    def add(self, path: str, is_named: bool = False) -> None:
        """Read the rows of a table, unless it was read before or is a table of something else.

        Args:
            path: path of the table.
            is_named: whether --captions names the table. Then it must have captions.

        Raises UserError if the table cannot be read to its end, or if a flag must choose between two columns. If the
        table were skipped instead, its images would get other captions.
        """
        # Find the columns.
        label = f'--captions {path}' if is_named else f'the table {path}'
        path = os.path.abspath(path)
        real_path = self.path_of('', path)
        if real_path in self.read:
            return
        rows = read_rows(path)
        try:
            image_column, caption_columns = self.columns.find(path, next(rows), USUAL_PATH_COLUMNS)
        except OSError as error:
            raise UserError(f'{label} cannot be read ({error.strerror})') from None
        except NoSuchColumn as error:
            if is_named:
                raise UserError(f'{label} is {NO_TABLE}: {error}') from None
            if not path.lower().endswith('.parquet'):  # Parquet may hold the images themselves
                self.read.add(real_path)
                self.skip(path, f'{NO_TABLE}: {error}', None)
            return
        self.read.add(real_path)
        if is_named:
            self.captions_table = path

        # Keep the rows that name an image. `match` finds the images after all folders have been searched.
        table = Table(path, ', '.join(caption_columns.values()))
        for number, values in rows:
            if isinstance(values, SkipReason):
                self.skip(path, values, number)
                continue
            name = values.get(image_column)
            if not isinstance(name, str) or not name.strip() or '\0' in name:
                self.skip(path, f'no path in a row: column {image_column} is empty or not text', number)
                continue
            cells = {caption_name: values.get(column) for caption_name, column in caption_columns.items()}
            image = name if is_coco(path) else self.path_of(os.path.dirname(real_path), name)
            self.rows.append(Row(table, number, image, cells))

    def match(self, images: Set[str]) -> dict[Table, int]:
        """Give each image the captions in its rows, and skip the rows without an image.

        An image gets the captions in all its rows of one table. If two tables name it, the first one decides. COCO does
        not say in which folder its images are, so its row names the only image whose path ends with that name.

        Args:
            images: paths of the images in SOURCE, with the links of their folders resolved.

        Returns the number of rows with a caption in each table, for tables that have such rows.

        Raises UserError if no row of --captions names an image.
        """
        images_by_name = defaultdict(list)
        for image in images:
            images_by_name[os.path.basename(image)].append(image)
        rows_with_caption = Counter()
        matched_tables = set()
        for row in self.rows:
            # Skip the row if it names no image, or an image that an earlier table has named.
            path = row.table.path
            found = [image for image in images_by_name[os.path.basename(row.image)]
                     if image == row.image or (is_coco(path) and image.endswith(f'/{row.image}'))]
            if len(found) != 1:
                number = 'no' if not found else f'{len(found)} images called'
                self.skip(path, f'no image for a row: SOURCE has {number} {row.image}', row.number)
                continue
            matched_tables.add(path)
            first, captions = self.captions.setdefault(found[0], (row.table, {name: [] for name in row.cells}))
            if first != row.table:
                self.skip(path, f'already captioned: {first.path} names {row.image} first', row.number)
                continue

            # Take the captions in its cells, and report cells without a caption.
            has_caption = False
            for name, cell in row.cells.items():
                for text in captions_in(cell):
                    if isinstance(text, SkipReason):
                        self.skip(path, f'{with_name(text, name)} for {row.image}', row.number)
                    else:
                        captions[name].append(text)
                        has_caption = True
            rows_with_caption[row.table] += has_caption
        if self.captions_table is not None and self.captions_table not in matched_tables:
            raise UserError(f'--captions {self.captions_table}: none of its rows names an image of SOURCE; its paths '
                            'are relative to its own folder, so move it or correct its paths')
        return {table: number for table, number in rows_with_caption.items() if number}

    def captions_of(self, image: str) -> Named | None:
        """Return the captions that a table has for the image at this path; None if no table names the image."""
        return self.captions[image][1] if image in self.captions else None


def with_name(reason: SkipReason, name: str) -> str:
    """Put the caption's name into the kind of the reason, because skips are counted by kind."""
    return reason if name == ONE_CAPTION else f'no caption called {name}: {reason.removeprefix("no caption: ")}'


def captions_in(value: Any) -> list[str | SkipReason]:
    """Return the captions in a cell, which holds a text or a list of texts. A SkipReason replaces an item without text.

    A text that is a JSON list counts as a list. A list as Python writes it, ['a', 'b'], is skipped, because NumPy
    writes nearly the same, ['a' 'b'], which Python would read as a single text.
    """
    if isinstance(value, str) and value.strip().startswith('['):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            if re.match(r"""\s*\[\s*["'].*["']\s*\]\s*$""", value, re.DOTALL):
                return [SkipReason(f'no caption: the row has a list that is not JSON, {value!r:.50}')]
    texts = [value]  # also for an empty list, which then gets a reason
    if isinstance(value, list) and value:
        texts = value
    captions = []
    for text in texts:
        if isinstance(text, str) and text.strip() and text.strip() not in MISSING_CAPTIONS:
            captions.append(text)
        else:
            captions.append(SkipReason(f'no caption: the row has {text!r:.50}'))
    return captions


def read_rows(path: str) -> Iterator:
    """Yield the list of a table's column names, then (number, row) for each row: a dict by column, or a SkipReason.

    The suffix of the table decides how it is read. `Row.number` explains the number.

    Raises UserError if the table cannot be read to its end.
    """
    readers = {'.csv': read_csv, '.jsonl': read_json_lines, COCO: read_coco, '.parquet': read_parquet_table}
    suffix = split_name(path)[1].lower()
    if suffix not in readers:
        raise UserError(f'the table {path} does not end in .csv, .jsonl or .parquet, or in {COCO} with the captions of '
                        'COCO; save it as a CSV with commas')
    try:
        yield from readers[suffix](path)
    except UnicodeError:
        raise UserError(f'the table {path} is not UTF-8; save it as "CSV UTF-8" in Excel, or convert '
                        'it with iconv -f CP1252 -t UTF-8') from None


# Other readers lose captions without an error. pandas 3.1 fills a row that is too short, and if the first row is too
# long, it takes the paths as an index and shifts all columns. In pyarrow a quote that is not closed makes all later
# rows part of its caption, and one row whose text is a number or a list makes a whole file of JSON lines unreadable.
def read_csv(path: str) -> Iterator:
    """Read a CSV with commas as `read_rows` does. Raises UserError if a quote is not closed."""
    csv.field_size_limit(sys.maxsize)  # a column that nobody uses may have megabytes in a cell
    with open(path, encoding='utf-8-sig', newline='') as file:
        reader = csv.DictReader(file, restkey=SkipReason, restval=SkipReason, strict=True, skipinitialspace=True)
        try:
            yield reader.fieldnames or []
            for values in reader:
                if SkipReason in values or SkipReason in values.values():
                    values = SkipReason(f'row with a wrong number of cells: the table has {len(reader.fieldnames)} '
                                        'columns; put quotes around a cell that contains a comma')
                yield reader.line_num, values
        except csv.Error as error:
            line = reader.reader.line_num  # that of DictReader stays at the last good row
            raise UserError(f'the table {path} cannot be read: error at line {line} ({error}); a caption that begins '
                            'with a quote must end with one, and a quote in it must be written twice') from None


def read_json_lines(path: str) -> Iterator:
    """Read JSON lines as `read_rows` does. Raises UserError if a line is not a JSON object."""
    rows = []
    with open(path, encoding='utf-8-sig') as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
                rows.append((number, dict(values.items())))
            except (ValueError, RecursionError, AttributeError) as error:
                raise UserError(f'line {number} of the table {path} cannot be read ({error}); write one JSON object, '
                                'such as {"file_name": "a.jpg", "text": "a cat"}, on each line') from None
    yield list(dict.fromkeys(key for _, row in rows for key in row))
    yield from rows


def is_coco(path: str) -> bool:
    """Tell whether a table is read in the layout of COCO."""
    return split_name(path)[1].lower() == COCO


def read_coco(path: str) -> Iterator:
    """Read the captions of COCO as `read_rows` does. Raises UserError if a JSON file has another layout."""
    with open(path, encoding='utf-8-sig') as file:
        try:
            content = json.load(file)
            names = {image['id']: image['file_name'] for image in content['images']}
            rows = [{'file_name': names.get(entry['image_id']), 'caption': entry['caption']}
                    for entry in content['annotations']]
        except UnicodeError:
            raise
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise UserError(f'the table {path} is not in the layout of COCO, with the keys "images" and "annotations" '
                            f'({type(error).__name__}: {one_line(error)}); other tables are .csv, .jsonl or .parquet'
                            ) from None
    yield ['file_name', 'caption']
    yield from enumerate(rows)


def read_parquet_table(path: str) -> Iterator:
    """Read Parquet as `read_rows` does. Raises UserError if it is damaged."""
    import pyarrow
    from pyarrow.parquet import ParquetFile
    try:
        with ParquetFile(path) as parquet:
            yield parquet.schema_arrow.names
            batches = parquet.iter_batches(use_threads=False)
            yield from enumerate(row for batch in batches for row in batch.to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        if getattr(error, 'errno', None) is not None:  # the disk failed: pyarrow's own errors have no number
            raise
        raise UserError(f'the table {path} is damaged ({one_line(error)}); replace it with a good copy') from None
