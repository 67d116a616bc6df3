"""Tables that have captions of images: their names, their columns and their rows."""
import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sdbench.errors import one_line

# names of the tables that are found in SOURCE: the first three are those of Hugging Face's ImageFolder
TABLES = ('metadata.csv', 'metadata.jsonl', 'metadata.parquet', 'captions.csv')
IMAGE_COLUMNS = ('file_name', 'filename')  # of paths of images
CAPTION_COLUMNS = ('text', 'caption')


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
        images = [self.image] if self.image else usual_images
        image = find_column(path, names, images, '--image_column')
        others = [name for name in names if name != image]
        if takes_only_other and not self.caption and len(others) == 1:
            return image, others[0]
        captions = [self.caption] if self.caption else CAPTION_COLUMNS
        return image, find_column(path, names, captions, '--caption_column', image)


USUAL_COLUMNS = Columns()


def find_column(path: str, names: Sequence[str], wanted: Sequence[str], flag: str, taken: str | None = None) -> str:
    """Return the one of the `wanted` columns that a table has, apart from the one that is `taken`.

    Raises as Columns.find does.
    """
    found = [name for name in names if name in wanted and name != taken]
    if not found:
        raise NoSuchColumn(f'no {" or ".join(wanted)} for {flag} among its columns {", ".join(names)}')
    if len(set(found)) > 1:
        raise ValueError(f'the table {path} has the columns {" and ".join(sorted(set(found)))}; name one of them with '
                         f'{flag}')
    if len(found) > 1:
        raise NoSuchColumn(f'several columns of one name: {len(found)} are called {found[0]}')
    return found[0]


class Row(NamedTuple):
    """A row of a table of captions."""
    number: int  # counted from 0
    image: str  # a path, relative to the folder of the table
    caption: str


class Table(NamedTuple):
    """A table of captions."""
    path: str
    column: str  # of the captions
    rows: list[Row]
    unread: dict[int, str]  # why a row is left out, by its number


class Captions:
    """The captions that the tables of SOURCE have for images.

    Every row is a sample of its own, so that an image with several captions is several samples. Where two tables name
    an image, the first one decides.

    Args:
        columns: that the flags name.
        leave_out: called with a file, a reason and the number of a row, for what no sample is made of.

    Attributes:
        read: real paths of all tables, also of those that are tables of something else.
        rows: by the real path of an image, the table that names it and its rows there.
        used: images whose captions were taken.
    """

    def __init__(self, columns: Columns, leave_out: Callable[[str, str, int | None], None]):
        self.columns = columns
        self.leave_out = leave_out
        self.read: set[str] = set()
        self.rows: dict[str, tuple[Table, list[Row]]] = {}
        self.used: set[str] = set()

    def add_named(self, path: str) -> None:
        """Read the table that --captions names. Raises ValueError if it is not a table of captions."""
        try:
            self.add(read_table(path, self.columns, is_named=True))
        except OSError as error:
            raise ValueError(f'--captions {path} cannot be read ({error.strerror})') from None
        except NoSuchColumn as error:
            raise ValueError(f'--captions {path} is no table of captions: {error}') from None

    def add_found(self, path: str) -> None:
        """Read a table that lies in SOURCE, unless it was read before. Leave out a table of something else."""
        if os.path.realpath(path) in self.read:
            return
        try:
            self.add(read_table(path, self.columns))
        except NoSuchColumn as error:
            if not path.endswith('.parquet'):  # which may hold the images themselves
                self.read.add(os.path.realpath(path))
                self.leave_out(path, f'no table of captions: {error}', None)

    def add(self, table: Table) -> None:
        """Take the rows of a table, except for images that an earlier table names."""
        self.read.add(os.path.realpath(table.path))
        for number, reason in table.unread.items():
            self.leave_out(table.path, reason, number)
        folder = os.path.realpath(os.path.dirname(table.path))
        for row in table.rows:
            image = os.path.realpath(os.path.join(folder, row.image))
            first, rows = self.rows.setdefault(image, (table, []))
            if first is table:
                rows.append(row)
            else:
                self.leave_out(table.path, f'a caption of another table: {first.path} has one of {row.image}',
                               row.number)

    def take(self, image: str) -> list[str]:
        """Return the captions that a table has for the image of a real path; none if no table names it."""
        if image not in self.rows:
            return []
        self.used.add(image)
        return [row.caption for row in self.rows[image][1]]

    def leave_out_missing(self) -> None:
        """Leave out the rows whose images do not exist."""
        for image, (table, rows) in self.rows.items():
            if image not in self.used and not os.path.isfile(image):
                for row in rows:
                    self.leave_out(table.path, f'no image at the path of a row: there is no {row.image}', row.number)

    def count(self) -> dict[tuple[str, str], int]:
        """Return how many captions were taken from each table, by its path and the name of its column."""
        numbers = Counter()
        for image, (table, rows) in self.rows.items():
            if image in self.used:
                numbers[table.path, table.column] += len(rows)
        return dict(numbers)


