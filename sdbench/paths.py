"""Paths of datasets, by their names alone. It needs no library."""
import os

HELD_OUT = '-held-out'  # how the name of a dataset of held-out samples ends
INDEX = 'index.json'  # of a dataset, which is whole once it is there
CLAIM = 'claim.json'  # says what is being made in a folder, and is there before anything else


def number_of_samples(index: dict) -> int:
    """Of a dataset, by its index.json."""
    return sum(shard['samples'] for shard in index['shards'])


def beside(folder: str, name: str) -> str:
    """FOLDER-NAME, for what belongs to a folder; of a store by the last part of its address, on this machine."""
    folder = folder.rstrip('/')
    return f'{os.path.basename(folder) if is_url(folder) else folder}-{name}'


def is_url(path: str) -> bool:
    """Whether a path is a URL in a store, of a kind that can be read or not; what exists as a path is not."""
    return ('://' in path or path.startswith('dbfs:')) and not os.path.exists(path)
