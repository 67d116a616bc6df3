"""Tables that have captions of images: their names, their columns and their rows."""
import codecs
import csv
import json
import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from sdbench.errors import one_line

OWN_TABLE = 'captions.csv'  # by its name a table of captions, whatever its columns
# names of the tables that are found in SOURCE: the first three are those of Hugging Face's ImageFolder
TABLES = ('metadata.csv', 'metadata.jsonl', 'metadata.parquet', OWN_TABLE)
NO_TABLE = 'no table of captions'  # how the reason begins for which a table of one of these names was not read
TABLE_SUFFIXES = ('.csv', '.tsv', '.jsonl', '.parquet')  # of those that --captions may name
IMAGE_COLUMNS = ('file_name', 'filename')  # of paths of images
CAPTION_COLUMNS = ('text', 'caption')
SEPARATORS = ',;\t|'  # of the columns of a CSV: spreadsheets write what is usual in their country
NO_CAPTIONS = ('nan', 'NaN', 'None', '<NA>')  # what pandas writes for a missing caption that was made text


class Unread(str):
    """Why something of a sample is not read."""


class NoSuchColumn(ValueError):
    """A table lacks a column, so that it may be a table of something else."""


class Columns(NamedTuple):
    """Names of the columns of images and of captions, as the flags give them; None: the usual ones."""
    image: str | None = None
    caption: str | None = None

    def find(self, path: str, names: Sequence[str], usual_images: Sequence[str], takes_only_other: bool = False
             ) -> tuple[str, str]:
        """Return the names of the two columns of a table.

        Args:
            path: of the table.
            names: of all its columns.
            usual_images: usual names of its column of images.
            takes_only_other: whether the only other column has the captions, whatever its name.

        Raises NoSuchColumn, with the names of the columns, if one is missing or two have its name. Raises ValueError if
        a flag must name one of two columns.
        """
        # the columns of these names
        images = [self.image] if self.image else usual_images
        captions = [self.caption] if self.caption else CAPTION_COLUMNS
        found_images = columns_called(images, names)
        others = [name for name in names if name not in found_images]
        found_captions = columns_called(captions, others)
        if takes_only_other and not self.caption and len(others) == 1:
            found_captions = others

        # there is to be one of each
        missing = []
        if not found_images:
            missing.append(f'no {" or ".join(images)} for --image_column')
        if not found_captions:
            missing.append(f'no {" or ".join(captions)} for --caption_column')
        if missing:
            listed = ', '.join(name or '(no name)' for name in names)
            raise NoSuchColumn(f'{" and ".join(missing)} among its columns {listed}')
        for found, flag in ((found_images, '--image_column'), (found_captions, '--caption_column')):
            if len(set(found)) > 1:
                raise ValueError(f'the table {path} has the columns {" and ".join(sorted(set(found)))}; name one of '
                                 f'them with {flag}')
            if len(found) > 1:
                raise NoSuchColumn(f'several columns of one name: {len(found)} are called {found[0]}')
        return found_images[0], found_captions[0]


USUAL_COLUMNS = Columns()


