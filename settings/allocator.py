"""How torch shares out a GPU's memory: what has to be said before torch is imported. Nothing here needs torch."""
import importlib.metadata
import os

VARIABLES = ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')
NEW_NAME_SINCE = (2, 9)  # of torch, which warns of the old name from then on


def let_segments_grow() -> None:
    """Let torch's allocator on a GPU grow its segments where they are, unless the user has told it what to do.

    Without this, memory that is freed in the first batch stays cut into pieces as it was, and what comes later, such as
    Adam's moments, fits into them badly.
    """
    if any(variable in os.environ for variable in VARIABLES):
        return
    try:
        major, minor = importlib.metadata.version('torch').split('.')[:2]
    except importlib.metadata.PackageNotFoundError:
        return  # the import of torch says which environment to activate
    is_new = (int(major), int(minor)) >= NEW_NAME_SINCE
    os.environ[VARIABLES[0] if is_new else VARIABLES[1]] = 'expandable_segments:True'
