"""Tables that have captions of images: their names, their columns and their rows."""
import codecs
import csv
import json
import os
import re
import stat
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from sdbench.errors import one_line
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


class NoSuchColumn(ValueError):
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
        """Return the name of the captions of a column or suffix: its own where several are given."""
        return given if len(self.captions) > 1 else ONE_CAPTION

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

        Raises NoSuchColumn, with the names of the columns, if one is missing or two have its name. Raises ValueError if
        a flag must name one of two columns.
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
            raise NoSuchColumn(f'{" and ".join(missing)} among its columns {listed}')
        for flag, _, _, called in found:
            if len(set(called)) > 1:
                raise ValueError(f'the table {path} has the columns {" and ".join(sorted(set(called)))}; name one of '
                                 f'them with {flag}')
            if len(called) > 1:
                raise NoSuchColumn(f'several columns of one name: {len(called)} are called {called[0]}')
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


FileIdentity = tuple[int, int]


def identity_of(status: os.stat_result) -> FileIdentity:
    """Return device and inode of a file: all names that links give it have the same, as os.path.samefile compares."""
    return status.st_dev, status.st_ino


def find_file(path: str) -> FileIdentity | None:
    """Return the identity of the regular file of a path; None if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # NUL in a path
        return None
    return identity_of(status) if stat.S_ISREG(status.st_mode) else None


class Row(NamedTuple):
    """A row of a table."""
    number: int  # of its line, counted from 1; in Parquet of the row, counted from 0
    image: str  # a path, relative to the folder of the table
    captions: dict[str, Any]  # by name: the whole cells, until the row is taken, and then their texts


class Captions:
    """The captions that the tables of SOURCE have for images.

    An image has the captions of all its rows. Where two tables name it, the first one decides. Rows whose path is that
    of a file go first: once all tables are added, `match_alike` looks for those whose names differ in their form.

    Args:
        columns: that the flags name.
        leave_out: called with a file, a reason and the number of a row, for what no sample is made of.

    Attributes:
        named: the table of --captions.
        read: real folder and identity of all tables, also of those that are tables of something else.
        rows: by the identity of an image, path and columns of the table that names it, and its rows there.
        unmatched: rows whose path is that of no file: the table, its folder, and the row.
        used: images whose captions were taken.
        listings: of folders, the names of their entries by form.
    """

    def __init__(self, columns: Columns, leave_out: Callable[[str, str, int | None], None]):
        self.columns = columns
        self.leave_out = leave_out
        self.named: str | None = None
        self.read: set[tuple[str, FileIdentity]] = set()
        self.rows: dict[FileIdentity, tuple[tuple[str, str], list[Row]]] = {}
        self.unmatched: list[tuple[tuple[str, str], str, Row]] = []
        self.used: set[FileIdentity] = set()
        self.listings: dict[str, dict[str, list[str]]] = {}

    def add(self, path: str, is_named: bool = False) -> None:
        """Take the rows of a table, unless it was read before or is not a table of captions.

        A row is left out where its image does not exist, or where an earlier table names that image. The paths in a
        table depend on its folder, so that one with links in several folders is read in each.

        Args:
            path: of the table.
            is_named: whether --captions names it: then it is one of captions, and its only other column has them.

        Raises ValueError if it cannot be read to its end, or a flag must name one of two columns: without it its images
        would have other captions.
        """
        # find the columns
        label = f'--captions {path}' if is_named else f'the table {path}'
        path = os.path.abspath(path)
        folder = os.path.realpath(os.path.dirname(path))
        if (folder, find_file(path)) in self.read:
            return
        rows = read_rows(path)
        try:
            image_column, caption_columns = self.columns.find(path, next(rows), IMAGE_COLUMNS, is_named)
        except OSError as error:
            raise ValueError(f'{label} cannot be read ({error.strerror})') from None
        except NoSuchColumn as error:
            if is_named:
                raise ValueError(f'{label} is {NO_TABLE}: {error}') from None
            if not path.lower().endswith('.parquet'):  # which may hold the images themselves
                self.read.add((folder, find_file(path)))
                self.leave_out(path, f'{NO_TABLE}: {error}', None)
            return
        self.read.add((folder, find_file(path)))
        if is_named:
            self.named = path

        # take the rows of files, and keep the others
        table = (path, ', '.join(caption_columns.values()))
        for number, values in rows:
            if isinstance(values, str):
                self.leave_out(path, values, number)
                continue
            name = values.get(image_column)
            if not isinstance(name, str) or not name.strip():
                self.leave_out(path, f'no image in a row: it has no path in column {image_column}', number)
                continue
            row = Row(number, name, {called: values.get(column) for called, column in caption_columns.items()})
            image = find_file(os.path.join(folder, name))
            if image is None:
                self.unmatched.append((table, folder, row))
            else:
                self.take_row(table, image, row)

    def take_row(self, table: tuple[str, str], image: FileIdentity, row: Row) -> None:
        """Take the captions in a row of an image, if its table is the first one that names it."""
        first, rows_of_image = self.rows.setdefault(image, (table, []))
        if first != table:
            reason = f'a caption of another table: {first[0]} has one of {row.image}'
            self.leave_out(table[0], reason, row.number)
            return
        captions = {}
        for name, cell in row.captions.items():
            texts = captions_in(cell)
            for text in texts:
                if isinstance(text, Unread):
                    self.leave_out(table[0], f'{with_name(text, name)} for {row.image}', row.number)
            captions[name] = [text for text in texts if not isinstance(text, Unread)]
        if any(captions.values()):
            rows_of_image.append(row._replace(captions=captions))

    def match_alike(self) -> None:
        """Take the rows whose path differs in its form from that of a file, where one name and one file are left over.

        A table and a disk may write an accent as one sign or as two (macOS), and / as a backslash (Windows), and they
        may differ in capitals and in blanks around a name.
        """
        alike = {}  # files by the path that rows have
        for _, folder, row in self.unmatched:
            if (folder, row.image) not in alike:
                alike[folder, row.image] = self.files_alike(folder, row.image)
        names = Counter(path for paths in alike.values() for path in paths)
        with_rows = set(self.rows)

        for table, folder, row in self.unmatched:
            found = alike[folder, row.image]
            there = os.path.join(folder, row.image)
            why = None
            if not found:
                why = f'there is no {there}'
            elif len(found) > 1:
                why = f'{row.image} may be each of {", ".join(found)}'
            elif find_file(found[0]) in with_rows:
                why = f'there is no {there}, and {found[0]} has rows of its own'
            elif names[found[0]] > 1:
                why = f'there is no {there}, and rows of several names may be of {found[0]}'
            if why is None:
                self.take_row(table, find_file(found[0]), row)
            else:
                self.leave_out(table[0], f'no image at the path of a row: {why}', row.number)
        self.unmatched.clear()

    def files_alike(self, folder: str, name: str) -> list[str]:
        """Return the paths of the files whose names differ in their form from the path that a row has."""
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

    def take(self, image: FileIdentity) -> Named | None:
        """Return the captions that a table has for an image; None if no table names it."""
        if image not in self.rows:
            return None
        self.used.add(image)
        captions = defaultdict(list)
        for row in self.rows[image][1]:
            for name, texts in row.captions.items():
                captions[name] += texts
        return dict(captions)

    def finish(self) -> dict[tuple[str, str], int]:
        """Leave out the rows of images that are none of SOURCE.

        Returns how many rows were taken from each table, by its path and the names of its columns of captions.

        Raises ValueError if no row of --captions names an image of SOURCE.
        """
        numbers = Counter()
        tables = set()
        for image, (table, rows) in self.rows.items():
            if image in self.used:
                numbers[table] += len(rows)
                tables.add(table[0])
                continue
            for row in rows:
                self.leave_out(table[0], f'no image of SOURCE at the path of a row: {row.image} is elsewhere, hidden '
                               'or no image', row.number)
        if self.named is not None and self.named not in tables:
            raise ValueError(f'--captions {self.named}: none of its rows names an image of SOURCE; its paths are '
                             'relative to its own folder, so move it or mend its paths')
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