def read_table(path: str, columns: Columns, is_named: bool = False) -> Table:
    """Read a table of captions: Parquet (*.parquet), JSON lines (*.jsonl), or else CSV.

    Args:
        path: of the table.
        columns: that the flags name.
        is_named: whether --captions names this table, so that its only other column has the captions.

    Raises NoSuchColumn if it lacks the columns, so that it may be a table of something else. Raises ValueError if it
    cannot be read to its end, or a flag must name one of two columns: without it its images would have other captions.
    """
    # read the names of the columns, and find the two
    readers = {'.parquet': read_parquet_table, '.jsonl': read_json_lines}
    read = readers.get(os.path.splitext(path)[1].lower(), read_csv)
    try:
        lines = read(path)
        names = next(lines)
        image, caption = columns.find(path, names, IMAGE_COLUMNS, is_named)
        table = Table(path, caption, [], {})

        # read the rows, or say why one is left out
        for number, values in enumerate(lines):
            if isinstance(values, str):
                table.unread[number] = values
                continue
            name = values.get(image)
            text = values.get(caption)
            if not isinstance(name, str) or not name:
                table.unread[number] = f'no image in a row: it has no path in column {image}'
            elif not isinstance(text, str):  # such as nothing, or a list
                table.rows.append(Row(number, name, ''))
            else:
                table.rows.append(Row(number, name, text))
    except UnicodeError:
        raise ValueError(f'the table {path} is not UTF-8; save it as that') from None
    return table


def read_csv(path: str) -> Iterator[list[str] | dict[str, str] | str]:
    """Yield the names of the columns of a CSV, and then each row by these, or why it cannot be read.

    Raises ValueError if a quote is not closed.
    """
    with open(path, encoding='utf-8-sig', newline='') as file:
        # guess what separates the columns: spreadsheets write what is usual in their country
        header = next(filter(str.strip, file), '')  # the first line that is not empty
        file.seek(0)
        separator = max(',;\t', key=header.count)

        # read the rows
        reader = csv.reader(file, delimiter=separator, strict=True)
        rows = filter(None, reader)  # an empty line is not a row
        try:
            names = next(rows, [])
            yield names
            for cells in rows:
                if len(cells) == len(names):
                    yield dict(zip(names, cells, strict=True))
                else:
                    yield (f'no row as long as the header: it has {len(cells)} cells instead of {len(names)}; a cell '
                           f'with {separator!r} in it stands in quotes')
        except csv.Error as error:
            raise ValueError(f'the table {path} cannot be read up to line {reader.line_num} ({error}); a caption that '
                            'begins with a quote ends with one, and a quote within it is written twice') from None


def read_json_lines(path: str) -> Iterator[list[str] | dict[str, Any]]:
    """Yield the names of all keys of a file of JSON lines, and then each line as an object.

    Raises ValueError if a line is not an object of JSON.
    """
    rows = []
    with open(path, encoding='utf-8-sig') as file:
        for line in filter(str.strip, file):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f'row {len(rows)} of the table {path} cannot be read ({error})') from None
            if not isinstance(values, dict):
                raise ValueError(f'row {len(rows)} of the table {path} cannot be read (it is not an object)')
            rows.append(values)
    yield list(dict.fromkeys(key for row in rows for key in row))
    yield from rows


def read_parquet_table(path: str) -> Iterator[list[str] | dict[str, Any]]:
    """Yield the names of the columns of a Parquet file, and then each row by these.

    Raises ValueError if it is damaged.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile
    try:
        with ParquetFile(path) as parquet:
            yield parquet.schema_arrow.names
            for batch in parquet.iter_batches(use_threads=False):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        if getattr(error, 'errno', None) is not None:  # of the disk: pyarrow's own have no number
            raise
        raise ValueError(f'the table {path} is damaged ({one_line(error)})') from None
