"""Names and paths that several commands share."""
import os

HELD_OUT = '-held-out'  # suffix of the dataset with the held-out samples
INDEX = 'index.json'  # of a dataset; it is written last, so a dataset with one is complete
EXPORTED = 'export.json'  # in a pipeline from export.py: the checkpoint and flags that made it
CLAIM = 'claim.json'  # in an output folder: the program and settings that make it; it is written first


def sibling_path(folder: str, name: str) -> str:
    """Return FOLDER-NAME, a path next to a folder.

    For a folder in a store, return a path in the working directory: s3://BUCKET/KEY/run1 gives run1-NAME.
    """
    folder = folder.rstrip('/')
    if is_url(folder):
        folder = os.path.basename(folder)
    return f'{folder}-{name}'


def is_url(path: str) -> bool:
    """Tell whether a path is the address of a store, supported or not. A path that exists here is not."""
    return ('://' in path or path.startswith('dbfs:')) and not os.path.exists(path)
