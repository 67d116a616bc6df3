"""Tables that have captions of images: their names, their columns and their rows."""
import codecs
import csv
import functools
import itertools
import json
import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from operator import attrgetter
from typing import Any, NamedTuple, TextIO

from sdbench.errors import UserError, one_line
from sdbench.inputs.captions import ONE_CAPTION, Named

OWN_TABLE = 'captions.csv'  # by its name a table of captions, whatever its columns
# names of the tables that are found in SOURCE: the first three are those of Hugging Face's ImageFolder
TABLES = ('metadata.csv', 'metadata.jsonl', 'metadata.parquet', OWN_TABLE)
NO_TABLE = 'no table of captions'  # how the reason begins for which a table of one of these names was not read
TABLE_SUFFIXES = ('.csv', '.tsv', '.jsonl', '.parquet')  # of those that --captions may name
IMAGE_COLUMNS = ('file_name', 'filename')  # of paths of images
CAPTION_COLUMNS = ('text', 'caption')
CAPTION_SUFFIXES = ('.txt', '.caption', '.json')  # of files; of the first that is there, and not empty, it is taken
SEPARATORS = ',;\t|'  # of the columns of a CSV: spreadsheets write what is usual in their country
UNQUOTED = '\t|'  # those of tables that are often written without quotes around cells
NO_CAPTIONS = ('nan', 'NaN', 'None', '<NA>')  # what pandas writes for a missing caption that was made text


class Unread(str):
    """Why something of a sample is not read."""


class NoSuchColumn(UserError):
    """A table lacks a column, so that it may be a table of something else."""


class Columns(NamedTuple):
    """Where images and captions are, as the flags name it; None and (): where they usually are.

    Attributes:
        image: column of the images.
        captions: columns of the captions, and suffixes of files with captions beside images.
    """
    image: str | None = None
    captions: tuple[str, ...] = ()

    def name_of(self, given: str | None) -> str:
        """Return the name of the captions in a column or suffix: its own if it is one of several that are given."""
        if given is not None and len(self.captions) > 1:
            return given
        return ONE_CAPTION

    @property
    def suffixes(self) -> list[str]:
        """Return the suffixes that are given."""
        return [given for given in self.captions if given in CAPTION_SUFFIXES]

    def find(self, path: str, names: Sequence[str], usual_images: Sequence[str], takes_only_other: bool = False
             ) -> tuple[str, dict[str, str]]:
        """Return the column of the images in a table, and those of the captions, by the names of the captions.

        Args:
            path: of the table.
            names: of all its columns.
            usual_images: usual names of its column of images.
            takes_only_other: whether the only other column has the captions, whatever its name.

        Raises NoSuchColumn, with the names of the columns, if one is missing, and UserError if there are two.
        """
        # the columns of these names: flag, usual names, and what is found
        images = columns_called(self.image, usual_images, names)
        others = [name for name in names if name not in images]
        found = [('--image_column', self.image, usual_images, images)]
        for given in [given for given in self.captions if given not in self.suffixes] or [None]:
            captions = columns_called(given, CAPTION_COLUMNS, others)
            if takes_only_other and given is None and len(others) == 1:
                captions = others
            found.append(('--caption_column', given, CAPTION_COLUMNS, captions))

        # there is to be one of each
        missing = [f'no {given or " or ".join(usual)} for {flag}' for flag, given, usual, called in found if not called]
        if missing:
            listed = ', '.join(name or '(no name)' for name in names)
            remedy = ' and '.join(f'{flag} NAME' for flag, given, _, called in found if not called and given is None)
            raise NoSuchColumn(f'{" and ".join(missing)} among its columns {listed}' + (remedy and f'; give {remedy}'))
        for flag, _, _, called in found:
            if len(called) > 1:
                raise UserError(f'the table {path} has the columns {" and ".join(sorted(called))}; name one of them '
                                f'with {flag}, or rename them')
        return images[0], {self.name_of(given): called[0] for _, given, _, called in found[1:]}


USUAL_COLUMNS = Columns()


