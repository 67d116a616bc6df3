"""Why a run failed, in one line, with the remedy where it is known."""
import traceback

import torch

from sdbench.errors import DataError, disk_is_full, ended_worker, is_out_of_memory, one_line
from sdbench.training.safeguard import NonFiniteStep


def reason(error: Exception, batch_flag: str) -> str:
    """Why a run failed, in one line; for any other error the traceback is printed as well.

    Args:
        error: what it ended with.
        batch_flag: the flag that decides how much memory is needed, with its value.
    """
    text = one_line(error)
    if isinstance(error, (DataError, NonFiniteStep)):
        return text
    if ended_worker(error):
        return ended_worker(error)
    if is_out_of_memory(error):
        return (f'out of memory at {batch_flag}; use a smaller one, a smaller --image_size, or, in training, '
                '--gradient_checkpointing')
    if type(error).__name__ == 'FailOnRecompileLimitHit':
        return (f'--compile: a part of the model was compiled {torch._dynamo.config.recompile_limit} times and would '
                'run uncompiled from here on; use --no-compile')
    if disk_is_full(error):
        return 'a disk is full: free some of it'
    traceback.print_exc()
    return f'{type(error).__name__}: {text[:500]}'
