"""What the names of files tell: which are images, captions or shards, which belong together, and which split they are.

In folders and in tars, a name is split at its last dot: the key is before it, and the suffix begins with it. The
caption of KEY.jpg is in KEY.txt or KEY.caption, or is the "caption" in KEY.json. The case of a suffix does not matter.
WebDataset splits at the first dot instead, which makes IMG_2020.01.02.jpg and IMG_2020.01.03.jpg one sample.

The keywords for splits are those of Hugging Face's `datasets`. Each side of a keyword is an end of the name, a digit, a
space, a dot, a dash or an underscore: train-00000.parquet, COCO_val2014_1.jpg and Test/ have one, and attest/ has none.
"""
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Set

from sdbench.errors import UserError
from sdbench.inputs.images import formats

IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.gif', '.bmp', '.avif', '.tif', '.tiff', '.jp2',
                  '.ppm')
HEIF_SUFFIXES = ('.heic', '.heif')  # read if pillow-heif is installed
CAPTION_SUFFIXES = ('.txt', '.caption', '.json')  # in this order, the first file that is not empty has the caption
TABLE_SUFFIXES = ('.csv', '.jsonl')

KEYWORDS = {'train': ('train', 'training'), 'validation': ('validation', 'valid', 'dev', 'val'),
            'test': ('test', 'testing', 'eval', 'evaluation')}
ALL_SPLITS = 'all'  # the value of --split that converts all splits together
SPLIT_OF = {keyword: split for split, keywords in KEYWORDS.items() for keyword in keywords}
PATTERN = re.compile(rf'(?<![^-._ 0-9])({"|".join(SPLIT_OF)})(?![^-._ 0-9])', re.IGNORECASE)


def split_name(name: str) -> tuple[str, str]:
    """Return the key and the suffix of a file name. The suffix includes its dot, and is '' if there is none."""
    key, dot, suffix = name.rpartition('.')
    if not key or key.endswith('/') or '/' in suffix:
        return name, ''
    return key, dot + suffix


def is_image(suffix: str) -> bool:
    return suffix.lower() in IMAGE_SUFFIXES or (suffix.lower() in HEIF_SUFFIXES and 'HEIF' in formats())


def is_caption(suffix: str) -> bool:
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
        return f'a {suffix} is read only in a folder, by the name of a table of captions or with --captions'
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


def group_by_split(paths: Iterable[str], sources: Iterable[str] = ()) -> dict[str, list[str]]:
    """Return the paths of each split that occurs.

    The first folder or file in a path that has a keyword decides. A path without a keyword belongs to 'train'. The
    folders that all paths share do not count, because a user who gives only the folder test/ wants to convert it.
    Folders above one of the `sources`, which found the files, do not count either.
    """
    above = {re.split(r'[*?[]', source.rstrip('/'))[0].rpartition('/')[0] + '/' for source in sources}
    parts_of = {}
    for path in paths:
        begin = min((len(folder) for folder in above if path.startswith(folder)), default=0)
        parts_of[path] = path[begin:].split('/')
    depth = len(os.path.commonprefix([parts[:-1] for parts in parts_of.values()]))
    groups = defaultdict(list)
    for path, parts in parts_of.items():
        matches = filter(None, map(PATTERN.search, parts[depth:]))
        keyword = next((match[1].lower() for match in matches), 'train')
        groups[SPLIT_OF[keyword]].append(path)
    return {split: groups[split] for split in KEYWORDS if split in groups}


def require_one_split(groups: dict[str, list[str]], label: str, fix: str) -> None:
    """Raise UserError if there are several splits, because nobody wants to train on a test split by mistake.

    `groups` is the result of `group_by_split`, `label` begins the message, and `fix` says how to convert one split.
    """
    if len(groups) > 1:
        counts = [f'{len(paths):,} of {split} (such as {min(paths)})' for split, paths in groups.items()]
        raise UserError(f'{label} holds several splits of a dataset: {", ".join(counts)}; {fix}, or give --split '
                        f'{ALL_SPLITS} to convert everything together')
