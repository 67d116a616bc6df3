"""Tables that have captions for images: which columns count, which image each row means, and how rows are read."""
import codecs
import csv
import functools
import itertools
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from operator import attrgetter
from typing import Any, NamedTuple, TextIO

from sdbench.datasets.names import CAPTION_SUFFIXES, normal_form, pair_by_form
from sdbench.errors import UserError, one_line
from sdbench.inputs.captions import ONE_CAPTION, Named

OWN_TABLE = 'captions.csv'  # this name promises captions, so convert.py fails if the columns are missing
# Names of the tables that are found in SOURCE. The first three are the names in Hugging Face's ImageFolder.
TABLES = ('metadata.csv', 'metadata.jsonl', 'metadata.parquet', OWN_TABLE)
NO_TABLE = 'not a table of captions'  # prefix of the reason for tables without the columns
USUAL_PATH_COLUMNS = ('file_name', 'filename')
USUAL_CAPTION_COLUMNS = ('text', 'caption')
SEPARATORS = ',;\t|'  # between the columns of a CSV; which one a spreadsheet writes depends on its language
UNQUOTED_SEPARATORS = '\t|'  # tables with these often have no quotes around cells
MISSING_CAPTIONS = ('nan', 'NaN', 'None', '<NA>')  # what pandas writes for a missing value in a column of text


class SkipReason(str):
    """The reason why a file, a row or a caption is skipped, in place of its content."""


class NoSuchColumn(UserError):
    """A table lacks a column, so it may be a table of something else."""


class Columns(NamedTuple):
    """The columns of images and captions that the flags name. None and () mean the usual names.

    Attributes:
        image: column of the images.
        captions: columns of the captions, and suffixes of caption files beside images.
    """
    image: str | None = None
    captions: tuple[str, ...] = ()

    def name_of(self, given: str | None) -> str:
        """Return the name of the captions from a column or suffix: the same if the flag gives several of them."""
        if given is not None and len(self.captions) > 1:
            return given
        return ONE_CAPTION

    @property
    def suffixes(self) -> list[str]:
        """Return the suffixes that are given."""
        return [given for given in self.captions if given in CAPTION_SUFFIXES]

    def find(self, path: str, names: Sequence[str], usual_images: Sequence[str], takes_only_other: bool = False
             ) -> tuple[str, dict[str, str]]:
        """Return the column of the images in a table, and the columns of the captions by the name of the captions.

        Args:
            path: of the table.
            names: of all its columns.
            usual_images: usual names for the column of images.
            takes_only_other: whether a single column besides the images has the captions, whatever its name.

        Raises NoSuchColumn, with the names of the columns, if one is missing, and UserError if there are two.
        """
        image = find_column(path, names, '--image_column', self.image, usual_images)
        others = [name for name in names if name != image]
        wanted = [given for given in self.captions if given not in self.suffixes]
        if not wanted and takes_only_other and len(others) == 1:
            return image, {ONE_CAPTION: others[0]}
        captions = {self.name_of(given): find_column(path, names, '--caption_column', given, USUAL_CAPTION_COLUMNS)
                    for given in wanted or [None]}
        return image, captions


USUAL_COLUMNS = Columns()


