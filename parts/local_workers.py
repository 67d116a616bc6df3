"""Workers that are processes of this machine."""
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection

from parts.engine import Answering, Part, WorkerDied, unpacked


class LocalWorkers:
    """Processes of this machine, which end with this one.

    Args:
        make: called with the number of its place in each of them, from 0; its result is called with a list of parts
            and returns a list of what there is to say of each.
        number: of processes.
        preload: the module that the workers import; one process imports it for all of them, and they are forked from
            it. None: each starts from nothing.
    """

    def __init__(self, make: Callable, number: int, preload: str | None):
        self.make = make
        self.number = number
        self.free_places = list(reversed(range(number)))
        self.alive = []
        self.context = multiprocessing.get_context('spawn')
        if preload is not None:
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
