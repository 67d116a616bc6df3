"""The processes of a run: how they meet, share a host's cores, and agree."""
import os
from collections.abc import Callable
from typing import Any

import torch
from composer.utils import dist

from sdbench.errors import one_line


def join_ranks(device, timeout: int) -> None:
    """Meet all ranks, if there are several, and share the host's cores. Raises ValueError if some did not come.

    Args:
        device: of Composer, that this rank trains on.
        timeout: in seconds, in which they meet, and in which each is waited for in whatever they do together.
    """
    if dist.get_world_size() == 1:
        return
    if dist.get_local_world_size() > 1 and 'OMP_NUM_THREADS' not in os.environ:
        cores = len(os.sched_getaffinity(0)) // dist.get_local_world_size()
        torch.set_num_threads(max(1, cores))  # each rank on all cores is 10 times slower on a CPU
    try:
        dist.initialize_dist(device, timeout)
    except (RuntimeError, ValueError) as error:  # torch's DistError and its kinds are RuntimeErrors
        address = f'{os.environ.get("MASTER_ADDR")}:{os.environ.get("MASTER_PORT")}'
        raise ValueError(f'the {dist.get_world_size()} processes of this run did not meet at {address} within '
                         f'{timeout} seconds ({one_line(error, 200)}); check that every node runs, and can reach it'
                         ) from None


def leave_ranks() -> None:
    """At the end of a program that completed on several GPUs: torch warns of a process that ends without.

    Gloo's group stays. Up to torch 2.7 its end holds Python's lock while it waits for a thread, which may wait for that
    lock to drop the last tensor that was gathered: https://github.com/pytorch/pytorch/pull/154976
    """
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == 'nccl':
        torch.distributed.destroy_process_group()


def on_rank_0(function: Callable[[], Any]) -> Any:
    """What `function()` returns on rank 0, for all ranks.

    Raises ValueError on all, so that none is left waiting, if it raises that or OSError.
    """
    def only_there() -> Any:
        return function() if dist.get_global_rank() == 0 else None
    return on_every_rank(only_there)[0]


def on_every_rank(function: Callable[[], Any]) -> list[Any]:
    """What `function()` returns on each rank, for all ranks.

    Raises ValueError on all, so that none is left waiting, if it raises that or OSError on one.
    """
    value = None
    message = None
    try:
        value = function()
    except (ValueError, OSError) as error:
        message = one_line(error)
    answers = dist.all_gather_object((value, message))
    for _, message in answers:
        if message is not None:
            raise ValueError(message)
    return [value for value, _ in answers]
