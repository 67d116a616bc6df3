"""Make the parts of a dataset in worker processes on this machine, or in tasks on a Ray cluster.

If a process on this machine dies, the parts that were in progress are made again, one at a time. If a machine of a Ray
cluster is lost, Ray makes its parts again on another machine. Machines that join the cluster later get work as well.
"""
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple

from sdbench import stores
from sdbench.errors import DataError, UserError, one_line
from sdbench.process import end_with_parent, progress_bar

SECONDS_BETWEEN_CHECKS = 1.0  # between checks of how many CPUs or GPUs the cluster has
SECONDS_TO_CONNECT = 20
PACKAGE = Path(__file__).parents[1]  # the folder sdbench, which is the only code that machines of a cluster need


class Part(NamedTuple):
    """A part of a dataset."""
    name: str  # name of its folder in OUT
    sources: list  # files or shards to make it from; each has a `name`, and other attributes for the function
    size: int = 0  # size of the sources, for the progress bar


def make_parts(workers: 'LocalWorkers | RayWorkers', parts: list[Part], missing: Iterable[Part], unit: str,
               parts_per_call: int = 1) -> list:
    """Let workers make all missing parts, and show a progress bar. Return the results of the calls as they ended.

    Parts that were in progress when a worker died are made again one at a time, while nothing else is in progress. A
    part that only lacked memory beside other parts then succeeds, and a part that kills its worker is identified.

    `parts` are all parts of the dataset, for the progress bar, and `unit` is the unit of their sizes.

    Raises DataError, which names the files, if a worker dies while it makes only one part. Raises any error of a call.
    """
    waiting = deque(missing)
    suspects = deque()  # parts that were in progress when a worker died
    in_progress = {}  # call: its parts
    results = []
    total = sum(part.size for part in parts)
    with progress_bar(total, unit, total - sum(part.size for part in waiting)) as bar:
        while waiting or suspects or in_progress:
            # Give parts to all idle workers. After a worker has died, wait until all calls have ended, and make one
            # suspect at a time.
            slots = workers.slots()
            if suspects and not in_progress:
                in_progress[workers.call([suspects[0]])] = [suspects[0]]
            while waiting and not suspects and len(in_progress) < slots:
                number = min(parts_per_call, 1 + len(waiting) // (2 * slots))  # fewer parts per call towards the end
                given = [waiting.popleft() for _ in range(number)]
                in_progress[workers.call(given)] = given

            # Wait for a call to end, but only for a second, because machines may have joined the cluster by then.
            ended, _ = wait(in_progress, SECONDS_BETWEEN_CHECKS, FIRST_COMPLETED)
            for call in ended:
                given = in_progress.pop(call)
                was_alone = suspects and given[0] is suspects[0]
                if not workers.is_death(call.exception()):
                    results.append(call.result())
                    bar.update(sum(part.size for part in given))
                    if was_alone:
                        suspects.popleft()
                elif was_alone:
                    files = ' to '.join(dict.fromkeys((given[0].sources[0].name, given[0].sources[-1].name)))
                    raise DataError(f'a worker was killed or ran out of memory while it read only {files}; give it '
                                    'more memory, or remove the file that needs so much')
                else:
                    if not suspects:
                        print('a worker died; making the parts in progress again, one at a time', file=sys.stderr)
                    suspects += given
    return results


class LocalWorkers(AbstractContextManager):
    """A pool of processes on this machine, which end with this process. If one dies, `call` starts a new pool.

    `do` makes a list of parts. Each process first calls `use_gpu`, if given, with the number of a GPU for it alone.
    """

    def __init__(self, do: Callable, number: int, use_gpu: Callable[[int], None] | None = None):
        self.do = do
        self.number = number
        self.use_gpu = use_gpu
        # Do not fork this process: clients of object stores do not survive a fork, and CUDA does not survive it either
        # if this process has asked for its devices.
        self.context = multiprocessing.get_context('spawn' if use_gpu else 'forkserver')
        self.begin_pool()

    def begin_pool(self) -> None:
        """Make a pool. Its processes start when they are needed."""
        numbers = self.context.SimpleQueue()
        for number in range(self.number):
            numbers.put(number)
        arguments = (dict(os.environ), numbers, self.use_gpu)
        self.pool = ProcessPoolExecutor(self.number, self.context, begin_process, arguments)

    def end_pool(self) -> None:
        """Kill all processes, even in the middle of a call. `shutdown` alone would wait for the calls to end."""
        for process in list(self.pool._processes.values()):  # Python 3.14 has pool.kill_workers()
            process.kill()
        self.pool.shutdown(cancel_futures=True)

    def __exit__(self, *error) -> None:
        self.end_pool()

    def slots(self) -> int:
        return self.number

    def call(self, parts: list[Part]) -> Future:
        try:
            return self.pool.submit(self.do, parts)
        except BrokenProcessPool:  # one of the pool's processes died
            self.end_pool()
            self.begin_pool()
            return self.pool.submit(self.do, parts)

    def is_death(self, error: BaseException | None) -> bool:
        """Return whether a call ended because its process died or ran out of memory."""
        return isinstance(error, (BrokenProcessPool, MemoryError))


def begin_process(environment: dict[str, str], numbers: SimpleQueue, use_gpu: Callable[[int], None] | None) -> None:
    """Prepare a new process of the pool.

    `environment` has the variables of the command, because a fork server may have been started with other ones, and
    `numbers` has a GPU number for each process.
    """
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGHUP):  # from the terminal to all processes; the command handles them
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    if use_gpu:
        # The loader starts new workers in each call. Let them be forked from a server that has imported everything,
        # because spawning takes seconds, and this process, which uses CUDA, must not be forked.
        multiprocessing.set_start_method('forkserver', force=True)
        use_gpu(numbers.get())


