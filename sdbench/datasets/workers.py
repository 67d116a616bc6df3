"""Call a function with some parts at a time, in processes of this machine or as tasks of a Ray cluster.

Where a process of this machine dies, the parts that were in flight are made again, one at a time. Where a machine of a
cluster is lost, Ray makes its parts again elsewhere. Machines that join a cluster later get work as well.
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

SECONDS_BETWEEN_LOOKS = 1.0  # at how many slots a cluster has
SECONDS_TO_CONNECT = 20
PACKAGE = Path(__file__).parents[1]  # what the machines of a cluster need of this program: the folder sdbench


class Part(NamedTuple):
    """A part of a dataset."""
    name: str  # of its folder in OUT
    sources: list  # that it is made of, each with a `name`; what else they are the function knows that makes it
    size: int = 0  # of what it is made of, for the progress bar


def make_parts(workers: 'LocalWorkers | RayWorkers', parts: list[Part], missing: Iterable[Part],
               is_done: Callable[[str], bool], unit: str, at_once: int = 1) -> list:
    """Have all missing parts made, with a progress bar; return what the calls returned, in the order in which they end.

    Parts that were in flight when a worker died are made again one at a time, with nothing else at work. So a part that
    only lacked memory beside others is made, and one that kills its worker is known.

    Args:
        workers: that make them.
        parts: all parts, which the bar counts.
        missing: those that are made, in their order.
        is_done: tells whether the part of a name is there, which is asked where a worker has died.
        unit: of the size of a part, as `progress_bar` takes it.
        at_once: the most parts of a call.

    Raises DataError, which names its files, if a worker dies at a part that it makes alone, and what a call raised.
    """
    waiting = deque(missing)
    at_work = {}  # the parts of each call
    lost = []  # parts that were in flight when a worker died
    answers = []
    total = sum(part.size for part in parts)
    with progress_bar(total, unit, total - sum(part.size for part in waiting)) as bar:
        while waiting or at_work:
            # give work to whoever has none, but not after a death: then all that is in flight ends first
            slots = workers.slots()
            while waiting and not lost and len(at_work) < slots:
                number = min(at_once, 1 + len(waiting) // (2 * slots))  # fewer towards the end
                given = [waiting.popleft() for _ in range(number)]
                at_work[workers.call(given)] = given

            # take what has ended; there may be more slots after a second
            ended, _ = wait(at_work, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
            for call in ended:
                given = at_work.pop(call)
                if workers.is_death(call.exception()):
                    lost += [part for part in given if not is_done(part.name)]
                else:
                    answers.append(call.result())
                    bar.update(sum(part.size for part in given))

            # make what was lost, one part at a time
            if lost and not at_work:
                print(f'a worker was lost; parts in flight are made again, one at a time: {len(lost)}', file=sys.stderr)
                for part in lost:
                    call = workers.call([part])
                    if workers.is_death(call.exception()):
                        raise fatal_part(part)
                    answers.append(call.result())
                    bar.update(part.size)
                lost = []
    return answers


def fatal_part(part: Part) -> DataError:
    """Return the error for a part that has killed its worker."""
    files = part.sources[0].name
    if len(part.sources) > 1:
        files = f'one of the {len(part.sources):,} files from {files} to {part.sources[-1].name}'
    return DataError(f'a worker was killed, or had no memory, while nothing but {files} was at work; give it more '
                     'memory, or leave that file out')


class LocalWorkers(AbstractContextManager):
    """A pool of processes of this machine, which end with this one. Where one dies, all are begun anew.

    Args:
        do: called with a list of parts.
        number: of processes.
        use_gpu: called first in each process, with the number of a GPU that no other has; None: they need none.
    """

    def __init__(self, do: Callable, number: int, use_gpu: Callable[[int], None] | None = None):
        self.do = do
        self.number = number
        self.use_gpu = use_gpu
        # A client of a store does not survive a fork, and CUDA not one of a process that has asked for its devices.
        self.context = multiprocessing.get_context('spawn' if use_gpu else 'forkserver')
        self.begin_pool()

    def begin_pool(self) -> None:
        """Build a pool, whose processes begin as they are needed."""
        numbers = self.context.SimpleQueue()
        for number in range(self.number):
            numbers.put(number)
        arguments = (dict(os.environ), numbers, self.use_gpu)
        self.pool = ProcessPoolExecutor(self.number, self.context, begin_process, arguments)

    def end_pool(self) -> None:
        """Kill all processes, whatever they are doing.

        The pool itself only sends SIGTERM to them, and only where one has died. That does not end them, because
        Composer's handler of SIGTERM raises SystemExit, which the pool takes for the result of a call.
        """
        for process in list(self.pool._processes.values()):  # pool.kill_workers() from Python 3.14 on
            process.kill()
        self.pool.shutdown(cancel_futures=True)

    def __exit__(self, *error) -> None:
        self.end_pool()

    def slots(self) -> int:
        """Return how many calls there may be at once."""
        return self.number

    def call(self, parts: list[Part]) -> Future:
        """Give a process parts to make."""
        try:
            return self.pool.submit(self.do, parts)
        except BrokenProcessPool:  # of which a process has died
            self.end_pool()
            self.begin_pool()
            return self.pool.submit(self.do, parts)

    def is_death(self, error: BaseException | None) -> bool:
        """Tell whether a call ended because its process is gone, or had no memory for it."""
        return isinstance(error, (BrokenProcessPool, MemoryError))


def begin_process(environment: dict[str, str], numbers: SimpleQueue, use_gpu: Callable[[int], None] | None) -> None:
    """Prepare a new process: take the environment of the command, and end when the command ends."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's to answer
    end_with_parent(signal.SIGKILL)
    if use_gpu:
        # What it starts, such as a loader's processes for each call, is forked from a server that has imported all.
        multiprocessing.set_start_method('forkserver', force=True)
        use_gpu(numbers.get())


