"""Images with captions out of the rows of Parquet files."""
from collections.abc import Iterator
from typing import Any

from sdbench.datasets.samples import OTHER_COLUMNS, Unread
from sdbench.datasets.sources import File
from sdbench.datasets.tables import PARQUET_IMAGE_COLUMNS, Columns, NoSuchColumn, holds_paths
from sdbench.errors import DataError
from sdbench.inputs.stores import open_file

ROWS_AT_ONCE = 32
BUFFER_BYTES = 8 << 20  # of each column, whose row group may be as large as the file


def read_parquet(file: File, columns: Columns) -> Iterator[tuple[int | None, str, bytes | Unread]]:
    """Yield (number, suffix, content) of the image and of the caption of each row, of a piece of a file its own rows.

    Where the file has other columns, that is all: (None, OTHER_COLUMNS, why). So it is where it holds paths of images:
    on this machine such a file is a table of captions (sdbench/datasets/tables.py).

    Raises OSError without a number, or an error of pyarrow, where the file is damaged, and DataError where a flag must
    name one of two columns.
    """
    from pyarrow.parquet import ParquetFile  # takes a third of a second
    with (open_file(file.name) as reader,
          ParquetFile(reader, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True) as parquet):
        try:
            pair = columns.find(file.name, parquet.schema_arrow.names, PARQUET_IMAGE_COLUMNS)
        except NoSuchColumn as error:
            yield None, OTHER_COLUMNS, Unread(error)
            return
        except ValueError as error:
            raise DataError(str(error)) from None
        if holds_paths(parquet, pair[0]):
            reason = f'paths instead of images in column {pair[0]}: these are read on this machine alone'
            yield None, OTHER_COLUMNS, Unread(reason)
            return
        number = 0  # of the row
        for index in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(index)
            if not file.has_byte(group.column(0).data_page_offset):
                number += group.num_rows
                continue
            for batch in parquet.iter_batches(ROWS_AT_ONCE, [index], pair, use_threads=False):
                for image, caption in zip(batch.column(pair[0]), batch.column(pair[1]), strict=True):
                    yield number, '.jpg', image_of(image.as_py())
                    yield number, '.txt', caption_of(caption)
                    number += 1


def image_of(value: Any) -> bytes | Unread:
    """Return the bytes of an image, of a column that holds bytes, or as on the hub a struct of bytes and path."""
    if isinstance(value, dict):
        value = value.get('bytes') or value.get('path')
    if isinstance(value, bytes):
        return value
    if value is None:
        return Unread('the row has none')
    return Unread(f'the row has {value!r:.50} instead of its bytes')


def caption_of(scalar: Any) -> bytes | Unread:
    """A caption, from pyarrow's scalar."""
    try:
        value = scalar.as_py()
    except UnicodeError:
        return Unread('it is not UTF-8')
    if not isinstance(value, str):
        return Unread(f'the row has {value!r:.50}')
    return value.encode()