class RayWorkers(AbstractContextManager):
    """Tasks on a Ray cluster, as many at the same time as the cluster has CPUs or GPUs.

    With `on_gpus` each task uses one GPU and sees no other, and waits until the cluster has one. Each task is a new
    process, because an old process would keep memory on the GPU that the next task gets.

    Raises UserError if no cluster answers at that address.
    """

    def __init__(self, do: Callable, address: str, on_gpus: bool = False):
        os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # Ray sends usage statistics by default
        # Ray repeats a task three times if its worker or machine is lost, but forever if it runs out of memory.
        os.environ.setdefault('RAY_task_oom_retries', '0')
        import ray
        self.ray = ray

        # Connect to the cluster, and send it this program and the settings of object stores.
        settings = {name: os.environ[name] for name in stores.SETTINGS if name in os.environ}
        environment = {'py_modules': [str(PACKAGE)], 'env_vars': settings}
        match = re.fullmatch(r'(?:ray://)?([^/]+):(\d+)', address)
        try:
            if match:  # a host and port, where Ray would try for many minutes if nothing listens; not `auto`
                socket.create_connection((match[1], int(match[2])), SECONDS_TO_CONNECT).close()
            ray.init(address, runtime_env=environment, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise UserError(f'--ray {address}: no Ray cluster answers there ({one_line(error, 200)}); start one with '
                            '"ray start --head"') from None

        # Define the task by the resources that it needs.
        self.on_gpus = on_gpus
        needs = {'num_gpus': 1, 'max_calls': 1} if on_gpus else {'num_cpus': 1}
        if on_gpus and 'GPU' not in ray.cluster_resources():
            print(f'--ray {address}: no machine of the cluster has a GPU yet; waiting for one (--cpu works on CPUs)',
                  file=sys.stderr, flush=True)
        self.task = ray.remote(**needs)(lambda do, parts: do(parts))
        self.do = ray.put(do)

    def __exit__(self, *error) -> None:
        self.ray.shutdown()

    def slots(self) -> int:
        """Return how many calls can be in progress now: at least one, so an autoscaling cluster starts a machine."""
        return max(1, int(self.ray.cluster_resources().get('GPU' if self.on_gpus else 'CPU', 0)))

    def call(self, parts: list[Part]) -> Future:
        return self.task.remote(self.do, parts).future()

    def is_death(self, error: BaseException | None) -> bool:
        """Return whether a call ended because its machine was lost or ran out of memory.

        Raises the error that the function raised, and DataError if the machines cannot run this program.
        """
        if isinstance(error, self.ray.exceptions.RuntimeEnvSetupError):
            raise DataError(f'a machine of the Ray cluster cannot run this program ({one_line(error)})') from None
        if isinstance(error, self.ray.exceptions.RayTaskError) and not isinstance(error.cause, MemoryError):
            raise error.cause from error
        return isinstance(error, self.ray.exceptions.RayError)