def columns_called(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns that have one of the `wanted` names; if none has, those that have it but for its form.

    So File_Name, "file name" and FILENAME are found as file_name.
    """
    def letters(name: str) -> str:
        return ''.join(filter(str.isalnum, name.casefold()))
    alike = {letters(name) for name in wanted}
    return [name for name in names if name in wanted] or [name for name in names if letters(name) in alike]


class Row(NamedTuple):
    """A caption in a row of a table."""
    number: int  # of its line, counted from 1; in Parquet of the row, counted from 0
    image: str  # a path, relative to the folder of the table
    caption: str


class Captions:
    """The captions that the tables of SOURCE have for images.

    Every row is a sample of its own, so that an image with several captions is several samples. Where two tables name
    an image, the first one decides.

    Args:
        columns: that the flags name.
        leave_out: called with a file, a reason and the number of a row, for what no sample is made of.

    Attributes:
        read: real paths of all tables, also of those that are tables of something else.
        rows: by the real path of an image, path and column of the table that names it, and its rows there.
        used: images whose captions were taken.
        listings: of folders, the names of their entries by form.
    """

    def __init__(self, columns: Columns, leave_out: Callable[[str, str, int | None], None]):
        self.columns = columns
        self.leave_out = leave_out
        self.read: set[str] = set()
        self.rows: dict[str, tuple[tuple[str, str], list[Row]]] = {}
        self.used: set[str] = set()
        self.listings: dict[str, dict[str, list[str]]] = {}

    def add(self, path: str, is_named: bool = False) -> None:
        """Take the rows of a table, unless it was read before or is not a table of captions.

        A row is left out where its image does not exist, or where an earlier table names that image.

        Args:
            path: of the table.
            is_named: whether --captions names it: then it is one of captions, and its only other column has them.

        Raises ValueError if it cannot be read to its end, or a flag must name one of two columns: without it its images
        would have other captions.
        """
        # find the two columns
        if os.path.realpath(path) in self.read:
            return
        label = f'--captions {path}' if is_named else f'the table {path}'
        rows = read_rows(path)
        try:
            image_column, caption_column = self.columns.find(path, next(rows), IMAGE_COLUMNS, is_named)
        except OSError as error:
            raise ValueError(f'{label} cannot be read ({error.strerror})') from None
        except NoSuchColumn as error:
            if is_named:
                raise ValueError(f'{label} is {NO_TABLE}: {error}') from None
            if not path.lower().endswith('.parquet'):  # which may hold the images themselves
                self.read.add(os.path.realpath(path))
                self.leave_out(path, f'{NO_TABLE}: {error}', None)
            return

        # take the rows
        self.read.add(os.path.realpath(path))
        table = (path, caption_column)
        folder = os.path.realpath(os.path.dirname(path))
        for number, values in rows:
            # the image, which is one file
            if isinstance(values, str):
                self.leave_out(path, values, number)
                continue
            name = values.get(image_column)
            if not isinstance(name, str) or not name.strip():
                self.leave_out(path, f'no image in a row: it has no path in column {image_column}', number)
                continue
            images = self.images_called(folder, name)
            if len(images) != 1:
                there = os.path.join(folder, name)
                which = f'{name} may be each of {", ".join(images)}' if images else f'there is no {there}'
                self.leave_out(path, f'no image at the path of a row: {which}', number)
                continue

            # its captions, of the first table that names it
            first, rows_of_image = self.rows.setdefault(os.path.realpath(images[0]), (table, []))
            for text in captions_in(values.get(caption_column)):
                if first != table:
                    self.leave_out(path, f'a caption of another table: {first[0]} has one of {name}', number)
                elif isinstance(text, Unread):
                    self.leave_out(path, f'no caption: {text} for {name}', number)
                else:
                    rows_of_image.append(Row(number, name, text))

    def images_called(self, folder: str, name: str) -> list[str]:
        """Return the path of the file that a row names, or if there is none those whose names differ in their form.

        A table and a disk may write an accent as one sign or as two (macOS), and / as a backslash (Windows), and they
        may differ in capitals and in blanks around a name.
        """
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return [path]
        found = ['/' if name.startswith('/') else folder]
        for part in name.replace('\\', '/').split('/'):
            found = [os.path.join(parent, entry) for parent in found for entry in self.entries_called(parent, part)]
        return list(filter(os.path.isfile, found))

    def entries_called(self, folder: str, name: str) -> list[str]:
        """Return the name if the folder has such an entry, or else those of its entries that differ in their form."""
        if os.path.lexists(os.path.join(folder, name)):
            return [name]
        if folder not in self.listings:
            self.listings[folder] = names_by_form(os.listdir(folder) if os.path.isdir(folder) else ())
        return self.listings[folder].get(form_of_name(name), [])

    def take(self, image: str) -> list[str] | None:
        """Return the captions that a table has for the image of a real path; None if no table names it."""
        if image not in self.rows:
            return None
        self.used.add(image)
        return [row.caption for row in self.rows[image][1]]

    def finish(self) -> dict[tuple[str, str], int]:
        """Leave out the rows of images that are none of SOURCE.

        Returns how many captions were taken from each table, by its path and the name of its column.
        """
        numbers = Counter()
        for image, (table, rows) in self.rows.items():
            if image in self.used:
                numbers[table] += len(rows)
                continue
            for row in rows:
                self.leave_out(table[0], f'no image of SOURCE at the path of a row: {row.image} is elsewhere, hidden '
                               'or no image', row.number)
        return dict(numbers)


def form_of_name(name: str) -> str:
    """Return what a name has in common with those that differ in accents of two signs, capitals and blanks alone."""
    return unicodedata.normalize('NFC', name.strip().casefold())


def names_by_form(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each form, sorted."""
    found = defaultdict(list)
    for name in sorted(names):
        found[form_of_name(name)].append(name)
    return found


def captions_in(value: Any) -> list[str | Unread]:
    """Return the captions in a cell: its text, or those of a list; in the place of each that is none, why.

    A CSV has a list as JSON. One that Python has written, ['a', 'b'], is refused: NumPy's looks nearly the same.
    """
    if isinstance(value, str) and re.match(r"""\s*\[["'].*["']\]\s*$""", value, re.DOTALL):
        try:
            value = json.loads(value)
        except ValueError:
            return [Unread(f'the row has a list that is not JSON, {value!r:.50}')]
    captions = []
    for text in value if isinstance(value, list) and value else [value]:
        if isinstance(text, str) and text.strip() and text.strip() not in NO_CAPTIONS:
            captions.append(text)
        else:
            captions.append(Unread(f'the row has {text!r:.50}'))
    return captions


def read_rows(path: str) -> Iterator:
    """Yield the names of the columns of a table, and then (number, row): a dict, or why the row cannot be read.

    The table is Parquet (*.parquet), JSON lines (*.jsonl), or else CSV. Numbers are those of class Row.

    Raises ValueError if it cannot be read to its end.
    """
    readers = {'.parquet': read_parquet_table, '.jsonl': read_json_lines}
    read = readers.get(os.path.splitext(path)[1].lower(), read_csv)
    try:
        yield from read(path)
    except UnicodeError:
        raise ValueError(f'the table {path} is not UTF-8; save it as "CSV UTF-8" in Excel, or move it to '
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
    """Read a CSV as `read_rows` does. Raises ValueError if a quote is not closed."""
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
        lines_before = 1 if first else 0
        try:
            names = next(filter(None, reader), [])  # the first row that is not empty
            end = lines_before + reader.line_num
            yield names
            for cells in reader:
                number, end = end + 1, lines_before + reader.line_num  # of the first line of a row, which may have more
                if len(cells) == len(names):
                    yield number, dict(zip(names, cells, strict=True))
                elif cells:
                    yield number, (f'no row as long as the header: it has {len(cells)} cells instead of {len(names)}; '
                                   f'a cell with {separator!r} in it stands in quotes')
        except csv.Error as error:
            raise ValueError(f'the table {path} cannot be read up to line {lines_before + reader.line_num} ({error}); '
                             'a caption that begins with a quote ends with one, and a quote within it is written twice'
                             ) from None


def read_json_lines(path: str) -> Iterator:
    """Read JSON lines as `read_rows` does. Raises ValueError if a line is not an object of JSON."""
    rows = []
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f'line {number} of the table {path} cannot be read ({error})') from None
            if not isinstance(values, dict):
                raise ValueError(f'line {number} of the table {path} cannot be read (it is not an object)')
            rows.append((number, values))
    yield list(dict.fromkeys(key for _, row in rows for key in row))
    yield from rows


def read_parquet_table(path: str) -> Iterator:
    """Read Parquet as `read_rows` does. Raises ValueError if it is damaged."""
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
        raise ValueError(f'the table {path} is damaged ({one_line(error)})') from None
