"""The process groups of torch that tests and runs leave."""
import ctypes

import torch


def leave_ranks() -> None:
    """This process is alone again.

    Its groups stay in memory: where one ends, Gloo waits, without letting Python go on, for threads of its own, which
    may wait for Python.
    """
    if not torch.distributed.is_initialized():
        return
    for group in torch.distributed.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    torch.distributed.destroy_process_group()
