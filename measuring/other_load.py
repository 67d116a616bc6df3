"""How much of the machine other programs take while a run is measured on CPUs: their load slows it many times over."""
import os
from dataclasses import dataclass

import psutil
import torch
from composer.utils import dist

SHORTEST_SECONDS = 0.5  # the system counts in hundredths of a second: less shows little


@dataclass
class CpuSeconds:
    """Seconds of CPU time: all that the machine's cores had, those in which they were busy, and of these our own."""
    had: float
    busy: float
    own: float

    def since(self, before: 'CpuSeconds') -> 'CpuSeconds':
        return CpuSeconds(self.had - before.had, self.busy - before.busy, self.own - before.own)


def cpu_seconds_until_now() -> CpuSeconds:
    """Since the machine's start, and of this process, those that it has started, and those that have ended of them."""
    machine = psutil.cpu_times()
    in_user_already = getattr(machine, 'guest', 0.0) + getattr(machine, 'guest_nice', 0.0)
    had = sum(machine) - in_user_already
    idle = machine.idle + getattr(machine, 'iowait', 0.0)
    this = psutil.Process()
    own = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
            continue
        own += times.user + times.system + times.children_user + times.children_system
    return CpuSeconds(had, had - idle, own)


class OtherLoad:
    """What this rank and its machine used between `start` and `stop`; on a GPU, which has no others, nothing."""

    def __init__(self):
        self._before: CpuSeconds | None = None
        self._used: CpuSeconds | None = None

    def start(self) -> None:
        if not torch.cuda.is_available():
            self._before = cpu_seconds_until_now()

    def stop(self) -> CpuSeconds | None:
        """What was used since the start; called again, the same. None where nothing was started."""
        if self._before is not None and self._used is None:
            self._used = cpu_seconds_until_now().since(self._before)
        return self._used


def gather_other_load(load: OtherLoad, all_ranks: bool = True) -> dict[str, float | int | None]:
    """The record's `other_load`, the mean number of cores that other programs used, and `cpu_cores` of the machine.

    Where other ranks may be gone, their load could not be told from that of others: `other_load` is None.
    """
    ranks = [load.stop()]
    if all_ranks:
        ranks = dist.all_gather_object(ranks[0])
    used = None
    if all_ranks or dist.get_world_size() == 1:
        used = cores_used_by_others(ranks, dist.get_local_world_size(), os.cpu_count())
    return {'other_load': used, 'cpu_cores': os.cpu_count()}


def cores_used_by_others(ranks: list[CpuSeconds | None], ranks_per_node: int, cores: int) -> float | None:
    """The mean number of cores that other programs used on the node where they used most; None where not known.

    Args:
        ranks: what each used, those of one node after the other.
        ranks_per_node: how many share a machine.
        cores: of a machine.
    """
    loads = []
    for first in range(0, len(ranks), ranks_per_node):
        of_node = ranks[first:first + ranks_per_node]
        machine = of_node[0]
        if None in of_node or machine.had < SHORTEST_SECONDS * cores:
            return None
        others = machine.busy - sum(rank.own for rank in of_node)
        loads.append(max(0.0, others / machine.had * cores))
    return max(loads)
