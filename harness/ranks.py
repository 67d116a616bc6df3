"""The processes of a run: how they meet, share a host's cores, and hear of each other's end."""
import contextlib
import datetime
import os

import torch
from composer.utils import dist

from inputs.errors import one_line

SECONDS_FOR_A_CHECKPOINT = 30 * 60  # once met, a rank may wait for another that writes 15 GB


def cores_per_rank() -> int:
    return max(1, len(os.sched_getaffinity(0)) // dist.get_local_world_size())


def join_ranks(device, timeout: int) -> None:
    """Meet all ranks within `timeout` seconds (ValueError: some did not come), and share the host's cores."""
    if dist.get_local_world_size() > 1 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(cores_per_rank())  # each rank on all cores is 10 times slower on a CPU
    try:
        dist.initialize_dist(device, timeout)
    except (RuntimeError, ValueError) as error:  # torch's DistError and its kinds are RuntimeErrors
        place = f'{os.environ.get("MASTER_ADDR")}:{os.environ.get("MASTER_PORT")}'
        raise ValueError(f'--dist_timeout {timeout}: the {dist.get_world_size()} processes of this run did not meet at '
                         f'{place} ({one_line(error)[:200]}); check that every node runs, and can reach it') from None
    wait_at_most(SECONDS_FOR_A_CHECKPOINT)


def wait_at_most(seconds: int) -> None:
    """How long a rank waits for the others from now on."""
    timeout = datetime.timedelta(seconds=seconds)
    if hasattr(torch.distributed, 'set_timeout'):  # since torch 2.12 or so
        torch.distributed.set_timeout(timeout)
    else:
        torch.distributed.distributed_c10d._set_pg_timeout(timeout)


def patient_group() -> torch.distributed.ProcessGroup:
    """A group of all ranks, made by all together, in which none gives up waiting; a dead one is noticed all the same.
    """
    return torch.distributed.new_group(backend='gloo', timeout=datetime.timedelta(days=30))


def gather_patiently(mine: dict) -> list[dict]:
    """What each rank gives, however much later than the others one comes."""
    everyone = [None for _ in range(dist.get_world_size())]
    torch.distributed.all_gather_object(everyone, mine, group=patient_group())
    return everyone


class SharedCount:
    """A number that every rank adds to, without waiting for the others.

    It begins at 0. Make it on all ranks before they last meet, so that none has added to it when another is made.

    Args:
        name: of the number.
    """

    def __init__(self, name: str):
        self.name = name
        self._alone = 0
        self._before = 0
        self._before = self.add(0)  # of an earlier run in the same processes

    def add(self, number: int) -> int:
        """The sum over all ranks after `number` is added."""
        if not torch.distributed.is_initialized():
            self._alone += number
            return self._alone
        store = torch.distributed.distributed_c10d._get_default_store()
        return store.add(self.name, number) - self._before


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
