"""Recognize the training, validation and test split of a dataset by the names of its folders and files.

The keywords are those of Hugging Face's `datasets`. Each side of a keyword is an end of the name, a digit, a space, a
dot, a dash or an underscore: train-00000.parquet, COCO_val2014_1.jpg and Test/ have one, and attest/ has none.
"""
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from sdbench.errors import UserError

KEYWORDS = {'train': ('train', 'training'), 'validation': ('validation', 'valid', 'dev', 'val'),
            'test': ('test', 'testing', 'eval', 'evaluation')}
ALL_SPLITS = 'all'  # the value of --split that converts all splits together
SPLIT_OF = {keyword: split for split, keywords in KEYWORDS.items() for keyword in keywords}
PATTERN = re.compile(rf'(?<![^-._ 0-9])({"|".join(SPLIT_OF)})(?![^-._ 0-9])', re.IGNORECASE)


def group_by_split(paths: Iterable[str], sources: Iterable[str] = ()) -> dict[str, dict[str, str]]:
    """Return the paths of each split that occurs, with their names relative to the folder that all paths share.

    The first part of a relative name that has a keyword decides. Without a keyword a path belongs to 'train'. The
    shared folder does not count: whoever gives only the folder test/ wants to convert it. Folders above a source do not
    count either.

    Args:
        paths: paths of files, or of samples in a tar.
        sources: the paths, addresses and globs by which the files were found.
    """
    above = {re.split(r'[*?[]', source.rstrip('/'))[0].rpartition('/')[0] + '/' for source in sources}
    parts_of = {}
    for path in paths:
        begin = min((len(folder) for folder in above if path.startswith(folder)), default=0)
        parts_of[path] = path[begin:].split('/')
    depth = len(os.path.commonprefix([parts[:-1] for parts in parts_of.values()]))
    groups = defaultdict(dict)
    for path, parts in parts_of.items():
        matches = filter(None, map(PATTERN.search, parts[depth:]))
        keyword = next((match[1].lower() for match in matches), 'train')
        groups[SPLIT_OF[keyword]][path] = '/'.join(parts[depth:])
    return {split: groups[split] for split in KEYWORDS if split in groups}


def require_one_split(groups: Mapping[str, Mapping[str, str]], label: str, fix: str) -> None:
    """Raise UserError if there are several splits, because nobody wants to train on a test split by mistake.

    Args:
        groups: the result of `group_by_split`.
        label: begins the error message.
        fix: what to do to convert one split, for the message.
    """
    if len(groups) > 1:
        counts = [f'{len(names):,} of {split} (such as {min(names.values())})' for split, names in groups.items()]
        raise UserError(f'{label} holds several splits of a dataset: {", ".join(counts)}; {fix}, or give --split '
                        f'{ALL_SPLITS} to convert everything together')
