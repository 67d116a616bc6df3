"""Tables with captions for images: find their columns, read their rows, and match each row with an image."""
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

OWN_TABLE = 'captions.csv'  # this name promises captions, so convert.py exits with status 1 if the columns are missing
# Names of the tables that are found in SOURCE. The first three are the names in Hugging Face's ImageFolder.
TABLES = ('metadata.csv', 'metadata.jsonl', 'metadata.parquet', OWN_TABLE)
NO_TABLE = 'not a table of captions'  # prefix of the reason for tables without the columns
USUAL_PATH_COLUMNS = ('file_name', 'filename')
USUAL_CAPTION_COLUMNS = ('text', 'caption')
SEPARATORS = ',;\t|'  # between the columns of a CSV; which one a spreadsheet writes depends on its language
UNQUOTED_SEPARATORS = '\t|'  # tables with these separators often have no quotes around cells
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
        """Return the suffixes of caption files that --caption_column gives, such as .txt."""
        return [given for given in self.captions if given in CAPTION_SUFFIXES]

    def find(self, path: str, names: Sequence[str], usual_images: Sequence[str], allow_any_single_column: bool = False
             ) -> tuple[str, dict[str, str]]:
        """Return the image column of a table, and a dict of its caption columns by caption name.

        Args:
            path: path of the table, for errors.
            names: names of all columns in the table.
            usual_images: usual names of the image column.
            allow_any_single_column: if the table has only one other column, take it as captions, whatever its name.

        Raises NoSuchColumn if a column is missing, and UserError if two columns match.
        """
        image = find_column(path, names, '--image_column', self.image, usual_images)
        others = [name for name in names if name != image]
        wanted = [given for given in self.captions if given not in self.suffixes]
        if not wanted and allow_any_single_column and len(others) == 1:
            return image, {ONE_CAPTION: others[0]}
        captions = {self.name_of(given): find_column(path, names, '--caption_column', given, USUAL_CAPTION_COLUMNS)
                    for given in wanted or [None]}
        return image, captions


USUAL_COLUMNS = Columns()


def find_column(path: str, names: Sequence[str], flag: str, given: str | None, usual: Sequence[str]) -> str:
    """Return the column with exactly the given name or, if no name is given, the column with a usual name.

    The spelling of a usual name does not matter: File_Name, "file name" and FILENAME are spellings of file_name.

    Args:
        path: path of the table, for errors.
        names: names of all columns in the table.
        flag: flag that names the column, for errors.
        given: value of the flag; None means the usual names.
        usual: usual names of the column.

    Raises NoSuchColumn if no column matches, and UserError if two columns match.
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
        if given:
            raise NoSuchColumn(f'it has no column {given} for {flag}; its columns are {present}')
        raise NoSuchColumn(f'it has no column {" or ".join(usual)}; its columns are {present}; give {flag} NAME')
    if len(found) > 1 and len(set(found)) == 1:
        raise UserError(f'the table {path} has {len(found)} columns called {found[0]}; rename all but one of them')
    if len(found) > 1:
        raise UserError(f'the table {path} has the columns {" and ".join(sorted(found))}; name one of them with '
                        f'{flag}, or rename them')
    return found[0]


class Table(NamedTuple):
    """A table of captions."""
    path: str
    columns: str  # names of its caption columns, with commas between them


class Row(NamedTuple):
    """A row of a table."""
    table: Table
    number: int  # line in the file, counted from 1; for Parquet the row, counted from 0
    image: str  # path of the image that the row names; links in its folders are resolved; for COCO a relative path
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
            is_named: whether --captions names the table. Then it must have captions; a single column besides the image
                column has them, whatever its name.

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
            image = os.path.normpath(name) if is_coco(path) else self.path_of(os.path.dirname(real_path), name)
            self.rows.append(Row(table, number, image, cells))

    def match(self, images: Set[str]) -> dict[Table, int]:
        """Give each image the captions in its rows, and skip the rows without an image.

        An image gets the captions in all its rows of one table. If two tables name it, the first one decides.

        Args:
            images: paths of the images in SOURCE, with the links of their folders resolved.

        Returns the number of rows with a caption in each table, for tables that have such rows.

        Raises UserError if no row of --captions names an image.
        """
        image_of = self.images_of_rows(images)
        rows_with_caption = Counter()
        matched_tables = set()
        for row in self.rows:
            # Skip the row if it names no image, or an image that an earlier table has named.
            path = row.table.path
            image = image_of.get((row.table, row.image))
            if image is None:
                several = ', or several' if is_coco(path) else ''
                self.skip(path, f'no image for a row: SOURCE has no {row.image}{several}', row.number)
                continue
            matched_tables.add(path)
            first, captions = self.captions.setdefault(image, (row.table, {name: [] for name in row.cells}))
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

    def images_of_rows(self, images: Set[str]) -> dict[tuple[Table, str], str]:
        """Return the path of the image for each row, by the row's table and `image`.

        It is an exact match, or else the only image whose path differs in case, spaces, backslashes or Unicode form.
        COCO does not say in which folder its images are, so there it is the only image whose path ends in that name.
        Each table is matched separately, so a row of --captions finds its image even if another table names that image
        exactly.
        """
        images_by_form = defaultdict(set)
        for image in images:
            images_by_form[normal_form(image)].add(image)
        images_by_name = defaultdict(list)
        for image in images:
            images_by_name[os.path.basename(image)].append(image)
        image_of = {}
        for table, rows in itertools.groupby(self.rows, attrgetter('table')):
            paths = {row.image for row in rows}
            for path in paths if is_coco(table.path) else ():
                found = [image for image in images_by_name[os.path.basename(path)] if image.endswith(f'/{path}')]
                if len(found) == 1:
                    image_of[table, path] = found[0]
            for path in paths & images:
                image_of[table, path] = path
            similar = {image for path in paths - images for image in images_by_form.get(normal_form(path), ())}
            for path, image in pair_by_form(paths - images, similar - paths):
                image_of[table, path] = image
        return image_of

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

    *.parquet is read as Parquet, *.jsonl as JSON lines, and anything else as CSV. `Row.number` explains the number.

    Raises UserError if the table cannot be read to its end.
    """
    readers = {'.parquet': read_parquet_table, '.jsonl': read_json_lines, '.json': read_coco}
    read = readers.get(os.path.splitext(path)[1].lower(), read_csv)
    try:
        yield from read(path)
    except UnicodeError:
        raise UserError(f'the table {path} is not UTF-8; save it as "CSV UTF-8" in Excel, or convert '
                        'it with iconv -f CP1252 -t UTF-8') from None


