"""Call a function with some parts at a time, in processes of this machine or as tasks of a Ray cluster.

A process or a machine that is lost costs what it was at: that is given to another, and machines that join a cluster
later get work as well.
"""
import logging
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from sdbench.errors import DataError, one_line

ATTEMPTS = 3  # workers that may die of a part before the run ends
SECONDS_BETWEEN_LOOKS = 1.0  # at how many slots a cluster has
SECONDS_TO_CONNECT = 20
OPEN_FILES = 256  # of the command itself
OPEN_FILES_A_PROCESS = 8
PACKAGE = Path(__file__).parents[1]  # what the machines of a cluster need of this program: the folder sdbench
# What they need to know to reach a store, and is no secret; they have credentials of their own.
SETTINGS_OF_STORES = ('S3_ENDPOINT_URL', 'AWS_REGION', 'AWS_DEFAULT_REGION', 'AWS_PROFILE', 'AZURE_ACCOUNT_NAME')


class Part(NamedTuple):
    """A part of a dataset."""
    name: str  # of its folder in OUT
    sources: list  # that it is made of, each with a `name`; what else they are the function knows that makes it
    size: int = 0  # of what it is made of, for the progress bar


class WorkerDied(Exception):
    """A call ended without an answer: its process or machine is gone, or had no memory for it."""


