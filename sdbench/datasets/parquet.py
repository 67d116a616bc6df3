"""Images with captions out of the rows of Parquet files."""
import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from sdbench.datasets.samples import OTHER_COLUMNS, Unread
from sdbench.datasets.sources import File
from sdbench.datasets.tables import Columns
from sdbench.inputs.stores import open_file
from sdbench.paths import is_url

ROWS_AT_ONCE = 32
BUFFER_BYTES = 8 << 20  # of each column, whose row group may be as large as the file


def read_parquet(file: File, columns: Columns) -> Iterator[tuple[int | None, str, bytes | Unread]]:
    """Yield (number, suffix, content) of the image and of the caption of each row, of a piece of a file its own rows.

    Where the file has other columns, that is all: (None, OTHER_COLUMNS, why).

    Raises OSError without a number, or an error of pyarrow, where the file is damaged.
    """
    from pyarrow.parquet import ParquetFile  # takes a third of a second
    with (open_file(file.name) as reader,
          ParquetFile(reader, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True) as parquet):
        try:
            pair = columns.find(parquet.schema_arrow.names, ['image'])
        except ValueError as error:
            yield None, OTHER_COLUMNS, Unread(error)
            return
        number = 0  # of the row
        for index in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(index)
            if not file.has_byte(group.column(0).data_page_offset):
                number += group.num_rows
                continue
            for batch in parquet.iter_batches(ROWS_AT_ONCE, [index], pair, use_threads=False):
                for image, caption in zip(batch.column(pair[0]), batch.column(pair[1]), strict=True):
                    yield number, '.jpg', image_of(image.as_py(), file)
                    yield number, '.txt', caption_of(caption)
                    number += 1


def image_of(value: Any, file: File) -> bytes | Unread:
    """The bytes of an image: a value of a column that holds bytes, paths, or as on the hub both in a struct."""
    if isinstance(value, dict):
        value = value.get('bytes') or value.get('path')
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        return Unread('the row has none')
    if is_url(file.name):
        return Unread('a path in a store is not read')
    if PurePath(value).is_absolute() or '..' in PurePath(value).parts:  # a stranger can have written it
        return Unread(f'{value} leads out of the folder')
    path = Path(os.path.dirname(file.name), value)
    if not os.path.isfile(path):
        return Unread(f'there is no {value}')
    return path.read_bytes()


def caption_of(scalar: Any) -> bytes | Unread:
    """A caption, from pyarrow's scalar."""
    try:
        value = scalar.as_py()
    except UnicodeError:
        return Unread('it is not UTF-8')
    if not isinstance(value, str):
        return Unread(f'the row has {value!r:.50}')
    return value.encode()