def encoding_of(beginning: bytes) -> str:
    """Return the name of the encoding of a text, from its first bytes: UTF-16 with a byte order mark, or else UTF-8."""
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return 'utf-16'
    return 'utf-8-sig'


def open_text(path: str) -> TextIO:
    """Open a table for reading, without changing its line ends."""
    with open(path, 'rb') as file:
        encoding = encoding_of(file.read(2))
    return open(path, encoding=encoding, newline='')


# pyarrow's readers of CSV and JSON lines were tried, and rejected: a quote that is not closed makes all later rows part
# of its caption, without an error, and one row whose text is a number or a list makes the whole file unreadable.
def read_csv(path: str) -> Iterator:
    """Read a CSV as `read_rows` does. Raises UserError if a quote is not closed."""
    csv.field_size_limit(sys.maxsize)  # a column that nobody uses may have megabytes in a cell
    with open_text(path) as file:
        # Excel may name the separator in a first line such as sep=; otherwise take the most frequent one in the header.
        first = re.fullmatch('"?sep=(.)"?[\r\n]*', file.readline(), re.IGNORECASE)
        if first:
            separator = first[1]
        else:
            file.seek(0)
            header = next(filter(str.strip, file), '')  # the first line that is not empty
            separator = max(SEPARATORS, key=header.count)
            file.seek(0)

        # An opening quote without a closing one swallows later rows. In tab and pipe tables, a cell with both a
        # separator and a line end shows this. Elsewhere, the csv module detects only a quote that is never closed.
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
            raise UserError(f'the table {path} cannot be read: error at line {reader.line_num} ({error}); a caption '
                            'that begins with a quote must end with one, and a quote in it must be written twice'
                            ) from None


def read_json_lines(path: str) -> Iterator:
    """Read JSON lines as `read_rows` does. Raises UserError if a line is not a JSON object."""
    fix = 'write one JSON object, such as {"file_name": "a.jpg", "text": "a cat"}, on each line'
    rows = []
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f'line {number} of the table {path} cannot be read ({error}); {fix}') from None
            if not isinstance(values, dict):
                raise UserError(f'line {number} of the table {path} cannot be read (it is not an object); {fix}')
            rows.append((number, values))
    yield list(dict.fromkeys(key for _, row in rows for key in row))
    yield from rows


def is_coco(path: str) -> bool:
    """Tell whether a table is read in the layout of COCO."""
    return path.lower().endswith('.json')


def read_coco(path: str) -> Iterator:
    """Read the captions of COCO as `read_rows` does. Raises UserError if a JSON file has another layout."""
    with open_text(path) as file:
        try:
            content = json.load(file)
            names = {image['id']: image['file_name'] for image in content['images']}
            rows = [{'file_name': names.get(entry['image_id']), 'caption': entry['caption']}
                    for entry in content['annotations']]
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
