"""Parts are made by workers: processes of this machine, or actors of a Ray cluster.

A worker is made once in its process and then called with some parts after others. Where it dies, alone or with its
machine, what it was at is given to another; machines that join a cluster later get work as well.
"""
import contextlib
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

from inputs.errors import DataError, one_line
from parts.output import ATTEMPTS

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_CONNECT = 20
ROOMS = ('fitting', 'inputs', 'models', 'parts')  # what a worker is made of
ROOT = Path(__file__).parent.parent
# What the machines of a cluster need to know to reach a store, and is no secret; they have credentials of their own.
SETTINGS_OF_STORES = ('S3_ENDPOINT_URL', 'AWS_REGION', 'AWS_DEFAULT_REGION', 'AWS_PROFILE', 'AZURE_ACCOUNT_NAME')


class Part(NamedTuple):
    """A part that is to be made."""
    number: int
    files: list  # that it is made of; what they are is known to the worker
    attempt: int = 0  # workers that have died of it


class WorkerDied(Exception):
    """A worker ended without an answer."""


class WorkerFailed(Exception):
    """A worker raised what nobody foresaw; the text is its traceback."""


def make_parts(workers: 'LocalWorkers | RayWorkers', parts: Iterable[Part], parts_at_once: int = 1) -> Iterator[object]:
    """Have each part made; yields what the workers return of it, in the order in which they end.

    Args:
        workers: that make them.
        parts: to make.
        parts_at_once: the most that a worker is given in one call, which lets it fetch ahead.

    Raises DataError, which names its files, if a part has cost ATTEMPTS workers, and what a worker raised.
    """
    waiting = deque(parts)
    idle = []
    at_work = {}  # the workers and what they are at, by their calls
    try:
        while waiting or at_work:
            while waiting and len(at_work) < workers.places():
                worker = idle.pop() if idle else workers.start()
                given = take(waiting, min(parts_at_once, 1 + len(waiting) // (2 * workers.places())))
                at_work[workers.call(worker, given)] = worker, given
            for call in workers.wait(list(at_work), SECONDS_BETWEEN_LOOKS):
                worker, given = at_work.pop(call)
                idle.append(worker)  # also if it has failed, so that it is ended
                try:
                    yield from workers.result(call)
                except WorkerDied:
                    workers.end(idle.pop())
                    waiting.extendleft(reversed([given_again(part) for part in given]))
            while idle and not waiting:
                workers.end(idle.pop())  # another may wait for its place
    finally:
        for worker in [*idle, *(worker for worker, _ in at_work.values())]:
            workers.end(worker)


def take(waiting: deque[Part], most: int) -> list[Part]:
    """The next parts; one that a worker has died of is given alone."""
    taken = [waiting.popleft()]
    while waiting and len(taken) < most and not taken[-1].attempt and not waiting[0].attempt:
        taken.append(waiting.popleft())
    return taken


def given_again(part: Part) -> Part:
    """A part for another worker. Raises DataError if it has cost too many."""
    if part.attempt + 1 < ATTEMPTS:
        return part._replace(attempt=part.attempt + 1)
    names = [getattr(file, 'name', file) for file in part.files]
    if len(names) > 3:
        names[2:] = [f'and {len(names) - 2} more']
    raise DataError(f'part {part.number} ({", ".join(names)}) was given to {ATTEMPTS} workers, and each was killed, '
                    'often for lack of memory; free some, use fewer workers, or leave these files out')


class LocalWorkers:
    """Processes of this machine, which end with this one.

    Args:
        make: called with the number of its place in each of them, from 0; its result is called with a list of parts
            and returns a list of what there is to say of each.
        number: of processes.
        preload: the module that the workers import; one process imports it for all of them.
    """

    def __init__(self, make: Callable, number: int, preload: str):
        self.make = make
        self.number = number
        self.free_places = list(reversed(range(number)))
        self.alive = []
        self.context = multiprocessing.get_context('forkserver')  # a client of a store does not survive a fork
        self.context.set_forkserver_preload([preload])

    def __enter__(self) -> 'LocalWorkers':
        return self

    def __exit__(self, *error) -> None:
        for worker in list(self.alive):
            self.end(worker)

    def places(self) -> int:
        """How many workers there may be."""
        return self.number

    def start(self) -> tuple:
        """A new worker."""
        place = self.free_places.pop()
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=work, args=(theirs, self.make, place, dict(os.environ)), daemon=False)
        process.start()
        theirs.close()
        worker = process, ours, place
        self.alive.append(worker)
        return worker

    def call(self, worker: tuple, parts: list[Part]) -> connection.Connection:
        """Give a worker parts to make."""
        _, ours, _ = worker
        with contextlib.suppress(OSError):  # it has died: `result` says so
            ours.send(parts)
        return ours

    def wait(self, calls: list[connection.Connection], seconds: float) -> list[connection.Connection]:
        """The calls that have an answer, at the latest after that many seconds."""
        return connection.wait(calls, seconds)

    def result(self, call: connection.Connection) -> list:
        """The answer to a call. Raises WorkerDied, and what the worker raised."""
        try:
            answer = call.recv()
        except (EOFError, OSError):
            raise WorkerDied from None
        return unpacked(answer)

    def end(self, worker: tuple) -> None:
        """End a worker, whatever it is at."""
        if worker not in self.alive:
            return
        self.alive.remove(worker)
        process, ours, place = worker
        process.kill()
        process.join()
        ours.close()
        self.free_places.append(place)


def work(calls: connection.Connection, make: Callable, place: int, environment: dict[str, str]) -> None:
    """In a process of its own, with the environment of its parent: answer calls until nobody calls any more."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    answer = Answering(make, place)
    with contextlib.suppress(EOFError, OSError):
        while True:
            calls.send(answer(calls.recv()))


def end_with_parent() -> None:
    """End this process when its parent ends, however that comes."""
    multiprocessing.parent_process().join()
    os._exit(1)


class Answering:
    """A worker, whose answers also say what it raised."""

    def __init__(self, make: Callable, place: int = 0):
        self.make = make
        self.place = place
        self.worker = None

    def __call__(self, parts: list[Part]) -> tuple[str, object]:
        try:
            if self.worker is None:
                self.worker = self.make(self.place)
            return 'made', self.worker(parts)
        except (DataError, ValueError) as error:
            return 'refused', one_line(error)
        except MemoryError:
            return 'refused', 'there is not enough memory; free some, or use fewer workers'
        except Exception:
            return 'failed', traceback.format_exc()


def unpacked(answer: tuple[str, object]) -> list:
    """What a worker returned. Raises DataError or WorkerFailed for what it raised."""
    kind, content = answer
    if kind == 'refused':
        raise DataError(content)
    if kind == 'failed':
        raise WorkerFailed(content)
    return content


class RayWorkers:
    """Actors of a Ray cluster, as many as it has GPUs, or CPUs where it has none or the work needs none.

    Args:
        make: as for LocalWorkers; each actor has place 0.
        address: of the cluster, as `ray.init` takes it.
        for_gpus: whether the work needs GPUs.
        most: actors that there may be.

    Raises ValueError if there is no cluster at that address.
    """

    def __init__(self, make: Callable, address: str, for_gpus: bool = False,
                 most: int = sys.maxsize):
        os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # Ray reports how it is used unless it is told not to
        try:
            import ray
        except ModuleNotFoundError:
            raise ValueError(f'--ray {address} needs the package ray; pip install -r requirements.txt') from None
        self.ray = ray
        self.make = make
        self.most = most
        refuse_silent_address(address)
        try:
            ray.init(address, runtime_env=environment_of_workers(), logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f'--ray {address}: no Ray cluster answers there ({one_line(error)[:200]}); start one with '
                             '"ray start --head"') from None
        self.kind = 'CPU'
        if for_gpus and ray.cluster_resources().get('GPU'):
            self.kind = 'GPU'
        self.needs = {'num_gpus': 1} if self.kind == 'GPU' else {'num_cpus': 1}
        self.actor = ray.remote(Answering).options(max_restarts=0, **self.needs)

    def __enter__(self) -> 'RayWorkers':
        return self

    def __exit__(self, *error) -> None:
        self.ray.shutdown()

    def places(self) -> int:
        """How many workers there may be, now."""
        return min(self.most, int(self.ray.cluster_resources().get(self.kind, 0)))

    def start(self):
        """A new worker."""
        return self.actor.remote(self.make)

    def call(self, worker, parts: list[Part]):
        """Give a worker parts to make."""
        return worker.__call__.remote(parts)

    def wait(self, calls: list, seconds: float) -> list:
        """The calls that have an answer, at the latest after that many seconds."""
        if not calls:
            time.sleep(seconds)  # until a machine comes
            return []
        return self.ray.wait(calls, timeout=seconds)[0]

    def result(self, call) -> list:
        """The answer to a call. Raises WorkerDied, and what the worker raised."""
        try:
            return unpacked(self.ray.get(call))
        except (self.ray.exceptions.RayTaskError, self.ray.exceptions.RuntimeEnvSetupError) as error:
            raise WorkerFailed(str(error)) from None
        except self.ray.exceptions.RayError:
            raise WorkerDied from None

    def end(self, worker) -> None:
        """End a worker, whatever it is at."""
        self.ray.kill(worker)


def refuse_silent_address(address: str) -> None:
    """Raises ValueError if nothing listens at HOST:PORT, which Ray would call for minutes."""
    place = re.fullmatch(r'(?:ray://)?([^/]+):(\d+)', address)
    if not place:
        return  # such as auto
    try:
        socket.create_connection((place[1], int(place[2])), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f'--ray {address}: no Ray cluster answers there ({one_line(error)}); start one with '
                         '"ray start --head"') from None


def environment_of_workers() -> dict:
    """What a worker finds on any machine of a cluster: this program's rooms, and where stores are."""
    settings = {name: os.environ[name] for name in SETTINGS_OF_STORES if name in os.environ}
    return {'py_modules': [str(ROOT / room) for room in ROOMS], 'env_vars': settings}