def find_column(path: str, names: Sequence[str], flag: str, given: str | None, usual: Sequence[str]) -> str:
    """Return the column with exactly the given name or, without one, with a usual name in any spelling.

    For example, File_Name, "file name" and FILENAME are spellings of file_name.

    Args:
        path: of the table.
        names: of all its columns.
        flag: that gives the name of the column.
        given: its value; None means the usual names.
        usual: usual names of the column.

    Raises NoSuchColumn, with the names of the columns, if there is no such column, and UserError if there are two.
    """
    def letters(name: str) -> str:
        return ''.join(filter(str.isalnum, name.casefold()))

    if given is not None:
        found = [name for name in names if name == given]
    else:
        spellings = {letters(name) for name in usual}
        found = [name for name in names if letters(name) in spellings]
    if not found:
        present = ', '.join(name or '(no name)' for name in names)
        wanted = given or ' or '.join(usual)
        remedy = '' if given else f'; give {flag} NAME'
        raise NoSuchColumn(f'no {wanted} for {flag} among its columns {present}{remedy}')
    if len(found) > 1:
        raise UserError(f'the table {path} has the columns {" and ".join(sorted(found))}; name one of them with '
                        f'{flag}, or rename them')
    return found[0]


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        table: path of the table, and the names of its caption columns.
        number: line in the file, counted from 1; for Parquet the row, counted from 0.
        image: path of its image, in a folder without links.
        cells: the cells with captions, by the name of the captions.
    """
    table: tuple[str, str]
    number: int
    image: str
    cells: dict[str, Any]


class CaptionTables:
    """The captions for images from all tables of SOURCE: call `add` for each table, then `match`.

    Paths are compared with the links of their folders resolved, so a folder may be reached by any of its names.

    Args:
        columns: the columns that the flags name.
        skip: called with a file, a reason and the number of a row for everything that does not become a caption.

    Attributes:
        named: the table of --captions.
        read: paths of all tables that were read, whether they have captions or not.
        rows: of all tables; the rows of --captions are first.
        captions: by the path of an image: the table that decides, and its captions.
    """

    def __init__(self, columns: Columns, skip: Callable[[str, str, int | None], None]):
        self.columns = columns
        self.skip = skip
        self.real_folder = functools.cache(os.path.realpath)
        self.named: str | None = None
        self.read: set[str] = set()
        self.rows: list[Row] = []
        self.captions: dict[str, tuple[tuple[str, str], Named]] = {}

    def path_of(self, folder: str, name: str) -> str:
        """Return the path of a name in a folder. The links of its folder are resolved, but not a link at its end."""
        folder, name = os.path.split(os.path.join(folder, name))
        return os.path.join(self.real_folder(folder), name)

    def add(self, path: str, is_named: bool = False) -> None:
        """Read the rows of a table, unless it was read before or is a table of something else.

        Args:
            path: of the table.
            is_named: whether --captions names it. Then it must have captions, in any column if there is only one.

        Raises UserError if it cannot be read to its end, or a flag must choose between two columns. Skipping the table
        would give its images other captions.
        """
        # Find the columns.
        label = f'--captions {path}' if is_named else f'the table {path}'
        path = os.path.abspath(path)
        real_path = self.path_of('', path)
        if real_path in self.read:
            return
        rows = read_rows(path)
        try:
            image_column, caption_columns = self.columns.find(path, next(rows), USUAL_PATH_COLUMNS, is_named)
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
            self.named = path

        # Keep the rows that name an image. Which images exist is known once all folders are searched.
        table = (path, ', '.join(caption_columns.values()))
        for number, values in rows:
            if isinstance(values, SkipReason):
                self.skip(path, values, number)
                continue
            name = values.get(image_column)
            if not isinstance(name, str) or not name.strip() or '\0' in name:
                self.skip(path, f'no path in a row: column {image_column} is empty or not a text', number)
                continue
            cells = {called: values.get(column) for called, column in caption_columns.items()}
            self.rows.append(Row(table, number, self.path_of(os.path.dirname(real_path), name), cells))

    def match(self, images: Set[str]) -> dict[tuple[str, str], int]:
        """Give each image the captions of its rows, and skip the rows without an image.

        An image gets the captions of all its rows in one table. If two tables name it, the first one decides.

        Args:
            images: paths of the images of SOURCE, in folders without links.

        Returns the number of rows with a caption from each table, by its path and the names of its caption columns.

        Raises UserError if no row of --captions names an image.
        """
        image_of = self.images_of_rows(images)
        numbers = Counter()
        matched_tables = set()
        for row in self.rows:
            # The row needs an image, which no earlier table names.
            path, _ = row.table
            image = image_of.get((row.table, row.image))
            if image is None:
                self.skip(path, f'no image for a row: SOURCE has no {row.image}', row.number)
                continue
            matched_tables.add(path)
            first, captions = self.captions.setdefault(image, (row.table, {name: [] for name in row.cells}))
            if first != row.table:
                self.skip(path, f'image of another table: {first[0]} has the captions of {row.image}', row.number)
                continue

            # Its cells have captions, or reasons why there are none.
            has_caption = False
            for name, cell in row.cells.items():
                for text in captions_in(cell):
                    if isinstance(text, SkipReason):
                        self.skip(path, f'{with_name(text, name)} for {row.image}', row.number)
                    else:
                        captions[name].append(text)
                        has_caption = True
            numbers[row.table] += has_caption
        if self.named is not None and self.named not in matched_tables:
            raise UserError(f'--captions {self.named}: none of its rows names an image of SOURCE; its paths are '
                            'relative to its own folder, so move it or correct its paths')
        return {table: number for table, number in numbers.items() if number}

    def images_of_rows(self, images: Set[str]) -> dict[tuple[tuple[str, str], str], str]:
        """Return the image that each row means, by the row's table and path: exactly that path, or else its spelling.

        Each table is matched by itself, so a row of --captions finds its image even if another table names it exactly.
        """
        images_by_form = defaultdict(set)
        for image in images:
            images_by_form[normal_form(image)].add(image)
        image_of = {}
        for table, rows in itertools.groupby(self.rows, attrgetter('table')):
            paths = {row.image for row in rows}
            for path in paths & images:
                image_of[table, path] = path
            similar = {image for path in paths - images for image in images_by_form.get(normal_form(path), ())}
            for path, image in pair_by_form(paths - images, similar - paths):
                image_of[table, path] = image
        return image_of

    def captions_of(self, image: str) -> Named | None:
        """Return the captions that a table has for the image at a path; None if no table names it."""
        return self.captions[image][1] if image in self.captions else None


def with_name(reason: SkipReason, name: str) -> str:
    """Return the reason why an image lacks a caption, with the name of the caption in the kind of the reason."""
    return reason if name == ONE_CAPTION else f'no caption called {name}: {reason.removeprefix("no caption: ")}'


def captions_in(value: Any) -> list[str | SkipReason]:
    """Return the captions in a cell: its text, or the items of a list, with a reason for each that has no text.

    A text is also a list if JSON reads it as one. A list as Python writes it, ['a', 'b'], is skipped, because NumPy
    writes nearly the same, ['a' 'b'], which Python would read as a single text.
    """
    if isinstance(value, str) and value.strip().startswith('['):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            if re.match(r"""\s*\[\s*["'].*["']\s*\]\s*$""", value, re.DOTALL):
                return [SkipReason(f'no caption: the row has a list that is not JSON, {value!r:.50}')]
    captions = []
    for text in value if isinstance(value, list) and value else [value]:
        if isinstance(text, str) and text.strip() and text.strip() not in MISSING_CAPTIONS:
            captions.append(text)
        else:
            captions.append(SkipReason(f'no caption: the row has {text!r:.50}'))
    return captions


def read_rows(path: str) -> Iterator:
    """Yield the names of the columns of a table, then (number, row), where a row is a dict or a SkipReason.

    *.parquet is read as Parquet, *.jsonl as JSON lines, and anything else as CSV. Class Row explains the number.

    Raises UserError if the table cannot be read to its end.
    """
    readers = {'.parquet': read_parquet_table, '.jsonl': read_json_lines}
    read = readers.get(os.path.splitext(path)[1].lower(), read_csv)
    try:
        yield from read(path)
    except UnicodeError:
        raise UserError(f'the table {path} is not UTF-8; save it as "CSV UTF-8" in Excel, or convert '
                        'it with iconv -f CP1252 -t UTF-8') from None


def encoding_of(beginning: bytes) -> str:
    """Return the encoding of a text by its first bytes: UTF-16 with a byte order mark, or else UTF-8."""
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return 'utf-16'
    return 'utf-8-sig'


def open_text(path: str) -> TextIO:
    """Open a table for reading, without changing its line ends."""
    with open(path, 'rb') as file:
        encoding = encoding_of(file.read(2))
    return open(path, encoding=encoding, newline='')


# pyarrow's readers of CSV and JSON lines were tried. A quote that is not closed makes all later rows part of its
# caption, without an error, and a single row whose text is a number or a list makes the whole file unreadable.
def read_csv(path: str) -> Iterator:
    """Read a CSV as `read_rows` does. Raises UserError if a quote is not closed."""
    csv.field_size_limit(sys.maxsize)  # a column that nobody uses may have megabytes in a cell
    with open_text(path) as file:
        # The separator is in a first line such as sep=; from Excel, or else the most frequent one in the header.
        first = re.fullmatch('"?sep=(.)"?[\r\n]*', file.readline(), re.IGNORECASE)
        if first:
            separator = first[1]
        else:
            file.seek(0)
            header = next(filter(str.strip, file), '')  # the first line that is not empty
            separator = max(SEPARATORS, key=header.count)
            file.seek(0)

        # A caption that begins with a quote would swallow the rows after it, up to the next quote. In tables whose
        # cells often have no quotes, a cell with both a separator and a line end is a sign of that. Otherwise the csv
        # module finds it if no quote closes the last cell.
        reader = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
        try:
            names = next(filter(None, reader), [])  # the first row that is not empty
            last_line = reader.line_num
            yield names
            for cells in reader:
                number = last_line + 1  # a row may have several lines
                last_line = reader.line_num
                for cell in cells if separator in UNQUOTED_SEPARATORS else ():
                    if separator in cell and len(cell.splitlines()) > 1:
                        raise csv.Error(f'a cell in line {number} begins with a quote and contains {separator!r} and '
                                        'line ends, so a quote after it seems to be missing')
                if len(cells) == len(names):
                    yield number, dict(zip(names, cells, strict=True))
                elif cells:
                    yield number, SkipReason(f'row with a wrong number of cells: {len(cells)} instead of '
                                             f'{len(names)}; put quotes around a cell that contains {separator!r}')
        except csv.Error as error:
            raise UserError(f'the table {path} cannot be read up to line {reader.line_num} ({error}); a caption that '
                            'begins with a quote must end with one, and a quote in it must be written twice') from None


def read_json_lines(path: str) -> Iterator:
    """Read JSON lines as `read_rows` does. Raises UserError if a line is not a JSON object."""
    rows = []
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f'line {number} of the table {path} cannot be read ({error})') from None
            if not isinstance(values, dict):
                raise UserError(f'line {number} of the table {path} cannot be read (it is not an object)')
            rows.append((number, values))
    yield list(dict.fromkeys(key for _, row in rows for key in row))
    yield from rows


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
        raise UserError(f'the table {path} is damaged ({one_line(error)})') from None
