"""The processes of a run: how they meet, share a host's cores, and hear of each other's end."""
import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from composer.utils import dist

from inputs.errors import one_line

SECONDS_FOR_A_START = 30 * 60  # a rank waits so long for another that reads 15 GB, or compiles
SECONDS_FOR_A_BATCH = 10 * 60  # for one that waits for its data, before its host is taken to be gone
SECONDS_FOR_A_CHECKPOINT = 30 * 60  # for one that writes 15 GB
SECONDS_FOR_DRAWINGS = 3 * 60 * 60  # for one that draws 100 prompts


def cores_per_rank() -> int:
    return max(1, len(os.sched_getaffinity(0)) // dist.get_local_world_size())


def join_ranks(device, timeout: int) -> None:
    """Meet all ranks within `timeout` seconds, and share the host's cores. Raises ValueError if some did not come."""
    if dist.get_local_world_size() > 1 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(cores_per_rank())  # each rank on all cores is 10 times slower on a CPU
    try:
        dist.initialize_dist(device, timeout)
    except (RuntimeError, ValueError) as error:  # torch's DistError and its kinds are RuntimeErrors
        place = f'{os.environ.get("MASTER_ADDR")}:{os.environ.get("MASTER_PORT")}'
        raise ValueError(f'--dist_timeout {timeout}: the {dist.get_world_size()} processes of this run did not meet at '
                         f'{place} ({one_line(error)[:200]}); check that every node runs, and can reach it') from None
    wait_at_most(SECONDS_FOR_A_START)


def leave_ranks() -> None:
    """At the end of a program that completed; torch warns on GPUs of a process that ends without."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def wait_at_most(seconds: int) -> None:
    """How long a rank waits for the others from now on, in whatever they do together."""
    if not torch.distributed.is_initialized():
        return
    timeout = datetime.timedelta(seconds=seconds)
    if hasattr(torch.distributed, 'set_timeout'):  # since torch 2.12 or so
        torch.distributed.set_timeout(timeout)
    else:
        torch.distributed.distributed_c10d._set_pg_timeout(timeout)


@contextlib.contextmanager
def waiting_at_most(seconds: int, afterwards: int = SECONDS_FOR_A_BATCH) -> Iterator[None]:
    """A context in which a rank waits so long for the others, and `afterwards` seconds after it."""
    wait_at_most(seconds)
    try:
        yield
    finally:
        wait_at_most(afterwards)


def on_rank_0(function: Callable[[], Any]) -> Any:
    """What `function()` returns on rank 0, for all ranks. Its ValueError is raised on all: none is left waiting."""
    outcome = None
    if dist.get_global_rank() == 0:
        outcome = outcome_of(function)
    value, message = dist.all_gather_object(outcome)[0]
    if message is not None:
        raise ValueError(message)
    return value


def on_each_node(function: Callable[[], Any]) -> dict[int, Any]:
    """What `function()` returns on the first rank of each node, by that rank, for all ranks.

    A ValueError of any of them is raised on all.
    """
    mine = None
    if dist.get_local_rank() == 0:
        mine = outcome_of(function)
    values = {}
    for rank, outcome in enumerate(dist.all_gather_object(mine)):
        if outcome is None:
            continue
        values[rank], message = outcome
        if message is not None:
            raise ValueError(message)
    return values


def first_rank_of_node() -> int:
    return dist.get_global_rank() - dist.get_local_rank()


def outcome_of(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a function returns, and None, or None and what its ValueError says."""
    try:
        return function(), None
    except ValueError as error:
        return None, one_line(error)


def group_with_timeout(seconds: int) -> torch.distributed.ProcessGroup:
    """A group of all ranks, made by all together, in which each waits that long; a dead one is noticed all the same.
    """
    return torch.distributed.new_group(backend='gloo', timeout=datetime.timedelta(seconds=seconds))


def failure_of_ranks(mine: str | None) -> str | None:
    """On rank 0, why another rank failed, if one did; on others, leave word for rank 0, which may see only silence."""
    if not torch.distributed.is_initialized():
        return None
    rank = dist.get_global_rank()
    with contextlib.suppress(RuntimeError):  # the store went with its host
        store = torch.distributed.distributed_c10d._get_default_store()
        if rank and mine:
            store.set('failure', f'rank {rank}: {mine}')
        elif not rank and store.check(['failure']):
            return store.get('failure').decode()
    return None


def wait_for_rank_0() -> None:
    """Until rank 0 has kept what there is to keep, or is gone; rank 0 says that it has."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = torch.distributed.distributed_c10d._get_default_store()
        if dist.get_global_rank():
            store.wait(['kept'], datetime.timedelta(minutes=10))
        else:
            store.set('kept', '')