class RayWorkers(AbstractContextManager):
    """Tasks on a Ray cluster, one at once for each CPU, or for each GPU, of which one is waited for.

    Args:
        do: as for LocalWorkers.
        address: of the cluster, as `ray.init` takes it.
        on_gpus: whether each task has a GPU, and sees no other. Each then is a process of its own, since a process that
            went on would keep memory of the GPU that the next task has.

    Raises UserError if there is no cluster at that address.
    """

    def __init__(self, do: Callable, address: str, on_gpus: bool = False):
        os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # Ray reports how it is used unless it is told not to
        # Ray makes a task again three times if its worker or machine is lost, but without end if its memory runs out.
        os.environ.setdefault('RAY_task_oom_retries', '0')
        import ray
        self.ray = ray

        settings = {name: os.environ[name] for name in stores.SETTINGS if name in os.environ}
        environment = {'py_modules': [str(PACKAGE)], 'env_vars': settings}
        match = re.fullmatch(r'(?:ray://)?([^/]+):(\d+)', address)
        try:
            if match:  # Ray would call what does not listen there for many minutes; auto and the like are Ray's to find
                socket.create_connection((match[1], int(match[2])), SECONDS_TO_CONNECT).close()
            ray.init(address, runtime_env=environment, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise UserError(f'--ray {address}: no Ray cluster answers there ({one_line(error, 200)}); start one with '
                            '"ray start --head"') from None
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
        """Return how many calls there may be now: at least one, for which a cluster that grows starts a machine."""
        return max(1, int(self.ray.cluster_resources().get('GPU' if self.on_gpus else 'CPU', 0)))

    def call(self, parts: list[Part]) -> Future:
        """Give a task parts to make."""
        return self.task.remote(self.do, parts).future()

    def is_death(self, error: BaseException | None) -> bool:
        """Tell whether a call ended because its machine is gone, or had no memory for it.

        Raises what the function itself raised, and DataError if no machine can work for this program.
        """
        if isinstance(error, self.ray.exceptions.RuntimeEnvSetupError):
            raise DataError(f'a machine of the cluster cannot work for this program ({one_line(error)})') from None
        if isinstance(error, self.ray.exceptions.RayTaskError) and not isinstance(error.cause, MemoryError):
            raise error.cause from error
        return isinstance(error, self.ray.exceptions.RayError)
