"""The ranks of a command that shares out parts: how they meet, who takes which part, how far all are, who is lost.

All goes through one small store of torch.distributed, so that neither a process group nor Composer is needed.
"""
import contextlib
import datetime
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import torch.distributed

from inputs.errors import one_line

PIECE_BYTES = 4 << 20  # that a store takes under one key: torch's own limit is 8 MiB
SECONDS_BETWEEN_SIGNS = 1.0  # of life
SECONDS_BETWEEN_LINES = 60  # of progress, where it is not shown on a terminal
AT_SIGTERM = 'ended by SIGTERM, as when a rank or a node is lost'


class RankLost(Exception):
    """The run cannot go on, since a rank failed or is gone."""


def environment_number(name: str, default: int) -> int:
    """What a launcher says; without one there is a single process."""
    return int(os.environ.get(name, default))


class Crew:
    """This rank and the others.

    Args:
        store: of torch.distributed, that all ranks reach; None for a single process.
        rank: of this process.
        size: number of ranks.
        patience: seconds without a sign of life after which a rank is lost.
    """

    def __init__(self, store=None, rank: int = 0, size: int = 1, patience: float = 300):
        self.store = store or torch.distributed.HashStore()
        self.rank = rank
        self.size = size
        self.patience = patience
        self.last_word = threading.Lock()  # taken by the thread that says why the run ends
        self._signs: dict[int, tuple[bytes, float]] = {}  # the last of each rank, and when it was first seen
        self._next_sign = 0.0

    @classmethod
    def join(cls, timeout: int) -> 'Crew':
        """Meet the ranks that a launcher started. ValueError: some did not come within `timeout` seconds."""
        size = environment_number('WORLD_SIZE', 1)
        if size == 1:
            return cls()
        try:
            store, rank, size = next(torch.distributed.rendezvous(
                'env://', timeout=datetime.timedelta(seconds=timeout)))
            store.set(f'sign/{rank}', json.dumps([0, False, 0, 0]))
            store.add('joined', 1)
            crew = cls(store, rank, size, timeout)
            crew.wait_until(lambda: store.add('joined', 0) == size, timeout)
        except (RuntimeError, ValueError, RankLost) as error:  # torch's DistError and its kinds are RuntimeErrors
            place = f'{os.environ.get("MASTER_ADDR")}:{os.environ.get("MASTER_PORT")}'
            raise ValueError(f'--dist_timeout {timeout}: the {size} processes of this run did not meet at {place} '
                             f'({one_line(error)[:200]}); check that every node runs, and can reach it') from None
        return crew

    def __enter__(self) -> 'Crew':
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """On rank 0, tell the others how it ended, and be there until they know."""
        if self.rank == 0 and self.size > 1:
            failed = kind is not None
            with contextlib.suppress(RuntimeError, RankLost):
                self.store.set('end', 'failed' if failed else 'whole')
                self.wait_until(lambda: self.store.add('left', 0) == self.size - 1, 5 if failed else self.patience)

    def wait_until(self, condition: Callable[[], bool], seconds: float = float('inf')) -> None:
        """Look again and again, so that signals are answered meanwhile. RankLost: it took longer, or rank 0 is gone."""
        end = time.monotonic() + seconds
        pause = 0.02
        with self._store_at_hand():
            while not condition():
                if time.monotonic() > end:
                    raise RankLost(f'not all ranks came within {seconds:g} s')
                self._heed_failure()
                time.sleep(pause)
                pause = min(2 * pause, SECONDS_BETWEEN_SIGNS)

    def wait_for_end(self) -> None:
        """On another rank than 0, until rank 0 has done what it alone does."""
        self.wait_until(lambda: self.store.check(['end']))
        self._heed_failure()
        with contextlib.suppress(RuntimeError):
            self.store.add('left', 1)

    def _heed_failure(self) -> None:
        """On another rank than 0, end without a word where rank 0 has said why the run ends."""
        if self.rank and self.store.check(['end']) and self.store.get('end') == b'failed':
            with contextlib.suppress(RuntimeError):
                self.store.add('left', 1)
            raise SystemExit(0)

    def publish(self, key: str, value: object) -> None:
        """Give the other ranks something that JSON can hold."""
        if self.size == 1:
            return
        packed = zlib.compress(json.dumps(value).encode())
        pieces = range(0, len(packed), PIECE_BYTES)
        for number, start in enumerate(pieces):
            self.store.set(f'{key}/{number}', packed[start:start + PIECE_BYTES])
        self.store.set(key, str(len(pieces)))

    def receive(self, key: str) -> object:
        """What a rank published. RankLost: rank 0 is gone."""
        self.wait_until(lambda: self.store.check([key]))
        with self._store_at_hand():
            pieces = [self.store.get(f'{key}/{number}') for number in range(int(self.store.get(key)))]
        return json.loads(zlib.decompress(b''.join(pieces)))

    def take_turns(self, numbers: list[int]) -> Iterator[int]:
        """Those of `numbers`, the same list on all ranks, that this rank comes for first: each goes to one rank.

        RankLost: rank 0 is gone.
        """
        while True:
            with self._store_at_hand():
                turn = self.store.add('turn', 1) - 1
            if turn >= len(numbers):
                return
            yield numbers[turn]

    def give_sign(self, images: int, bytes_done: int, finished: bool = False) -> None:
        """Say, at most once a second, what this rank has done so far, and that it is alive. RankLost: rank 0 is gone.
        """
        if time.monotonic() >= self._next_sign or finished:
            self._next_sign = time.monotonic() + SECONDS_BETWEEN_SIGNS
            with self._store_at_hand():
                self._heed_failure()
                self.store.set(f'sign/{self.rank}', json.dumps([time.time(), finished, images, bytes_done]))

    def look_around(self) -> tuple[bool, int, int]:
        """On rank 0, whether all ranks have finished, and the images and bytes that they have done together.

        RankLost: one has failed, or was silent for too long.
        """
        if self.store.check(['failure']):
            raise RankLost(self.store.get('failure').decode())
        now = time.monotonic()
        all_finished, all_images, all_bytes = True, 0, 0
        for rank, sign in enumerate(self.store.multi_get([f'sign/{rank}' for rank in range(self.size)])):
            if sign != self._signs.get(rank, (None,))[0]:
                self._signs[rank] = (sign, now)
            _, finished, images, bytes_done = json.loads(sign)
            if not finished and rank != self.rank and now - self._signs[rank][1] > self.patience:
                raise RankLost(f'rank {rank} has given no sign for {self.patience:g} s')
            all_finished = all_finished and finished
            all_images += images
            all_bytes += bytes_done
        return all_finished, all_images, all_bytes

    def leave_word(self, message: str) -> None:
        """On another rank than 0, say why it fails, and give rank 0 time to say so for all."""
        if self.rank == 0:
            return
        with contextlib.suppress(RuntimeError):
            self.store.set('failure', f'rank {self.rank}: {message}')
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how a launcher ends this rank when rank 0 has spoken
            time.sleep(10)

    def is_alone(self) -> bool:
        """Whether the store, which lives on rank 0's host, is gone."""
        try:
            self.store.check(['failure'])
        except RuntimeError:
            return True
        return False

    @contextlib.contextmanager
    def _store_at_hand(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # torch's DistError and its kinds
            raise RankLost('rank 0 is gone') from None


@contextlib.contextmanager
def sigterm_answered(say: Callable[[], None]) -> Iterator[None]:
    """When SIGTERM comes, call `say` and end, also while this process waits in C++, where Python answers no signal."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = os.getpid()

    def wait_for_signal():
        while number := os.read(reader, 1):
            if number == bytes([signal.SIGTERM]) and os.getpid() == process:
                with contextlib.suppress(Exception):
                    say()
                    time.sleep(1)  # other ranks, who get it at the same time, see whether rank 0 is there
                os._exit(128 + signal.SIGTERM)
        os.close(reader)

    handler_before = signal.signal(signal.SIGTERM, lambda *_: None)  # its number goes to the pipe at once
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=wait_for_signal, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        signal.signal(signal.SIGTERM, handler_before)
        os.close(writer)


def say_stopped(program: str, crew: Crew, why: str) -> bool:
    """Print, once, why a run ends: on rank 0, or where that is gone, on the first rank of each node.

    Returns whether this process has said it, now or, in another thread, before.
    """
    if crew.rank:
        first_of_its_node = crew.rank == 1 or environment_number('LOCAL_RANK', 0) == 0  # but for rank 0
        if not first_of_its_node or not crew.is_alone():
            return False
    if crew.last_word.acquire(blocking=False):
        print(f'{program}: error: {why}', file=sys.stderr, flush=True)
    return True


class ProgressLine:
    """How far a run is: a line that changes on a terminal, and one a minute elsewhere.

    Args:
        total: bytes of all that is to be done.
        before: bytes that earlier runs have done.
    """

    def __init__(self, total: int, before: int):
        self.total = total
        self.before = before
        self.start = time.monotonic()
        self.on_terminal = sys.stderr.isatty()
        self.next_line = self.start + (0.5 if self.on_terminal else SECONDS_BETWEEN_LINES)
        self.shown = False

    def show(self, images: int, bytes_done: int) -> None:
        """Show what this run has done so far, unless the last line is new enough."""
        now = time.monotonic()
        if now < self.next_line:
            return
        self.next_line = now + (0.5 if self.on_terminal else SECONDS_BETWEEN_LINES)
        line = progress_line(images, bytes_done, now - self.start, self.before, self.total)
        if self.on_terminal:
            print(f'\r{line:<79}', end='', file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
        self.shown = True

    def close(self) -> None:
        """Leave the line on the terminal."""
        if self.shown and self.on_terminal:
            print(file=sys.stderr)
        self.shown = False


def progress_line(images: int, bytes_done: int, seconds: float, before: int, total: int) -> str:
    """What a run of `seconds` has done, its speed, the share of all that is done, and the time left at this speed."""
    share = (before + bytes_done) / total if total else 1
    left = 'time left not known'
    if bytes_done:
        seconds_left = int((total - before - bytes_done) * seconds / bytes_done)
        left = f'{datetime.timedelta(seconds=max(0, seconds_left))} left'
    return f'{images:,} images, {images / seconds:,.0f} images/s, {share:.1%} of {total / 1e9:,.1f} GB, {left}'