def work(workers: 'LocalWorkers | RayWorkers', parts: Iterable[Part], is_done: Callable[[str], bool],
         at_once: int = 1) -> Iterator[tuple[list[Part], Any]]:
    """Have all parts made. Yield the parts of each call with what it returned, in the order in which calls end.

    Args:
        workers: that make them.
        parts: to make, in their order.
        is_done: tells whether the part of a name is there, which is asked where a worker has died.
        at_once: the most parts of a call.

    Raises DataError, which names its sources, if ATTEMPTS workers have died of a part, and what a call raised.
    """
    waiting = deque(parts)
    at_work = {}  # the parts of each call
    deaths = Counter()  # of workers, by the name of the part that each was at
    while waiting or at_work:
        # give work to whoever has none
        slots = workers.slots()
        while waiting and len(at_work) < slots:
            number = min(at_once, 1 + len(waiting) // (2 * slots))  # fewer towards the end
            given = [waiting.popleft() for _ in range(number)]
            at_work[workers.call(given)] = given

        # take what has ended, and put back what a dead worker was at
        for call in workers.ended(list(at_work)):
            given = at_work.pop(call)
            try:
                yield given, workers.result(call)
            except WorkerDied:
                left = [part for part in given if not is_done(part.name)]
                waiting.extendleft(reversed(left))
                if left:  # they are made one after the other: it was at the first
                    deaths[left[0].name] += 1
                    report_dead_worker(left[0], deaths[left[0].name])


def report_dead_worker(part: Part, deaths: int) -> None:
    """Print what a worker that died was at. Raises DataError if it is not to be tried again."""
    names = [source.name for source in part.sources]
    which = ', '.join(names[:2])
    if len(names) > 2:
        which += f' and {len(names) - 2} more'
    if deaths == ATTEMPTS:
        raise DataError(f'{ATTEMPTS} workers were killed, each while it was at {which}, often for lack of memory; free '
                        'some, use fewer workers, or leave these files out')
    print(f'a worker or its machine was lost; what it was at is made again: {which}', file=sys.stderr)


class LocalWorkers:
    """Processes of this machine, which end with this one.

    Each is a pool of its own, since a pool whose process dies ends all others that it has.

    Args:
        do: called with a list of parts; where `on_gpus`, also with `gpu`, the number of the process's own.
        number: of processes.
        on_gpus: each has a GPU.
    """

    def __init__(self, do: Callable, number: int, on_gpus: bool = False):
        self.do = do
        self.number = number
        self.on_gpus = on_gpus
        # A client of a store does not survive a fork, and CUDA not one of a process that has asked for its devices.
        self.context = multiprocessing.get_context('spawn' if on_gpus else 'forkserver')
        allow_open_files(OPEN_FILES + OPEN_FILES_A_PROCESS * number)
        self.worker_end, self.command_end = self.context.Pipe(duplex=False)
        self.idle = list(range(number))  # numbers of processes, and of their GPUs
        self.pools = {}  # of a process each, by its number
        self.numbers = {}  # of the process of each call

    def __enter__(self) -> 'LocalWorkers':
        return self

    def __exit__(self, *error) -> None:
        """End all processes, whatever they are at."""
        self.command_end.close()
        for pool in self.pools.values():
            pool.shutdown(cancel_futures=True)

    def slots(self) -> int:
        """Return how many calls there may be at once."""
        return self.number

    def call(self, parts: list[Part]) -> Future:
        """Give a process parts to make."""
        number = self.idle.pop()
        if number not in self.pools:
            about_process = (self.worker_end, dict(os.environ))
            self.pools[number] = ProcessPoolExecutor(1, self.context, begin_process, about_process)
        gpu = {'gpu': number} if self.on_gpus else {}
        try:
            call = self.pools[number].submit(self.do, parts, **gpu)
        except BrokenProcessPool as error:  # since its last call
            call = Future()
            call.set_exception(error)
        self.numbers[call] = number
        return call

    def ended(self, calls: list[Future]) -> Iterable[Future]:
        """Return the calls that have ended, at least one."""
        ended, _ = wait(calls, return_when=FIRST_COMPLETED)
        return ended

    def result(self, call: Future) -> Any:
        """Return what a call returned. Raises WorkerDied, and what the function raised."""
        number = self.numbers.pop(call)
        self.idle.append(number)
        try:
            return call.result()
        except MemoryError:  # of a worker that lives on
            raise WorkerDied from None
        except BrokenProcessPool:
            self.pools.pop(number).shutdown()  # and the next call makes another
            raise WorkerDied from None


def allow_open_files(number: int) -> None:
    """Let this process open so many files, as far as it may: of 1024, a usual limit, 120 processes would take all."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, min(number, most)), most))


def begin_process(alive: connection.Connection, environment: dict[str, str]) -> None:
    """Prepare a new process: take the environment of the command, and end when the command closes `alive` or ends."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's to answer
    threading.Thread(target=end_with_command, args=(alive,), daemon=True).start()


def end_with_command(alive: connection.Connection) -> None:
    """Wait until nobody has the other end of `alive` any more, and end this process."""
    alive.poll(None)
    os._exit(1)


class RayWorkers:
    """Tasks on a Ray cluster, one at once for each CPU, or for each GPU, of which one is waited for.

    Args:
        do: as for LocalWorkers. Where each task has a GPU, its number is 0: it sees no other.
        address: of the cluster, as `ray.init` takes it.
        on_gpus: whether each task has a GPU. Each then is a process of its own, since a process that went on would keep
            memory of the GPU that the next task has.

    Raises ValueError if there is no cluster at that address.
    """

    def __init__(self, do: Callable, address: str, on_gpus: bool = False):
        os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # Ray reports how it is used unless it is told not to
        import ray
        self.ray = ray
        refuse_silent_address(address)
        settings = {name: os.environ[name] for name in SETTINGS_OF_STORES if name in os.environ}
        environment = {'py_modules': [str(PACKAGE)], 'env_vars': settings}
        try:
            ray.init(address, runtime_env=environment, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise no_cluster_error(address, error) from None
        self.on_gpus = on_gpus
        needs = {'num_gpus': 1, 'max_calls': 1} if on_gpus else {'num_cpus': 1}
        if on_gpus and 'GPU' not in ray.cluster_resources():
            print(f'--ray {address}: no machine of the cluster has a GPU yet; waiting for one (--cpu works on CPUs)',
                  file=sys.stderr, flush=True)
        # What is lost is given out here again, and not by Ray, so that it is known which part each worker died of.
        self.task = ray.remote(max_retries=0, **needs)(call_on_cluster)
        self.do = ray.put(do)

    def __enter__(self) -> 'RayWorkers':
        return self

    def __exit__(self, *error) -> None:
        self.ray.shutdown()

    def slots(self) -> int:
        """Return how many calls there may be now: at least one, for which a cluster that grows starts a machine."""
        return max(1, int(self.ray.cluster_resources().get('GPU' if self.on_gpus else 'CPU', 0)))

    def call(self, parts: list[Part]):
        """Give a task parts to make."""
        return self.task.remote(self.do, parts, self.on_gpus)

    def ended(self, calls: list) -> list:
        """Return a call that has ended; none after a second, when there may be more slots."""
        ended, _ = self.ray.wait(calls, timeout=SECONDS_BETWEEN_LOOKS)
        return ended

    def result(self, call) -> Any:
        """Return what a call returned. Raises WorkerDied, and what the function raised."""
        try:
            return self.ray.get(call)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MemoryError):
                raise WorkerDied from None
            raise error.cause from error
        except self.ray.exceptions.RuntimeEnvSetupError as error:
            raise DataError(f'a machine of the cluster cannot work for this program ({one_line(error)})') from None
        except self.ray.exceptions.RayError:
            raise WorkerDied from None


def call_on_cluster(do: Callable, parts: list[Part], on_gpu: bool) -> Any:
    """Call the function, with the one GPU that this task sees."""
    return do(parts, gpu=0) if on_gpu else do(parts)


def refuse_silent_address(address: str) -> None:
    """Raise ValueError if nothing listens at HOST:PORT, which Ray would call for many minutes."""
    match = re.fullmatch(r'(?:ray://)?([^/]+):(\d+)', address)
    if match is None:
        return  # such as auto
    try:
        socket.create_connection((match[1], int(match[2])), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise no_cluster_error(address, error) from None


def no_cluster_error(address: str, error: Exception) -> ValueError:
    """Return the error of an address at which no cluster answers."""
    return ValueError(f'--ray {address}: no Ray cluster answers there ({one_line(error, 200)}); start one with "ray '
                      'start --head"')
