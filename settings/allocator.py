"""How torch shares out a GPU's memory: what has to be said before torch is imported. Nothing here needs torch."""
import os

VARIABLES = ('PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF')  # torch reads the second since 2.9


def let_segments_grow() -> None:
    """Let torch's allocator on a GPU grow its segments where they are, unless the user has told it what to do.

    Without this, memory that is freed in the first batch stays cut into pieces as it was, and what comes later, such as
    Adam's moments, fits into them badly.
    """
    if not any(variable in os.environ for variable in VARIABLES):
        os.environ[VARIABLES[0]] = 'expandable_segments:True'
