"""Parts are made by workers: of this machine (parts/local_workers.py), or of a Ray cluster (parts/ray_workers.py).

A worker is made once in its process and then called with some parts after others. Where it dies, alone or with its
machine, what it was at is given to another; machines that join a cluster later get work as well.
"""
import platform
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from inputs.errors import DataError, one_line
from parts.output import ATTEMPTS

SECONDS_BETWEEN_LOOKS = 1.0


class Part(NamedTuple):
    """A part that is to be made."""
    number: int
    files: list  # that it is made of; what they are is known to the worker
    attempt: int = 0  # workers that have died of it


class WorkerDied(Exception):
    """A worker ended without an answer."""


class WorkerFailed(Exception):
    """A worker raised what nobody foresaw; the text is its traceback."""


class Workers(Protocol):
    """Those who make parts. A worker and a call to one are known only to their kind."""

    def places(self) -> int:
        """How many workers there may be, now."""

    def start(self) -> object:
        """A new worker."""

    def call(self, worker: object, parts: list[Part]) -> object:
        """Give a worker parts to make."""

    def wait(self, calls: list, seconds: float) -> list:
        """The calls that have an answer, at the latest after that many seconds."""

    def result(self, call: object) -> list:
        """The answer to a call. Raises WorkerDied, and what the worker raised."""

    def end(self, worker: object) -> None:
        """End a worker, whatever it is at."""


def make_parts(workers: Workers, parts: Iterable[Part], parts_at_once: int = 1) -> Iterator[object]:
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
        except OSError as error:
            return 'refused', f'a worker on {platform.node()} cannot go on ({one_line(error)})'
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
