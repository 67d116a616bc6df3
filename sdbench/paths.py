"""Paths of datasets, by their names alone. It needs no library."""
import os
import re

HELD_OUT = '-held-out'  # how the name of a dataset of held-out samples ends
INDEX = 'index.json'  # of a dataset, which is whole once it is there
CLAIM = 'claim.json'  # says what is being made in a folder, and is there before anything else


def number_of_samples(index: dict) -> int:
    """Of a dataset, by its index.json."""
    return sum(shard['samples'] for shard in index['shards'])


def beside(folder: str, name: str) -> str:
    """Return FOLDER-NAME, for what belongs to a folder. For one in a store it is on this machine, below the folders of
    its whole address: s3/BUCKET/KEY-NAME.
    """
    folder = folder.rstrip('/')
    if is_url(folder):
        folder = re.sub(':/+', '/', folder)
    return f'{folder}-{name}'


def is_url(path: str) -> bool:
    """Whether a path is a URL in a store, of a kind that can be read or not; what exists as a path is not."""
    return ('://' in path or path.startswith('dbfs:')) and not os.path.exists(path)
