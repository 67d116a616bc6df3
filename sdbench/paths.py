"""Names and paths of datasets, checkpoints and pipelines."""
import os
import re

HELD_OUT = '-held-out'  # how the name of a dataset of held-out samples ends
INDEX = 'index.json'  # of a dataset, which is whole once it is there
EXPORTED = 'export.json'  # in a pipeline folder of export.py: what it was made of
CLAIM = 'claim.json'  # says what is being made in a folder, and is there before anything else


def sibling_path(folder: str, name: str) -> str:
    """Return FOLDER-NAME, the path of what belongs to a folder and lies next to it.

    The sibling of a folder in a store is on this machine, below the folders of its whole address: s3/BUCKET/KEY-NAME.
    """
    folder = folder.rstrip('/')
    if is_url(folder):
        folder = re.sub(':/+', '/', folder)
    return f'{folder}-{name}'


def is_url(path: str) -> bool:
    """Tell whether a path is a URL of a store, even of an unsupported one. A path that exists here is none."""
    return ('://' in path or path.startswith('dbfs:')) and not os.path.exists(path)