def columns_called(given: str | None, usual: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns of the name that a flag has given, or else those that have it or a usual name in any form.

    So File_Name, "file name" and FILENAME are found as file_name.
    """
    def letters(name: str) -> str:
        return ''.join(filter(str.isalnum, name.casefold()))
    exact = [name for name in names if name == given]
    alike = {letters(name) for name in ([given] if given else usual)}
    return exact or [name for name in names if letters(name) in alike]


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        table: path of the table, and the names of its columns of captions.
        number: of its line, counted from 1; in Parquet of the row, counted from 0.
        image: path of its image, in a folder without links.
        cells: those with captions, by the names of these.
    """
    table: tuple[str, str]
    number: int
    image: str
    cells: dict[str, Any]


class Captions:
    """The captions that the tables of SOURCE have for images: all tables are added before `match`.

    Paths are compared as those in folders without links, so that it does not matter by which name a folder is reached.

    Args:
        columns: that the flags name.
        leave_out: called with a file, a reason and the number of a row, for what no sample is made of.

    Attributes:
        named: the table of --captions.
        read: paths of all tables, also of those that are tables of something else.
        rows: of all tables, those of --captions first.
        of_image: by the path of an image the table that decides, and the captions that it has.
    """

    def __init__(self, columns: Columns, leave_out: Callable[[str, str, int | None], None]):
        self.columns = columns
        self.leave_out = leave_out
        self.real_folder = functools.cache(os.path.realpath)
        self.named: str | None = None
        self.read: set[str] = set()
        self.rows: list[Row] = []
        self.of_image: dict[str, tuple[tuple[str, str], Named]] = {}

    def path_of(self, folder: str, name: str) -> str:
        """Return the path that a name has from a folder. Links are followed to its folder, and not that of the file."""
        folder, name = os.path.split(os.path.join(folder, name))
        return os.path.join(self.real_folder(folder), name)

    def add(self, path: str, is_named: bool = False) -> None:
        """Take the rows of a table, unless it was read before or is not a table of captions.

        Args:
            path: of the table.
            is_named: whether --captions names it: then it is one of captions, and its only other column has them.

        Raises UserError if it cannot be read to its end, or a flag must name one of two columns: without it its images
        would have other captions.
        """
        # find the columns
        label = f'--captions {path}' if is_named else f'the table {path}'
        path = os.path.abspath(path)
        real_path = self.path_of('', path)
        if real_path in self.read:
            return
        rows = read_rows(path)
        try:
            image_column, caption_columns = self.columns.find(path, next(rows), IMAGE_COLUMNS, is_named)
        except OSError as error:
            raise UserError(f'{label} cannot be read ({error.strerror})') from None
        except NoSuchColumn as error:
            if is_named:
                raise UserError(f'{label} is {NO_TABLE}: {error}') from None
            if not path.lower().endswith('.parquet'):  # which may hold the images themselves
                self.read.add(real_path)
                self.leave_out(path, f'{NO_TABLE}: {error}', None)
            return
        self.read.add(real_path)
        if is_named:
            self.named = path

        # take the rows that name an image
        table = (path, ', '.join(caption_columns.values()))
        for number, values in rows:
            if isinstance(values, str):
                self.leave_out(path, values, number)
                continue
            name = values.get(image_column)
            if not isinstance(name, str) or not name.strip() or '\0' in name:
                self.leave_out(path, f'no image in a row: it has no path in column {image_column}', number)
                continue
            cells = {called: values.get(column) for called, column in caption_columns.items()}
            self.rows.append(Row(table, number, self.path_of(os.path.dirname(real_path), name), cells))

    def match(self, images: Set[str]) -> dict[tuple[str, str], int]:
        """Give the images of SOURCE the captions of their rows, and list the rows that are of none.

        An image has the captions of all its rows in a table. Where two tables name it, the first one decides.

        Args:
            images: their paths, in folders without links.

        Returns how many rows were taken from each table, by its path and the names of its columns of captions.

        Raises UserError if no row of --captions names an image.
        """
        image_of = self.pair_rows(images)
        numbers = Counter()
        tables = set()
        for row in self.rows:
            path, _ = row.table
            image = image_of.get((row.table, row.image))
            if image is None:
                self.leave_out(path, f'no image at the path of a row: SOURCE has none at {row.image}', row.number)
                continue
            tables.add(path)
            first, captions = self.of_image.setdefault(image, (row.table, {name: [] for name in row.cells}))
            if first != row.table:
                self.leave_out(path, f'a caption of another table: {first[0]} has one of {row.image}', row.number)
                continue
            has_text = False
            for name, cell in row.cells.items():
                texts = captions_in(cell)
                for text in texts:
                    if isinstance(text, Unread):
                        self.leave_out(path, f'{with_name(text, name)} for {row.image}', row.number)
                    else:
                        captions[name].append(text)
                        has_text = True
            numbers[row.table] += has_text
        if self.named is not None and self.named not in tables:
            raise UserError(f'--captions {self.named}: none of its rows names an image of SOURCE; its paths are '
                            'relative to its own folder, so move it or mend its paths')
        return {table: number for table, number in numbers.items() if number}

    def pair_rows(self, images: Set[str]) -> dict[tuple[tuple[str, str], str], str]:
        """Return the image that each row names, by the row's table and path.

        Each table is paired by itself, so that a row of --captions finds its image whatever other tables name.
        """
        of_form = defaultdict(set)
        for image in images:
            of_form[form_of_name(image)].add(image)
        image_of = {}
        for table, rows in itertools.groupby(self.rows, attrgetter('table')):
            written = {row.image for row in rows}
            for name in written & images:
                image_of[table, name] = name
            alike = {image for name in written - images for image in of_form.get(form_of_name(name), ())}
            for name, image in left_over_pairs(written - images, alike - written):
                image_of[table, name] = image
        return image_of

    def take(self, image: str) -> Named | None:
        """Return the captions that a table has for an image, by its path; None if no table names it."""
        return self.of_image[image][1] if image in self.of_image else None


def form_of_name(name: str) -> str:
    """Return what a name or a path has in common with others that people and systems write for the same file.

    These differ in capitals, in blanks around a name, in backslashes for slashes, and in accents of one sign or two.
    """
    parts = [part.strip() for part in name.replace('\\', '/').split('/')]
    return unicodedata.normalize('NFC', os.path.normpath('/'.join(parts)).casefold())


def left_over_pairs(names: Iterable[str], others: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, other) of each form of which one name and one other are left over."""
    of_form = defaultdict(lambda: ([], []))
    for side, of_side in enumerate((names, others)):
        for name in of_side:
            of_form[form_of_name(name)][side].append(name)
    return [(one[0], other[0]) for one, other in of_form.values() if len(one) == len(other) == 1]


def with_name(reason: Unread, name: str) -> str:
    """Return a reason for which an image lacks a caption, with its name in the kind of the reason."""
    return reason if name == ONE_CAPTION else f'no caption called {name}: {reason.removeprefix("no caption: ")}'


def captions_in(value: Any) -> list[str | Unread]:
    """Return the captions in a cell: its text, or those of a list; in the place of each that is none, why.

    A text that JSON reads as a list is a list. One that Python has written, ['a', 'b'], is refused: NumPy's looks
    nearly the same.
    """
    if isinstance(value, str) and value.strip().startswith('['):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            if re.match(r"""\s*\[\s*["'].*["']\s*\]\s*$""", value, re.DOTALL):
                return [Unread(f'no caption: the row has a list that is not JSON, {value!r:.50}')]
    captions = []
    for text in value if isinstance(value, list) and value else [value]:
        if isinstance(text, str) and text.strip() and text.strip() not in NO_CAPTIONS:
            captions.append(text)
        else:
            captions.append(Unread(f'no caption: the row has {text!r:.50}'))
    return captions


def read_rows(path: str) -> Iterator:
    """Yield the names of the columns of a table, and then (number, row): a dict, or why the row cannot be read.

    The table is Parquet (*.parquet), JSON lines (*.jsonl), or else CSV. Numbers are those of class Row.

    Raises UserError if it cannot be read to its end.
    """
    readers = {'.parquet': read_parquet_table, '.jsonl': read_json_lines}
    read = readers.get(os.path.splitext(path)[1].lower(), read_csv)
    try:
        yield from read(path)
    except UnicodeError:
        raise UserError(f'the table {path} is not UTF-8; save it as "CSV UTF-8" in Excel, or move it to '
                        'another folder and write it here anew by iconv -f CP1252 -t UTF-8') from None


def encoding_of(beginning: bytes) -> str:
    """Return the encoding of a text by how it begins: UTF-16 where a byte order mark says so, or else UTF-8."""
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return 'utf-16'
    return 'utf-8-sig'


def open_text(path: str) -> TextIO:
    """Open a table for reading, with the ends of its lines as they are."""
    with open(path, 'rb') as file:
        encoding = encoding_of(file.read(2))
    return open(path, encoding=encoding, newline='')


# pyarrow's readers of CSV and JSON lines were tried: a quote that is not closed takes all rows behind it as its
# caption, without an error, and one row whose text is a number or a list makes the whole file unreadable.
def read_csv(path: str) -> Iterator:
    """Read a CSV as `read_rows` does. Raises UserError if a quote is not closed."""
    csv.field_size_limit(sys.maxsize)  # a column that nobody uses may hold megabytes in a cell
    with open_text(path) as file:
        # what separates the columns: Excel can say so in a first line, sep=;
        first = re.fullmatch('"?sep=(.)"?[\r\n]*', file.readline(), re.IGNORECASE)
        if first:
            separator = first[1]
        else:
            file.seek(0)
            header = next(filter(str.strip, file), '')  # the first line that is not empty
            separator = max(SEPARATORS, key=header.count)
            file.seek(0)

        # the rows
        reader = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
        try:
            names = next(filter(None, reader), [])  # the first row that is not empty
            end = reader.line_num
            yield names
            for cells in reader:
                number, end = end + 1, reader.line_num  # of the first line of a row, which may have more
                for cell in cells if separator in UNQUOTED else ():
                    if separator in cell and len(cell.splitlines()) > 1:
                        raise csv.Error(f'a cell that begins with a quote in line {number} has {separator!r} and ends '
                                        'of lines in it, as where rows follow one whose caption begins with a quote')
                if len(cells) == len(names):
                    yield number, dict(zip(names, cells, strict=True))
                elif cells:
                    yield number, (f'no row as long as the header: it has {len(cells)} cells instead of {len(names)}; '
                                   f'a cell with {separator!r} in it stands in quotes')
        except csv.Error as error:
            raise UserError(f'the table {path} cannot be read up to line {reader.line_num} ({error}); '
                            'a caption that begins with a quote ends with one, and a quote within it is written twice'
                            ) from None


def read_json_lines(path: str) -> Iterator:
    """Read JSON lines as `read_rows` does. Raises UserError if a line is not an object of JSON."""
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
        if getattr(error, 'errno', None) is not None:  # of the disk: pyarrow's own have no number
            raise
        raise UserError(f'the table {path} is damaged ({one_line(error)})') from None
