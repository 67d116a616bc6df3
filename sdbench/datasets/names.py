"""Names of files: which are images, captions or tables, and which names belong together.

In folders and in tars, a name is split at its last dot: the key is before it, and the suffix begins with it. The
caption of KEY.jpg is in KEY.txt or KEY.caption, or is the "caption" in KEY.json. The case of a suffix does not matter.
WebDataset splits at the first dot instead, which makes IMG_2020.01.02.jpg and IMG_2020.01.03.jpg one sample.
"""
from collections.abc import Iterable, Set

from sdbench.inputs.images import formats

IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.gif', '.bmp', '.avif', '.tif', '.tiff', '.jp2',
                  '.ppm')
HEIF_SUFFIXES = ('.heic', '.heif')  # read if pillow-heif is installed
CAPTION_SUFFIXES = ('.txt', '.caption', '.json')  # in this order, the first file that is not empty has the caption
TABLE_SUFFIXES = ('.csv', '.jsonl', '.parquet')  # tables that --captions may name


def split_name(name: str) -> tuple[str, str]:
    """Return the key and the suffix of a file name. The suffix includes its dot, and is '' if there is none."""
    key, dot, suffix = name.rpartition('.')
    if not key or key.endswith('/') or '/' in suffix:
        return name, ''
    return key, dot + suffix


def is_image(suffix: str) -> bool:
    """Tell whether files with this suffix are read as images."""
    return suffix.lower() in IMAGE_SUFFIXES or (suffix.lower() in HEIF_SUFFIXES and 'HEIF' in formats())


def is_caption(suffix: str) -> bool:
    """Tell whether a file with this suffix may contain a caption."""
    return suffix.lower() in CAPTION_SUFFIXES


def is_shard(suffix: str) -> bool:
    """Tell whether a file with this suffix can hold many samples, because it is a tar or a Parquet file."""
    return suffix.lower() in ('.tar', '.parquet')


def caption_suffixes(suffixes: Iterable[str]) -> list[str]:
    """Return the suffixes that caption files have, ordered as the files are tried."""
    return sorted(filter(is_caption, suffixes), key=lambda suffix: (CAPTION_SUFFIXES.index(suffix.lower()), suffix))


def why_not_read(suffix: str) -> str:
    """Return why a file with this suffix is skipped."""
    if suffix.lower() in HEIF_SUFFIXES:
        return f'{suffix} needs a package (pip install pillow-heif)'
    if suffix.lower() in TABLE_SUFFIXES:
        return f'a {suffix} of this name is read only with --captions'
    return f'{suffix or "a file without a suffix"} is not read'


def is_written_by_img2dataset(name: str, present: Set[str]) -> bool:
    """Tell whether img2dataset wrote this file about a shard that is present.

    Next to 00000.tar, or to the folder 00000 of its layout `files`, it writes 00000.parquet and 00000_stats.json.
    """
    shard = name.removesuffix('.parquet').removesuffix('_stats.json')
    if shard == name:
        return False
    return f'{shard}.tar' in present or {shard, f'{shard}_stats.json'} <= present


def is_hidden(name: str) -> bool:
    """Tell whether a file is hidden or lies in a hidden folder, such as ._a.jpg and .Trash/a.jpg."""
    return any(part.startswith('.') and part not in ('.', '..') for part in name.split('/'))
