"""Tables of images: which columns are read, and the captions that a table beside images has."""
import csv
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# how a table beside images may be called: the first two by Hugging Face's ImageFolder
METADATA = ('metadata.csv', 'metadata.jsonl', 'captions.csv')
IMAGE_COLUMNS = ('file_name', 'filename')  # of paths of images
PARQUET_IMAGE_COLUMNS = ('image',)  # of paths of images, or of their bytes
CAPTION_COLUMNS = ('text', 'caption')


class NoSuchColumn(ValueError):
    """A table that lacks a column, and so may be one of something else."""


class Columns(NamedTuple):
    """The columns of images and of captions that the flags name; None: those that are usual."""
    image: str | None = None
    caption: str | None = None

    def find(self, path: str, names: Sequence[str], usual_images: Sequence[str], takes_only_other: bool = False
             ) -> tuple[str, str]:
        """Return the names of the two columns of a table.

        Args:
            path: of the table.
            names: of all its columns.
            usual_images: how its column of images may be called.
            takes_only_other: whether the only column beside that of the images has the captions, whatever it is called.

        Raises NoSuchColumn, which tells the columns, if one is not there or has the name of another, and ValueError if
        there are two of which a flag must name one.
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
    """Return the one of the `wanted` columns that a table has beside the one that is `taken`.

    Raises as Columns.find does.
    """
    found = [name for name in names if name in wanted and name != taken]
    if not found:
        raise NoSuchColumn(f'no {" or ".join(wanted)} for {flag} among its columns {", ".join(names)}')
    if len(set(found)) > 1:
        raise ValueError(f'the table {path} has the columns {" and ".join(sorted(set(found)))}; name one of them with '
                         f'{flag}')
    if len(found) > 1:
        raise NoSuchColumn(f'{len(found)} of its columns are called {found[0]}')
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
    unread: dict[int, str]  # why a row is none, by its number


def read_table(path: str, columns: Columns, is_named: bool = False) -> Table:
    """Read a CSV, or JSON lines where the name ends in .jsonl.

    Args:
        path: of the table.
        columns: that the flags name.
        is_named: the user has named this table, so that its only other column has the captions.

    Raises NoSuchColumn if it has not the columns, so that it may be a table of something else. Raises ValueError if it
    cannot be read to its end, or nothing says which column is meant: without it its images would have other captions.
    """
    lines = read_json_lines(path) if path.lower().endswith('.jsonl') else read_csv(path)
    names = next(lines)
    image, caption = columns.find(path, names, IMAGE_COLUMNS, is_named)
    table = Table(path, caption, [], {})
    for number, values in enumerate(lines):
        if isinstance(values, str):
            table.unread[number] = values
        elif not isinstance(values.get(image), str) or not values[image]:
            table.unread[number] = f'no image in a row: it has no {image}'
        else:
            text = values.get(caption)
            if not isinstance(text, str):  # such as nothing, or a list
                text = ''
            table.rows.append(Row(number, values[image], text))
    return table


def read_csv(path: str) -> Iterator[list[str] | dict[str, str] | str]:
    """Yield the names of the columns of a CSV, and then each row by these, or why it cannot be read.

    Raises ValueError if the file is not UTF-8, or a quote in it is not closed.
    """
    with open(path, encoding='utf-8-sig', newline='') as file:
        try:
            header = next(filter(str.strip, file), '')  # the first line that is not empty
            file.seek(0)
            separator = max(',;\t', key=header.count)  # programs of tables write what their country uses
            reader = csv.reader(file, delimiter=separator, strict=True)
            rows = filter(None, reader)  # an empty line is no row
            names = next(rows, [])
            yield names
            for cells in rows:
                if len(cells) == len(names):
                    yield dict(zip(names, cells, strict=True))
                else:
                    yield (f'no row as long as the header: it has {len(cells)} cells instead of {len(names)}; a cell '
                           f'with {separator!r} in it stands in quotes')
        except UnicodeError:
            raise ValueError(f'the table {path} is not UTF-8; save it as that') from None
        except csv.Error as error:
            raise ValueError(f'the table {path} cannot be read up to line {reader.line_num} ({error}); a caption that '
                            'begins with a quote ends with one, and a quote within it is written twice') from None


def read_json_lines(path: str) -> Iterator[list[str] | dict[str, Any]]:
    """Yield the names of all keys of a file of JSON lines, and then each line as an object.

    Raises ValueError if the file is not UTF-8, or a line is no object of JSON.
    """
    rows = []
    with open(path, encoding='utf-8-sig') as file:
        try:
            for line in filter(str.strip, file):
                values = json.loads(line)
                if not isinstance(values, dict):
                    raise ValueError('it is no object')
                rows.append(values)
        except UnicodeError:
            raise ValueError(f'the table {path} is not UTF-8; save it as that') from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f'row {len(rows)} of the table {path} cannot be read ({error})') from None
    yield list(dict.fromkeys(key for row in rows for key in row))
    yield from rows


def read_table_of_paths(path: str, columns: Columns) -> Table | None:
    """Read a Parquet file whose column of images holds their paths; None: it holds bytes, or cannot be read.

    A path is a string, or stands in a struct whose bytes are all null.

    Raises OSError where the file cannot be opened, and ValueError where a flag must name one of two columns.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile
    try:
        with ParquetFile(path) as parquet:
            image, caption = columns.find(path, parquet.schema_arrow.names, PARQUET_IMAGE_COLUMNS)
            if not holds_paths(parquet, image):
                return None
            table = Table(path, caption, [], {})
            for batch in parquet.iter_batches(columns=[image, caption], use_threads=False):
                for value, text in zip(batch.column(image), batch.column(caption), strict=True):
                    add_row(table, value.as_py(), text)
            return table
    except OSError as error:
        if error.errno is not None:
            raise
        return None  # it is damaged, as whoever reads its samples says
    except (NoSuchColumn, UnicodeError, pyarrow.ArrowException):
        return None


def holds_paths(parquet: Any, image: str) -> bool:
    """Return whether a column of an opened Parquet file (pyarrow.parquet.ParquetFile) holds paths, and no bytes."""
    from pyarrow import types
    kind = parquet.schema_arrow.field(image).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind):
        return True
    if not types.is_struct(kind) or 'path' not in kind.names:
        return False
    if 'bytes' not in kind.names or types.is_null(kind.field('bytes').type):
        return True
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema == f'{image}.bytes' and not is_all_null(chunk):
                return False
    return True


def is_all_null(chunk: Any) -> bool:
    """Return whether a column of a row group (pyarrow.parquet.ColumnChunkMetaData) says that it holds nothing."""
    statistics = chunk.statistics
    return statistics is not None and statistics.has_null_count and statistics.null_count == chunk.num_values


def add_row(table: Table, image: Any, caption: Any) -> None:
    """Add a row of Parquet to a table.

    Args:
        table: to which it is added.
        image: the value of its column of images, a path or a struct with one.
        caption: pyarrow's scalar of its caption.
    """
    number = len(table.rows) + len(table.unread)
    if isinstance(image, dict):
        image = image['path']
    if not image:
        table.unread[number] = f'no image in a row: it has {image!r}'
        return
    try:
        text = caption.as_py()
    except UnicodeError:
        table.unread[number] = f'caption is not UTF-8: of {image}'
        return
    table.rows.append(Row(number, image, text if isinstance(text, str) else ''))
